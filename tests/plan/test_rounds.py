"""Owners of blocks, their decisions about claims, rounds, and the order of reads.

The loads in `tests/load` check for all topologies that every byte is read once and reaches its destination.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_ucp.model.access import READ_ALL, PartialAccess
from deepspeed_ucp.model.records import Read, Records
from deepspeed_ucp.plan.rounds import (
    SELF_READ,
    Answers,
    Blocks,
    LoadPlan,
    make_owner_plan,
    make_plan,
    split_claims_by_owner,
)
from tests.support.reshard import examples

Row = tuple[int, int, int, int, int]
"""(record, offset, run, step, count)."""


def judge(
    *tables: Sequence[Row], nbytes: int, block: int, round_bytes: int, machine: int = 0
) -> tuple[LoadPlan, list[Answers]]:
    """Return the decision of rank 0, which owns all blocks."""
    arrays = [np.array(rows, np.int64).reshape(-1, 5) for rows in tables]
    blocks = Blocks.of(Records.of([(0, 0, nbytes, 0)]), block, 1)
    owned = blocks.owned(0, np.array([0]))
    return make_owner_plan(arrays, blocks, owned, round_bytes, np.zeros(len(tables), np.bool_), machine, 20)


def plain(offset: int, nbytes: int) -> Row:
    return (0, offset, nbytes, nbytes, 1)


@pytest.mark.parametrize(
    ("tables", "own"),
    [
        ([[plain(10, 5), plain(20, 5)], []], "11"),  # short runs, but no other rank wants the block
        ([[plain(0, 20)], [plain(30, 70)]], "11"),
        ([[plain(0, 19)], [plain(19, 19)]], "00"),
        ([[plain(0, 60)], [plain(59, 41)]], "00"),  # one byte of overlap
        ([[plain(0, 90)], [plain(5, 25)], [plain(40, 50)]], "000"),
        ([[plain(0, 60), plain(30, 60)]], "00"),
        ([[(0, 0, 30, 60, 2)]], "0"),  # strided
        ([[plain(10, 30)], [plain(40, 10)], [plain(45, 10)]], "100"),
    ],
)
def test_a_rank_reads_long_runs_that_only_it_wants_and_the_owner_the_rest(tables: list[list[Row]], own: str) -> None:
    found, answers = judge(*tables, nbytes=100, block=100, round_bytes=1000)
    assert [number == SELF_READ for each in answers for number, _ in each.tolist()] == [each == "1" for each in own]
    staged = 100 - sum(row[2] for row, each in zip(chain(*tables), own, strict=True) if each == "1")
    assert [each.staged for each in found.rounds] == [staged] * ("0" in own)


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


# -- blocks and their owners ------------------------------------------------------------------------------------------


@st.composite
def accesses(draw: st.DrawFn, ranks: int, files: int) -> PartialAccess:
    """Draw hosts in any order of ranks, and one or more hosts for each file."""
    hosts = draw(st.integers(1, ranks))
    views = [*range(hosts), *(draw(st.integers(0, hosts - 1)) for _ in range(ranks - hosts))]
    views = draw(st.permutations(views))
    holders = st.sets(st.integers(0, hosts - 1), min_size=1)
    return PartialAccess.of(views, [draw(holders) for _ in range(files)])


@examples(200)
@given(data=st.data(), ranks=st.integers(1, 7), sizes=st.lists(st.integers(0, 60), min_size=1, max_size=8))
def test_readers_of_a_file_own_equal_numbers_of_its_blocks(data: st.DataObject, ranks: int, sizes: list[int]) -> None:
    """The numbers are equal over all files of the same ranks, too, so nodes with copies read equal parts."""
    records, block = Records.of([(file, 64, size, 0) for file, size in enumerate(sizes)]), data.draw(BLOCKS)
    access = data.draw(accesses(ranks, len(records)))
    everyone = PartialAccess.of([0] * ranks, [{0}] * len(records))
    for each, partial in ((access, access), (READ_ALL, everyone)):
        blocks, touched = Blocks.of(records, block, ranks, each), np.arange(len(records))
        owned = [list(blocks.owned(rank, touched)) for rank in range(ranks)]
        every = [(record, low // block) for record, size in enumerate(sizes) for low in range(0, size, block)]
        assert sorted(chain(*owned)) == every
        for rank, held in enumerate(owned):
            assert held == sorted(held)
            pairs = np.array(held, np.int64).reshape(-1, 2)
            for at in (0, block - 1):
                assert (blocks.owners(pairs[:, 0], pairs[:, 1] * block + at) == rank).all()
        for group in range(len(partial.seen)):
            of_group = [sum(partial.groups[record] == group for record, _ in held) for held in owned]
            shares = [of_group[rank] for rank in partial.list_readers(partial.groups.tolist().index(group), ranks)]
            assert sum(shares) == sum(of_group)
            assert max(shares) - min(shares) <= 1


BLOCKS = st.sampled_from((4, 8, 16))


def test_ranks_that_can_read_a_file_own_its_blocks_in_turn() -> None:
    access = PartialAccess.of([0, 0, 1, 2], [{0}, {0, 2}, {1}, {0}, {0, 2}, {0, 2}])
    assert access.take_turns(range(6), 4).tolist() == [0, 0, 2, 1, 1, 3]
    assert access.take_turns([], 4).tolist() == []
    readable = [[0, 1, 3, 4, 5], [2], [1, 4, 5]]
    assert [np.flatnonzero(access.can_read(rank, range(6))).tolist() for rank in (0, 2, 3)] == readable
    assert access.select_files([2, 0]).take_turns([0, 1], 4).tolist() == [2, 0]


def test_access_of_ten_thousand_hosts_to_local_files_needs_a_few_megabytes() -> None:
    hosts = 10_240
    access = PartialAccess.of(range(hosts), [{host} for host in range(hosts)])
    assert access.seen.nbytes <= 14 << 20
    records = Records.of([(file, 0, 5 * 16, 0) for file in range(hosts)])
    blocks = Blocks.of(records, 16, hosts, access)
    assert list(blocks.owned(7777, np.arange(hosts))) == [(7777, number) for number in range(5)]


def test_ranks_with_access_to_all_wanted_files_exchange_no_bytes() -> None:
    """Two ranks resume the files of four ranks on the same two hosts."""
    access = PartialAccess.of([0, 1], [{0}, {0}, {1}, {1}])
    blocks = Blocks.of(Records.of([(file, 64, 16, 0) for file in range(4)]), 1 << 20, 2, access)
    for rank in range(2):
        tables, _ = split_claims_by_owner([Read.of(record, 0, 16) for record in (2 * rank, 2 * rank + 1)], blocks)
        assert [len(table) for table in tables] == [2 - 2 * rank, 2 * rank]


# -- the order of reads -----------------------------------------------------------------------------------------------


def test_ranks_begin_to_read_at_different_offsets() -> None:
    """They read in the order of the files, here the reverse of the records'."""
    reads, files = [Read.of(record, 0, 16) for record in range(6)], [5 - record for record in range(6)]
    answers, none = [np.full((6, 2), (SELF_READ, 0))], LoadPlan([], [], np.ones(1, np.bool_))
    plans = [make_plan([reads], answers, none, rank, files) for rank in range(4)]
    assert [[files[read.record] for read in plan.own_reads] for plan in plans] == [
        [0, 1, 2, 3, 4, 5],
        [3, 4, 5, 0, 1, 2],
        [1, 2, 3, 4, 5, 0],
        [5, 0, 1, 2, 3, 4],
    ]
