"""How ZeRO lays parameters out and cuts them: one description, used for files and for live buffers alike."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cut:
    """Elements [start, start + numel) of a parameter lie at element ``offset`` of a flat buffer."""

    name: str
    start: int
    numel: int
    offset: int


def accumulate_offsets(numels: Iterable[int], gaps: Sequence[int] = ()) -> list[int]:
    """Offsets of parameters that follow each other, with ``gaps[i]`` elements of padding behind the i-th."""
    offsets, position = [], 0
    for index, numel in enumerate(numels):
        offsets.append(position)
        position += numel + (gaps[index] if gaps else 0)
    return offsets


def cut_flat(names: Sequence[str], numels: Sequence[int], offsets: Sequence[int], low: int, high: int) -> list[Cut]:
    """ZeRO 1/2, BF16: what falls into [low, high) of a flat buffer with parameters at ``offsets``.

    Returned offsets count from ``low``, as in a rank's partition.
    """
    cuts = []
    for name, numel, offset in zip(names, numels, offsets, strict=True):
        first, last = max(offset, low), min(offset + numel, high)
        if first < last:
            cuts.append(Cut(name, first - offset, last - first, first - low))
    return cuts


def part_numel(numel: int, dp: int) -> int:
    """ZeRO 3: elements of a parameter that each of ``dp`` ranks reserves, padding included."""
    return -(-numel // dp)


def cut_parameter(numel: int, rank: int, dp: int) -> tuple[int, int]:
    """ZeRO 3: (start, elements) of a parameter that ``rank`` of ``dp`` holds; none where it holds padding only."""
    part = part_numel(numel, dp)
    start = min(rank * part, numel)
    return start, min(part, numel - start)


def cut_sub_group(names: Sequence[str], numels: Sequence[int], rank: int, dp: int) -> list[Cut]:
    """ZeRO 3: what ``rank`` holds of a sub-group's parameters, whose reserved parts follow each other."""
    cuts = []
    offsets = accumulate_offsets(part_numel(numel, dp) for numel in numels)
    for name, numel, offset in zip(names, numels, offsets, strict=True):
        start, held = cut_parameter(numel, rank, dp)
        if held:
            cuts.append(Cut(name, start, held, offset))
    return cuts
