"""The collective part of planning: ranks tell each other what they want and agree who reads it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from ..atoms import AtomicIndex, Record
from ..comm import Comm
from ..plan import Blocks, Claim, LoadPlan, Want, address_claims, decide, list_claims, make_plan
from ..plan.resolve import BLOCK, MIN_DIRECT, find_share
from .sinks import TensorSink


def negotiate(
    wants: Iterable[Want],
    sinks: Sequence[TensorSink],
    index: AtomicIndex,
    comm: Comm,
    window: int,
    *,
    block: int = BLOCK,
    min_direct: int = MIN_DIRECT,
) -> LoadPlan:
    """Plan a load; collective.

    Args:
        wants: of this rank.
        sinks: destinations by buffer number; the staging memory has the number behind the last.
        window: bytes of staging memory.
        block, min_direct: see ``plan``.

    Raises:
        UcpError: a want cannot be located; the same on every rank.
    """
    claims = comm.run(lambda: list_claims(wants, lambda buffer: sinks[buffer].fresh, block))
    touched = np.flatnonzero(comm.any_of(_mark(claims, index.stored.records)))
    blocks = Blocks.of(index.stored.records, block, comm.size)
    tables, addressed = address_claims(claims, blocks)
    share = find_share(window, block)
    decision = decide(comm.swap_tables(tables), blocks, touched, comm.rank, share=share, min_direct=min_direct)
    plan = make_plan(
        addressed,
        comm.swap_tables(decision.answers),
        decision,
        rank=comm.rank,
        chunk=block,
        stage=len(sinks),
        file_of=[record.file for record in index.stored.records],
    )
    return plan.agree(comm.gather(plan.count_steps(share)), comm.size)


def _mark(claims: Iterable[Claim], records: Sequence[Record]) -> np.ndarray:
    mask = np.zeros(len(records), np.bool_)
    mask[[claim.record for claim in claims]] = True
    return mask
