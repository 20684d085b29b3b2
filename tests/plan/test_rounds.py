"""Owners of blocks, their claims and rounds; the reads of each rank: listed cases, and random ones byte by byte."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_ucp.model.access import READ_ALL, PartialAccess
from deepspeed_ucp.model.records import Records
from deepspeed_ucp.plan.rounds import SELF_READ, Answers, Blocks, LoadPlan, make_owner_plan
from deepspeed_ucp.tensor_parallel.layout import Run
from tests.plan.planning import (
    BLOCK,
    ITEM,
    Demand,
    Piece,
    Planned,
    check_plan,
    demands,
    divide,
    execute,
    plan_pieces,
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
    assert all((blocks.owners(records, numbers * block + at) == ranks).all() for at in (0, block - 1))
    shares = [int((ranks == rank).sum()) for rank in range(size)]
    assert max(shares) - min(shares) <= 1


# -- plans of all ranks -----------------------------------------------------------------------------------------------


def test_ranks_begin_to_read_at_different_offsets() -> None:
    """They read in the order of the files, here the reverse of the records'."""
    records = Records.of([(5 - i, 0, 16, 0) for i in range(6)])
    plans = plan_pieces([[Piece(i, 0, Run(rank, 0, 1)) for i in range(6)] for rank in range(4)], records).plans
    assert [[records.files[read.record] for read in plan.own_reads] for plan in plans] == [
        [0, 1, 2, 3, 4, 5],
        [3, 4, 5, 0, 1, 2],
        [1, 2, 3, 4, 5, 0],
        [5, 0, 1, 2, 3, 4],
    ]


# -- exchange ---------------------------------------------------------------------------------------------------------


def test_owners_send_in_the_same_round_and_ranks_receive_in_steps() -> None:
    """Eight blocks of 16 bytes for four machines, in rounds of 32 bytes: 48 are sent and received in each."""
    pieces, records = [[Piece(0, 0, Run(0, 0, 32))]] * 4, Records.of([(0, 0, 128, 0)])
    plans = plan_pieces(pieces, records, block=16, window=32).plans
    assert [[[read.offset for read in each.reads] for each in plan.rounds] for plan in plans] == [
        [[0], [64]],
        [[80], [16]],
        [[32], [96]],
        [[112], [48]],
    ]
    assert {each.exchanges for plan in plans for each in plan.rounds} == {2}
    assert sum(read.nbytes for plan in plans for read in plan.reads) == 128


# -- random claims ----------------------------------------------------------------------------------------------------


@st.composite
def accesses(draw: st.DrawFn, ranks: int, files: int) -> PartialAccess:
    """Draw hosts in any order of ranks, and one or more hosts for each file."""
    hosts = draw(st.integers(1, ranks))
    views = [*range(hosts), *(draw(st.integers(0, hosts - 1)) for _ in range(ranks - hosts))]
    views = draw(st.permutations(views))
    holders = st.sets(st.integers(0, hosts - 1), min_size=1)
    return PartialAccess.of(views, [draw(holders) for _ in range(files)])


@examples(250)
@given(
    data=st.data(),
    demand=demands(),
    window=st.sampled_from((32, 64, 100, 1 << 20)),
    min_direct=st.sampled_from((1, 8, 16, 1 << 20)),
    first=st.sets(st.integers(0, 60)),
)
def test_random_claims_are_filled_with_each_byte_read_once(
    data: st.DataObject, demand: Demand, window: int, min_direct: int, first: set[int]
) -> None:
    """A rank that can access a byte reads it. An owner reads only its blocks for peers."""
    records, pieces, _ = demand
    access = data.draw(st.just(READ_ALL) | accesses(len(pieces), 3))
    planned = plan_pieces(pieces, records, block=BLOCK, window=window, min_direct=min_direct, access=access)
    check_passes(planned, first, *check_plan(planned, demand, window))
    for rank, plan in enumerate(planned.plans):
        assert access.can_read(rank, [records.files[read.record] for read in plan.reads]).all()
        owned = set(planned.blocks.owned(rank, np.arange(len(records))))
        passed = [read for each in plan.rounds for read in each.reads]
        passed += [read for read in plan.own_reads if not read.items]
        assert {(read.record, read.offset // BLOCK) for read in passed} <= owned


def check_passes(planned: Planned, first: set[int], data: Sequence[np.ndarray], whole: Sequence[np.ndarray]) -> None:
    """Check that two passes fill the same memory as one, and that the second reads ranges of the first again."""
    most = 1 + max((each.destination for mine in planned.claims for claim in mine for each in claim.items), default=0)
    one, two = divide(planned, first.__contains__, most)
    buffers, others = ([np.zeros_like(each) for each in whole] for _ in range(2))
    assert (execute(one, data, ITEM, buffers, first.__contains__) == execute(planned, data, ITEM, others)).all()
    again = execute(two, data, ITEM, buffers, lambda buffer: buffer not in first)
    assert (again <= 1).all()
    assert all((mine == all_).all() for mine, all_ in zip(buffers, whole, strict=True))
    for plan, before in zip(two.plans, planned.plans, strict=True):
        assert {read[:3] for read in plan.reads} <= {read[:3] for read in before.reads}
        assert all(any(each.destination not in first for each in read.items) for read in plan.own_reads)


# -- files that only some ranks can read -------------------------------------------------------------------------------


@examples(100)
@given(demand=demands(), window=st.sampled_from((32, 100, 1 << 20)))
def test_partial_access_of_all_ranks_to_all_files_gives_the_usual_plan(demand: Demand, window: int) -> None:
    records, pieces, _ = demand
    plain = plan_pieces(pieces, records, block=BLOCK, window=window)
    access = PartialAccess.of(range(len(pieces)), [set(range(len(pieces)))] * 3)
    assert plan_pieces(pieces, records, block=BLOCK, window=window, access=access).plans == plain.plans


@examples(100)
@given(data=st.data(), ranks=st.integers(1, 6), counts=st.lists(st.integers(0, 9), min_size=1, max_size=8))
def test_readers_of_a_file_own_equal_numbers_of_its_blocks(data: st.DataObject, ranks: int, counts: list[int]) -> None:
    """The numbers are equal over all files of the same ranks, too, so nodes with copies read equal parts."""
    records = Records.of([(file, 64, count * 16, 0) for file, count in enumerate(counts)])
    access = data.draw(accesses(ranks, len(records)))
    blocks, touched = Blocks.of(records, 16, ranks, access), np.arange(len(records))
    owned = [list(blocks.owned(rank, touched)) for rank in range(ranks)]
    assert sorted(each for held in owned for each in held) == [
        (record, number) for record, count in enumerate(counts) for number in range(count)
    ]
    for rank, held in enumerate(owned):
        assert held == sorted(held)
        pairs = np.array(held, np.int64).reshape(-1, 2)
        assert (blocks.owners(pairs[:, 0], pairs[:, 1] * 16) == rank).all()
    for group in range(len(access.seen)):
        of_group = [sum(access.groups[record] == group for record, _ in held) for held in owned]
        file = access.groups.tolist().index(group)
        shares = [of_group[rank] for rank in access.list_readers(file, ranks)]
        assert sum(shares) == sum(of_group)
        assert max(shares) - min(shares) <= 1


def test_ranks_that_can_read_a_file_own_its_blocks_in_turn() -> None:
    access = PartialAccess.of([0, 0, 1, 2], [{0}, {0, 2}, {1}, {0}, {0, 2}, {0, 2}])
    assert access.take_turns(range(6), 4).tolist() == [0, 0, 2, 1, 1, 3]
    assert access.take_turns([], 4).tolist() == []
    readable = [[0, 1, 3, 4, 5], [2], [1, 4, 5]]
    assert [np.flatnonzero(access.can_read(rank, range(6))).tolist() for rank in (0, 2, 3)] == readable
    assert access.choose([2, 0]).take_turns([0, 1], 4).tolist() == [2, 0]


def test_access_of_ten_thousand_hosts_to_local_files_needs_a_few_megabytes() -> None:
    hosts = 10_240
    access = PartialAccess.of(range(hosts), [{host} for host in range(hosts)])
    assert access.seen.nbytes <= 14 << 20
    records = Records.of([(file, 0, 5 * 16, 0) for file in range(hosts)])
    blocks = Blocks.of(records, 16, hosts, access)
    assert list(blocks.owned(7777, np.arange(hosts))) == [(7777, number) for number in range(5)]


def test_ranks_with_access_to_all_wanted_files_exchange_no_bytes() -> None:
    """Two ranks resume the files of four ranks on the same two hosts."""
    records = Records.of([(file, 64, 16, 0) for file in range(4)])
    pieces = [[Piece(file, 0, Run(0, 4 * (file % 2), 4)) for file in (2 * rank, 2 * rank + 1)] for rank in range(2)]
    split = PartialAccess.of([0, 1], [{0}, {0}, {1}, {1}])
    plain, partial = (plan_pieces(pieces, records, access=access).plans for access in (READ_ALL, split))
    assert [set(plan.reads) for plan in partial] == [set(plan.reads) for plan in plain]
    assert all(plan.rounds == [] for plan in partial)
