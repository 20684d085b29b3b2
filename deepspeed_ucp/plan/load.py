"""One rank's part of a load, as data: what it reads for itself, and the rounds in which ranks read for each other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import numpy as np
import numpy.typing as npt

from .claims import GRANTED, Claim
from .requests import DISCARD, Part, Request
from .resolve import OwnerPlan, Send, Service, Span


@dataclass(frozen=True, slots=True)
class Round:
    """One round of exchange.

    Attributes:
        reads: what this rank stages; the parts' positions are bytes of the staging memory.
        staged: bytes of staging memory.
        sends: per rank, what of the staged bytes it gets, in order.
        receives: per rank, the claims whose bytes come from it, in order.
        steps: in how many exchanges the bytes travel, each with a part of the other ranks; the same on every rank.
    """

    reads: tuple[Request, ...]
    staged: int
    sends: tuple[tuple[Send, ...], ...]
    receives: tuple[tuple[Claim, ...], ...]
    steps: int = 1

    def count_steps(self, window: int) -> int:
        """Exchanges that this rank needs to send and to receive no more than about ``window`` bytes in each."""
        sent = sum(send.nbytes for one in self.sends for send in one)
        received = sum(claim.nbytes for one in self.receives for claim in one)
        return min(max(-(-max(sent, received) // window), 1), len(self.sends))


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What one rank does.

    Attributes:
        direct: reads for its own buffers, and of bytes that only the checksums need, in the order of reading.
        rounds: exchange, the same number of rounds on every rank.
        nbytes: bytes that this rank reads, each once.
    """

    direct: tuple[Request, ...]
    rounds: tuple[Round, ...]
    nbytes: int

    @property
    def requests(self) -> tuple[Request, ...]:
        """All reads."""
        return self.direct + tuple(request for each in self.rounds for request in each.reads)

    def count_steps(self, window: int) -> list[int]:
        """Exchanges that each round needs here."""
        return [each.count_steps(window) for each in self.rounds]

    def agree(self, counts: Iterable[Sequence[int]], size: int) -> LoadPlan:
        """The same in as many rounds and exchanges as the rank of ``size`` that needs the most.

        Args:
            counts: every rank's :meth:`count_steps`.
        """
        steps = [max(each) for each in zip_longest(*counts, fillvalue=1)]
        nothing: tuple[tuple[Any, ...], ...] = ((),) * size
        idle = [Round((), 0, nothing, nothing)] * (len(steps) - len(self.rounds))
        rounds = [replace(each, steps=count) for each, count in zip([*self.rounds, *idle], steps, strict=True)]
        return replace(self, rounds=tuple(rounds))


def make_plan(
    addressed: Sequence[Sequence[Claim]],
    answers: Sequence[npt.NDArray[np.int32]],
    decision: OwnerPlan,
    *,
    rank: int,
    chunk: int,
    stage: int,
    file_of: Sequence[int],
) -> LoadPlan:
    """Put a rank's plan together.

    Args:
        addressed: per owner, this rank's claims.
        answers: per owner, what it answered to them.
        decision: this rank's as an owner.
        chunk: largest request in bytes.
        stage: buffer number of the staging memory.
        file_of: file of each record; reads are in file order, but each rank starts at a place of its own and wraps
            around, so that ranks that need neighbouring bytes do not all wait for the same part of the storage.
    """
    size = len(addressed)
    granted = [claim for claims, told in zip(addressed, answers, strict=True) for claim in _pick(claims, told, GRANTED)]
    direct = [Request(claim.record, claim.offset, claim.nbytes, claim.parts) for claim in granted]
    direct += [request for span in decision.unclaimed for request in _read(span, DISCARD, chunk)]
    direct.sort(key=lambda request: (file_of[request.record], request.record, request.offset))
    first = len(direct) * rank // size
    rounds = max([len(decision.services), *(int(told.max(initial=GRANTED)) + 1 for told in answers)])
    planned = tuple(_make_round(number, addressed, answers, decision, chunk, stage) for number in range(rounds))
    nbytes = sum(request.nbytes for request in direct)
    nbytes += sum(request.nbytes for each in planned for request in each.reads)
    return LoadPlan(tuple(direct[first:] + direct[:first]), planned, nbytes)


def _pick(claims: Sequence[Claim], answers: npt.NDArray[np.int32], wanted: int) -> list[Claim]:
    return [claims[number] for number in np.flatnonzero(answers == wanted).tolist()]


def _make_round(
    number: int,
    addressed: Sequence[Sequence[Claim]],
    answers: Sequence[npt.NDArray[np.int32]],
    decision: OwnerPlan,
    chunk: int,
    stage: int,
) -> Round:
    service = decision.services[number] if number < len(decision.services) else Service()
    reads = [request for span in service.spans for request in _read(span, stage, chunk)]
    receives = tuple(tuple(_pick(claims, told, number)) for claims, told in zip(addressed, answers, strict=True))
    # In the order of the claims, which is the order in which they are received.
    sorted_sends = [sorted(service.sends.get(rank, ()), key=lambda item: item[0]) for rank in range(len(addressed))]
    sends = tuple(tuple(send for _, send in items) for items in sorted_sends)
    return Round(tuple(reads), service.staged, sends, receives)


def _read(span: Span, buffer: int, chunk: int) -> list[Request]:
    requests = []
    for low in range(span.low, span.high, chunk):
        nbytes = min(chunk, span.high - low)
        requests.append(Request(span.record, low, nbytes, (Part(nbytes, buffer, span.position + low - span.low),)))
    return requests
