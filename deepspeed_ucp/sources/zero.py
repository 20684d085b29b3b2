"""ZeRO 1, 2, 3 and BF16_Optimizer files → atoms."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any

from ..atoms import MASTER, MODULE, MOMENTUM, USE_MUON, GroupInfo, ParamKey, count, strip_compiled
from ..errors import CheckpointError, shorten
from ..experts import DATA_FIRST, count_experts, drop_fixed, find_layer, list_holders, name_experts, number_in_stage
from ..flat import Cut, FlatBuffer, cut_parameter, find_gaps, join_parameters, join_reserved
from .builder import Builder
from .headers import FileHeader, OptimHeader, Piece, Shape, TensorStates
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
        _add_rank(builder, rank, dealt[mp], _get_optim(save.shards[mp][0]))
        if save.is_sharded:
            add_frozen_zero3(builder, rank, save.models[mp], optimized)
    add_tensors(builder)


@dataclass(frozen=True)
class HeldParameters:
    """Parameters of a group that the same ranks hold: all of them, or some of its experts.

    Attributes:
        ranks: of the pipeline stage that hold them.
        own: the ranks' own parameters, as the module spells them, with shapes.
        parts: by these the whole model's parameters that are in them, with shapes.
        folded: they are experts that are spread over all of the stage's ranks, and not over one lane's.
        named: the flat buffer names these ranks, as others hold others.
    """

    ranks: range
    own: dict[str, Shape]
    parts: dict[str, dict[str, Shape]]
    folded: bool = False
    named: bool = False

    @cached_property
    def shapes(self) -> dict[str, Shape]:
        """The whole model's parameters."""
        return {strip_compiled(name): shape for held in self.parts.values() for name, shape in held.items()}

    @cached_property
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
    totals = count_experts(name for header in save.experts.values() for name in header.layer or {})
    dealt: list[list[HeldParameters]] = []
    for number, group in enumerate(save.model(mp).param_shapes or ()):
        held = count_experts(name for name, _ in group) if save.experts else {}
        spread = bool(held) or any(find_layer(name, placements) for name, _ in group)
        replicas = counts[number] if spread and number < len(counts) else len(save.shards[mp])
        holders = _find_holders(save, mp, replicas, folded=spread and save.folds_experts)
        _check_placements(save, mp, group, len(holders))
        shares = _share_experts(save, held, totals, len(holders))
        folded, several = spread and save.folds_experts, len(holders) > 1
        dealt.append([])
        for place, ranks in enumerate(holders):
            own: dict[str, Sequence[int]] = {
                layer: range(place * share, (place + 1) * share) for layer, share in shares.items()
            }
            own |= {layer: each[place] for layer, each in placements.items() if place < len(each)}
            parts = {name: name_experts(name, shape, own) for name, shape in group}
            dealt[-1].append(HeldParameters(ranks, dict(group), parts, folded, folded or several))
    return dealt


def _share_experts(save: Save, held: Mapping[str, int], totals: Mapping[str, int], degree: int) -> dict[str, int]:
    """By layer the experts of one expert-parallel rank.

    Args:
        held: those that a rank has in a param group.
        totals: those that have files.

    Raises:
        CheckpointError: these do not fit.
    """
    for layer, count_held in held.items():
        total = totals.get(strip_compiled(layer), 0)
        if total % degree or total // degree < count_held:
            raise CheckpointError(
                f"{save.path(save.main)}: tells of {count_held} experts in {layer} on each of {degree} "
                f"expert-parallel ranks; the files of single experts are of {total}. The folder lacks files or mixes "
                "two saves."
            )
    return {layer: totals.get(strip_compiled(layer), 0) // degree for layer in held}


def _find_holders(save: Save, mp: int, replicas: int, *, folded: bool) -> list[range]:
    """Ranks of the pipeline stage that hold the same parameters of a group: by expert-parallel rank, or a lane's.

    Raises:
        CheckpointError: they cannot be so many.
    """
    dp, data_first = len(save.shards[mp]), bool(save.main.config.get(DATA_FIRST))
    ranks = dp * save.tp if folded else dp
    if replicas < 1 or ranks % replicas:
        raise CheckpointError(
            f"{save.path(save.shards[mp][0])}: has a param group that is cut over {replicas} ranks, which does not "
            f"divide the {ranks} that hold the model. The file is damaged, or of another save."
        )
    holders = list_holders(ranks, replicas, data_first=data_first)
    return holders if folded else [number_in_stage(held, save.tp, mp % save.tp) for held in holders]


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


def _add_rank(builder: Builder, rank: SavedRank, dealt: Sequence[Sequence[HeldParameters]], first: OptimHeader) -> None:
    """A model-parallel rank's flat buffers: one per param group, of ZeRO 3 one per sub-group.

    What is folded is the same on all tensor-parallel ranks, and added with the first.
    """
    save = builder.save
    flats: list[FlatBuffer] = []
    members: dict[int, list[ParamKey]] = defaultdict(list)
    hypers = list(map(drop_fixed, first.groups)) if save.is_sharded else []
    for index, parts in enumerate(dealt):
        owner = first.owners[index] if index < len(first.owners) else None
        if not save.is_sharded:  # ZeRO rebuilds Adagrad with one group
            hypers.append({} if owner is None else drop_fixed(first.groups[owner]))
        for place, held in enumerate(parts):
            shards = [save.shard(rank.pp, each) for each in held.ranks]
            rank.shapes.update(held.shapes)
            rank.folded.update(held.shapes if held.folded else ())
            if save.is_sharded:
                _check_holders(save, rank.pp, index, place, held)
                buffer = join_reserved(owner or 0, tuple(held.own), tuple(held.own.values()), len(held.ranks))
            else:
                buffer = _join_group(builder, shards, index, held.own)
            buffer = buffer.split(held.parts)
            if held.folded:
                _check_folding(save, shards, held.ranks, place)
            if not (held.folded and rank.tp):
                _add_parts(builder, rank, shards, index, replace(buffer, names=tuple(held.shapes)), held)
            members[buffer.group] += map(rank.param, held.shapes)
            flats.append(replace(buffer, ranks=held.ranks if held.named else None))
    rank.flats = tuple(flats)
    rank.groups = tuple(GroupInfo(tuple(members[group]), hyper) for group, hyper in enumerate(hypers))


def _add_parts(
    builder: Builder,
    rank: SavedRank,
    shards: Sequence[FileHeader],
    index: int,
    buffer: FlatBuffer,
    held: HeldParameters,
) -> None:
    """What the ranks of ``shards`` together hold of a flat buffer."""
    if not buffer.by_parameter:
        _add_empty(builder, rank, shards[0], index, held.shapes)
    for place, shard in enumerate(shards):
        _add_part(_Part(builder, rank, shard, index, buffer, place, buffer.cuts(place)), held.owners)


def _check_folding(save: Save, shards: Sequence[FileHeader], ranks: range, place: int) -> None:
    """Hold the files of an expert-parallel rank against what AutoEP under AutoTP tells in each of them.

    Raises:
        CheckpointError: a file is of another rank.
    """
    for rank, shard in zip(ranks, shards, strict=True):
        if shard.folding not in (None, (rank % save.tp, place)):
            raise CheckpointError(
                f"{save.path(shard)}: is of tensor- and expert-parallel rank {shard.folding}, by its name and the "
                f"degrees it has to be of {(rank % save.tp, place)}. The file belongs to another run; put the right "
                "one back."
            )


def _check_holders(save: Save, stage: int, group: int, place: int, parts: HeldParameters) -> None:
    """ZeRO 3 with AutoEP saves no copies of the experts, but every file tells which ranks hold a sub-group.

    Raises:
        CheckpointError: they are others, or of another expert-parallel rank.
    """
    for rank in parts.ranks:
        shard = save.shard(stage, rank)
        header = save.models[stage * save.tp + rank % save.tp][rank // save.tp]
        held, model = _get_optim(shard).partition_ranks, header.model
        ranks = tuple(each + stage * save.dp * save.tp for each in parts.ranks)
        if held and held[group : group + 1] != (ranks,):
            raise CheckpointError(
                f"{save.path(shard)}: sub-group {group} is cut over other ranks than {shorten(ranks)}, as the degrees "
                "have it. The file belongs to another run; put the right one back."
            )
        if parts.named and model and model.ep_rank != place:
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


@dataclass(frozen=True, slots=True)
class _Part:
    """What one data-parallel rank's file holds of a flat buffer.

    Attributes:
        index: which flat buffer of the file it is.
        place: which part of the buffer.
        cuts: of the part.
    """

    builder: Builder
    rank: SavedRank
    shard: FileHeader
    index: int
    buffer: FlatBuffer
    place: int
    cuts: Sequence[Cut]

    @property
    def optim(self) -> OptimHeader:
        return _get_optim(self.shard)

    @property
    def path(self) -> str:
        return self.builder.save.path(self.shard)

    def add_cuts(self, state: str, cuts: Sequence[Cut], piece: Piece) -> None:
        self.builder.add_cuts(self.rank, state, cuts, self.shard, piece)


def _add_part(part: _Part, owners: Mapping[str, str]) -> None:
    """The master, and the optimizer's states.

    Of a sub-group that is swapped only what is in no swap file, as a step, is taken from the state file.
    """
    swaps = part.builder.save.swaps.get((part.shard.name, part.index), {})
    for state, header in swaps.items():
        if header.swap is not None:
            replace(part, shard=header).add_cuts(state, part.cuts, header.swap)
    if not swaps:
        _add_master(part, owners)
    _add_states(part, swaps)


def _add_master(part: _Part, owners: Mapping[str, str]) -> None:
    buffer, index = part.buffer, part.index
    found = _count_elements(part.builder, part.shard, index)
    if found != buffer.partition:
        what = "sub-group" if buffer.by_parameter else "partition"
        raise CheckpointError(
            f"{part.path}: {what} {index} has {found} elements, {buffer.partition} are expected. The file belongs to "
            "another run or world size; put the right one back."
        )
    if not buffer.by_parameter:
        _check_slices(part, owners)
    master = part.optim.masters[index]
    for cut in part.cuts:
        if cut.offset + cut.numel > master.numel:
            raise CheckpointError(
                f"{part.path}: {cut.name} ends beyond the fp32 partition of group {index} "
                f"({cut.offset + cut.numel} > {master.numel} elements). The file belongs to another rank or run."
            )
    part.add_cuts(MASTER, part.cuts, master)


def _add_states(part: _Part, swapped: Container[str]) -> None:
    optim, index = part.optim, part.index
    if index >= len(optim.tensors):
        return
    held = optim.tensors[index]
    states = replace(held, states={state: piece for state, piece in held.states.items() if state not in swapped})
    if _keeps_whole_momentum(part.builder.save, optim, index):
        states = _add_momentum(part, states)
    stored = optim.masters[index].numel if optim.elastic else part.buffer.partition
    part.builder.add_states(part.rank, part.cuts, states, stored, part.shard)


def _keeps_whole_momentum(save: Save, optim: OptimHeader, index: int) -> bool:
    """ZeRO 1 and 2 keep Muon's momentum of whole parameters, unless the optimizer is offloaded."""
    is_muon = bool(optim.groups[optim.owners[index]].get(USE_MUON))
    return is_muon and optim.kind == "zero12" and describe_offload(save.zero).startswith("none/")


def _add_momentum(part: _Part, held: TensorStates) -> TensorStates:
    """Add the momentum of the parameters that a partition touches; what else there is of states.

    Each rank's own elements make up the atom; those beyond a border of its partition are other ranks' own.
    """
    states, touched = dict(held.states), part.buffer.join_touched(part.place)
    piece = states.pop(MOMENTUM, None)
    if piece is None or piece.fault:
        return held
    if piece.numel != touched.partition:
        what = f"{piece.numel} elements where the parameters of a rank have {touched.partition}"
        return replace(held, states=states, other={**held.other, MOMENTUM: what})
    own, beyond = [], []
    cuts = {cut.name: cut for cut in part.cuts}
    for name, place, numel in zip(touched.names, touched.offsets, touched.numels, strict=True):
        cut = cuts.get(name, Cut(name, 0, 0, 0))  # of an expert that lies in one tensor with those that are held
        if cut.numel:
            own.append(replace(cut, offset=place + cut.start))
        rest = find_gaps([(cut.start, cut.start + cut.numel)], numel)
        beyond += [Cut(name, low, high - low, place + low) for low, high in rest]
    part.add_cuts(MOMENTUM, own, piece)
    part.builder.add_repeated(part.rank, MOMENTUM, beyond, part.shard, piece)
    return replace(held, states=states)


def _check_slices(part: _Part, owners: Mapping[str, str]) -> None:
    """The names in ``param_slice_mappings`` tell a shard of another rank or run; without round robin they are right.

    Args:
        owners: the rank's own name for each parameter; experts that lie in one parameter follow each other.
    """
    if (part.shard.config.get("zero_optimization") or {}).get("round_robin_gradients"):
        return
    slices, group = part.optim.slices, part.index
    parts: dict[str, list[Cut]] = defaultdict(list)
    for cut in part.cuts:
        parts[owners[cut.name]].append(cut)
    expected = [(own, each[0].offset, sum(cut.numel for cut in each)) for own, each in parts.items()]
    held = slices[group] if group < len(slices) else ()
    found = [(strip_compiled(name), start, numel) for name, start, numel in held]
    if sorted(found) != sorted(expected):
        odd = sorted(set(found) ^ set(expected))[0]
        raise CheckpointError(
            f"{part.path}: holds other parts of group {group} than this rank's file of this checkpoint has to (first "
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
