"""What an engine's optimizer holds, as one number per parameter and state that no topology changes.

The number is the sum over the elements of their 32 bits, taken as an integer, times a number that only the element's
place in the whole parameter decides, modulo 2^64. So it is the same however the parameter is partitioned or cut, and
another one as soon as a bit differs or two unequal elements have changed places. Where elements lie is asked of
DeepSpeed's own bookkeeping and of the model's, never of the plugin.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

STATES = ("fp32", "exp_avg", "exp_avg_sq")
MODULUS = 1 << 64
_FACTOR = -0x61C8864680B583EB  # 2^64 divided by the golden ratio, odd, as a signed number

Sums = dict[str, int]
"""By state."""

Place = Callable[[torch.Tensor], torch.Tensor]
"""Of each element of a rank's tensor, flattened, the place in the flattened whole."""


@dataclass(frozen=True)
class Part:
    """What one rank holds of a parameter.

    Attributes:
        name: the parameter's name in the saved model.
        stage, shard: the pipeline stage, and the tensor-parallel rank where the parameter is cut, else 0.
        mirror: the tensor-parallel rank where it is not cut, else 0: of a mirror it is a copy.
        sums: of this rank's elements.
    """

    name: str
    stage: int
    shard: int
    mirror: int
    sums: Sums


@dataclass(frozen=True)
class Local:
    """Elements [start, start + numel) of a rank's flattened parameter, by state."""

    parameter: torch.Tensor
    start: int
    states: dict[str, torch.Tensor]


def hold_whole(parameter: torch.Tensor) -> torch.Tensor:
    """The place of each element where no tensor is cut."""
    return torch.arange(getattr(parameter, "ds_numel", parameter.numel()))


def sum_parts(engine: Any, place: Place) -> dict[int, Sums]:
    """By the id of each parameter, the sums of what this rank's optimizer holds of it."""
    find = {0: _find_whole, 3: _find_zero3}.get(engine.zero_optimization_stage(), _find_zero12)
    sums = {}
    for local in find(engine.optimizer):
        places = place(local.parameter)
        sums[id(local.parameter)] = {
            state: _sum_bits(values, places[local.start : local.start + values.numel()])
            for state, values in local.states.items()
        }
    return sums


def _find_whole(optimizer: Any) -> Iterator[Local]:
    """Stage 0 in 16 bit: every rank has a master of every parameter."""
    for parameters, masters in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
        for parameter, master in zip(parameters, masters, strict=True):
            yield Local(parameter, 0, _cut_states(optimizer, master, 0, master.numel()))


def _find_zero12(optimizer: Any) -> Iterator[Local]:
    for group, flat in zip(optimizer.bit16_groups, optimizer.single_partition_of_fp32_groups, strict=True):
        for parameter in group:
            mapping = getattr(parameter, "_hp_mapping", None)
            if mapping is None:  # of no element here
                continue
            low, numel = mapping.hp_fragment_address.start, mapping.hp_fragment_address.numel
            states = _cut_states(optimizer, flat, low, numel)
            yield Local(parameter, mapping.lp_fragment_address.start, states)


def _find_zero3(optimizer: Any) -> Iterator[Local]:
    groups = zip(optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat, strict=True)
    rank, world = (ask(group=optimizer.dp_process_group) for ask in (dist.get_rank, dist.get_world_size))
    for group, flat in groups:
        low = 0
        for parameter in group:
            part = -(-parameter.ds_numel // world)
            start = min(rank * part, parameter.ds_numel)
            numel = min(part, parameter.ds_numel - start)
            yield Local(parameter, start, _cut_states(optimizer, flat, low, numel))
            low += part


def _cut_states(optimizer: Any, flat: torch.Tensor, low: int, numel: int) -> dict[str, torch.Tensor]:
    state = optimizer.optimizer.state[flat]
    held = {name: (flat if name == "fp32" else state[name]).detach().flatten() for name in STATES}
    return {name: values[low : low + numel] for name, values in held.items()}


def _sum_bits(values: torch.Tensor, places: torch.Tensor) -> int:
    bits = values.contiguous().view(torch.int32).long()
    return int((bits * (places + 1).mul_(_FACTOR)).sum()) % MODULUS


def sum_whole(values: torch.Tensor) -> int:
    """The number of a whole parameter's state."""
    return sum_range(values, 0)


def sum_range(values: torch.Tensor, start: int) -> int:
    """That of elements from ``start`` on."""
    return _sum_bits(values.detach().flatten(), torch.arange(start, start + values.numel()))


def join_parts(parts: Iterable[Part]) -> dict[str, Sums]:
    """The fingerprint of a model from all ranks' parts, by parameter.

    Of what several pipeline stages hold under one name the first stage's counts.

    Raises:
        ValueError: tensor-parallel ranks hold different copies of a parameter.
    """
    held: dict[tuple[str, int], dict[int, Sums]] = defaultdict(lambda: defaultdict(lambda: dict.fromkeys(STATES, 0)))
    for part in parts:
        sums = held[part.name, part.stage][part.mirror]
        for state, value in part.sums.items():
            sums[state] = (sums[state] + value) % MODULUS
    found: dict[str, Sums] = {}
    for (name, _), copies in sorted(held.items(), key=lambda item: item[0]):
        if any(sums != copies[0] for sums in copies.values()):
            raise ValueError(f"{name}: its copies on tensor-parallel ranks differ")
        found.setdefault(name, copies[0])
    return found


def find_differing(found: dict[str, Sums], saved: dict[str, Sums]) -> list[str]:
    """Parameters with other bits than saved, or that only one side has."""
    return sorted(name for name in found.keys() | saved.keys() if found.get(name) != saved.get(name))
