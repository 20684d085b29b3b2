"""The owner's side of two-phase reading: which claims are granted, what the owner reads and sends itself, and when.

An owner decides from the claims on its own blocks alone, in the order of the blocks: no rank has to be asked twice. It
grants a claim that is one run apart from all others, if it is long or its rank is alone in the block; so no byte is
granted to two ranks, or to one and sent to another. Everything else of a block of which something is sent is staged,
padding included. A round stages, and sends, no more than its share of the window, or one block. What a rank receives in
a round is bounded by the steps in which the round's bytes travel (``plan.load.Round``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ..flat import find_gaps
from .claims import GRANTED, Blocks, Table

_Row = tuple[int, int, Sequence[int]]
"""A claim: its rank, its number in that rank's table, its columns."""

BLOCK = 4 << 20
"""Bytes per block: the unit of ownership, and the largest read."""

MIN_DIRECT = 256 << 10
"""Bytes from which on a rank reads a part of a block for itself: below, the pages at its ends would weigh."""


def find_share(window: int, block: int) -> int:
    """Bytes per round of exchange: staged, packed, sent and received at once, by a backend with buffers of its own."""
    return max(window // 8, block)


@dataclass(frozen=True, slots=True)
class Send:
    """``count`` runs of ``run`` bytes, ``step`` apart, from byte ``position`` of the owner's staging memory on."""

    position: int
    run: int
    step: int
    count: int
    fresh: bool

    @property
    def nbytes(self) -> int:
        """Bytes sent."""
        return self.run * self.count


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes [low, high) of a record, staged at byte ``position`` of the owner's memory."""

    record: int
    low: int
    high: int
    position: int


@dataclass(slots=True)
class Service:
    """What an owner does in one round: spans to stage, and what it sends to whom, with the claim's number."""

    spans: list[Span] = field(default_factory=list)
    sends: dict[int, list[tuple[int, Send]]] = field(default_factory=lambda: defaultdict(list))
    staged: int = 0
    sent: int = 0

    def add(self, block: Span, gaps: Iterable[tuple[int, int]], claims: Iterable[_Row]) -> None:
        """Stage what is not granted of a block, and send what is claimed of it."""
        base = self.staged - block.low
        self.spans += [Span(block.record, low, high, base + low) for low, high in gaps]
        self.staged += block.high - block.low
        for rank, number, (_, offset, run, step, count, fresh) in claims:
            send = Send(base + offset, run, step, count, bool(fresh))
            self.sends[rank].append((number, send))
            self.sent += send.nbytes


@dataclass(slots=True)
class OwnerPlan:
    """What an owner decides about the claims on its blocks.

    Attributes:
        answers: per rank, for each of its claims GRANTED or the round in which the owner sends the bytes.
        services: what the owner does, by round.
        unclaimed: spans of further blocks that only the checksums need (positions are not used).
    """

    answers: list[npt.NDArray[np.int32]]
    services: list[Service] = field(default_factory=list)
    unclaimed: list[Span] = field(default_factory=list)

    def serve(self, block: Span, gaps: Iterable[tuple[int, int]], claims: Sequence[_Row], share: int) -> None:
        """Send claims on a block in the last round, or in a new one where its share is used up."""
        sent = sum(row[2] * row[4] for _, _, row in claims)
        last = self.services[-1] if self.services else None
        if last is None or max(last.staged + block.high - block.low, last.sent + sent) > share:
            last = Service()
            self.services.append(last)
        last.add(block, gaps, claims)
        for rank, number, _ in claims:
            self.answers[rank][number] = len(self.services) - 1


def decide(
    tables: Sequence[Table],
    blocks: Blocks,
    touched: npt.NDArray[np.int64],
    rank: int,
    *,
    share: int,
    min_direct: int = MIN_DIRECT,
) -> OwnerPlan:
    """Decide about every block that ``rank`` owns.

    Args:
        tables: per rank its claims on these blocks.
        touched: records of which some rank claims something, ascending.
        share: bytes that are staged, or sent, per round.
        min_direct: bytes from which on a claim can be granted beside others' in one block.
    """
    decision = OwnerPlan([np.full(len(table), GRANTED, np.int32) for table in tables])
    claimed = _group(tables, blocks.block)
    for record, number in blocks.owned(rank, touched):
        low = number * blocks.block
        block = Span(record, low, min(low + blocks.block, int(blocks.nbytes[record])), 0)
        granted, served = _split(claimed.get((record, number), []), low, min_direct)
        gaps = find_gaps(granted, block.high, block.low)
        if served:
            decision.serve(block, gaps, served, share)
        else:
            decision.unclaimed += [Span(record, *gap, 0) for gap in gaps]
    return decision


def _group(tables: Sequence[Table], block: int) -> dict[tuple[int, int], list[_Row]]:
    """Claims by (record, block of it)."""
    claimed: dict[tuple[int, int], list[_Row]] = defaultdict(list)
    for rank, table in enumerate(tables):
        for number, row in enumerate(table.tolist()):
            claimed[row[0], row[1] // block].append((rank, number, row))
    return claimed


def _split(claims: list[_Row], reach: int, min_direct: int) -> tuple[list[tuple[int, int]], list[_Row]]:
    """Ranges of a block's claims that are granted, and the claims that the owner serves.

    Args:
        reach: where the block begins; from there on, where the claims so far end.
    """
    alone = len({rank for rank, _, _ in claims}) == 1
    claims = sorted(claims, key=lambda claim: claim[2][1])
    starts = [row[1] for _, _, row in claims]
    granted, served = [], []
    for claim, follower in zip(claims, [*starts[1:], None], strict=bool(claims)):
        _, low, run, step, count, _ = claim[2]
        high = low + (count - 1) * step + run
        apart = low >= reach and (follower is None or follower >= high)
        if apart and count == 1 and (alone or run >= min_direct):
            granted.append((low, high))
        else:
            served.append(claim)
        reach = max(reach, high)
    return granted, served
