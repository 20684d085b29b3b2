"""Threads that take jobs in order, each once. After an error or interrupt all end before the caller continues."""

from __future__ import annotations

import concurrent.futures
import itertools
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future

import pytest
import torch

from deepspeed_ucp.errors import clear_frames
from deepspeed_ucp.io import threads
from deepspeed_ucp.io.threads import count_threads, limit_torch_threads, run_threads
from tests.support.held import without_collector


@pytest.mark.parametrize("count", [1, 3, 20])
def test_every_job_is_taken_once(count: int) -> None:
    for jobs in (0, 10):
        taken: list[int] = []
        run_threads(range(jobs), taken.extend, count)
        assert sorted(taken) == list(range(jobs))


def test_the_first_error_is_raised_and_remaining_jobs_are_skipped() -> None:
    taken: list[int] = []

    def work(turn: Iterator[int]) -> None:
        for job in turn:
            taken.append(job)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_threads(range(100), work, 2)
    assert len(taken) <= 2


def test_memory_of_unraised_errors_of_threads_is_freed() -> None:
    """Only the raised error keeps the variables of its traceback."""
    begun = threading.Barrier(3)

    with without_collector() as failing:

        def work(turn: Iterator[int]) -> None:
            for job in turn:
                begun.wait()  # no thread ends before all have started
                failing.fail(ZeroDivisionError(job))

        with pytest.raises(ZeroDivisionError) as raised:
            run_threads(range(100), work, 3)
        assert failing.held == 1
        clear_frames(raised.value)
        assert failing.held == 0


def test_an_interrupt_waits_for_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their files and memory may be freed afterwards. A second interrupt arrives during the wait."""
    ended: list[int] = []
    begun, release, waits = threading.Barrier(3), threading.Event(), itertools.count()

    def work(turn: Iterator[int]) -> None:
        for job in turn:
            begun.wait()
            release.wait()
            ended.append(job)

    def interrupt(_: object) -> None:
        begun.wait()
        raise KeyboardInterrupt("first")

    def wait(futures: Sequence[Future[None]]) -> None:
        if next(waits) == 0:
            raise KeyboardInterrupt("second")
        release.set()
        concurrent.futures.wait(futures)

    monkeypatch.setattr(Future, "result", interrupt)
    monkeypatch.setattr(threads, "wait", wait)
    with pytest.raises(KeyboardInterrupt, match="second"):
        run_threads(range(100), work, 2)
    assert len(ended) == 2


@pytest.mark.parametrize(
    ("cores", "ranks", "count"), [(16, "", 64), (16, "2", 32), (16, "4", 16), (16, "16", 8), (2000, "16", 64)]
)
def test_ranks_of_a_node_share_its_cores(cores: int, ranks: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert count_threads() == count


@pytest.mark.parametrize(("ranks", "share"), [("4", 4), ("100", 1), ("1", 6)])
def test_torch_uses_a_ranks_share_of_the_cores_and_one_thread_in_each_worker(
    ranks: str, share: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number is restored, also after an error."""
    before, seen = torch.get_num_threads(), list[int]()
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)

    def work(turn: Iterator[int]) -> None:
        seen.extend(torch.get_num_threads() // job for job in turn)

    torch.set_num_threads(6)
    try:
        with limit_torch_threads():
            assert torch.get_num_threads() == share
        run_threads([1] * 10, work, 3)
        assert seen == [1] * 10 and torch.get_num_threads() == 6
        with pytest.raises(ZeroDivisionError):
            run_threads([0], work, 3)
        assert torch.get_num_threads() == 6
    finally:
        torch.set_num_threads(before)
