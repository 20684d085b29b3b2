"""Rows of intervals [low, high)."""

from __future__ import annotations

from collections.abc import Iterable


def find_gaps(spans: Iterable[tuple[int, int]], low: int, high: int) -> list[tuple[int, int]]:
    """What spans, in any order, leave free of [low, high)."""
    gaps, position = [], low
    for begin, end in [*sorted(spans), (high, high)]:
        if begin > position:
            gaps.append((position, begin))
        position = max(position, end)
    return gaps
