"""Claims of one rank, the blocks that they lie in, and who owns these."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_ucp.model.records import CopyItem, Read, Record
from deepspeed_ucp.plan.locate import MAX_ITEMS, Want, join_items, list_claims, list_reads
from deepspeed_ucp.plan.rounds import Blocks, address_claims
from tests.plan.planning import make_atom
from tests.support.reads import item
from tests.support.reshard import examples


def test_neighbours_are_one_claim_with_an_item_each() -> None:
    first, second = item(0, 8, 12, 0, 5), item(0, 20, 8, 1, 0)
    assert join_items([second, first]) == [Read(0, 8, 20, 20, 1, (first, second))]


def test_items_with_a_gap_or_in_other_records_or_blocks_stay_separate() -> None:
    items = [item(0, 0, 8, 0, 0), item(0, 12, 4, 0, 2), item(0, 16, 4, 0, 3), item(1, 20, 4, 0, 4)]
    assert join_items(items, 16) == [Read(*each[:5], (each,)) for each in items]


def test_strided_runs_are_a_separate_claim() -> None:
    """Three runs of two elements, six apart; their neighbour does not join."""
    runs, follower = CopyItem(0, 0, 8, 24, 3, 0, 5), item(0, 56, 4, 1, 0)
    first, second = join_items([follower, runs])
    assert first == Read(0, 0, 8, 24, 3, (runs,)) and (first.nbytes, first.end) == (24, 56)
    assert second == Read(0, 56, 4, 4, 1, (follower,))


def test_contiguous_bytes_may_go_to_strided_rows() -> None:
    rows = CopyItem(0, 8, 10, 10, 4, 3, 100, 8)
    assert join_items([rows]) == [Read(0, 8, 40, 40, 1, (rows,))]


def test_claims_end_where_blocks_do() -> None:
    want = Want(make_atom("w", 5, (0, 5, 0, 4)), 0, 5, 0, 10)
    parts = [item(0, 4, 4, 0, 10), item(0, 8, 8, 0, 11), item(0, 16, 8, 0, 13)]
    assert list_claims([want], 8) == list_reads([want], 8) == [Read(*each[:5], (each,)) for each in parts]
    assert list_reads([want]) == [Read(0, 4, 20, 20, 1, (item(0, 4, 20, 0, 10),))]


def test_a_claim_has_no_more_items_than_the_kernel_takes() -> None:
    items = [item(0, 4 * i, 4, 0, 2 * i) for i in range(MAX_ITEMS + 3)]
    assert [len(claim.items) for claim in join_items(items)] == [MAX_ITEMS, 3]


def test_no_items_no_claims() -> None:
    assert join_items([]) == []
    tables, addressed = address_claims([], Blocks.of([Record(0, 0, 100, 0)], 16, 3))
    assert [table.shape for table in tables] == [(0, 5)] * 3
    assert addressed == [[], [], []]


# -- blocks -----------------------------------------------------------------------------------------------------------


@examples(150)
@given(
    nbytes=st.lists(st.integers(0, 60), min_size=1, max_size=6),
    block=st.sampled_from((4, 8, 16)),
    size=st.integers(1, 7),
)
def test_every_block_has_one_owner(nbytes: list[int], block: int, size: int) -> None:
    blocks = Blocks.of([Record(0, 0, count, 0) for count in nbytes], block, size)
    touched = np.arange(len(nbytes))
    held = [(record, number, rank) for rank in range(size) for record, number in blocks.owned(rank, touched)]
    every = [(record, low // block) for record, count in enumerate(nbytes) for low in range(0, count, block)]
    assert sorted((record, number) for record, number, _ in held) == every
    records, numbers, ranks = (np.array([each[k] for each in held], np.int64) for k in range(3))
    assert (blocks.owners(records, numbers * block) == ranks).all()
    shares = [int((ranks == rank).sum()) for rank in range(size)]
    assert max(shares) - min(shares) <= 1


def test_claims_go_to_the_owners_of_their_blocks_in_the_same_order_as_the_tables() -> None:
    items = [
        item(0, 0, 16, 0, 0),
        item(0, 16, 16, 0, 4),
        item(0, 16, 4, 1, 0),
        item(0, 32, 4, 0, 8),
        item(1, 4, 8, 0, 9),
    ]
    claims = join_items(items, 16)
    tables, addressed = address_claims(claims, Blocks.of([Record(0, 0, 48, 0), Record(0, 0, 16, 0)], 16, 2))
    assert [[claim[:5] for claim in mine] for mine in addressed] == [
        [tuple(row) for row in table.tolist()] for table in tables
    ]
    assert [[claim[:2] for claim in mine] for mine in addressed] == [[(0, 0), (0, 32)], [(0, 16), (0, 16), (1, 4)]]
