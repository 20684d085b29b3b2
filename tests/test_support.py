"""Tools of the tests: covering arrays, and ranks as threads."""

from __future__ import annotations

from itertools import combinations, product
from typing import Any

import numpy as np
import pytest

from deepspeed_ucp.comm import Comm
from tests.support.covering import cover, turns
from tests.support.ranks import BrokenWorldError, World, run_ranks


@pytest.mark.parametrize("sizes", [(4, 4, 3, 3), (2, 5), (3, 3, 3, 2, 2), (1, 4)], ids=str)
def test_cover_has_every_pair_of_values(sizes: tuple[int, ...]) -> None:
    factors = [[f"{name}{index}" for index in range(size)] for name, size in enumerate(sizes)]
    rows = cover(*factors)
    for first, second in combinations(range(len(factors)), 2):
        assert {(row[first], row[second]) for row in rows} == set(product(factors[first], factors[second]))
    assert len(rows) == len(set(rows)) <= 2 * max(a * b for a, b in combinations(sizes, 2))
    assert rows == cover(*factors)


@pytest.mark.parametrize(("left", "right", "count"), [(10, 10, 4), (10, 4, 2), (4, 10, 1), (3, 3, 3), (5, 1, 1)])
def test_turns_use_every_value_of_both_sides(left: int, right: int, count: int) -> None:
    first, second = list(range(left)), [f"t{index}" for index in range(right)]
    rows = turns(first, second, count)
    assert len(rows) == len(set(rows))
    assert {row[0] for row in rows} == set(first)
    assert {row[1] for row in rows} == set(second)


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


def test_different_collectives_of_ranks_as_threads_are_an_error() -> None:
    def work(rank: int, comm: Comm) -> None:
        comm.gather(None) if rank else comm.any_of(np.zeros(1, np.bool_))

    with pytest.raises(BrokenWorldError, match="different collectives"):
        run_ranks(2, work)
