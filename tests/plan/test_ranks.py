"""The reads and exchanges of each rank: a few cases by hand, random ones byte by byte."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_ucp.model.access import READ_ALL
from deepspeed_ucp.model.records import STAGE, CopyItem, Read, Record
from deepspeed_ucp.plan.locate import Want
from deepspeed_ucp.tensor_parallel.layout import Run
from tests.plan.planning import (
    BLOCK,
    ITEM,
    Demand,
    Piece,
    Planned,
    accesses,
    carry_out,
    check_plan,
    demands,
    divide,
    make_atom,
    plan_pieces,
    plan_wants,
)
from tests.support.reads import item, read_of
from tests.support.reshard import examples

# -- direct reads -----------------------------------------------------------------------------------------------------


def test_reads_follow_files_and_offsets_for_any_order_of_records_and_wants() -> None:
    atoms = [make_atom(name, 1, (0, 1, record, 0)) for name, record in (("a", 0), ("b", 1), ("c", 2))]
    records = [Record(1, 64, 4, 0), Record(0, 200, 4, 0), Record(0, 64, 4, 0)]
    (plan,) = plan_wants([[Want(atom, 0, 1, 0, i) for i, atom in enumerate(atoms)]], records).plans
    assert [records[read.record].file for read in plan.direct] == [0, 0, 1]


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


def test_padding_of_block_n_goes_to_rank_n_modulo_size() -> None:
    """Also for blocks that no rank wants, in a record from which some rank wants something."""
    atoms = [make_atom(f"a{i}", 1, (0, 1, i, 0)) for i in range(2)]
    wants: list[list[Want]] = [[], [], [Want(atom, 0, 1, 0, 0) for atom in atoms]]
    plans = plan_wants(wants, [Record(i, 0, 28, 0) for i in range(2)], block=8).plans
    assert [sorted(read[:3] for read in plan.direct) for plan in plans] == [
        [(0, 4, 4), (0, 24, 4), (1, 16, 8)],
        [(0, 8, 8), (1, 4, 4), (1, 24, 4)],
        [(0, 0, 4), (0, 16, 8), (1, 0, 4), (1, 8, 8)],
    ]


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


# -- random claims ----------------------------------------------------------------------------------------------------


@examples(250)
@given(
    data=st.data(),
    demand=demands(),
    window=st.sampled_from((32, 64, 100, 1 << 20)),
    min_direct=st.sampled_from((1, 8, 16, 1 << 20)),
    first=st.sets(st.integers(0, 60)),
)
def test_random_claims(data: st.DataObject, demand: Demand, window: int, min_direct: int, first: set[int]) -> None:
    """Each byte is read once, by a rank that can read it; an owner reads only its own blocks for others."""
    records, pieces, _ = demand
    access = data.draw(st.just(READ_ALL) | accesses(len(pieces), 3))
    planned = plan_pieces(pieces, records, block=BLOCK, window=window, min_direct=min_direct, access=access)
    check_passes(planned, first, *check_plan(planned, demand, window))
    for rank, plan in enumerate(planned.plans):
        assert access.can_read(rank, [records[read.record].file for read in plan.reads]).all()
        own = set(planned.blocks.owned(rank, np.arange(len(records))))
        passed = [read for each in plan.rounds for read in each.reads]
        passed += [read for read in plan.direct if not read.items]
        assert {(read.record, read.offset // BLOCK) for read in passed} <= own


def check_passes(planned: Planned, first: set[int], data: Sequence[np.ndarray], whole: Sequence[np.ndarray]) -> None:
    """Two passes fill the same memory as one, and the second one reads the ranges of the first again."""
    most = 1 + max((each.destination for mine in planned.claims for claim in mine for each in claim.items), default=0)
    one, two = divide(planned, first.__contains__, most)
    buffers, others = ([np.zeros_like(each) for each in whole] for _ in range(2))
    assert (carry_out(one, data, ITEM, buffers, first.__contains__) == carry_out(planned, data, ITEM, others)).all()
    again = carry_out(two, data, ITEM, buffers, lambda buffer: buffer not in first)
    assert (again <= 1).all()
    assert all((mine == all_).all() for mine, all_ in zip(buffers, whole, strict=True))
    for plan, before in zip(two.plans, planned.plans, strict=True):
        assert {read[:3] for read in plan.reads} <= {read[:3] for read in before.reads}
        assert all(any(each.destination not in first for each in read.items) for read in plan.direct)
