"""Locations of the parameters' elements in DeepSpeed's flat buffers, for every rank and wrapper; pure integers.

Sources: `DeepSpeedZeroOptimizer.__init__` (round robin, parameter alignment, padding to 2 x dp), `BF16_Optimizer`,
`FP16_Optimizer`, and ZeRO 3's `_create_fp16_sub_groups` with its ceil(numel / dp) per parameter and rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from deepspeed_ucp.model.flat import Cut

from .description import Model, Param, Topology
from .experts import own_models

_START_ALIGNMENT = 2  # elements; DeepSpeed's nccl_start_alignment_factor
_PARAMETER_ALIGNMENT = 16  # bytes; zero_optimization.parameter_alignment


@dataclass(frozen=True, slots=True)
class Flat:
    """One flat buffer of one rank: `numel` elements with padding; `padding` is the number that DeepSpeed records.

    `names` are the parameters in all ranks' buffers of this group or sub-group, `own` those of the rank's module. At
    stage 0 without flattening each parameter has a Flat (also frozen ones of a raw optimizer).
    """

    group: int
    names: tuple[str, ...]
    numel: int
    padding: int
    slices: tuple[Cut, ...]
    own: tuple[Param, ...] = ()


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """A group's whole flat buffer (all ranks' partitions): parameters in flat order, offsets, padding after each.

    `parts` is the number of partitions.
    """

    group: int
    params: tuple[Param, ...]
    offsets: tuple[int, ...]
    paddings: tuple[int, ...]
    used: int
    numel: int
    parts: int

    @property
    def own(self) -> tuple[Cut, ...]:
        """The slices of the rank's parameters."""
        pairs = zip(self.params, self.offsets, strict=True)
        return tuple(Cut(param.name, 0, param.numel, offset) for param, offset in pairs)

    @property
    def slices(self) -> tuple[Cut, ...]:
        """The slices of the whole model's parameters."""
        pairs = zip(self.params, self.own, strict=True)
        return tuple(part for param, whole in pairs for part in take_apart(param, whole))


def partition_layout(model: Model, topology: Topology) -> tuple[tuple[Flat, ...], ...]:
    """Return the flat buffers of every rank: result[rank][i], where i counts groups (sub-groups under ZeRO 3).

    Stage 0 without BF16_Optimizer has only one rank's buffers, or, with experts, all ranks' buffers.
    """
    owns = own_models(model, topology)
    if not topology.partitions:
        return tuple(tuple(_whole_flats(own, topology)) for own in (owns if model.experts else owns[:1]))
    if topology.stage == 3:
        return tuple(tuple(_stage3_flats(own, topology, rank)) for rank, own in enumerate(owns))
    groups = {id(own): group_layouts(own, topology) for own in owns}
    return tuple(
        tuple(_rank_flat(group, topology, *own.seat(group.group, topology, rank)) for group in groups[id(own)])
        for rank, own in enumerate(owns)
    )


def group_layouts(model: Model, topology: Topology) -> tuple[GroupLayout, ...]:
    """Return the whole flat buffer of every group of a rank's module, for wrappers that flatten parameters."""
    return tuple(
        _lay_out_group(index, trained(group), topology, count_parts(model, index, topology))
        for index, group in enumerate(model.groups)
    )


def count_parts(model: Model, group: int, topology: Topology) -> int:
    return len(model.spread[group].ranks) if model.spread else topology.dp


def take_apart(param: Param, part: Cut) -> Iterator[Cut]:
    """Divide a slice of a rank's parameter into slices of the whole model's parameters in it."""
    size = param.numel // len(param.atoms)
    for number, name in enumerate(param.atoms):
        low, high = max(part.start, number * size), min(part.start + part.numel, (number + 1) * size)
        if low < high or not param.parts:
            yield Cut(name, low - number * size, high - low, part.offset + low - part.start)


def list_atoms(params: Sequence[Param]) -> tuple[str, ...]:
    """Return the whole model's parameters in some of a rank's parameters."""
    return tuple(name for param in params for name in param.atoms)


def trained(params: Sequence[Param]) -> tuple[Param, ...]:
    return tuple(param for param in params if param.trains)


def sub_groups(params: Sequence[Param], topology: Topology, parts: int) -> list[tuple[Param, ...]]:
    """Divide a group under ZeRO 3: a sub-group ends when a partition has `sub_group_size` elements."""
    limit = topology.sub_group_size
    if not params or limit is None or limit >= sum(partition_numel(param, parts) for param in params):
        return [tuple(params)] if params else []
    result: list[list[Param]] = [[]]
    size = 0
    for param in params:
        if size >= limit:
            result.append([])
            size = 0
        result[-1].append(param)
        size += partition_numel(param, parts)
    return [tuple(group) for group in result]


def partition_numel(param: Param, dp: int) -> int:
    """Return the elements of a ZeRO 3 partition, with padding."""
    return -(-param.numel // dp)


def stage3_slice(param: Param, dp: int, rank: int, offset: int = 0) -> Cut:
    """Return the rank's slice of one parameter under ZeRO 3, which may be empty."""
    size = partition_numel(param, dp)
    start = min(rank * size, param.numel)
    return Cut(param.name, start, min(size, param.numel - start), offset)


def recorded_offsets(group: GroupLayout, params: Sequence[Param]) -> tuple[int, ...]:
    """Return the offsets in param_slice_mappings, in the order of the group's `params`.

    They are wrong under round robin, as `_link_all_hp_params` counts in the order before shuffling; with alignment
    padding it looks the offsets up.
    """
    if any(group.paddings):
        by_name = dict(zip((param.name for param in group.params), group.offsets, strict=True))
        return tuple(by_name[param.name] for param in params)
    return _starts([param.numel for param in params])


def clip(whole: Cut, start: int, end: int) -> Cut | None:
    """Return the part of a slice inside [start, end) of its buffer, with its offset from `start`."""
    low, high = max(whole.offset, start), min(whole.offset + whole.numel, end)
    return Cut(whole.name, whole.start + low - whole.offset, high - low, low - start) if low < high else None


def _lay_out_group(index: int, params: tuple[Param, ...], topology: Topology, parts: int) -> GroupLayout:
    zero = topology.row.strips_padding
    if zero and topology.round_robin:
        params = tuple(param for part in range(parts) for param in params[part::parts])
    unit = _PARAMETER_ALIGNMENT // topology.dtype.itemsize if zero and topology.parameter_alignment else 1
    # Every parameter starts at a multiple of the unit, so the padding depends only on its size.
    paddings = [-param.numel % unit for param in params[:-1]] + [0] * bool(params)
    spans = [param.numel + padding for param, padding in zip(params, paddings, strict=True)]
    used = sum(spans)
    alignment = 1 if topology.row.is_flat else _START_ALIGNMENT * parts
    return GroupLayout(index, params, _starts(spans), tuple(paddings), used, used + -used % alignment, parts)


def _starts(spans: Sequence[int]) -> tuple[int, ...]:
    return tuple(accumulate(spans, initial=0))[:-1]


def _rank_flat(group: GroupLayout, topology: Topology, part: int, parts: int) -> Flat:
    size = group.numel // parts
    start, end = part * size, (part + 1) * size
    slices = tuple(piece for whole in group.slices if (piece := clip(whole, start, end)))
    padding = min(max(end - group.used, 0), size)
    if not topology.row.strips_padding:  # the last rank records all of it, even if it exceeds the partition
        padding = group.numel - group.used if part == parts - 1 else 0
    return Flat(group.group, list_atoms(group.params), size, padding, slices, group.params)


def _stage3_flats(model: Model, topology: Topology, rank: int) -> Iterator[Flat]:
    for index, group in enumerate(model.groups):
        part, parts = model.seat(index, topology, rank)
        for params in sub_groups(trained(group), topology, parts):
            sizes = [partition_numel(param, parts) for param in params]
            placed = zip(params, _starts(sizes), strict=True)
            held = [(param, stage3_slice(param, parts, part, offset)) for param, offset in placed]
            slices = [piece for param, whole in held for piece in take_apart(param, whole)]
            yield Flat(index, list_atoms(params), sum(sizes), 0, tuple(each for each in slices if each.numel), params)


def _whole_flats(model: Model, topology: Topology) -> Iterator[Flat]:
    if topology.row.is_flat:
        for layout in group_layouts(model, topology):
            yield Flat(layout.group, list_atoms(layout.params), layout.numel, 0, layout.slices, layout.params)
        return
    for index, group in enumerate(model.groups):
        for param in group if not topology.row.has_copies else trained(group):
            slices = tuple(take_apart(param, Cut(param.name, 0, param.numel, 0)))
            yield Flat(index, param.atoms, param.numel, 0, slices, (param,))
