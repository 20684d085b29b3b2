"""Files that only some ranks can read: their readers and owners. test_ranks.py has plans of random claims."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_ucp.model.access import READ_ALL, PartialAccess
from deepspeed_ucp.model.records import Record
from deepspeed_ucp.plan.rounds import Blocks
from deepspeed_ucp.tensor_parallel.layout import Run
from tests.plan.planning import BLOCK, Demand, Piece, accesses, demands, plan_pieces
from tests.support.reshard import examples


@examples(100)
@given(demand=demands(), window=st.sampled_from((32, 100, 1 << 20)))
def test_the_plan_is_the_same_if_every_rank_can_read_all(demand: Demand, window: int) -> None:
    records, pieces, _ = demand
    plain = plan_pieces(pieces, records, block=BLOCK, window=window)
    access = PartialAccess.of(range(len(pieces)), [set(range(len(pieces)))] * 3)
    assert plan_pieces(pieces, records, block=BLOCK, window=window, access=access).plans == plain.plans


@examples(100)
@given(data=st.data(), ranks=st.integers(1, 6), counts=st.lists(st.integers(0, 9), min_size=1, max_size=8))
def test_readers_of_a_file_own_equally_many_of_its_blocks(data: st.DataObject, ranks: int, counts: list[int]) -> None:
    """Also over all files that the same ranks can read, so that copies on several nodes are read in equal parts."""
    records = [Record(file, 64, count * 16, 0) for file, count in enumerate(counts)]
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


def test_ranks_that_can_read_a_file_take_turns() -> None:
    access = PartialAccess.of([0, 0, 1, 2], [{0}, {0, 2}, {1}, {0}, {0, 2}, {0, 2}])
    assert access.take_turns(range(6), 4).tolist() == [0, 0, 2, 1, 1, 3]
    assert access.take_turns([], 4).tolist() == []
    readable = [[0, 1, 3, 4, 5], [2], [1, 4, 5]]
    assert [np.flatnonzero(access.can_read(rank, range(6))).tolist() for rank in (0, 2, 3)] == readable
    assert access.choose([2, 0]).take_turns([0, 1], 4).tolist() == [2, 0]


def test_ten_thousand_hosts_with_files_of_their_own_are_a_few_megabytes() -> None:
    hosts = 10_240
    access = PartialAccess.of(range(hosts), [{host} for host in range(hosts)])
    assert access.seen.nbytes <= 14 << 20
    records = [Record(file, 0, 5 * 16, 0) for file in range(hosts)]
    blocks = Blocks.of(records, 16, hosts, access)
    assert list(blocks.owned(7777, np.arange(hosts))) == [(7777, number) for number in range(5)]


def test_ranks_that_see_the_files_that_they_want_exchange_nothing() -> None:
    """Four ranks' files on two hosts, resumed by two ranks on the same hosts."""
    records = [Record(file, 64, 16, 0) for file in range(4)]
    pieces = [[Piece(file, 0, Run(0, 4 * (file % 2), 4)) for file in (2 * rank, 2 * rank + 1)] for rank in range(2)]
    split = PartialAccess.of([0, 1], [{0}, {0}, {1}, {1}])
    plain, partial = (plan_pieces(pieces, records, access=access).plans for access in (READ_ALL, split))
    assert [set(plan.reads) for plan in partial] == [set(plan.reads) for plan in plain]
    assert all(plan.rounds == [] for plan in partial)
