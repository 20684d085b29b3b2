"""ZeRO 1, 2, 3 and BF16_Optimizer files → atoms."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from ..atoms import MASTER, MODULE, GroupInfo, count, strip_compiled
from ..errors import CheckpointError, UnsupportedError
from ..plan.geometry import Cut, accumulate_offsets, cut_flat, cut_parameter, cut_sub_group, part_numel
from ..topology import FlatGroup
from .builder import Builder
from .headers import FileHeader, ModelHeader, OptimHeader


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
        numels = tuple(count(shape) for shape in shapes.values())
        offsets = accumulate_offsets(numels, gaps)
        for rank, shard in enumerate(shards):
            cuts = cut_flat(tuple(shapes), numels, offsets, rank * partition, (rank + 1) * partition)
            _add_partition(builder, shard, group, cuts, partition)
        _add_empty(builder, shards[0], first, group, shapes)
        builder.groups.append(GroupInfo(tuple(shapes), _hyper(first, group)))
        names = tuple(name for name, _ in entries)
        flats.append(FlatGroup(group, names, numels, partition, gaps if any(gaps) else ()))
    return tuple(flats)


def _add_empty(
    builder: Builder, shard: FileHeader, optim: OptimHeader, group: int, shapes: dict[str, tuple[int, ...]]
) -> None:
    """Parameters without elements, which older releases keep in the groups."""
    file = builder.file(builder.folder + "/" + shard.name, shard.size)
    for name, shape in shapes.items():
        if not count(shape):
            builder.add(name, MASTER, shape, file, optim.masters[group].narrow(0, 0))


def _add_partition(builder: Builder, shard: FileHeader, group: int, cuts: list[Cut], partition: int) -> None:
    optim = _optim(shard)
    file = builder.file(builder.folder + "/" + shard.name, shard.size)
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
        builder.add(cut.name, MASTER, builder.shapes[cut.name], file, master.narrow(cut.offset, cut.numel), cut.start)
    stored = master.numel if optim.elastic else partition
    if group < len(optim.holders):
        builder.add_holder(cuts, optim.holders[group], stored, file)


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
        numels = tuple(count(shape) for shape in logical.values())
        partition = sum(part_numel(numel, dp) for numel in numels)
        for rank, shard in enumerate(shards):
            _add_sub_group(builder, shard, index, cut_sub_group(tuple(logical), numels, rank, dp), partition)
        group = owner.get(index, 0)
        members[group].extend(logical)
        names = tuple(name for name, _ in entries)
        flats.append(FlatGroup(group, names, numels, partition))
    for group, hyper in enumerate(_optim(shards[0]).groups):
        builder.groups.append(GroupInfo(tuple(members[group]), hyper))
    return tuple(flats)


def _add_sub_group(builder: Builder, shard: FileHeader, index: int, cuts: list[Cut], partition: int) -> None:
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
    for cut in cuts:
        part = optim.masters[index].narrow(cut.offset, cut.numel)
        builder.add(cut.name, MASTER, builder.shapes[cut.name], file, part, cut.start)
    holder = optim.holders[index] if index < len(optim.holders) else None
    if holder is not None:
        builder.add_holder(cuts, holder, partition, file)


def add_frozen_zero3(builder: Builder, models: list[FileHeader]) -> None:
    """Frozen parameters of ZeRO 3: each rank's model states hold ``ceil(numel / dp)`` elements."""
    dp = len(models)
    first = models[0].model
    zero = (first.config.get("zero_optimization") or {}) if first else {}
    if first and zero.get("zero_quantized_nontrainable_weights"):
        builder.unreadable.update(dict.fromkeys(first.frozen, "a frozen parameter saved quantized, without its scales"))
        return
    for rank, file_header in enumerate(models):
        model = file_header.model
        if model is None:
            continue
        file = builder.file(builder.folder + "/" + file_header.name, file_header.size)
        for name, piece in model.frozen.items():
            shape = tuple(model.frozen_shapes[name])
            start, numel = cut_parameter(count(shape), rank, dp)
            builder.add(strip_compiled(name), MODULE, shape, file, piece.narrow(0, numel), start)


def _optim(shard: FileHeader) -> OptimHeader:
    if shard.optim is None:
        raise CheckpointError(f"{shard.name}: holds no optimizer state.")
    return shard.optim
