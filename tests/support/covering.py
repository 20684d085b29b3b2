"""Rows of a test that cover every pair of values instead of every combination, and sweeps of every n-th case.

Most faults need two values at once, such as a source and a target. All other cases run under `-m exhaustive`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from itertools import combinations, product
from typing import Any

import pytest

Row = tuple[Any, ...]


def is_exhaustive() -> bool:
    """Return True under `-m exhaustive`, which ``make test-all`` uses."""
    return bool(os.environ.get("UCP_EXHAUSTIVE"))


def stride(step: int) -> int:
    """Return the step of a sweep over calls, sites or orders; 1 under `-m exhaustive`."""
    return 1 if is_exhaustive() else step


def few(values: Sequence[Any], count: int) -> list[Any]:
    """Return `count` of the values, evenly spaced from the first one on; all of them under `-m exhaustive`."""
    if is_exhaustive() or len(values) <= count:
        return list(values)
    return [values[len(values) * number // count] for number in range(count)]


def cover(*factors: Sequence[Any], strength: int = 2) -> list[Row]:
    """Return rows in which every `strength` factors take all their combinations; deterministic and greedy."""
    rows = list(product(*(range(len(factor)) for factor in factors)))
    columns = list(combinations(range(len(factors)), min(strength, len(factors))))

    def bring(row: tuple[int, ...]) -> set[tuple[tuple[int, ...], tuple[int, ...]]]:
        return {(chosen, tuple(row[column] for column in chosen)) for chosen in columns}

    missing = set().union(*(bring(row) for row in rows))
    found = []
    while missing:
        best = max(rows, key=lambda row: len(bring(row) & missing))
        missing -= bring(best)
        found.append(tuple(factor[index] for factor, index in zip(factors, best, strict=True)))
    return found


def turns(first: Sequence[Any], second: Sequence[Any], count: int) -> list[Row]:
    """Pair each value with `count` values of the other side, along the diagonals of a Latin square.

    Every value is in about the same number of rows.
    """
    longer, shorter = (first, second) if len(first) >= len(second) else (second, first)
    step = max(1, len(shorter) // max(count, 1))
    stride = 3 if len(shorter) % 3 else 1
    rows = [(i, (i * stride + k * step) % len(shorter)) for i in range(len(longer)) for k in range(count)]
    chosen = dict.fromkeys(rows if longer is first else [(j, i) for i, j in rows])
    chosen |= dict.fromkeys((i, i % len(second)) for i in range(len(first)) if not any(row[0] == i for row in chosen))
    return [(first[i], second[j]) for i, j in sorted(chosen)]


def params(chosen: Sequence[Any], every: Iterable[Any], ids: Callable[[Any], str] | None = None) -> list[Any]:
    """Return parameters of a test: the chosen rows or single values, and all others marked as exhaustive."""
    found = []
    for row in [*chosen, *(row for row in every if row not in chosen)]:
        marks = () if row in chosen else (pytest.mark.exhaustive,)
        values = row if isinstance(row, tuple) else (row,)
        found.append(pytest.param(*values, id=ids(row) if ids else None, marks=marks))
    return found


def all_turns(first: Sequence[Any], second: Sequence[Any], count: int, ids: Callable[[Row], str] | None = None) -> Any:
    return params(turns(first, second, count), list(product(first, second)), ids)
