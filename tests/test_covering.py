"""The covering arrays that other tests choose their cases by."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from tests.support.covering import cover, turns


@pytest.mark.parametrize("sizes", [(4, 4, 3, 3), (2, 5), (3, 3, 3, 2, 2), (1, 4)], ids=str)
@pytest.mark.parametrize("strength", [2, 3])
def test_every_pair_is_there(sizes: tuple[int, ...], strength: int) -> None:
    factors = [[f"{name}{index}" for index in range(size)] for name, size in enumerate(sizes)]
    rows = cover(*factors, strength=strength)
    for columns in combinations(range(len(factors)), min(strength, len(factors))):
        wanted = set(product(*(factors[column] for column in columns)))
        assert {tuple(row[column] for column in columns) for row in rows} == wanted
    assert len(rows) == len(set(rows)) <= 2 * max(a * b for a, b in combinations(sizes, 2)) * (4 if strength > 2 else 1)
    assert rows == cover(*factors, strength=strength)


def test_rows_that_make_no_sense_are_left_out() -> None:
    rows = cover([1, 2, 3], [1, 2, 3], [1, 2], where=lambda a, b, _: a != b)
    assert {row[:2] for row in rows} == {(a, b) for a, b in product([1, 2, 3], repeat=2) if a != b}


@pytest.mark.parametrize(("left", "right", "count"), [(10, 10, 4), (10, 4, 2), (4, 10, 1), (3, 3, 3), (5, 1, 1)])
def test_both_sides_take_turns(left: int, right: int, count: int) -> None:
    first, second = list(range(left)), [f"t{index}" for index in range(right)]
    rows = turns(first, second, count)
    assert len(rows) == len(set(rows))
    assert {row[0] for row in rows} == set(first)
    assert {row[1] for row in rows} == set(second)
