"""All ranks' plans in one process: what they would tell each other is handed on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..atoms import Record
from ..plan.claims import Blocks, Claim, address_claims, take_turns
from ..plan.load import LoadPlan, make_plan
from ..plan.resolve import MIN_DIRECT, Judgement, Resolution, judge_claims, schedule


@dataclass(frozen=True, slots=True)
class Everyone:
    """Every rank's plan and how it came about.

    Attributes:
        records: what is read.
        blocks: of these, by their owners.
        claims, judgements, resolutions, plans: by rank.
    """

    records: Sequence[Record]
    blocks: Blocks
    claims: tuple[Sequence[Claim], ...]
    judgements: tuple[Judgement, ...]
    resolutions: tuple[Resolution, ...]
    plans: tuple[LoadPlan, ...]


def plan_everyone(
    claims: Sequence[Sequence[Claim]],
    records: Sequence[Record],
    *,
    block: int,
    share: int,
    min_direct: int = MIN_DIRECT,
    stage: int = 0,
) -> Everyone:
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
    judgements = [
        judge_claims([tables[owner] for tables, _ in sent], blocks, touched, owner, min_direct=min_direct)
        for owner in range(size)
    ]
    turns = [
        take_turns(addressed, [judgement.granted[rank] for judgement in judgements], share)
        for rank, (_, addressed) in enumerate(sent)
    ]
    resolutions = [
        schedule(judgement, [turn[owner] for turn in turns], share) for owner, judgement in enumerate(judgements)
    ]
    rounds = max(len(resolution.services) for resolution in resolutions)
    file_of = [record.file for record in records]
    plans = [
        make_plan(
            sent[rank][1],
            [resolution.answers[rank] for resolution in resolutions],
            resolutions[rank],
            rounds,
            rank=rank,
            chunk=block,
            stage=stage,
            file_of=file_of,
        )
        for rank in range(size)
    ]
    return Everyone(records, blocks, tuple(claims), tuple(judgements), tuple(resolutions), _agree_steps(plans, share))


def _agree_steps(plans: Sequence[LoadPlan], share: int) -> tuple[LoadPlan, ...]:
    """Every rank exchanges in as many steps as the one that needs the most."""
    steps = np.array([[each.count_steps(share) for each in plan.rounds] for plan in plans]).max(axis=0, initial=1)
    return tuple(
        replace(plan, rounds=tuple(replace(r, steps=n) for r, n in zip(plan.rounds, steps.tolist(), strict=True)))
        for plan in plans
    )
