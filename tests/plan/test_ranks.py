"""The reads and exchanges of each rank: a few cases by hand, random ones byte by byte."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_ucp.model.records import STAGE, CopyItem, Read, Record
from deepspeed_ucp.model.storage import Atom
from deepspeed_ucp.plan.locate import Want
from deepspeed_ucp.tensor_parallel.layout import Run
from tests.plan.planning import ITEM, Piece, Planned, carry_out, divide, make_atom, plan_pieces, plan_wants
from tests.support.reads import item, read_of
from tests.support.reshard import examples


def reads_of(wants: Sequence[Want], records: Sequence[Record], block: int = 1 << 20) -> list[Read]:
    """Return the reads of a single rank."""
    (plan,) = plan_wants([wants], records, block=block).plans
    assert plan.rounds == []
    assert plan.nbytes == sum(read.nbytes for read in plan.direct)
    return plan.direct


def places(reads: Sequence[Read]) -> list[tuple[int, int, int]]:
    return sorted(read[:3] for read in reads)


def dp4() -> tuple[Atom, list[Record]]:
    """Return 12 elements in four ranks' files, 3 in each, behind a header of 64 bytes."""
    atom = make_atom("w", 12, (0, 3, 0, 0), (3, 3, 1, 0), (6, 3, 2, 0), (9, 3, 3, 0))
    return atom, [Record(file, 64, 12, 0) for file in range(4)]


# -- direct reads -----------------------------------------------------------------------------------------------------


def test_dp4_to_dp3_the_middle_rank_reads_the_end_of_one_file_and_the_start_of_the_next() -> None:
    atom, records = dp4()
    plans = plan_wants([[Want(atom, 4 * rank, 4, 5, 100)] for rank in range(3)], records).plans
    assert set(plans[1].direct) == {read_of(item(1, 4, 8, 5, 100)), read_of(item(2, 0, 8, 5, 102))}
    assert all(plan.rounds == [] for plan in plans)


def test_reads_follow_files_and_offsets_for_any_order_of_records_and_wants() -> None:
    atoms = [make_atom(name, 1, (0, 1, record, 0)) for name, record in (("a", 0), ("b", 1), ("c", 2))]
    records = [Record(1, 64, 4, 0), Record(0, 200, 4, 0), Record(0, 64, 4, 0)]
    plan = reads_of([Want(atom, 0, 1, 0, i) for i, atom in enumerate(atoms)], records)
    assert [records[read.record].file for read in plan] == [0, 0, 1]


def test_each_rank_begins_at_a_place_of_its_own() -> None:
    atoms = [make_atom(f"a{i}", 4, (0, 4, i, 0)) for i in range(6)]
    records = [Record(i, 0, 16, 0) for i in range(6)]
    plans = plan_wants([[Want(atom, rank, 1, 0, 0) for atom in atoms] for rank in range(4)], records).plans
    assert [[read.record for read in plan.direct] for plan in plans] == [
        [0, 1, 2, 3, 4, 5],
        [3, 4, 5, 0, 1, 2],
        [1, 2, 3, 4, 5, 0],
        [5, 0, 1, 2, 3, 4],
    ]


def test_padding_is_read_for_the_checksum() -> None:
    atoms = [make_atom("a", 2, (0, 2, 0, 0)), make_atom("b", 1, (0, 1, 0, 12))]
    wants = [Want(atom, 0, atom.numel, 0, i) for i, atom in enumerate(atoms)]
    assert reads_of(wants, [Record(0, 64, 20, 0)]) == [
        read_of(item(0, 0, 8, 0, 0)),
        Read.of(0, 8, 12),
        read_of(item(0, 12, 4, 0, 1)),
        Read.of(0, 16, 20),
    ]


def test_padding_of_block_n_goes_to_rank_n_modulo_size() -> None:
    """Also for blocks that no rank wants, in a record from which some rank wants something."""
    atoms = [make_atom(f"a{i}", 1, (0, 1, i, 0)) for i in range(2)]
    wants: list[list[Want]] = [[], [], [Want(atom, 0, 1, 0, 0) for atom in atoms]]
    plans = plan_wants(wants, [Record(i, 0, 28, 0) for i in range(2)], block=8).plans
    assert [places(plan.direct) for plan in plans] == [
        [(0, 4, 4), (0, 24, 4), (1, 16, 8)],
        [(0, 8, 8), (1, 4, 4), (1, 24, 4)],
        [(0, 0, 4), (0, 16, 8), (1, 0, 4), (1, 8, 8)],
    ]


def test_wanting_nothing_reads_nothing() -> None:
    atom, records = dp4()
    assert reads_of([], records) == []
    assert reads_of([Want(make_atom("e", 0), 0, 0, 0, 0)], records) == []
    assert reads_of([Want(atom, 3, 0, 0, 0)], records) == []


# -- exchange ---------------------------------------------------------------------------------------------------------


def test_bytes_for_two_ranks_are_read_by_the_owner_and_sent_to_both() -> None:
    atom = make_atom("w", 4, (0, 4, 1, 0))
    wants = [[], [Want(atom, 0, 3, 0, 5)], [Want(atom, 1, 3, 2, 0)]]
    plans = plan_wants(wants, [Record(0, 0, 8, 0), Record(0, 64, 16, 0)]).plans
    owner = plans[1].rounds[0]
    assert [plan.direct for plan in plans] == [[], [], []]
    assert owner.reads == [read_of(item(1, 0, 16, STAGE, 0))]
    assert owner.staged == 16
    assert owner.sends == [[], [Read.of(STAGE, 0, 12)], [Read.of(STAGE, 4, 16)]]
    assert [each.rounds[0].receives[1] for each in plans] == [
        [],
        [read_of(item(1, 0, 12, 0, 5))],
        [read_of(item(1, 4, 12, 2, 0))],
    ]
    assert [plan.nbytes for plan in plans] == [0, 16, 0]


def test_runs_that_interleave_are_sent_as_runs() -> None:
    """Columns of a 2 × 4 matrix for two ranks (a refined Shard-H)."""
    pieces = [[Piece(0, 0, Run(2 * rank, 0, 2, 2, 4, 2))] for rank in range(2)]
    plans = plan_pieces(pieces, [Record(0, 0, 32, 0)]).plans
    assert plans[0].rounds[0].sends == [[Read(STAGE, 0, 8, 16, 2)], [Read(STAGE, 8, 8, 16, 2)]]
    assert plans[1].rounds[0].receives[0] == [Read(0, 8, 8, 16, 2, (CopyItem(0, 8, 8, 16, 2, 0, 0),))]
    assert [plan.nbytes for plan in plans] == [32, 0]


def test_owners_send_at_the_same_time_and_ranks_receive_in_steps() -> None:
    """Eight blocks of 16 bytes for four machines, in rounds of 32 bytes: 48 are sent and received in each."""
    atom = make_atom("w", 32, (0, 32, 0, 0))
    plans = plan_wants([[Want(atom, 0, 32, 0, 0)]] * 4, [Record(0, 0, 128, 0)], block=16, window=32).plans
    assert [[[read.offset for read in each.reads] for each in plan.rounds] for plan in plans] == [
        [[0], [64]],
        [[80], [16]],
        [[32], [96]],
        [[112], [48]],
    ]
    assert {each.steps for plan in plans for each in plan.rounds} == {2}
    assert sum(plan.nbytes for plan in plans) == 128


def test_every_rank_takes_part_in_as_many_rounds() -> None:
    """Two blocks of the first rank, in rounds of one; the third rank only takes part."""
    atom = make_atom("w", 8, (0, 4, 0, 0), (4, 4, 0, 48))
    wants = [[Want(atom, 0, 8, 0, 0)], [Want(atom, 0, 4, 0, 0)], [Want(atom, 4, 4, 0, 0)]]
    plans = plan_wants(wants, [Record(0, 0, 64, 0)], block=16, window=16).plans
    assert [len(plan.rounds) for plan in plans] == [2, 2, 2]
    assert plans[2].rounds[0].receives == [[], [], []]


# -- random claims ----------------------------------------------------------------------------------------------------

BLOCK = 32

Demand = tuple[list[Record], list[list[Piece]], list[int]]


@st.composite
def runs(draw: st.DrawFn, numel: int) -> Run:
    """Runs inside a record of so many elements whose destinations do not overlap (`place` follows)."""
    width = draw(st.integers(1, numel))
    low = draw(st.integers(0, numel - width))
    most = (numel - low - width) // width + 1
    count = draw(st.integers(1, most)) if draw(st.booleans()) else 1
    if count == 1:
        return Run(low, 0, width)
    step = draw(st.integers(width, (numel - low - width) // (count - 1)))
    stride = width + draw(st.integers(0, 2))
    return Run(low, 0, width, count, step, stride)


@st.composite
def demands(draw: st.DrawFn) -> Demand:
    """Records, each rank's pieces, and the elements of each rank's memory; every piece has its own buffer."""
    numels = draw(st.lists(st.integers(1, 40), min_size=1, max_size=4))
    records = [Record(draw(st.integers(0, 2)), 64, ITEM * numel, 0) for numel in numels]
    pieces, sizes = [], []
    for _ in range(draw(st.integers(1, 5))):
        mine, place = [], 0
        for _ in range(draw(st.integers(0, 6))):
            record = draw(st.integers(0, len(records) - 1))
            run = draw(runs(numels[record]))
            mine.append(Piece(record, place, run))
            place += (run.count - 1) * max(run.dst_step, run.width) + run.width
        pieces.append(mine)
        sizes.append(place)
    return records, pieces, sizes


@examples(250)
@given(
    demand=demands(),
    window=st.sampled_from((32, 64, 100, 1 << 20)),
    min_direct=st.sampled_from((1, 8, 16, 1 << 20)),
    first=st.sets(st.integers(0, 60)),
)
def test_random_claims_of_several_ranks(demand: Demand, window: int, min_direct: int, first: set[int]) -> None:
    planned = plan_pieces(demand[1], demand[0], block=BLOCK, window=window, min_direct=min_direct)
    check_passes(planned, first, *check_plan(planned, demand, window))


def check_plan(planned: Planned, demand: Demand, window: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Carry out a plan, and check every byte; return the bytes of the records, and each rank's memory."""
    records, pieces, sizes = demand
    draw = np.random.default_rng(0)
    data = [draw.integers(1, 256, record.nbytes, dtype=np.uint8) for record in records]
    buffers = [np.zeros(ITEM * size, np.uint8) for size in sizes]
    counts = carry_out(planned, data, ITEM, buffers)
    touched = {piece.record for mine in pieces for piece in mine}
    wanted = [np.full(record.nbytes, number in touched) for number, record in enumerate(records)]
    assert (counts == np.concatenate(wanted)).all(), "every byte of every touched record once, no byte of others"
    for mine, buffer in zip(pieces, buffers, strict=True):
        assert (buffer == expect(mine, data, len(buffer))).all()
    check_bounds(planned, window)
    return data, buffers


def expect(pieces: Sequence[Piece], data: Sequence[np.ndarray], nbytes: int) -> np.ndarray:
    """Return the final memory of a rank, element by element."""
    memory = np.zeros(nbytes // ITEM, np.uint32)
    for piece in pieces:
        values, run = data[piece.record].view(np.uint32), piece.run
        for row in range(run.count):
            low, high = piece.destination + run.dst + row * run.dst_step, run.src + row * run.src_step
            memory[low : low + run.width] = values[high : high + run.width]
    return memory.view(np.uint8)


def check_bounds(planned: Planned, window: int) -> None:
    """Reads stay inside blocks; a round stages, and sends to others, at most a window or one block."""
    for rank, plan in enumerate(planned.plans):
        for read in plan.reads:
            assert 0 < read.nbytes <= BLOCK and read.count == 1
            assert read.offset // BLOCK == (read.end - 1) // BLOCK
            assert sum(each.nbytes for each in read.items) in (0, read.nbytes)
        for each in plan.rounds:
            sent = sum(send.nbytes for peer, one in enumerate(each.sends) for send in one if peer != rank)
            blocks = {(read.record, read.offset // BLOCK) for read in each.reads}
            assert len(blocks) <= 1 or (each.staged <= window and sent <= window)
            assert sum(read.nbytes for read in each.reads) <= each.staged
        assert plan.nbytes == sum(read.nbytes for read in plan.reads)


def check_passes(planned: Planned, first: set[int], data: Sequence[np.ndarray], whole: Sequence[np.ndarray]) -> None:
    """Two passes fill the same memory as one, and the second one reads the ranges of the first again."""
    most = 1 + max((each.destination for mine in planned.claims for claim in mine for each in claim.items), default=0)
    one, two = divide(planned, first.__contains__, most)
    buffers = [np.zeros_like(each) for each in whole]
    assert (carry_out(one, data, ITEM, buffers, first.__contains__) == carry_out(planned, data, ITEM, buffers)).all()
    buffers = [np.zeros_like(each) for each in whole]
    carry_out(one, data, ITEM, buffers, first.__contains__)
    again = carry_out(two, data, ITEM, buffers, lambda buffer: buffer not in first)
    assert (again <= 1).all()
    assert all((mine == all_).all() for mine, all_ in zip(buffers, whole, strict=True))
    for plan, before in zip(two.plans, planned.plans, strict=True):
        assert {read[:3] for read in plan.reads} <= {read[:3] for read in before.reads}
        assert all(any(each.destination not in first for each in read.items) for read in plan.direct)


@examples(60)
@given(demand=demands(), window=st.sampled_from((32, 100, 1 << 20)))
def test_an_owner_reads_only_blocks_of_its_own_for_others(demand: Demand, window: int) -> None:
    records, pieces, _ = demand
    planned = plan_pieces(pieces, records, block=BLOCK, window=window)
    for rank, plan in enumerate(planned.plans):
        own = set(planned.blocks.owned(rank, np.arange(len(records))))
        passed = [r for each in plan.rounds for r in each.reads]
        passed += [r for r in plan.direct if not r.items]
        assert {(read.record, read.offset // BLOCK) for read in passed} <= own
