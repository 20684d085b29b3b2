"""ZeRO 1, 2, 3 and BF16_Optimizer files → atoms."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from ..atoms import MASTER, MODULE, MOMENTUM, USE_MUON, GroupInfo, ParamKey, count, strip_compiled
from ..errors import CheckpointError, UnsupportedError, shorten
from ..experts import DATA_FIRST, count_experts, drop_fixed, find_layer, list_holders, name_experts
from ..flat import Cut, FlatBuffer, cut_parameter, find_gaps, join_parameters, join_reserved
from .builder import Builder
from .headers import FileHeader, OptimHeader, Shape, TensorStates
from .module import add_tensors
from .ranks import SavedRank, fill_param_shapes, list_ranks
from .save import Save, describe_offload


def build_zero(builder: Builder) -> None:
    """Add everything; the model states name the parameters of each rank.

    The order is that of ``param_shapes`` and the padding that of ``param_alignment_paddings``; the files' own
    ``param_slice_mappings`` are wrong under ``round_robin_gradients`` (they follow the order before shuffling).
    """
    save = builder.save
    fill_param_shapes(save)
    dealt = [deal_parameters(save, mp) for mp in range(len(save.models))]
    names = [[name for part in chain(*groups) for name in part.shapes] for groups in dealt]
    builder.ranks, builder.instances = list_ranks(save, names)
    optimized = {name for held in names for name in held}
    for mp, rank in enumerate(builder.ranks):
        _add_rank(builder, rank, dealt[mp], save.shards[mp])
        if save.is_sharded:
            add_frozen_zero3(builder, rank, save.models[mp], optimized)
    add_tensors(builder)


@dataclass(frozen=True, slots=True)
class HeldParameters:
    """Parameters of a group that the same data-parallel ranks hold: all of them, or some of its experts.

    Attributes:
        ranks: that hold them.
        own: the ranks' own parameters, as the module spells them, with shapes.
        parts: by these the whole model's parameters that are in them, with shapes.
    """

    ranks: range
    own: dict[str, Shape]
    parts: dict[str, dict[str, Shape]]

    @property
    def shapes(self) -> dict[str, Shape]:
        """The whole model's parameters."""
        return {strip_compiled(name): shape for held in self.parts.values() for name, shape in held.items()}

    @property
    def owners(self) -> dict[str, str]:
        """The ranks' own name for each of these."""
        return {strip_compiled(name): strip_compiled(own) for own, held in self.parts.items() for name in held}


def deal_parameters(save: Save, mp: int) -> list[list[HeldParameters]]:
    """Who holds which parameters, by group; the model states count every rank's experts from 0.

    How many of a DeepSpeed layer a rank holds the experts' files tell: what it has of them in its groups may be less,
    some may be frozen.

    Raises:
        CheckpointError: the files, or the placement of AutoEP's experts, tell of other experts.
    """
    placements, counts = save.model(mp).placements, _get_optim(save.shards[mp][0]).partition_count
    totals = count_experts(name for header in save.experts for name in header.layer or {})
    dealt: list[list[HeldParameters]] = []
    for number, group in enumerate(save.model(mp).param_shapes or ()):
        held = count_experts(name for name, _ in group) if save.experts else {}
        replicas = counts[number] if (held or placements) and number < len(counts) else len(save.shards[mp])
        holders = list_holders(len(save.shards[mp]), replicas, data_first=bool(save.main.config.get(DATA_FIRST)))
        _check_placements(save, mp, group, len(holders))
        shares = {layer: totals.get(strip_compiled(layer), 0) / len(holders) for layer in held}
        for layer, share in shares.items():
            if share != int(share) or share < held[layer]:
                raise CheckpointError(
                    f"{save.path(save.main)}: tells of {held[layer]} experts in {layer} on each of {len(holders)} "
                    f"expert-parallel ranks; the files of single experts are of {round(share * len(holders))}. The "
                    "folder lacks files or mixes two saves."
                )
        dealt.append([])
        for place, ranks in enumerate(holders):
            own: dict[str, Sequence[int]] = {
                layer: range(place * int(share), (place + 1) * int(share)) for layer, share in shares.items()
            }
            own |= {layer: each[place] for layer, each in placements.items() if place < len(each)}
            parts = {name: name_experts(name, shape, own) for name, shape in group}
            dealt[-1].append(HeldParameters(ranks, dict(group), parts))
    return dealt


def _check_placements(save: Save, mp: int, group: Sequence[tuple[str, Shape]], degree: int) -> None:
    """Hold the parameters of AutoEP's experts against the placement: as many experts, over as many ranks."""
    placements = save.model(mp).placements
    for name, shape in group:
        placement = placements.get(find_layer(name, placements) or "", ())
        if placement and (len(placement) != degree or any(shape[:1] != (len(held),) for held in placement)):
            raise CheckpointError(
                f"{save.path(save.models[mp][0])}: {name} of shape {shape} is spread over {degree} expert-parallel "
                f"ranks, its expert placement tells of {[len(held) for held in placement]} experts by rank. The file "
                "is damaged, or of another save."
            )


def _add_rank(
    builder: Builder,
    rank: SavedRank,
    dealt: Sequence[Sequence[HeldParameters]],
    shards: Sequence[FileHeader],
) -> None:
    """A model-parallel rank's flat buffers: one per param group, of ZeRO 3 one per sub-group."""
    save, first = builder.save, _get_optim(shards[0])
    flats: list[FlatBuffer] = []
    members: dict[int, list[ParamKey]] = defaultdict(list)
    hypers = list(map(drop_fixed, first.groups)) if save.is_sharded else []
    for index, parts in enumerate(dealt):
        owner = first.owners[index] if index < len(first.owners) else None
        if not save.is_sharded:  # ZeRO rebuilds Adagrad with one group
            hypers.append({} if owner is None else drop_fixed(first.groups[owner]))
        for place, held in enumerate(parts):
            rank.shapes.update(held.shapes)
            if save.is_sharded:
                _check_holders(save, index, place, held.ranks)
                buffer = join_reserved(owner or 0, tuple(held.own), tuple(held.own.values()), len(held.ranks))
            else:
                buffer = _join_group(builder, [shards[dp_rank] for dp_rank in held.ranks], index, held.own)
                _add_empty(builder, rank, shards[held.ranks[0]], index, held.shapes)
            buffer = buffer.split(held.parts)
            named = replace(buffer, names=tuple(held.shapes))
            for part, dp_rank in enumerate(held.ranks):
                _add_part(builder, rank, shards[dp_rank], index, named, part, held.owners)
            members[buffer.group] += map(rank.param, held.shapes)
            flats.append(replace(buffer, ranks=held.ranks if len(parts) > 1 else None))
    rank.flats = tuple(flats)
    rank.groups = tuple(GroupInfo(tuple(members[group]), hyper) for group, hyper in enumerate(hypers))


def _check_holders(save: Save, group: int, place: int, ranks: range) -> None:
    """ZeRO 3 with AutoEP saves no copies of the experts, but every file tells which ranks hold a sub-group.

    Raises:
        CheckpointError: they are others, or of another expert-parallel rank.
    """
    for dp_rank in ranks:
        shard, header = save.shards[0][dp_rank], save.models[0][dp_rank]
        held, model = _get_optim(shard).partition_ranks, header.model
        if held and held[group : group + 1] != (tuple(ranks),):
            raise CheckpointError(
                f"{save.path(shard)}: sub-group {group} is cut over other ranks than {shorten(ranks)}, as the degrees "
                "have it. The file belongs to another run; put the right one back."
            )
        if len(ranks) < save.dp and model and model.ep_rank != place:
            raise CheckpointError(
                f"{save.path(header)}: is of expert-parallel rank {model.ep_rank}, by the degrees it has to be "
                f"of {place}. The file belongs to another run; put the right one back."
            )


def _join_group(builder: Builder, shards: Sequence[FileHeader], group: int, shapes: Mapping[str, Shape]) -> FlatBuffer:
    """ZeRO 1/2 and BF16_Optimizer: equal partitions of one flat buffer per param group."""
    alignment = _get_optim(shards[0]).alignment
    partition = _count_elements(builder, shards[0], group)
    gaps = alignment[group] if alignment else ()
    return join_parameters(
        group, tuple(shapes), tuple(shapes.values()), parts=len(shards), partition=partition, gaps=gaps
    )


def _add_empty(builder: Builder, rank: SavedRank, shard: FileHeader, group: int, shapes: Mapping[str, Shape]) -> None:
    """Parameters without elements, which older releases keep in the groups."""
    nothing = _get_optim(shard).masters[group].narrow(0, 0)
    for name, shape in shapes.items():
        if not count(shape):
            builder.add(rank, name, MASTER, shard, replace(nothing, shape=shape))


def _add_part(
    builder: Builder,
    rank: SavedRank,
    shard: FileHeader,
    index: int,
    buffer: FlatBuffer,
    part: int,
    owners: Mapping[str, str],
) -> None:
    """What a data-parallel rank holds of a flat buffer: the master, and the optimizer's states."""
    optim, path, cuts = _get_optim(shard), builder.save.path(shard), buffer.cuts(part)
    found = _count_elements(builder, shard, index)
    if buffer.by_parameter and buffer.partition and not found:
        raise UnsupportedError(f"{path}: optimizer states on NVMe are not in the file.")
    if found != buffer.partition:
        what = "sub-group" if buffer.by_parameter else "partition"
        raise CheckpointError(
            f"{path}: {what} {index} has {found} elements, {buffer.partition} are expected. The file belongs to "
            "another run or world size; put the right one back."
        )
    if not buffer.by_parameter:
        _check_slices(shard, path, index, cuts, owners)
    master = optim.masters[index]
    for cut in cuts:
        if cut.offset + cut.numel > master.numel:
            raise CheckpointError(
                f"{path}: {cut.name} ends beyond the fp32 partition of group {index} "
                f"({cut.offset + cut.numel} > {master.numel} elements). The file belongs to another rank or run."
            )
    builder.add_cuts(rank, MASTER, cuts, shard, master)
    if index < len(optim.tensors):
        stored = master.numel if optim.elastic else buffer.partition
        states = optim.tensors[index]
        if _keeps_whole_momentum(builder.save, optim, index):
            states = _add_momentum(builder, rank, buffer, part, states, shard)
        builder.add_states(rank, cuts, states, stored, shard)


def _keeps_whole_momentum(save: Save, optim: OptimHeader, index: int) -> bool:
    """ZeRO 1 and 2 keep Muon's momentum of whole parameters, unless the optimizer is offloaded."""
    is_muon = bool(optim.groups[optim.owners[index]].get(USE_MUON))
    return is_muon and optim.kind == "zero12" and describe_offload(save.zero).startswith("none/")


def _add_momentum(
    builder: Builder, rank: SavedRank, buffer: FlatBuffer, part: int, held: TensorStates, shard: FileHeader
) -> TensorStates:
    """Add the momentum of the parameters that a partition touches; what else there is of states.

    Each rank's own elements make up the atom; those beyond a border of its partition are other ranks' own.
    """
    states, touched = dict(held.states), buffer.join_touched(part)
    piece = states.pop(MOMENTUM, None)
    if piece is None or piece.fault:
        return held
    if piece.numel != touched.partition:
        what = f"{piece.numel} elements where the parameters of a rank have {touched.partition}"
        return replace(held, states=states, other={**held.other, MOMENTUM: what})
    own, beyond = [], []
    for cut, place, numel in zip(buffer.cuts(part), touched.offsets, touched.numels, strict=True):
        own.append(replace(cut, offset=place + cut.start))
        rest = find_gaps([(cut.start, cut.start + cut.numel)], numel)
        beyond += [Cut(cut.name, low, high - low, place + low) for low, high in rest]
    builder.add_cuts(rank, MOMENTUM, own, shard, piece)
    builder.add_repeated(rank, MOMENTUM, beyond, shard, piece)
    return replace(held, states=states)


def _check_slices(shard: FileHeader, path: str, group: int, cuts: Sequence[Cut], owners: Mapping[str, str]) -> None:
    """The names in ``param_slice_mappings`` tell a shard of another rank or run; without round robin they are right.

    Args:
        owners: the rank's own name for each parameter; experts that lie in one parameter follow each other.
    """
    if (shard.config.get("zero_optimization") or {}).get("round_robin_gradients"):
        return
    slices = _get_optim(shard).slices
    parts: dict[str, list[Cut]] = defaultdict(list)
    for cut in cuts:
        parts[owners[cut.name]].append(cut)
    expected = [(own, each[0].offset, sum(cut.numel for cut in each)) for own, each in parts.items()]
    held = slices[group] if group < len(slices) else ()
    found = [(strip_compiled(name), start, numel) for name, start, numel in held]
    if sorted(found) != sorted(expected):
        odd = sorted(set(found) ^ set(expected))[0]
        raise CheckpointError(
            f"{path}: holds other parts of group {group} than this rank's file of this checkpoint has to (first "
            f"difference: {odd[0]}, elements [{odd[1]}, {odd[1] + odd[2]}) of its partition). The file belongs to "
            "another rank, run or world size; put the right one back."
        )


def _count_elements(builder: Builder, shard: FileHeader, index: int) -> int:
    """Elements of a rank's partition, padding included; ZeRO 1/2 strips it from the masters, others do not."""
    optim = _get_optim(shard)
    if index >= len(optim.masters):
        raise CheckpointError(
            f"{builder.save.path(shard)}: has {len(optim.masters)} flat buffers, the model states tell of more. The "
            "file belongs to another run; put the right one back."
        )
    padding = optim.paddings[index] if optim.kind == "zero12" and index < len(optim.paddings) else 0
    return optim.masters[index].numel + padding


def add_frozen_zero3(builder: Builder, rank: SavedRank, models: Sequence[FileHeader], optimized: set[str]) -> None:
    """Frozen parameters of ZeRO 3: each rank's model states hold ``ceil(numel / dp)`` elements.

    ``optimized`` are trained on some tensor-parallel rank: where they are listed as frozen, they have no elements.
    """
    first, zero = models[0].model, builder.save.zero
    if first and zero.get("zero_quantized_nontrainable_weights"):
        builder.unreadable.update(dict.fromkeys(first.frozen, "a frozen parameter saved quantized, without its scales"))
        return
    for part, header in enumerate(models):
        model = header.model
        for name, piece in model.frozen.items() if model else ():
            if model is None or name in optimized:
                continue
            shape = model.frozen_shapes[name]
            start, numel = cut_parameter(count(shape), part, len(models))
            if _is_placeholder(piece.numel, numel, zero):
                builder.unreadable[name] = "a frozen parameter on NVMe, of which the save holds a placeholder alone"
            else:
                builder.add_cuts(rank, MODULE, (Cut(name, start, numel, 0),), header, piece, {name: shape})


def _is_placeholder(found: int, numel: int, zero: Mapping[str, Any]) -> bool:
    """DeepSpeed saves one element of 1.0 in the place of a frozen parameter that is on NVMe."""
    on_nvme = describe_offload(zero).endswith("/nvme")
    return found < numel or (on_nvme and found == 1)


def _get_optim(shard: FileHeader) -> OptimHeader:
    if shard.optim is None:
        raise CheckpointError(f"{shard.name}: holds no optimizer state.")
    return shard.optim
