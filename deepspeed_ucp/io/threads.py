"""Threads that take jobs one by one, and the number of threads."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import TypeVar

from ..errors import clear_frames

T = TypeVar("T")
R = TypeVar("R")


_PER_CORE, _LEAST, MOST = 4, 8, 64


def count_threads() -> int:
    """Return the number of threads for reads and writes, which mostly wait."""
    return min(max(_PER_CORE * len(os.sched_getaffinity(0)) // _count_ranks(), _LEAST), MOST)


def _count_ranks() -> int:
    names = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")
    return max(int(next((value for value in map(os.environ.get, names) if value), "1")), 1)


@contextmanager
def limit_torch_threads(threads: int | None = None) -> Iterator[None]:
    """Limit torch's threads per operation, by default to this rank's share of cores.

    Without a limit each rank, and each of our threads, uses all cores for an operation. OpenMP's threads then spin
    while they wait for others without a core: loads on 2 cores took up to 4 times as long.
    """
    torch = sys.modules.get("torch")
    before = torch.get_num_threads() if torch else 0
    most = max(len(os.sched_getaffinity(0)) // _count_ranks(), 1) if threads is None else threads
    if torch is None or before <= most:
        yield
        return
    torch.set_num_threads(most)  # also for threads that start inside
    try:
        yield
    finally:
        torch.set_num_threads(before)


def run_threads(jobs: Sequence[T], work: Callable[[Iterator[T]], None], threads: int) -> None:
    """Let threads take jobs in order; all have ended when this returns or raises.

    Torch uses a single thread in each of them. ``work`` is called in each thread with an iterator over its jobs. After
    the first error of a thread, or an interrupt, the other threads stop after their job.
    """
    turn, lock, stop = iter(jobs), threading.Lock(), threading.Event()

    def take() -> Iterator[T]:
        while not stop.is_set():
            with lock:
                job = next(turn, stop)
            if job is stop:
                return
            yield job  # type: ignore[misc]

    def run() -> None:
        try:
            work(take())
        except BaseException:
            stop.set()
            raise

    count = max(min(threads, len(jobs)), 1)
    pool = ThreadPoolExecutor(count, thread_name_prefix="ucp-work")
    futures: list[Future[None]] = []
    with limit_torch_threads(1):
        try:
            futures.extend(pool.submit(run) for _ in range(count))
            for future in futures:
                future.result()
        finally:
            stop.set()
            _wait_for_end(futures)
            pool.shutdown()


def map_threads(work: Callable[[T], R], items: Iterable[T], threads: int) -> list[R]:
    """Like ``map`` with several threads; raises the first error of a thread."""
    jobs = list(enumerate(items))
    results: dict[int, R] = {}

    def run(turn: Iterator[tuple[int, T]]) -> None:
        for number, item in turn:
            results[number] = work(item)

    if jobs:
        run_threads(jobs, run, threads)
    return [results[number] for number, _ in jobs]


def _wait_for_end(futures: Sequence[Future[None]]) -> None:
    """Wait for threads despite interrupts, and release errors that are not raised.

    The threads' memory is freed afterwards. ``Thread.join`` is no alternative: if it is interrupted, it takes a running
    thread for ended.
    """
    interrupt: BaseException | None = None
    while True:
        try:
            wait(futures)
            break
        except KeyboardInterrupt as again:
            interrupt = again
    raised = sys.exc_info()[1]
    for future in futures:
        if (error := future.exception()) is not None and error is not raised:
            clear_frames(error)
    if interrupt is not None:
        raise interrupt
