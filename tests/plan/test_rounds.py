"""Owners of blocks: the claims that they receive, grant and serve, and their rounds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_ucp.model.records import STAGING, Read, Records
from deepspeed_ucp.plan.rounds import SELF_READ, Answers, Blocks, LoadPlan, make_owner_plan
from tests.support.reshard import examples

Row = tuple[int, int, int, int, int]
"""(record, offset, run, step, count)."""


def judge(
    *tables: Sequence[Row],
    nbytes: int = 100,
    min_direct: int = 20,
    block: int = 100,
    round_bytes: int = 1000,
    machine: int = 0,
) -> tuple[LoadPlan, list[Answers]]:
    """Return the decision of rank 0, which owns all blocks."""
    arrays = [np.array(rows, np.int64).reshape(-1, 5) for rows in tables]
    blocks = Blocks.of(Records.of([(0, 0, nbytes, 0)]), block, 1)
    owned = blocks.owned(0, np.array([0]))
    return make_owner_plan(arrays, blocks, owned, round_bytes, np.zeros(len(tables), np.bool_), machine, min_direct)


def plain(offset: int, nbytes: int) -> Row:
    return (0, offset, nbytes, nbytes, 1)


def spans(reads: Sequence[Read]) -> list[tuple[int, int, int]]:
    """Return (first byte, end, byte of the staging memory or 0) of each read."""
    assert all(sum(item.nbytes for item in read.items) == (read.nbytes if read.items else 0) for read in reads)
    return [(read.offset, read.end, sum(item.position for item in read.items)) for read in reads]


def decided(answers: Sequence[Answers]) -> list[list[bool]]:
    return [(each[:, 0] == SELF_READ).tolist() for each in answers]


@pytest.mark.parametrize(
    ("tables", "unclaimed"),
    [
        ([[plain(0, 1)], []], [(1, 100, 0)]),
        ([[plain(0, 19)], []], [(19, 100, 0)]),
        ([[plain(0, 100)], []], []),
        ([[plain(10, 5), plain(20, 5)]], [(0, 10, 0), (15, 20, 0), (25, 100, 0)]),
        ([[plain(0, 20)], [plain(30, 70)]], [(20, 30, 0)]),
    ],
    ids=["one byte", "short", "whole", "several pieces of one rank", "long runs of several ranks"],
)
def test_claims_of_a_single_rank_are_granted(tables: list[list[Row]], unclaimed: list[tuple[int, int, int]]) -> None:
    found, answers = judge(*tables)
    assert decided(answers) == [[True] * len(table) for table in tables]
    assert found.rounds == []
    assert spans(found.own_reads) == unclaimed


def test_machines_begin_with_different_rounds() -> None:
    """Two ranks want five whole blocks, each of which is a round; a third rank is the only one in its block."""
    both, third = [plain(offset, 20) for offset in range(0, 100, 20)], plain(100, 20)
    found = [judge(both, both, [third], nbytes=120, block=20, round_bytes=20, machine=machine) for machine in (0, 1)]
    assert [[round_.reads[0].offset for round_ in each.rounds] for each, _ in found] == [
        [0, 20, 40, 60, 80],
        [60, 80, 0, 20, 40],
    ]
    for each, (*served, granted) in found:
        assert granted.tolist() == [[SELF_READ, 0]]
        for answers in served:
            begins = [each.rounds[number].reads[0].offset for number in answers[:, 0].tolist()]
            assert begins == [0, 20, 40, 60, 80]


SERVED: dict[str, list[list[Row]]] = {
    "short": [[plain(0, 19)], [plain(19, 19)]],
    "same": [[plain(0, 60)], [plain(0, 60)]],
    "one byte of overlap": [[plain(0, 60)], [plain(59, 41)]],
    "inside": [[plain(0, 60)], [plain(10, 30)]],
    "behind the second, but inside the first": [[plain(0, 90)], [plain(5, 25)], [plain(40, 50)]],
    "overlap within one rank": [[plain(0, 60), plain(30, 60)]],
    "strided, of one rank": [[(0, 0, 30, 60, 2)]],
}


@pytest.mark.parametrize("tables", SERVED.values(), ids=SERVED)
def test_claims_of_several_ranks_for_a_block_are_served(tables: list[list[Row]]) -> None:
    assert decided(judge(*tables)[1]) == [[False] * len(table) for table in tables]


def test_granted_claims_are_not_staged() -> None:
    found, answers = judge([plain(10, 30)], [plain(40, 10)], [plain(45, 10)])
    assert decided(answers) == [[True], [False], [False]]
    (served,) = found.rounds
    assert spans(served.reads) == [(0, 10, 0), (40, 100, 10)]
    assert (served.staged, served.sent_remote) == (70, 20)
    assert served.served == [[], [Read.of(STAGING, 10, 20)], [Read.of(STAGING, 15, 25)]]


def test_granted_claims_do_not_count_in_a_rounds_size() -> None:
    """Ten bytes of each of four blocks are sent, in one round of 40 bytes."""
    long, short = [plain(50 * block + 10, 40) for block in range(4)], [plain(50 * block, 10) for block in range(4)]
    found, _ = judge(long, short, short, nbytes=200, block=50, round_bytes=80)
    assert [(each.staged, each.sent_remote) for each in found.rounds] == [(40, 80)]


# -- rounds -----------------------------------------------------------------------------------------------------------


def rounds(window: int, ranks: int = 2) -> list[list[int]]:
    """Return the blocks of each round, for four blocks of 50 bytes that all ranks want whole."""
    found, answers = judge(
        *[[plain(low, 50) for low in range(0, 200, 50)]] * ranks, nbytes=200, block=50, round_bytes=window
    )
    numbers = [[read.offset // 50 for read in served.reads] for served in found.rounds]
    for number, blocks in enumerate(numbers):
        for each in answers:
            assert all(each[block, 0] == number for block in blocks)
    return numbers


def test_rounds_have_the_blocks_of_a_window_and_at_least_one() -> None:
    assert rounds(1000) == [[0, 1, 2, 3]]
    assert rounds(200) == [[0, 1], [2, 3]]  # 100 bytes staged, 200 sent
    assert rounds(100, ranks=1) == []  # the claims of a single rank are granted
    assert rounds(199) == rounds(10, ranks=3) == [[0], [1], [2], [3]]


def test_staged_bytes_fill_a_round_even_if_few_are_sent() -> None:
    """Two ranks want the first byte of each of four blocks."""
    found, _ = judge(*[[plain(low, 1) for low in range(0, 200, 50)]] * 2, nbytes=200, block=50, round_bytes=100)
    assert [(served.staged, served.sent_remote) for served in found.rounds] == [(100, 4), (100, 4)]


# -- blocks and their owners ------------------------------------------------------------------------------------------


@examples(150)
@given(
    nbytes=st.lists(st.integers(0, 60), min_size=1, max_size=6),
    block=st.sampled_from((4, 8, 16)),
    size=st.integers(1, 7),
)
def test_every_block_has_one_owner(nbytes: list[int], block: int, size: int) -> None:
    blocks = Blocks.of(Records.of([(0, 0, count, 0) for count in nbytes]), block, size)
    touched = np.arange(len(nbytes))
    held = [(record, number, rank) for rank in range(size) for record, number in blocks.owned(rank, touched)]
    every = [(record, low // block) for record, count in enumerate(nbytes) for low in range(0, count, block)]
    assert sorted((record, number) for record, number, _ in held) == every
    records, numbers, ranks = (np.array([each[k] for each in held], np.int64) for k in range(3))
    assert (blocks.owners(records, numbers * block) == ranks).all()
    shares = [int((ranks == rank).sum()) for rank in range(size)]
    assert max(shares) - min(shares) <= 1
