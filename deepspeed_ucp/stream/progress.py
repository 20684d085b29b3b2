"""What a conversion and an export share about their workers: threads, their memory, who is told of their progress."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, TypeVar

from ..io.memory import allocate
from ..plan.conversion import ALIGNMENT, RANGE

T = TypeVar("T")


class Bar(Protocol):
    """What is told of progress."""

    def add(self, amount: int) -> None:
        """``amount`` more bytes are done; any thread may call it."""


class _NoBar:
    def add(self, amount: int) -> None:
        pass


def no_bar(total: int) -> AbstractContextManager[Bar]:
    """Progress that is shown to nobody."""
    return nullcontext(_NoBar())


def default_workers() -> int:
    """Threads per node: twice the cores that this rank may use, 4 to 64; half of their time is waiting."""
    cores = len(os.sched_getaffinity(0))
    told = [os.environ.get(name) for name in ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "LOCAL_SIZE")]
    ranks = max(int(next((value for value in told if value), "1")), 1)
    return min(max(2 * cores // ranks, 4), 64)


def divide_window(workers: int, window: int) -> tuple[int, int]:
    """(threads, bytes that each reads at once): a thread holds about three times these, scratch memory included.

    Args:
        workers: threads asked for; 0 chooses from the cores. Fewer where the window has no room for them.
        window: bytes of memory for all of them.
    """
    threads = max(min(workers or default_workers(), window // (3 * ALIGNMENT)), 1)
    most = window // (3 * threads) // ALIGNMENT * ALIGNMENT
    return threads, max(min(most, RANGE), ALIGNMENT)


def run_threads(jobs: Sequence[T], work: Callable[[Iterator[T]], None], threads: int) -> None:
    """Let threads take jobs one by one, in order.

    Args:
        work: what each thread does, with the jobs that it gets.

    Raises:
        UcpError: the first thread's error; the others stop after their job.
    """
    turn, lock, stop = iter(jobs), threading.Lock(), threading.Event()

    def take() -> Iterator[T]:
        while not stop.is_set():
            with lock:
                found = next(turn, stop)
            if found is stop:
                return
            yield found  # type: ignore[misc]

    def run() -> None:
        try:
            work(take())
        except BaseException:
            stop.set()
            raise

    count = max(min(threads, len(jobs)), 1)
    with ThreadPoolExecutor(count, thread_name_prefix="ucp-work") as pool:
        try:
            for future in [pool.submit(run) for _ in range(count)]:
                future.result()
        finally:
            stop.set()  # an interrupt does not wait for the whole queue


class Scratch:
    """Two pieces of memory that one thread uses again and again; they grow to the largest that was asked for."""

    def __init__(self) -> None:
        self._held = [memoryview(b""), memoryview(b"")]

    def take(self, nbytes: int) -> memoryview:
        """The first piece's leading ``nbytes``; what it held is lost."""
        return self._take(0, nbytes)

    def take_second(self, nbytes: int) -> memoryview:
        """The second piece's leading ``nbytes``; what it held is lost."""
        return self._take(1, nbytes)

    def _take(self, number: int, nbytes: int) -> memoryview:
        if self._held[number].nbytes < nbytes:
            self._held[number] = memoryview(b"")  # the smaller one goes back first
            self._held[number] = memoryview(allocate(nbytes))
        return self._held[number][:nbytes]
