"""All ranks' plans in one process: what they would tell each other is handed on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..atoms import Record
from ..plan.claims import Blocks, Claim, address_claims
from ..plan.load import LoadPlan, make_plan
from ..plan.resolve import MIN_DIRECT, decide


def plan_ranks(
    claims: Sequence[Sequence[Claim]],
    records: Sequence[Record],
    *,
    block: int,
    share: int,
    min_direct: int = MIN_DIRECT,
    stage: int = 0,
) -> list[LoadPlan]:
    """The plans of as many ranks as there are lists of claims, as their negotiation would end.

    Args:
        claims: by rank.
        block: bytes per block.
        share: bytes per round of exchange.
        min_direct: bytes from which on a claim can be granted beside others' in one block.
        stage: buffer number of the staging memory.
    """
    size = len(claims)
    touched = np.array(sorted({claim.record for mine in claims for claim in mine}), np.int64)
    blocks = Blocks.of(records, block, size)
    sent = [address_claims(mine, blocks) for mine in claims]
    decisions = [
        decide([tables[owner] for tables, _ in sent], blocks, touched, owner, share=share, min_direct=min_direct)
        for owner in range(size)
    ]
    file_of = [record.file for record in records]
    plans = [
        make_plan(
            sent[rank][1],
            [decision.answers[rank] for decision in decisions],
            decisions[rank],
            rank=rank,
            chunk=block,
            stage=stage,
            file_of=file_of,
        )
        for rank in range(size)
    ]
    counts = [plan.count_steps(share) for plan in plans]
    return [plan.agree(counts, size) for plan in plans]
