"""Threads that take jobs one by one, and how many of them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


_PER_CORE, _LEAST, _MOST = 4, 8, 64


def count_threads() -> int:
    """As many as read and write well: several for each core of this rank's share, as most of their time is waiting."""
    names = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")
    ranks = max(int(next((value for value in map(os.environ.get, names) if value), "1")), 1)
    return min(max(_PER_CORE * len(os.sched_getaffinity(0)) // ranks, _LEAST), _MOST)


def run_threads(jobs: Sequence[T], work: Callable[[Iterator[T]], None], threads: int) -> None:
    """Let threads take jobs one by one, in order; all of them have ended when this returns or raises.

    Args:
        work: what each thread does, with the jobs that it gets.

    Raises:
        BaseException: the first thread's error, or an interrupt; the others stop after their job.
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
    try:
        futures += [pool.submit(run) for _ in range(count)]
        for future in futures:
            future.result()
    finally:
        stop.set()
        _wait_for_end(futures)
        pool.shutdown()


def map_threads(work: Callable[[T], R], items: Iterable[T], threads: int) -> list[R]:
    """As ``map``, by several threads: results in order, or the first thread's error."""
    jobs = list(enumerate(items))
    found: dict[int, R] = {}

    def run(turn: Iterator[tuple[int, T]]) -> None:
        for number, item in turn:
            found[number] = work(item)

    if jobs:
        run_threads(jobs, run, threads)
    return [found[number] for number, _ in jobs]


def _wait_for_end(futures: Sequence[Future[None]]) -> None:
    """However often it is interrupted: what the threads work on is freed afterwards.

    Joining the threads would not do: an interrupted ``Thread.join`` takes a running thread for one that has ended.
    """
    interrupt: BaseException | None = None
    while True:
        try:
            wait(futures)
            break
        except KeyboardInterrupt as again:
            interrupt = again
    if interrupt is not None:
        raise interrupt
