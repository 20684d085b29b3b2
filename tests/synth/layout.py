"""Where each element of each parameter lies in DeepSpeed's flat buffers: pure integers, every rank of every wrapper.

Sources: `DeepSpeedZeroOptimizer.__init__` (round robin, parameter alignment, padding to 2 x dp), `BF16_Optimizer`,
`FP16_Optimizer`, and ZeRO 3's `_create_fp16_sub_groups` with its ceil(numel / dp) per parameter and rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from .description import Model, Param, Topology

_START_ALIGNMENT = 2  # elements; DeepSpeed's nccl_start_alignment_factor
_PARAMETER_ALIGNMENT = 16  # bytes; zero_optimization.parameter_alignment


@dataclass(frozen=True, slots=True)
class Slice:
    """Elements [start, start + numel) of the parameter lie at [offset, offset + numel) of the flat buffer."""

    name: str
    start: int
    offset: int
    numel: int


@dataclass(frozen=True, slots=True)
class Flat:
    """One flat buffer of one rank: `numel` elements, padding included; `padding` is what DeepSpeed records for it.

    `names` are the parameters of all ranks' buffers of this group or sub-group. At stage 0 without flattening there is
    one Flat per parameter (frozen ones too where the raw optimizer was given them).
    """

    group: int
    names: tuple[str, ...]
    numel: int
    padding: int
    slices: tuple[Slice, ...]


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """A group's whole flat buffer (all ranks' partitions): parameters in flat order, offsets, padding after each."""

    group: int
    params: tuple[Param, ...]
    offsets: tuple[int, ...]
    paddings: tuple[int, ...]
    used: int
    numel: int

    @property
    def slices(self) -> tuple[Slice, ...]:
        """Every parameter whole."""
        pairs = zip(self.params, self.offsets, strict=True)
        return tuple(Slice(param.name, 0, offset, param.numel) for param, offset in pairs)


def partition_layout(model: Model, topology: Topology) -> tuple[tuple[Flat, ...], ...]:
    """The flat buffers of every rank: result[rank][i], i counting groups (sub-groups under ZeRO 3).

    Stage 0 has one rank's worth, whatever dp is (but BF16_Optimizer partitions there too).
    """
    if not topology.partitions:
        return (tuple(_whole_flats(model, topology)),)
    if topology.stage == 3:
        return tuple(tuple(_stage3_flats(model, topology, rank)) for rank in range(topology.dp))
    groups = group_layouts(model, topology)
    return tuple(tuple(_rank_flat(group, topology, rank) for group in groups) for rank in range(topology.dp))


def group_layouts(model: Model, topology: Topology) -> tuple[GroupLayout, ...]:
    """The whole flat buffer of every group, for the wrappers that flatten the module's parameters."""
    return tuple(_lay_out_group(index, trained(group), topology) for index, group in enumerate(model.groups))


def trained(params: Sequence[Param]) -> tuple[Param, ...]:
    """Those that DeepSpeed's wrappers own."""
    return tuple(param for param in params if param.trains)


def sub_groups(params: Sequence[Param], topology: Topology) -> list[tuple[Param, ...]]:
    """ZeRO 3's cut of one group: a sub-group is closed once it holds `sub_group_size` elements of one partition."""
    limit = topology.sub_group_size
    if not params or limit is None or limit >= sum(partition_numel(param, topology.dp) for param in params):
        return [tuple(params)] if params else []
    result: list[list[Param]] = [[]]
    size = 0
    for param in params:
        if size >= limit:
            result.append([])
            size = 0
        result[-1].append(param)
        size += partition_numel(param, topology.dp)
    return [tuple(group) for group in result]


def partition_numel(param: Param, dp: int) -> int:
    """Elements of a ZeRO 3 partition, padding included."""
    return -(-param.numel // dp)


def stage3_slice(param: Param, dp: int, rank: int, offset: int = 0) -> Slice:
    """The rank's elements of one parameter under ZeRO 3 (possibly none)."""
    size = partition_numel(param, dp)
    start = min(rank * size, param.numel)
    return Slice(param.name, start, offset, min(size, param.numel - start))


def recorded_offsets(group: GroupLayout, params: Sequence[Param]) -> tuple[int, ...]:
    """The offsets that DeepSpeed *believes in* for param_slice_mappings, in the order of the group's `params`.

    `_link_all_hp_params` counts in the group's own order, which is wrong under round robin, unless the group has
    alignment padding: then it looks the offsets up.
    """
    if any(group.paddings):
        by_name = dict(zip((param.name for param in group.params), group.offsets, strict=True))
        return tuple(by_name[param.name] for param in params)
    return _starts([param.numel for param in params])


def clip(whole: Slice, start: int, end: int) -> Slice | None:
    """The part of a slice inside [start, end) of its buffer, its offset then counted from `start`."""
    low, high = max(whole.offset, start), min(whole.offset + whole.numel, end)
    return Slice(whole.name, whole.start + low - whole.offset, low - start, high - low) if low < high else None


def _lay_out_group(index: int, params: tuple[Param, ...], topology: Topology) -> GroupLayout:
    zero = topology.kind == "zero"
    params = _round_robin(params, topology.dp) if zero and topology.round_robin else params
    unit = _PARAMETER_ALIGNMENT // topology.dtype.itemsize if zero and topology.parameter_alignment else 1
    # Every parameter starts at a multiple of the unit, so the padding depends on its own size only.
    paddings = [-param.numel % unit for param in params[:-1]] + [0] * bool(params)
    spans = [param.numel + padding for param, padding in zip(params, paddings, strict=True)]
    used = sum(spans)
    alignment = 1 if topology.kind == "fused" else _START_ALIGNMENT * topology.dp
    return GroupLayout(index, params, _starts(spans), tuple(paddings), used, used + -used % alignment)


def _round_robin(params: tuple[Param, ...], dp: int) -> tuple[Param, ...]:
    return tuple(param for rank in range(dp) for param in params[rank::dp])


def _starts(spans: Sequence[int]) -> tuple[int, ...]:
    return tuple(accumulate(spans, initial=0))[:-1]


def _rank_flat(group: GroupLayout, topology: Topology, rank: int) -> Flat:
    size = group.numel // topology.dp
    start, end = rank * size, (rank + 1) * size
    slices = tuple(part for whole in group.slices if (part := clip(whole, start, end)))
    padding = min(max(end - group.used, 0), size)
    if topology.kind == "bf16":  # all of it is booked on the last rank, even where it exceeds the partition
        padding = group.numel - group.used if rank == topology.dp - 1 else 0
    return Flat(group.group, tuple(param.name for param in group.params), size, padding, slices)


def _stage3_flats(model: Model, topology: Topology, rank: int) -> Iterator[Flat]:
    for index, group in enumerate(model.groups):
        for params in sub_groups(trained(group), topology):
            sizes = [partition_numel(param, topology.dp) for param in params]
            pairs = zip(params, _starts(sizes), strict=True)
            slices = [stage3_slice(param, topology.dp, rank, offset) for param, offset in pairs]
            names = tuple(param.name for param in params)
            yield Flat(index, names, sum(sizes), 0, tuple(part for part in slices if part.numel))


def _whole_flats(model: Model, topology: Topology) -> Iterator[Flat]:
    if topology.kind == "fused":
        for layout in group_layouts(model, topology):
            yield Flat(layout.group, tuple(param.name for param in layout.params), layout.numel, 0, layout.slices)
        return
    for index, group in enumerate(model.groups):
        for param in group if topology.kind == "raw" else trained(group):
            yield Flat(index, (param.name,), param.numel, 0, (Slice(param.name, 0, 0, param.numel),))
