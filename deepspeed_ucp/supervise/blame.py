"""Whose fault it is: of ranks that fail one after the other, and of ranks that all wait for each other."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass

from .deaths import describe_state
from .watch import RankStatus, Watch

_TOGETHER = 10.0
"""Seconds in which a cause may be told after what it has led to: an error's way out of a script may end the connections
that others wait at."""

_SAVED, _LAST_WORDS, _OTHERS_WORDS = 128 + signal.SIGTERM, 5.0, 1.0
"""The exit code of a rank that has saved when it was told to go (:mod:`deepspeed_ucp.preemption`); seconds from what a
rank tells of its error to its end, and for the one that has led to it to tell."""

_FOLLOWS = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|connection\w*error|closed by peer|broken ?pipe|"
    r"socket (closed|timeout)|timed? ?out|remote process exited|nccl(remote|system)error|"
    r"nccl (error|communicator was aborted)|dist(backend|network|store)error|remoteerror",
    re.IGNORECASE,
)
"""In the line of an exception: what ranks meet when another one has gone."""

_ORDER = {None: 0, "forward": 1, "backward": 2, "step": 3}
"""Phases in the order in which ranks go through them."""

_NAMED = 8
"""Ranks that a hang names."""


def find_first_failure(ranks: Sequence[RankStatus]) -> RankStatus | None:
    """The rank that failed first: by an error, with a code, or without a word. What others say of it is not the cause,
    even where it is told a little earlier."""
    failed = [(seen.failed, seen) for seen in ranks if seen.failed is not None]
    if not failed:
        return None
    first = min(when for when, _ in failed)
    together = [(_follows(seen), when, seen.rank) for when, seen in failed if when <= first + _TOGETHER]
    rank = min(together)[2]
    return next(seen for _, seen in failed if seen.rank == rank)


def describe_first_failure(ranks: Sequence[RankStatus]) -> str | None:
    """The first failure of an agent's ranks and when it was, to be compared with what other agents say; None without.

    An agent knows its own ranks alone.
    """
    first = find_first_failure(ranks)
    if first is None or first.failed_at is None:
        return None
    when = time.strftime("%H:%M:%S", time.gmtime(first.failed_at)) + f"{first.failed_at % 1:.3f}"[1:]
    elsewhere = "; another rank's end has led to that, which another agent may tell" if _follows(first) else ""
    return f"{first.describe()} ({when} UTC, the first of this agent's ranks){elsewhere}"


def find_broken(ranks: Sequence[RankStatus]) -> RankStatus | None:
    """The first failure, if the other ranks can neither go on nor save, and there is no more to be heard of it.

    A rank that has saved as it was told ends with 143, as all do then. One that tells of an error has some seconds to
    end, and where another one's end has led to its own, that one has a moment to tell.
    """
    first = find_first_failure([seen for seen in ranks if seen.code != _SAVED])
    if first is None or first.failed is None:
        return None
    now = time.monotonic()
    if now < first.failed + (_LAST_WORDS if first.is_open else _OTHERS_WORDS if _follows(first) else 0.0):
        return None
    return first


def _follows(seen: RankStatus) -> bool:
    """Whether a rank's end looks as if another one had caused it: it met a lost connection, waited in vain until its
    watchdog ended it (SIGABRT), or was told to end by its launcher."""
    if seen.error is not None:
        return _FOLLOWS.search(seen.line or seen.error.rstrip().rpartition("\n")[2]) is not None
    return seen.signal in (signal.SIGTERM, signal.SIGABRT) or seen.code == 128 + signal.SIGTERM


@dataclass(frozen=True, slots=True)
class Hang:
    """What is known of ranks that do not go on.

    Attributes:
        summary: in words: who was not waiting, else that all were.
        culprits: who was not waiting, with what it did, in words and as frames.
        places: ranks by how far they came.
    """

    summary: str
    culprits: list[dict[str, object]]
    places: dict[str, list[int]]


def examine_hang(watch: Watch, *, has_all: bool = False) -> Hang:
    """Ask all ranks where they are (a second, if any does not answer), and tell who holds the others up.

    Args:
        has_all: this watcher has all ranks of the launch; a rank that has not come is one that is missing.
    """
    silent = watch.ask()
    ranks = sorted(watch.look(), key=lambda seen: seen.rank)
    there = [seen for seen in ranks if not seen.said_goodbye and seen.is_open]
    told = [_tell_missing(rank) for rank in _find_missing(ranks)] if has_all else []
    if not told:
        ended = [seen for seen in ranks if seen.said_goodbye]
        told = [_tell(seen) for seen in ended or silent or find_culprits([seen for seen in there if seen.where])]
    places: dict[str, list[int]] = {}
    for seen in there:
        places.setdefault(seen.place, []).append(seen.rank)
    summary = "; ".join(str(each["what"]) for each in told[:_NAMED])
    if len(told) > _NAMED:
        summary += f"; and {len(told) - _NAMED} more"
    return Hang(summary or _describe_wait(there), told[:_NAMED], places)


def _find_missing(ranks: Sequence[RankStatus]) -> list[int]:
    came = {seen.rank for seen in ranks}
    return [rank for rank in range(max((seen.world for seen in ranks), default=0)) if rank not in came]


def find_culprits(ranks: Sequence[RankStatus]) -> list[RankStatus]:
    """Those of some ranks that answered (:attr:`RankStatus.where`) for whom the others wait; empty where all are alike.

    Each thing that is known leaves some of them: who does not wait; whose collectives the others have begun already;
    who has come less far.
    """
    left = list(ranks)
    for choose in (_find_busy, _find_awaited, _find_late):
        chosen = {id(seen) for seen in choose(ranks)}
        left = [seen for seen in left if id(seen) in chosen] or left
    return left if len(left) < len(ranks) else []


def _find_busy(ranks: Sequence[RankStatus]) -> list[RankStatus]:
    return [seen for seen in ranks if seen.where and seen.where.waits is None]


def _find_awaited(ranks: Sequence[RankStatus]) -> list[RankStatus]:
    """Who has begun fewer collectives of a group than another one of its ranks, and is waiting for nobody so itself."""
    counts = [seen.where.collectives if seen.where else {} for seen in ranks]
    groups = {group for each in counts for group in each}
    most = {group: max(each.get(group, 0) for each in counts) for group in groups}
    least = {group: min(each[group] for each in counts if group in each) for group in groups}
    behind = [any(count < most[group] for group, count in each.items()) for each in counts]
    ahead = [any(count > least[group] for group, count in each.items()) for each in counts]
    return [seen for seen, late, early in zip(ranks, behind, ahead, strict=True) if late and not early]


def _find_late(ranks: Sequence[RankStatus]) -> list[RankStatus]:
    """Who has ended the fewest steps, and of those, as far as phases tell, who is in the first one."""
    steps = [-1 if seen.step is None else seen.step for seen in ranks]
    late = [seen for seen, step in zip(ranks, steps, strict=True) if step == min(steps)]
    if len(late) < len(ranks) or any(seen.phase not in _ORDER for seen in late):
        return late
    first = min((_ORDER[seen.phase] for seen in late), default=0)
    return [seen for seen in late if _ORDER[seen.phase] == first]


def _tell(seen: RankStatus) -> dict[str, object]:
    stack: list[str] = []
    if seen.said_goodbye:
        what = f"had ended its script{', but its process has not ended' if seen.is_open else ''}"
    elif seen.where is None:
        state = describe_state(seen.pid, seen.started)
        what = f"does not answer{state and f': {state}'}"
    else:
        stack, waits = list(seen.where.stack), seen.where.waits
        how = f"has others wait, although it waits in {waits}" if waits else "was not waiting"
        places = dict.fromkeys((*stack[:1], *filter(None, [seen.where.own])))
        what = how + (f", at {', called at '.join(places)}" if places else "")
    text = f"{seen.name}, {seen.place}, {what}"
    return {"rank": seen.rank, "host": seen.host, "step": seen.step, "phase": seen.phase, "what": text, "stack": stack}


def _tell_missing(rank: int) -> dict[str, object]:
    what = f"rank {rank} has not come as far as to import DeepSpeed, or cannot connect"
    return {"rank": rank, "host": None, "step": None, "phase": None, "what": what, "stack": []}


def _describe_wait(ranks: Sequence[RankStatus]) -> str:
    """Of ranks of which none stands out."""
    waits = sorted({seen.where.waits for seen in ranks if seen.where and seen.where.waits})
    if len(_find_busy(ranks)) == len(ranks):
        stacks = sorted({seen.where.stack[0] for seen in ranks if seen.where and seen.where.stack})
        return f"none of the ranks waits for another; they are at {', '.join(stacks[:_NAMED])}" if stacks else ""
    return (
        f"all ranks here wait for others ({', '.join(waits)}): the cause is a rank elsewhere, or what connects them"
        if waits
        else ""
    )
