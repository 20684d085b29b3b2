"""Tools of the tests: covering arrays, and ranks as threads."""

from __future__ import annotations

from itertools import combinations, product
from typing import Any

import numpy as np
import pytest

from deepspeed_ucp.comm import Comm
from tests.support.covering import cover, turns
from tests.support.ranks import BrokenWorldError, World, run_ranks

# -- covering arrays


@pytest.mark.parametrize("sizes", [(4, 4, 3, 3), (2, 5), (3, 3, 3, 2, 2), (1, 4)], ids=str)
@pytest.mark.parametrize("strength", [2, 3])
def test_cover_has_every_pair_of_values(sizes: tuple[int, ...], strength: int) -> None:
    factors = [[f"{name}{index}" for index in range(size)] for name, size in enumerate(sizes)]
    rows = cover(*factors, strength=strength)
    for columns in combinations(range(len(factors)), min(strength, len(factors))):
        wanted = set(product(*(factors[column] for column in columns)))
        assert {tuple(row[column] for column in columns) for row in rows} == wanted
    assert len(rows) == len(set(rows)) <= 2 * max(a * b for a, b in combinations(sizes, 2)) * (4 if strength > 2 else 1)
    assert rows == cover(*factors, strength=strength)


def test_cover_omits_invalid_rows() -> None:
    rows = cover([1, 2, 3], [1, 2, 3], [1, 2], where=lambda a, b, _: a != b)
    assert {row[:2] for row in rows} == {(a, b) for a, b in product([1, 2, 3], repeat=2) if a != b}


@pytest.mark.parametrize(("left", "right", "count"), [(10, 10, 4), (10, 4, 2), (4, 10, 1), (3, 3, 3), (5, 1, 1)])
def test_turns_use_every_value_of_both_sides(left: int, right: int, count: int) -> None:
    first, second = list(range(left)), [f"t{index}" for index in range(right)]
    rows = turns(first, second, count)
    assert len(rows) == len(set(rows))
    assert {row[0] for row in rows} == set(first)
    assert {row[1] for row in rows} == set(second)


# -- ranks as threads


@pytest.mark.parametrize("order", [None, (2, 1, 0), (1, 2, 0)], ids=str)
def test_ranks_as_threads_run_in_turn_and_receive_copies(order: tuple[int, ...] | None) -> None:
    seen: list[tuple[int, int]] = []

    def work(rank: int, comm: Comm) -> tuple[Any, Any]:
        for step in range(3):
            seen.append((step, rank))
            gathered = comm.gather([rank])
        gathered[0].append(rank)
        return gathered, comm.broadcast({"from": rank}, src=2)

    results = World(3, order).run(work)
    assert seen == [(step, rank) for step in range(3) for rank in order or range(3)]
    assert results == [([[0, rank], [1], [2]], {"from": 2}) for rank in range(3)]


@pytest.mark.parametrize(("size", "culprit"), [(2, 0), (2, 1), (3, 0), (3, 1), (3, 2)])
def test_ranks_as_threads_do_not_wait_for_one_that_has_ended(size: int, culprit: int) -> None:
    def work(rank: int, comm: Comm) -> None:
        comm.gather(None)
        if rank == culprit:
            raise ZeroDivisionError("oh")
        comm.gather(None)

    results = World(size).run(work)
    kinds = [ZeroDivisionError if rank == culprit else BrokenWorldError for rank in range(size)]
    assert [type(result) for result in results] == kinds
    with pytest.raises(ZeroDivisionError):
        run_ranks(size, work)


def test_different_collectives_of_ranks_as_threads_are_an_error() -> None:
    def work(rank: int, comm: Comm) -> None:
        comm.gather(None) if rank else comm.any_of(np.zeros(1, np.bool_))

    with pytest.raises(BrokenWorldError, match="different collectives"):
        run_ranks(2, work)
