"""The collective part of planning: ranks tell each other what they want and agree who reads it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from ..atoms import AtomicIndex, Record
from ..comm import Comm
from ..plan import (
    Blocks,
    Claim,
    LoadPlan,
    Want,
    address_claims,
    judge_claims,
    locate,
    make_claims,
    make_plan,
    schedule,
    take_turns,
)
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
    claims: list[Claim] = []
    with comm.together():
        pieces = [piece for want in wants for piece in locate(want)]
        claims = make_claims(pieces, lambda buffer: sinks[buffer].fresh, block)
    touched = np.flatnonzero(comm.any_of(_mark(claims, index.records)))
    blocks = Blocks.of(index.records, block, comm.size)
    tables, addressed = address_claims(claims, blocks)
    judgement = judge_claims(comm.swap_tables(tables), blocks, touched, comm.rank, min_direct=min_direct)
    share = find_share(window, block)
    turns = take_turns(addressed, comm.swap_tables(judgement.granted), share)
    resolution = schedule(judgement, comm.swap_tables(turns), share)
    answers = comm.swap_tables(resolution.answers)
    plan = make_plan(
        addressed,
        answers,
        resolution,
        max(comm.gather(len(resolution.services))),
        rank=comm.rank,
        chunk=block,
        stage=len(sinks),
        file_of=[record.file for record in index.records],
    )
    steps = np.array(comm.gather([each.count_steps(share) for each in plan.rounds])).max(axis=0, initial=1).tolist()
    rounds = (replace(each, steps=count) for each, count in zip(plan.rounds, steps, strict=True))
    return replace(plan, rounds=tuple(rounds))


def _mark(claims: Iterable[Claim], records: Sequence[Record]) -> np.ndarray:
    mask = np.zeros(len(records), np.bool_)
    mask[[claim.record for claim in claims]] = True
    return mask
