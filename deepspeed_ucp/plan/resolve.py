"""The owner's side of two-phase reading: which claims are granted, what the owner reads and sends itself, and when."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from .claims import GRANTED, Blocks, Table

Row = tuple[int, int, tuple[int, ...]]
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


@dataclass(slots=True)
class Judgement:
    """What an owner grants.

    Attributes:
        granted: per rank, for each of its claims whether it reads for itself.
        shared: blocks of which the owner sends something.
        unclaimed: spans of other blocks that only the checksums need (positions are not used).
    """

    granted: list[npt.NDArray[np.bool_]]
    shared: list[SharedBlock]
    unclaimed: list[Span]


@dataclass(slots=True)
class SharedBlock:
    """Bytes [low, high) of a record: ranges that are granted, and served claims as (rank, number, columns)."""

    record: int
    low: int
    high: int
    granted: list[tuple[int, int]] = field(default_factory=list)
    served: list[Row] = field(default_factory=list)

    def free(self) -> list[tuple[int, int]]:
        """Ranges that are not granted."""
        found, position = [], self.low
        for low, high in sorted(self.granted):
            if low > position:
                found.append((position, low))
            position = high
        if position < self.high:
            found.append((position, self.high))
        return found


def judge_claims(
    tables: Sequence[Table],
    blocks: Blocks,
    touched: npt.NDArray[np.int64],
    rank: int,
    *,
    min_direct: int = MIN_DIRECT,
) -> Judgement:
    """Decide about every block that ``rank`` owns.

    Args:
        tables: per rank its claims on these blocks.
        touched: records of which some rank claims something, ascending.
        min_direct: bytes from which on a claim can be granted beside others' in one block.
    """
    result = Judgement([np.ones(len(table), np.bool_) for table in tables], [], [])
    claimed = _group(tables, blocks.block)
    for record, number in blocks.owned(rank, touched):
        low = number * blocks.block
        block = SharedBlock(record, low, min(low + blocks.block, int(blocks.nbytes[record])))
        _grant(block, claimed.get((record, number), []), min_direct)
        for claimant, position, _ in block.served:
            result.granted[claimant][position] = False
        if block.served:
            result.shared.append(block)
        else:
            result.unclaimed += [Span(record, low, high, 0) for low, high in block.free()]
    return result


def _group(tables: Sequence[Table], block: int) -> dict[tuple[int, int], list[Row]]:
    """Claims by (record, block of it)."""
    found: dict[tuple[int, int], list[Row]] = defaultdict(list)
    for rank, table in enumerate(tables):
        for number, row in enumerate(table.tolist()):
            found[row[0], row[1] // block].append((rank, number, tuple(row)))
    return found


def _grant(block: SharedBlock, claims: list[Row], min_direct: int) -> None:
    """Sort a block's claims into those granted and those served by the owner."""
    alone = len({rank for rank, _, _ in claims}) == 1
    claims = sorted(claims, key=lambda claim: claim[2][1])
    reach = block.low  # where the claims so far end
    for position, (rank, number, row) in enumerate(claims):
        _, low, run, step, count, _ = row
        high = low + (count - 1) * step + run
        follower = claims[position + 1][2][1] if position + 1 < len(claims) else high
        apart = low >= reach and follower >= high
        if apart and count == 1 and (alone or run >= min_direct):
            block.granted.append((low, high))
        else:
            block.served.append((rank, number, row))
        reach = max(reach, high)


@dataclass(slots=True)
class Resolution:
    """An owner's decisions.

    Attributes:
        answers: per rank, for each of its claims GRANTED or the round in which its bytes come.
        services: by round.
        unclaimed: as judged.
    """

    answers: list[npt.NDArray[np.int32]]
    services: list[Service]
    unclaimed: list[Span]


def schedule(judgement: Judgement, turns: Sequence[npt.NDArray[np.int32]], window: int) -> Resolution:
    """Put shared blocks into rounds: none before its claimants' turn, and within the window.

    Args:
        turns: per rank, for each of its claims the earliest round in which it wants the bytes.
        window: bytes that are staged, or sent, per round.
    """
    answers = [np.full(len(granted), GRANTED, np.int32) for granted in judgement.granted]
    services: list[Service] = []
    due = [(max(int(turns[rank][number]) for rank, number, _ in b.served), b) for b in judgement.shared]
    due.sort(key=lambda item: (item[0], item[1].record, item[1].low))
    current = 0
    for turn, block in due:
        current = max(current, turn)
        services += [Service() for _ in range(current + 1 - len(services))]
        sent = sum(row[2] * row[4] for _, _, row in block.served)
        last = services[current]
        if last.spans and max(last.staged + block.high - block.low, last.sent + sent) > window:
            current += 1
            services.append(Service())
        _serve(block, services[current])
        for rank, number, _ in block.served:
            answers[rank][number] = current
    return Resolution(answers, services, judgement.unclaimed)


def _serve(block: SharedBlock, service: Service) -> None:
    base = service.staged
    service.spans += [Span(block.record, low, high, base + low - block.low) for low, high in block.free()]
    service.staged += block.high - block.low
    for rank, number, (_, offset, run, step, count, fresh) in block.served:
        send = Send(base + offset - block.low, run, step, count, bool(fresh))
        service.sends[rank].append((number, send))
        service.sent += send.nbytes
