"""Threads that take jobs: in order, each once; errors and interrupts end all of them before anybody goes on."""

from __future__ import annotations

import concurrent.futures
import itertools
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future

import pytest
import torch

from deepspeed_ucp.errors import let_go
from deepspeed_ucp.io import threads
from deepspeed_ucp.io.threads import count_threads, limit_torch, run_threads
from tests.support.held import without_collector


@pytest.mark.parametrize("count", [1, 3, 20])
def test_every_job_is_taken_once(count: int) -> None:
    taken: list[int] = []
    run_threads(range(10), taken.extend, count)
    assert sorted(taken) == list(range(10))


def test_no_jobs_are_no_work() -> None:
    run_threads([], list, 4)


def test_the_first_error_is_raised_and_the_rest_left() -> None:
    taken: list[int] = []

    def work(turn: Iterator[int]) -> None:
        for job in turn:
            taken.append(job)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_threads(range(100), work, 2)
    assert len(taken) <= 2


def test_what_threads_held_that_failed_beside_the_first_is_given_back_at_once() -> None:
    """Theirs are errors that nobody sees; the one that is raised has all of its trace's variables."""
    begun = threading.Barrier(3)

    with without_collector() as failing:

        def work(turn: Iterator[int]) -> None:
            for job in turn:
                begun.wait()  # no thread ends before all have begun
                failing.fail(ZeroDivisionError(job))

        with pytest.raises(ZeroDivisionError) as raised:
            run_threads(range(100), work, 3)
        assert failing.held == 1
        let_go(raised.value)
        assert failing.held == 0


def test_an_interrupt_waits_for_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """What they work on (open files, memory) may be freed afterwards. The second interrupt comes while it waits."""
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


def test_ranks_of_a_node_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert count_threads() == 64
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert count_threads() == 32
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert count_threads() == 16
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "16")
    assert count_threads() == 8
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(2000)))
    assert count_threads() == 64


@pytest.fixture
def threads_of_torch() -> Iterator[int]:
    """More than a rank's share of the cores is."""
    before = torch.get_num_threads()
    torch.set_num_threads(6)
    yield 6
    torch.set_num_threads(before)


def test_torch_divides_nothing_that_a_thread_of_ours_does(threads_of_torch: int) -> None:
    seen: list[int] = []

    def work(turn: Iterator[int]) -> None:
        seen.extend(torch.get_num_threads() for _ in turn)

    run_threads(range(10), work, 3)
    assert seen == [1] * 10
    assert torch.get_num_threads() == threads_of_torch

    def fail(turn: Iterator[int]) -> None:
        seen.extend(1 // job for job in turn)

    with pytest.raises(ZeroDivisionError):
        run_threads([0], fail, 3)
    assert torch.get_num_threads() == threads_of_torch


def test_torch_works_with_a_ranks_share_of_the_cores(threads_of_torch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(16)))
    for ranks, share in (("4", 4), ("100", 1), ("1", threads_of_torch)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        with limit_torch():
            assert torch.get_num_threads() == share
        assert torch.get_num_threads() == threads_of_torch
