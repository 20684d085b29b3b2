"""Several ranks in one process: threads that take turns, and a `Comm` between them that really exchanges.

One thread runs at a time, from one collective to the next, in rank order: tests are deterministic, and a collective
costs one thread switch per rank. Exchanged values are pickled, as in a real launch.
"""

from __future__ import annotations

import pickle
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from deepspeed_ucp.comm import Comm

_POOL = ThreadPoolExecutor(max_workers=256, thread_name_prefix="rank")
_here = threading.local()


def current_rank() -> int:
    return int(_here.rank)


class BrokenWorldError(Exception):
    """Another rank ended, or is in another collective."""


class World:
    """Ranks that run one after the other, until each has reached the same collective.

    Args:
        order: order of the ranks; rank order by default.
    """

    def __init__(self, size: int, order: Sequence[int] | None = None) -> None:
        self.size = size
        self.order = list(order or range(size))
        self.turns: list[queue.SimpleQueue[None]] = [queue.SimpleQueue() for _ in range(size)]
        self.pending: dict[int, str] = {}
        self.values: list[Any] = [None] * size
        self.results: list[Any] = []
        self.ended: set[int] = set()
        self.broken = ""
        self.collectives = 0

    def run(self, work: Callable[[int, Comm], Any]) -> list[Any]:
        """Return every rank's result, or the error that ended it."""
        if self.size == 1:
            return [_try(work, 0, Comm())]
        futures = [_POOL.submit(self._run_rank, work, rank) for rank in range(self.size)]
        self.turns[self.order[0]].put(None)
        return [future.result() for future in futures]

    def _run_rank(self, work: Callable[[int, Comm], Any], rank: int) -> Any:
        self.turns[rank].get()
        _here.rank = rank
        result = _try(work, rank, ThreadComm(self, rank))
        self.ended.add(rank)
        if self.pending:
            self.broken = self.broken or f"rank {rank} has ended, others wait in {sorted(set(self.pending.values()))}"
        self._pass_on(rank)
        return result

    def _pass_on(self, rank: int) -> None:
        place = self.order.index(rank) + 1
        for following in self.order[place:] + self.order[:place]:  # this rank if it is the last
            if following not in self.ended:
                self.turns[following].put(None)
                return

    def exchange(self, rank: int, kind: str, value: Any) -> list[Any]:
        """Return the values of all ranks in the same collective."""
        if self.ended:
            self.broken = self.broken or f"rank {rank} waits in {kind}, ranks {sorted(self.ended)} have ended"
        self.pending[rank], self.values[rank] = kind, value
        if len(self.pending) == self.size:
            self._complete()
        self._pass_on(rank)
        self.turns[rank].get()
        if self.broken:
            raise BrokenWorldError(self.broken)
        return self.results

    def _complete(self) -> None:
        if len(set(self.pending.values())) > 1:
            self.broken = f"ranks are in different collectives: {self.pending}"
        self.results = list(self.values)
        self.pending.clear()
        self.collectives += 1


def _try(work: Callable[[int, Comm], Any], rank: int, comm: Comm) -> Any:
    try:
        return work(rank, comm)
    except BaseException as error:  # noqa: BLE001 - handed to the test
        return error


def run_ranks(size: int, work: Callable[[int, Comm], Any], order: Sequence[int] | None = None) -> list[Any]:
    """Run `work(rank, comm)` on every rank. Returns the results in rank order.

    Raises:
        BaseException: the first error that is not a consequence of another rank's error.
    """
    results = World(size, order).run(work)
    errors = [result for result in results if isinstance(result, BaseException)]
    errors.sort(key=lambda error: isinstance(error, BrokenWorldError))
    if errors:
        raise errors[0]
    return results


class Apart(threading.local):
    """Stands in for ``objects._known``: each thread has separate listings, as if it were a process."""

    def __init__(self) -> None:
        self._known: dict[str, Any] = {}

    def update(self, entries: dict[str, Any]) -> None:
        self._known.update(entries)

    def __setitem__(self, url: str, entry: Any) -> None:
        self._known[url] = entry

    def get(self, url: str) -> Any:
        return self._known.get(url)


class ThreadComm(Comm):
    def __init__(self, world: World, rank: int) -> None:
        self.world, self.rank, self.size = world, rank, world.size

    def gather(self, value: Any) -> list[Any]:
        return [pickle.loads(value) for value in self.world.exchange(self.rank, "gather", pickle.dumps(value))]

    def broadcast(self, value: Any, src: int = 0) -> Any:
        values = self.world.exchange(self.rank, f"broadcast {src}", pickle.dumps(value) if self.rank == src else b"")
        return pickle.loads(values[src])

    def swap(self, data: np.ndarray, sends: list[int], receives: list[int], into: Any = None) -> np.ndarray:
        if data.ndim != 1 or data.dtype != np.uint8 or data.size != sum(sends) or len(sends) != self.size:
            raise ValueError(f"rank {self.rank} sends {sends} of {data.shape} {data.dtype}")
        values = self.world.exchange(self.rank, "swap", np.split(data.copy(), np.cumsum(sends)[:-1]))
        parts = [parcels[self.rank] for parcels in values]
        if [part.size for part in parts] != receives:
            raise ValueError(f"rank {self.rank} expects {receives}, gets {[part.size for part in parts]}")
        if into is not None and into.nbytes != sum(receives):
            raise ValueError(f"rank {self.rank} has memory for {into.nbytes} bytes, gets {sum(receives)}")
        return np.concatenate(parts, out=into)

    def any_of(self, mask: Any) -> Any:
        return np.logical_or.reduce(self.world.exchange(self.rank, "any_of", mask.copy()))
