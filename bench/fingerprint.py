"""A checksum per parameter and optimizer state that does not depend on the topology.

Each element's 32 bits, as an integer, are multiplied by a number derived from the element's position in the whole
parameter; the sum is taken modulo 2^64. It is the same for any partitioning, and differs if a bit differs or two
unequal elements are swapped. Positions come from the bookkeeping of DeepSpeed and of the model, not of the plugin.
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
"""Checksum by state."""

FindPositions = Callable[[torch.Tensor], torch.Tensor]
"""Returns the position of each element of a rank's flattened tensor in the flattened whole parameter."""


@dataclass(frozen=True)
class Part:
    """One rank's part of a parameter.

    Attributes:
        name: name of the parameter in the saved model.
        stage: pipeline stage.
        replica: tensor-parallel rank if the parameter is replicated, else 0.
        sums: checksums of this rank's elements.
    """

    name: str
    stage: int
    replica: int
    sums: Sums


_Local = tuple[torch.Tensor, int, dict[str, torch.Tensor]]
"""A parameter, the first element of a rank's part of it, and the states of the part."""


def count_up(parameter: torch.Tensor) -> torch.Tensor:
    """Return the positions in a parameter that tensor parallelism does not cut."""
    return torch.arange(getattr(parameter, "ds_numel", parameter.numel()))


def sum_parts(engine: Any, find_positions: FindPositions) -> dict[int, Sums]:
    """Return the checksums of this rank's elements, by the parameter's id; for engines at ZeRO 1 to 3."""
    list_locals = _list_zero3 if engine.zero_optimization_stage() == 3 else _list_zero12
    sums = {}
    for parameter, start, states in list_locals(engine.optimizer):
        positions = find_positions(parameter)[start:]
        sums[id(parameter)] = {name: _sum_bits(each, positions[: each.numel()]) for name, each in states.items()}
    return sums


def _list_zero12(optimizer: Any) -> Iterator[_Local]:
    for group, flat in zip(optimizer.bit16_groups, optimizer.single_partition_of_fp32_groups, strict=True):
        for parameter in group:
            mapping = getattr(parameter, "_hp_mapping", None)
            if mapping is None:  # this rank has none of its elements
                continue
            start, numel = mapping.hp_fragment_address.start, mapping.hp_fragment_address.numel
            yield (parameter, mapping.lp_fragment_address.start, _cut_states(optimizer, flat, start, numel))


def _list_zero3(optimizer: Any) -> Iterator[_Local]:
    group = optimizer.dp_process_group
    rank, world = dist.get_rank(group=group), dist.get_world_size(group=group)
    for parameters, flat in zip(optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat, strict=True):
        offset = 0
        for parameter in parameters:
            partition = -(-parameter.ds_numel // world)
            start = min(rank * partition, parameter.ds_numel)
            numel = min(partition, parameter.ds_numel - start)
            yield (parameter, start, _cut_states(optimizer, flat, offset, numel))
            offset += partition


def _cut_states(optimizer: Any, flat: torch.Tensor, start: int, numel: int) -> dict[str, torch.Tensor]:
    state = {"fp32": flat, **optimizer.optimizer.state[flat]}
    return {name: state[name].detach().flatten()[start : start + numel] for name in STATES}


def _sum_bits(values: torch.Tensor, positions: torch.Tensor) -> int:
    bits = values.contiguous().view(torch.int32).long()
    return int((bits * (positions + 1).mul_(_FACTOR)).sum()) % MODULUS


def sum_whole(values: torch.Tensor) -> int:
    """Return the checksum of a whole parameter's state."""
    return _sum_bits(values.detach().flatten(), torch.arange(values.numel()))


def join_parts(parts: Iterable[Part]) -> dict[str, Sums]:
    """Join the parts of all ranks to one fingerprint of the model, by parameter.

    If several pipeline stages have a parameter of one name, the first stage's is used.

    Raises:
        ValueError: replicas of a parameter on tensor-parallel ranks differ.
    """
    joined: dict[tuple[str, int], dict[int, Sums]] = defaultdict(lambda: defaultdict(lambda: dict.fromkeys(STATES, 0)))
    for part in parts:
        sums = joined[part.name, part.stage][part.replica]
        for state, value in part.sums.items():
            sums[state] = (sums[state] + value) % MODULUS
    fingerprint: dict[str, Sums] = {}
    for (name, _), replicas in sorted(joined.items(), key=lambda item: item[0]):
        if any(sums != replicas[0] for sums in replicas.values()):
            raise ValueError(f"{name}: its replicas on tensor-parallel ranks differ")
        fingerprint.setdefault(name, replicas[0])
    return fingerprint


def find_differing(loaded: dict[str, Sums], saved: dict[str, Sums]) -> list[str]:
    """Return the parameters with other bits than saved, or that only one side has."""
    return sorted(name for name in loaded.keys() | saved.keys() if loaded.get(name) != saved.get(name))
