"""Barrier of ``torch.distributed`` ranks without a timeout, before collectives.

A collective aborts if a rank is later than the group's timeout, even if that rank only reads from a slow store. Here
ranks poll the group's store until all have arrived. Heartbeats of a thread in each rank (:func:`start_heartbeats`)
detect ranks that have died.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from .errors import RemoteError, UcpError

_PREFIX = "deepspeed_ucp"
_ARRIVALS, _FAILURE, _HEARTBEATS = "came", "left", "signs/{}"
"""Keys of the store: number of arrivals at barriers, the last failed rank, and a rank's heartbeats."""

_LONGEST_PAUSE, _GROWTH = 0.05, 1.5
"""Longest pause between two polls in seconds, and the growth of pauses up to it."""

_PAUSE_PER_RANK = 20e-6
"""Seconds of the first pause per rank, because one store serves all ranks."""

_INTERVAL, _TIMEOUT = 5.0, 60.0
"""Seconds between two heartbeats, and without a heartbeat until a rank counts as dead."""


@dataclass(slots=True)
class _MeetingState:
    """State of this process.

    Attributes:
        failures: number of its errors that were not shared with all ranks; the recorded failure has such a number, too.
        thread: sends heartbeats until ``ends``.
    """

    failures: int = 0
    thread: threading.Thread | None = None
    ends: threading.Event = field(default_factory=threading.Event)


_state = _MeetingState()


def find_store() -> Any:
    """Return the default group's store with a prefix of keys; None without one (MPI)."""
    import torch.distributed as dist

    if not dist.is_initialized():
        return None
    store = dist.distributed_c10d._get_default_store()
    return None if store is None else dist.PrefixStore(_PREFIX, store)


def meet(store: Any, rank: int, size: int) -> None:
    """Wait until every rank has called this as often as this rank; collective.

    Raises:
        RemoteError: a rank has failed or stopped its heartbeats, or the store is unreachable.
    """
    try:
        arrivals, pause = store.add(_ARRIVALS, 1), _PAUSE_PER_RANK * size
        awaited, neighbour = arrivals + -arrivals % size, (rank + 1) % size  # each rank checks one other rank
        heartbeats, silent, unchecked = -1, 0.0, 0.0
        while int(store.get(_ARRIVALS)) < awaited:
            time.sleep(pause)
            unchecked += pause  # without the time in which this process was stopped
            pause = max(min(pause * _GROWTH, _LONGEST_PAUSE), pause)
            if unchecked < _INTERVAL / 5:
                continue
            silent, unchecked, before = silent + unchecked, 0.0, heartbeats
            heartbeats = store.add(_HEARTBEATS.format(neighbour), 0)
            silent = silent if heartbeats == before else 0.0
            if silent > _TIMEOUT:
                reason = f"no heartbeat for {_TIMEOUT:.0f} s: it has ended or hangs. See its own output."
                _record_failure(store, neighbour, reason)
            failure = _find_failure(store)
            if failure is not None:
                raise RemoteError(*failure.split("\n"))
    except UcpError:
        raise
    except RuntimeError as error:  # torch's error classes differ between releases
        raise RemoteError(
            f"the store of the process group cannot be reached ({error}): its process, rank 0 or the launcher's agent, "
            "has ended. See the output of that process."
        ) from error


def report_failure(store: Any, rank: int, error: BaseException) -> None:
    """Report an error of this rank alone to the ranks that wait for it."""
    with suppress(RuntimeError):  # other ranks notice an unreachable store themselves
        if _find_failure(store) is None:
            _record_failure(store, rank, f"{type(error).__name__}: {error}")
    _state.failures += 1


def _record_failure(store: Any, rank: int, reason: str) -> None:
    store.set(_FAILURE, f"{_state.failures + 1} [rank {rank}] {reason}")


def _find_failure(store: Any) -> str | None:
    """Return the recorded failure if this rank had fewer failures, or None."""
    if not store.check([_FAILURE]):
        return None
    number, _, reason = store.get(_FAILURE).decode().partition(" ")
    return reason if int(number) > _state.failures else None


def start_heartbeats() -> None:
    """Start a thread that sends heartbeats while this process and its group exist."""
    if _state.thread is None or not _state.thread.is_alive():
        _state.thread = threading.Thread(target=_send_heartbeats, daemon=True, name="heartbeats")
        _state.thread.start()


def _send_heartbeats() -> None:
    import torch.distributed as dist

    while (store := find_store()) is not None:
        with suppress(RuntimeError):  # the waiting main thread raises
            store.add(_HEARTBEATS.format(dist.get_rank()), 1)
        del store  # do not keep the group's store alive
        if _state.ends.wait(_INTERVAL):
            return


@atexit.register
def _stop_at_exit() -> None:
    """Stop the thread at exit, and report an uncaught error to waiting ranks."""
    if _state.thread is None:
        return
    _state.ends.set()
    _state.thread.join(timeout=10.0)
    error = getattr(sys, "last_value", None)
    if error is not None and (store := find_store()) is not None:
        import torch.distributed as dist

        report_failure(store, dist.get_rank(), error)


os.register_at_fork(after_in_child=lambda: setattr(_state, "thread", None))  # a child does not have its parent's thread
