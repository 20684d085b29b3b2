"""Where ranks of ``torch.distributed`` wait for each other without being in a collective.

A collective ends its process when a rank comes later than the group's timeout, however well that rank is: it may read
from a slow store. Here all wait by short looks at the group's store until the last one has come, and the collective
that follows finds everyone there. What keeps a wait from lasting for ever is signs of life, which a thread of every
rank gives from its first :func:`give_signs` on.
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

_ROOM = "deepspeed_ucp"
_CAME, _LEFT, _SIGNS = "came", "left", "signs/{}"
"""Keys of the store: how often ranks have come to a meeting, who left last, and a rank's signs of life."""

_LONGEST_PAUSE, _GROWTH = 0.05, 1.5
"""Seconds between two looks at the most, and how pauses grow up to that."""

_PAUSE_PER_RANK = 20e-6
"""Seconds of the first pause for each rank: one store answers all of them."""

_EVERY, _PATIENCE = 5.0, 60.0
"""Seconds between a rank's signs of life, and those after whose lack it counts as gone."""


@dataclass(slots=True)
class _Here:
    """This process among the others.

    Attributes:
        left: how often it has left with an error that was not told to all. Who left as often had its own.
        thread: gives signs of life until ``ends``.
    """

    left: int = 0
    thread: threading.Thread | None = None
    ends: threading.Event = field(default_factory=threading.Event)


_here = _Here()


def find_store() -> Any:
    """Our room in the store of the default group; None without a group, or where it has no store (MPI)."""
    import torch.distributed as dist

    if not dist.is_initialized():
        return None
    store = dist.distributed_c10d._get_default_store()
    return None if store is None else dist.PrefixStore(_ROOM, store)


def meet(store: Any, rank: int, size: int) -> None:
    """Wait until every rank has come here as often as this one; collective.

    Raises:
        RemoteError: a rank has left or gives no sign of life any more, or the store is gone.
    """
    try:
        came = store.add(_CAME, 1)
        _wait(store, came + -came % size, _Neighbour(store, (rank + 1) % size), _PAUSE_PER_RANK * size)
    except UcpError:
        raise
    except RuntimeError as error:  # torch's, whose kinds differ between releases
        raise RemoteError(
            f"the store by which ranks wait for each other cannot be reached ({error}): the process that keeps it, "
            "rank 0 or the launcher's agent, has ended. Its own output says why."
        ) from error


def leave(store: Any, rank: int, error: BaseException) -> None:
    """Tell who waits for this rank that it does not come, because of an error of its own."""
    with suppress(RuntimeError):  # a store that is gone tells for itself
        if _hear(store) is None:
            _note(store, rank, f"{type(error).__name__}: {error}")
    _here.left += 1


def _note(store: Any, rank: int, why: str) -> None:
    store.set(_LEFT, f"{_here.left + 1} [rank {rank}] {why}")


def _hear(store: Any) -> str | None:
    """Why a rank has left more often than this one, if one has."""
    if not store.check([_LEFT]):
        return None
    number, _, told = store.get(_LEFT).decode().partition(" ")
    return told if int(number) > _here.left else None


def _wait(store: Any, awaited: int, neighbour: _Neighbour, pause: float) -> None:
    while int(store.get(_CAME)) < awaited:
        time.sleep(pause)
        neighbour.look(pause)
        pause = max(min(pause * _GROWTH, _LONGEST_PAUSE), pause)


class _Neighbour:
    """The rank whose signs of life this one looks for; every rank is looked for by one."""

    def __init__(self, store: Any, rank: int) -> None:
        self.store, self.rank = store, rank
        self._signs, self._unseen, self._silent = -1, 0.0, 0.0

    def look(self, pause: float) -> None:
        """Note that ``pause`` seconds have gone by; those of a stopped process are none.

        Raises:
            RemoteError: some rank is gone.
        """
        self._unseen += pause
        if self._unseen < _EVERY / 5:
            return
        self._silent, self._unseen = self._silent + self._unseen, 0.0
        signs = self.store.add(_SIGNS.format(self.rank), 0)
        if signs != self._signs:
            self._signs, self._silent = signs, 0.0
        if self._silent > _PATIENCE:
            why = f"no sign of life for {_PATIENCE:.0f} s: it has ended, or hangs. Its own output says more."
            _note(self.store, self.rank, why)
        told = _hear(self.store)
        if told is not None:
            raise RemoteError(*told.split("\n"))


def give_signs() -> None:
    """Have a thread tell that this process lives, as long as it does and its group exists."""
    if _here.thread is None or not _here.thread.is_alive():
        _here.thread = threading.Thread(target=_live, daemon=True, name="signs of life")
        _here.thread.start()


def _live() -> None:
    import torch.distributed as dist

    while (store := find_store()) is not None:
        with suppress(RuntimeError):  # whoever waits for the store is told
            store.add(_SIGNS.format(dist.get_rank()), 1)
        del store  # it is the group's, and goes with it
        if _here.ends.wait(_EVERY):
            return


@atexit.register
def _end() -> None:
    """End the thread, which must not outlive the interpreter; who waits is told of an uncaught error."""
    if _here.thread is None:
        return
    _here.ends.set()
    _here.thread.join(timeout=10.0)
    error = getattr(sys, "last_value", None)
    if error is not None and (store := find_store()) is not None:
        import torch.distributed as dist

        leave(store, dist.get_rank(), error)


os.register_at_fork(after_in_child=lambda: setattr(_here, "thread", None))  # that is its parent's
