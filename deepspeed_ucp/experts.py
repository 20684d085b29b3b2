"""DeepSpeed's own mixture of experts (``deepspeed/moe``): what its experts are called, and which ranks hold them.

Every rank counts the experts of a layer that it holds from 0. An atom is named by the number that the expert has in its
whole layer, as the file of that expert names it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_EXPERT = re.compile(r"((?:^|.*\.)deepspeed_moe\.experts\.deepspeed_experts\.)(\d{1,9})(?=\.|$)", re.ASCII)

DATA_FIRST = "use_data_before_expert_parallelism"
"""Key of a ds_config: ranks that hold the same experts follow each other."""

_FIXED = ("moe", "name")


def find_expert(name: str) -> tuple[str, int] | None:
    """The layer of an expert's parameter or buffer, and the expert's number; None for anything else."""
    found = _EXPERT.match(name)
    return (found[1], int(found[2])) if found else None


def count_experts(names: Iterable[str]) -> dict[str, int]:
    """Experts per layer, of those that are numbered without a gap from 0."""
    counts: dict[str, int] = {}
    for name in names:
        if found := find_expert(name):
            counts[found[0]] = max(counts.get(found[0], 0), found[1] + 1)
    return counts


def number_expert(name: str, first: Mapping[str, int]) -> str:
    """A rank's own name for a parameter → its name in the whole model.

    Args:
        first: per layer, the number in the whole layer of the first expert that the rank holds.
    """
    found = _EXPERT.match(name)
    if not found or not first.get(found[1]):
        return name
    return f"{found[1]}{int(found[2]) + first[found[1]]}{name[found.end() :]}"


def list_holders(dp: int, replicas: int, *, data_first: bool) -> list[range]:
    """Data-parallel ranks that hold the same experts, by expert-parallel rank (``deepspeed/utils/groups.py``).

    Args:
        dp: data-parallel ranks.
        replicas: how many of them hold the same experts.
        data_first: ``use_data_before_expert_parallelism``.
    """
    degree = dp // replicas
    if data_first:
        return [range(rank * replicas, (rank + 1) * replicas) for rank in range(degree)]
    return [range(rank, dp, degree) for rank in range(degree)]


def drop_fixed(hyper: Mapping[str, Any]) -> dict[str, Any]:
    """Hyper-parameters of a param group; of experts' without what names process groups of the engine."""
    return {key: value for key, value in hyper.items() if not (hyper.get("moe") and key in _FIXED)}


def pick_held(names: Sequence[str], degree: int, place: int) -> list[str]:
    """Of a param group's names, with those of all experts, the ones that an expert-parallel rank has, in its own order.

    Args:
        names: what all ranks of a live engine hold of the group, one rank's names behind the other's.
        degree: expert-parallel ranks.
        place: the rank among them.

    Raises:
        ValueError: the degree does not fit, or the optimizer has the experts in another order than the module.
    """
    counts = count_experts(names)
    if not counts:
        return list(names)
    largest = max(counts.values())
    if names not in [[name for part in _deal(names, counts, each) for name in part] for each in range(1, largest + 1)]:
        raise ValueError("the optimizer has the experts in another order than the module")
    dealt = _deal(names, counts, degree)
    if not dealt:
        raise ValueError(f"{degree} expert-parallel ranks do not fit {sorted(set(counts.values()))} experts")
    return dealt[place]


def _deal(names: Sequence[str], counts: Mapping[str, int], degree: int) -> list[list[str]]:
    """Names by expert-parallel rank, layer by layer and expert by expert; empty where the degree does not fit."""
    if any(count % degree for count in counts.values()):
        return []
    ends: dict[str, dict[str, None]] = {layer: {} for layer in counts}
    for name in names:
        if found := _EXPERT.match(name):
            ends[found[1]][name[found.end() :]] = None
    return [
        [
            f"{layer}{expert}{end}"
            for layer, count in counts.items()
            for expert in range(place * (count // degree), (place + 1) * (count // degree))
            for end in ends[layer]
        ]
        for place in range(degree)
    ]
