"""ZeRO 1, 2, 3 and BF16_Optimizer files of one model-parallel rank → atoms."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

from ..atoms import MASTER, MODULE, GroupInfo, ParamKey, count, strip_compiled
from ..errors import CheckpointError, UnsupportedError
from ..flat import Cut, FlatBuffer, cut_parameter, join_parameters, join_reserved
from .builder import Builder, Seat
from .headers import FileHeader, ModelHeader, OptimHeader
from .refused import describe_offload

Built = tuple[tuple[FlatBuffer, ...], tuple[GroupInfo, ...]]
"""The flat buffers of a model-parallel rank, and its param groups."""


def build_zero12(builder: Builder, seat: Seat, model: ModelHeader, shards: list[FileHeader]) -> Built:
    """Fragments of ZeRO 1/2 and BF16_Optimizer: equal partitions of one flat buffer per param group.

    The order is that of ``param_shapes`` and the padding that of ``param_alignment_paddings``; the files' own
    ``param_slice_mappings`` are wrong under ``round_robin_gradients`` (they follow the order before shuffling).
    """
    flats, groups = [], []
    first = _optim(shards[0])
    for group, entries in enumerate(model.param_shapes or ()):
        shapes = {strip_compiled(name): tuple(shape) for name, shape in entries}
        seat.shapes.update(shapes)
        gaps = first.alignment[group] if first.alignment else ()
        partition = _partition_numel(builder, shards[0], group)
        buffer = join_parameters(
            group, tuple(shapes), tuple(shapes.values()), parts=len(shards), partition=partition, gaps=gaps
        )
        for rank, shard in enumerate(shards):
            _add_partition(builder, seat, shard, group, buffer.cuts(rank), partition)
        _add_empty(builder, seat, shards[0], first, group, shapes)
        owned = tuple(map(seat.param, shapes))
        groups.append(GroupInfo(owned, _hyper(first, group)))
        flats.append(replace(buffer, names=tuple(name for name, _ in entries)))
    return tuple(flats), tuple(groups)


def _add_empty(
    builder: Builder,
    seat: Seat,
    shard: FileHeader,
    optim: OptimHeader,
    group: int,
    shapes: dict[str, tuple[int, ...]],
) -> None:
    """Parameters without elements, which older releases keep in the groups."""
    file = builder.file(shard)
    for name, shape in shapes.items():
        if not count(shape):
            builder.add(seat, name, MASTER, shape, file, optim.masters[group].narrow(0, 0))


def _add_partition(
    builder: Builder, seat: Seat, shard: FileHeader, group: int, cuts: list[Cut], partition: int
) -> None:
    optim = _optim(shard)
    file = builder.file(shard)
    if (found := _partition_numel(builder, shard, group)) != partition:
        raise CheckpointError(
            f"{builder.files[file].path}: partition {group} has {found} elements, rank 0's has {partition}. "
            "The file belongs to another run or world size; put the right one back."
        )
    _check_slices(builder, shard, group, cuts, file)
    master = optim.masters[group]
    for cut in cuts:
        if cut.offset + cut.numel > master.numel:
            raise CheckpointError(
                f"{builder.files[file].path}: {cut.name} ends beyond the fp32 partition of group {group} "
                f"({cut.offset + cut.numel} > {master.numel} elements). The file belongs to another rank or run."
            )
    builder.add_cuts(seat, MASTER, cuts, file, master, seat.shapes)
    stored = master.numel if optim.elastic else partition
    if group < len(optim.holders):
        builder.add_holder(seat, cuts, optim.holders[group], stored, file)


def _check_slices(builder: Builder, shard: FileHeader, group: int, cuts: list[Cut], file: int) -> None:
    """The names in ``param_slice_mappings`` tell a shard of another rank or run; without round robin they are right."""
    zero = shard.config.get("zero_optimization") or {}
    if zero.get("round_robin_gradients"):
        return
    slices = _optim(shard).slices
    expected = [(cut.name, cut.offset, cut.numel) for cut in cuts]
    found = (
        [(strip_compiled(name), start, numel) for name, start, numel in slices[group]] if group < len(slices) else []
    )
    if sorted(found) != sorted(expected):
        odd = sorted(set(found) ^ set(expected))[0]
        raise CheckpointError(
            f"{builder.files[file].path}: holds other parts of group {group} than this rank's file of this checkpoint "
            f"has to (first difference: {odd[0]}, elements [{odd[1]}, {odd[1] + odd[2]}) of its partition). The file "
            "belongs to another rank, run or world size; put the right one back."
        )


def _hyper(optim: OptimHeader, position: int) -> dict[str, Any]:
    """Hyper-parameters of a flat buffer; ZeRO rebuilds Adagrad with all buffers in one group."""
    for group, owned in enumerate(optim.params):
        if position in owned:
            return optim.groups[group]
    return {}


def _partition_numel(builder: Builder, shard: FileHeader, group: int) -> int:
    """Elements of a rank's partition, padding included; ZeRO 1/2 strips it from the masters, BF16 does not."""
    optim = _optim(shard)
    if group >= len(optim.masters):
        raise CheckpointError(
            f"{builder.folder}/{shard.name}: has {len(optim.masters)} param groups, the model states more. The file "
            "belongs to another run; put the right one back."
        )
    padding = optim.paddings[group] if optim.kind == "zero12" and group < len(optim.paddings) else 0
    return optim.masters[group].numel + padding


def build_zero3(builder: Builder, seat: Seat, model: ModelHeader, shards: list[FileHeader]) -> Built:
    """Fragments of ZeRO 3: in each sub-group's flat buffer a rank holds ``ceil(numel / dp)`` elements a parameter."""
    dp = len(shards)
    first = _optim(shards[0])
    owner = {index: group for group, owned in enumerate(first.params) for index in owned}
    members: dict[int, list[ParamKey]] = defaultdict(list)
    flats = []
    for index, entries in enumerate(model.param_shapes or ()):
        shapes = {strip_compiled(name): tuple(shape) for name, shape in entries}
        seat.shapes.update(shapes)
        group = owner.get(index, 0)
        buffer = join_reserved(group, tuple(shapes), tuple(shapes.values()), dp)
        for rank, shard in enumerate(shards):
            _add_sub_group(builder, seat, shard, index, buffer.cuts(rank), buffer.partition)
        members[group].extend(map(seat.param, shapes))
        flats.append(replace(buffer, names=tuple(name for name, _ in entries)))
    groups = tuple(GroupInfo(tuple(members[group]), hyper) for group, hyper in enumerate(first.groups))
    return tuple(flats), groups


def _add_sub_group(
    builder: Builder, seat: Seat, shard: FileHeader, index: int, cuts: list[Cut], partition: int
) -> None:
    optim = _optim(shard)
    file = builder.file(shard)
    found = optim.masters[index].numel if index < len(optim.masters) else None
    if found == 0 and partition:
        raise UnsupportedError(f"{builder.files[file].path}: optimizer states on NVMe are not in the file.")
    if found != partition:
        raise CheckpointError(
            f"{builder.files[file].path}: sub-group {index} has {found} elements, {partition} are expected. "
            "The file belongs to another run or world size."
        )
    builder.add_cuts(seat, MASTER, cuts, file, optim.masters[index], seat.shapes)
    holder = optim.holders[index] if index < len(optim.holders) else None
    if holder is not None:
        builder.add_holder(seat, cuts, holder, partition, file)


def add_frozen_zero3(builder: Builder, seat: Seat, models: list[FileHeader], optimized: set[str]) -> None:
    """Frozen parameters of ZeRO 3: each rank's model states hold ``ceil(numel / dp)`` elements.

    ``optimized`` are trained on some tensor-parallel rank: where they are listed as frozen, they have no elements.
    """
    dp = len(models)
    first = models[0].model
    zero = (first.config.get("zero_optimization") or {}) if first else {}
    if first and zero.get("zero_quantized_nontrainable_weights"):
        builder.unreadable.update(dict.fromkeys(first.frozen, "a frozen parameter saved quantized, without its scales"))
        return
    for rank, header in enumerate(models):
        model = header.model
        if model is None:
            continue
        file = builder.file(header)
        for raw, piece in model.frozen.items():
            name, shape = strip_compiled(raw), tuple(model.frozen_shapes[raw])
            if name in optimized:
                continue
            start, numel = cut_parameter(count(shape), rank, dp)
            if _is_placeholder(piece.numel, numel, zero):
                builder.unreadable[name] = "a frozen parameter on NVMe, of which the save holds a placeholder alone"
                continue
            builder.add_cuts(seat, MODULE, (Cut(name, start, numel, 0),), file, piece, {name: shape})


def _is_placeholder(found: int, numel: int, zero: dict[str, Any]) -> bool:
    """DeepSpeed saves one element of 1.0 in the place of a frozen parameter that is on NVMe."""
    on_nvme = describe_offload(zero).endswith("/nvme")
    return found < numel or (on_nvme and found == 1)


def _optim(shard: FileHeader) -> OptimHeader:
    if shard.optim is None:
        raise CheckpointError(f"{shard.name}: holds no optimizer state.")
    return shard.optim
