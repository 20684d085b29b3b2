"""ZeRO 1, 2, 3 and BF16_Optimizer files → atoms."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from ..atoms import MASTER, MODULE, GroupInfo, count
from ..errors import CheckpointError, UnsupportedError
from ..topology import FlatGroup
from .builder import Builder
from .headers import FileHeader, ModelHeader, OptimHeader, strip_compiled

Layout = list[tuple[str, tuple[int, ...], int, int, int]]


def build_zero12(builder: Builder, model: ModelHeader, shards: list[FileHeader]) -> tuple[FlatGroup, ...]:
    """Fragments of ZeRO 1/2 and BF16_Optimizer: equal partitions of one flat buffer per param group.

    The order is that of ``param_shapes`` and the padding that of ``param_alignment_paddings``; the files' own
    ``param_slice_mappings`` are wrong under ``round_robin_gradients`` (they follow the order before shuffling).
    """
    flats = []
    for group, entries in enumerate(model.param_shapes or ()):
        shapes = {strip_compiled(name): tuple(shape) for name, shape in entries}
        builder.shapes.update(shapes)
        first = _optim(shards[0])
        gaps = tuple(first.alignment[group]) if first.alignment else (0,) * len(shapes)
        partition = _partition_numel(builder, shards[0], group)
        for rank, shard in enumerate(shards):
            _add_partition(builder, shard, group, _cut_zero12(shapes, gaps, rank * partition, partition), partition)
        builder.groups.append(GroupInfo(tuple(shapes), _hyper(first, group)))
        names = tuple(name for name, _ in entries)
        numels = tuple(count(shape) for shape in shapes.values())
        flats.append(FlatGroup(group, names, numels, partition, gaps if any(gaps) else ()))
    return tuple(flats)


def _cut_zero12(shapes: dict[str, tuple[int, ...]], gaps: tuple[int, ...], low: int, partition: int) -> Layout:
    layout, offset = [], 0
    for (name, shape), gap in zip(shapes.items(), gaps, strict=True):
        first, last = max(offset, low), min(offset + count(shape), low + partition)
        if first < last:
            layout.append((name, shape, first - low, first - offset, last - first))
        offset += count(shape) + gap
    return layout


def _add_partition(builder: Builder, shard: FileHeader, group: int, layout: Layout, partition: int) -> None:
    optim = _optim(shard)
    file = builder.file(builder.folder + "/" + shard.name, shard.size)
    if (found := _partition_numel(builder, shard, group)) != partition:
        raise CheckpointError(
            f"{builder.files[file].path}: partition {group} has {found} elements, rank 0's has {partition}. "
            "The file belongs to another run or world size; put the right one back."
        )
    _check_slices(builder, shard, group, layout, file)
    master = optim.masters[group]
    for name, shape, offset, start, numel in layout:
        if offset + numel > master.numel:
            raise CheckpointError(
                f"{builder.files[file].path}: {name} ends beyond the fp32 partition of group {group} "
                f"({offset + numel} > {master.numel} elements). The file belongs to another rank or run."
            )
        builder.add(name, MASTER, shape, file, master.narrow(offset, numel), start)
    stored = master.numel if optim.elastic else partition
    if group < len(optim.holders):
        builder.add_holder(layout, optim.holders[group], stored, file)


def _check_slices(builder: Builder, shard: FileHeader, group: int, layout: Layout, file: int) -> None:
    """The names in ``param_slice_mappings`` tell a shard of another rank or run; without round robin they are right."""
    zero = shard.config.get("zero_optimization") or {}
    if zero.get("round_robin_gradients"):
        return
    slices = _optim(shard).slices
    expected = [(name, offset, numel) for name, _, offset, _, numel in layout]
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


def build_zero3(builder: Builder, model: ModelHeader, shards: list[FileHeader]) -> tuple[FlatGroup, ...]:
    """Fragments of ZeRO 3: in each sub-group's flat buffer a rank holds ``ceil(numel / dp)`` elements a parameter."""
    shapes = model.param_shapes or ()
    dp = len(shards)
    owner = {index: group for group, owned in enumerate(_optim(shards[0]).params) for index in owned}
    members: dict[int, list[str]] = defaultdict(list)
    flats = []
    for index, entries in enumerate(shapes):
        logical = {strip_compiled(name): tuple(shape) for name, shape in entries}
        builder.shapes.update(logical)
        partition = sum(-(-count(shape) // dp) for shape in logical.values())
        for rank, shard in enumerate(shards):
            _add_sub_group(builder, shard, index, _cut_zero3(logical, rank, dp), partition)
        group = owner.get(index, 0)
        members[group].extend(logical)
        names = tuple(name for name, _ in entries)
        flats.append(FlatGroup(group, names, tuple(count(shape) for shape in logical.values()), partition))
    for group, hyper in enumerate(_optim(shards[0]).groups):
        builder.groups.append(GroupInfo(tuple(members[group]), hyper))
    return tuple(flats)


def _cut_zero3(logical: dict[str, tuple[int, ...]], rank: int, dp: int) -> Layout:
    layout, offset = [], 0
    for name, shape in logical.items():
        part = -(-count(shape) // dp)
        start = min(rank * part, count(shape))
        numel = min(part, count(shape) - start)
        layout.append((name, shape, offset, start, numel))
        offset += part
    return layout


def _add_sub_group(builder: Builder, shard: FileHeader, index: int, layout: Layout, partition: int) -> None:
    optim = _optim(shard)
    file = builder.file(builder.folder + "/" + shard.name, shard.size)
    found = optim.masters[index].numel if index < len(optim.masters) else None
    if found == 0 and partition:
        raise UnsupportedError(f"{builder.files[file].path}: optimizer states on NVMe are not in the file.")
    if found != partition:
        raise CheckpointError(
            f"{builder.files[file].path}: sub-group {index} has {found} elements, {partition} are expected. "
            "The file belongs to another run or world size."
        )
    for name, shape, offset, start, numel in layout:
        builder.add(name, MASTER, shape, file, optim.masters[index].narrow(offset, numel), start)
    holder = optim.holders[index] if index < len(optim.holders) else None
    if holder is not None:
        builder.add_holder(layout, holder, partition, file)


def add_frozen_zero3(builder: Builder, models: list[FileHeader]) -> None:
    """Frozen parameters of ZeRO 3: each rank's model states hold ``ceil(numel / dp)`` elements."""
    dp = len(models)
    for rank, file_header in enumerate(models):
        model = file_header.model
        if model is None:
            continue
        file = builder.file(builder.folder + "/" + file_header.name, file_header.size)
        for name, piece in model.frozen.items():
            shape = tuple(model.frozen_shapes[name])
            part = -(-count(shape) // dp)
            start = min(rank * part, count(shape))
            numel = min(part, count(shape) - start)
            builder.add(strip_compiled(name), MODULE, shape, file, piece.narrow(0, numel), start)


def _optim(shard: FileHeader) -> OptimHeader:
    if shard.optim is None:
        raise CheckpointError(f"{shard.name}: holds no optimizer state.")
    return shard.optim
