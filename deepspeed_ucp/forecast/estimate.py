"""Figures of a planned load: per rank, in total, and the seconds that they take at given bandwidths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..plan import LoadPlan, Request

GIGA = 1_000_000_000
"""Bandwidths are in GB/s of 10^9 bytes."""


@dataclass(frozen=True, slots=True)
class RankFigures:
    """What one rank does; bytes.

    Attributes:
        rank, stage, dp_rank, tp_rank: which rank, and where it stands.
        needed: of the checkpoint, what it holds afterwards.
        read: what it asks storage for.
        requests: reads.
        files: files that it opens for reading (headers aside).
        received, sent: exchanged with other ranks.
        rounds: of exchange, the same number on every rank.
        peak: most memory beyond the engine's buffers: scratch of the reading threads; what is staged, packed and
            received in a round of exchange.
        engine: the engine's own buffers: masters, optimizer states, the model's copies.
    """

    rank: int
    stage: int
    dp_rank: int
    tp_rank: int
    needed: int
    read: int
    requests: int
    files: int
    received: int
    sent: int
    rounds: int
    peak: int
    engine: int


MEASURED = ("needed", "read", "requests", "files", "received", "sent", "rounds", "peak", "engine")
"""The figures of a rank, in the order in which they are told."""


def spread(ranks: Sequence[RankFigures], figure: str) -> dict[str, float]:
    """The least, the mean and the most over ranks, of one of :data:`MEASURED`."""
    values = [getattr(rank, figure) for rank in ranks]
    return {"least": min(values), "mean": sum(values) / len(values), "most": max(values)}


@dataclass(frozen=True, slots=True)
class LoadTotals:
    """All ranks together; bytes.

    Attributes:
        checkpoint: size of all its files.
        files: their number.
        state: what is restored, each atom once.
        read: what is asked of storage: every byte of every record that holds some of it, once.
        needed: what all ranks hold afterwards, replicas included.
        exchanged: what travels between ranks.
        replicas: what is read on top to compare replicas.
        headers: files whose headers a rank reads, at most.
    """

    checkpoint: int
    files: int
    state: int
    read: int
    needed: int
    exchanged: int
    replicas: int
    headers: int

    @property
    def ratio(self) -> float:
        """Bytes read per byte of state."""
        return self.read / self.state if self.state else 1.0


@dataclass(frozen=True, slots=True)
class Bandwidths:
    """GB/s: ``read`` of the storage as a whole, ``rank`` what one rank gets of it, ``net`` of a rank's network."""

    read: float
    rank: float | None = None
    net: float | None = None


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds.

    Attributes:
        checkpoint: reading the whole checkpoint once.
        aggregate: reading what the load reads, all ranks together at the storage's bandwidth.
        slowest: the rank that reads the most, at an equal share of that bandwidth and at no more than a rank gets.
        exchange: the rank that exchanges the most; None where no network's bandwidth is given.
        load: reading and exchange.
    """

    checkpoint: float
    aggregate: float
    slowest: float
    exchange: float | None
    load: float


def estimate_times(totals: LoadTotals, ranks: Sequence[RankFigures], world: int, speeds: Bandwidths) -> Times:
    """How long reading and exchange take, if nothing but bandwidth counts."""
    aggregate = totals.read / (speeds.read * GIGA)
    share = speeds.read * GIGA / world
    if speeds.rank is not None:
        share = min(share, speeds.rank * GIGA)
    slowest = max(rank.read for rank in ranks) / share
    floor = aggregate
    if speeds.rank is not None:
        floor = max(floor, max(rank.read for rank in ranks) / (speeds.rank * GIGA))
    exchange = None
    if speeds.net is not None:
        exchange = max(max(rank.received, rank.sent) for rank in ranks) / (speeds.net * GIGA)
    return Times(
        checkpoint=totals.checkpoint / (speeds.read * GIGA),
        aggregate=aggregate,
        slowest=slowest,
        exchange=exchange,
        load=floor + (exchange or 0.0),
    )


def measure_plan(plan: LoadPlan, rank: int, files: Sequence[int], threads: int) -> dict[str, int]:
    """Figures of a rank's whole plan: read, requests, files, received, sent, rounds, peak.

    Args:
        files: file of each record.
        threads: reading threads.
    """
    return {
        "read": plan.nbytes,
        "requests": len(plan.requests),
        "files": len({files[request.record] for request in plan.requests}),
        "received": sum(
            c.nbytes for r in plan.rounds for peer, one in enumerate(r.receives) if peer != rank for c in one
        ),
        "sent": sum(s.nbytes for r in plan.rounds for peer, one in enumerate(r.sends) if peer != rank for s in one),
        "rounds": len(plan.rounds),
        "peak": max(measure_scratch(plan.direct, threads), measure_exchange(plan, rank)),
    }


def measure_scratch(requests: Sequence[Request], threads: int) -> int:
    """Scratch memory of the reading threads: each has some of the largest request's size."""
    return min(threads, len(requests)) * max((request.nbytes for request in requests), default=0)


def measure_exchange(plan: LoadPlan, rank: int) -> int:
    """Most memory that rounds of exchange take: staged for two of the largest, packed and received in a step."""
    moved = 0
    for each in plan.rounds:
        for step in range(each.steps):
            sends, claims = each.pick_step(rank, step, plan.same_node)
            nbytes = [send.nbytes for one in sends for send in one] + [claim.nbytes for one in claims for claim in one]
            moved = max(moved, sum(nbytes))
    return 2 * max((each.staged for each in plan.rounds), default=0) + moved
