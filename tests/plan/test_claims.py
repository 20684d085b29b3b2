"""Claims of one rank, the blocks that they lie in, and who owns these."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_ucp.model import Record
from deepspeed_ucp.plan import Blocks, Claim, Extent, Part, address_claims, make_claims
from deepspeed_ucp.plan.claims import MAX_PARTS
from deepspeed_ucp.tensor_parallel import Run
from tests.support.reshard import examples


def claims_of(*pieces: Extent, block: int = 1 << 20) -> list[Claim]:
    return make_claims(pieces, block)


def test_neighbours_are_one_claim_with_a_part_each() -> None:
    first, second = Extent(0, 0, 4, Run(2, 5, 3)), Extent(0, 1, 4, Run(5, 0, 2))
    assert claims_of(second, first) == [Claim(0, 8, 20, 20, 1, (Part(12, 0, 5), Part(8, 1, 0)))]


def test_pieces_with_a_gap_or_in_other_records_stay_separate() -> None:
    pieces = Extent(0, 0, 4, Run(0, 0, 2)), Extent(0, 0, 4, Run(3, 2, 2)), Extent(1, 0, 4, Run(5, 4, 1))
    assert [(c.record, c.offset, c.nbytes) for c in claims_of(*pieces)] == [(0, 0, 8), (0, 12, 8), (1, 20, 4)]


def test_claims_end_where_blocks_do() -> None:
    assert claims_of(Extent(0, 0, 4, Run(1, 10, 5)), block=8) == [
        Claim(0, 4, 4, 4, 1, (Part(4, 0, 10),)),
        Claim(0, 8, 8, 8, 1, (Part(8, 0, 11),)),
        Claim(0, 16, 8, 8, 1, (Part(8, 0, 13),)),
    ]


def test_strided_runs_are_a_separate_claim() -> None:
    """Three runs of two elements, six apart; their neighbour does not join."""
    runs, follower = Extent(0, 0, 4, Run(0, 5, 2, 3, 6, 2)), Extent(0, 1, 4, Run(14, 0, 1))
    first, second = claims_of(runs, follower)
    assert first == Claim(0, 0, 8, 24, 3, (Part(24, 0, 5),)) and first.nbytes == 24
    assert second == Claim(0, 56, 4, 4, 1, (Part(4, 1, 0),))


def test_runs_are_cut_at_blocks_and_single_ones_are_plain() -> None:
    claims = claims_of(Extent(0, 0, 4, Run(0, 0, 2, 3, 3, 5)), block=16)
    assert claims == [
        Claim(0, 0, 8, 8, 1, (Part(8, 0, 0),)),
        Claim(0, 12, 4, 4, 1, (Part(4, 0, 5),)),
        Claim(0, 16, 4, 4, 1, (Part(4, 0, 6),)),
        Claim(0, 24, 8, 8, 1, (Part(8, 0, 10),)),
    ]


def test_contiguous_bytes_and_strided_runs_may_go_to_strided_rows() -> None:
    assert claims_of(Extent(0, 3, 2, Run(4, 100, 5, 4, 5, 8))) == [Claim(0, 8, 40, 40, 1, (Part(40, 3, 100, 10, 8),))]
    assert claims_of(Extent(0, 3, 4, Run(0, 10, 2, 2, 4, 6))) == [Claim(0, 0, 8, 16, 2, (Part(16, 3, 10, 8, 6),))]


def test_a_claim_has_no_more_parts_than_the_kernel_takes() -> None:
    pieces = [Extent(0, 0, 4, Run(i, 2 * i, 1)) for i in range(MAX_PARTS + 3)]
    assert [len(claim.parts) for claim in claims_of(*pieces)] == [MAX_PARTS, 3]


def test_no_pieces_no_claims() -> None:
    assert claims_of() == []
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
    claims = claims_of(
        Extent(0, 0, 4, Run(0, 0, 9)), Extent(1, 0, 4, Run(1, 9, 2)), Extent(0, 1, 4, Run(4, 0, 1)), block=16
    )
    tables, addressed = address_claims(claims, Blocks.of([Record(0, 0, 48, 0), Record(0, 0, 16, 0)], 16, 2))
    assert [[(c.record, c.offset, c.run, c.step, c.count) for c in mine] for mine in addressed] == [
        [tuple(row) for row in table.tolist()] for table in tables
    ]
    assert [[(c.record, c.offset) for c in mine] for mine in addressed] == [
        [(0, 0), (0, 32)],
        [(0, 16), (0, 16), (1, 4)],
    ]
