"""Signals that are waited for, without an engine."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from deepspeed_ucp import preemption


class Engine(SimpleNamespace):
    """Notes its saves, and what else is asked of it."""

    global_steps = 7

    def save_checkpoint(self, save_dir: str, client_state: dict[str, Any]) -> None:
        self.saves.append((save_dir, client_state))

    def _commit_decoupled_checkpoint(self) -> None:
        self.saves.append("commit")


@pytest.fixture
def engine() -> Iterator[Engine]:
    numbers = (signal.SIGTERM, signal.SIGUSR1)
    former = {number: signal.getsignal(number) for number in numbers}
    engine = Engine(saves=[])
    preemption.follow(engine, "folder", client_state=lambda: {"mine": 1})
    yield engine
    for number in numbers:
        signal.signal(number, former[number])
        preemption._arrived.pop(number, None)


def test_a_signal_that_comes_again_is_the_same(engine: Engine) -> None:
    """Launchers pass on what their ranks have been sent too, and schedulers send once more before SIGKILL."""
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGUSR1)
        preemption.end_step(engine)
        preemption.end_step(engine)
    assert engine.saves == [("folder", {"mine": 1})] * 2
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(SystemExit) as end:
        preemption.end_step(engine)
    assert end.value.code == 0 and len(engine.saves) == 3


def test_a_save_by_a_writer_of_its_own_is_whole_before_the_ranks_end(engine: Engine) -> None:
    """DeepSpeed brings it to its end in the next step, which never comes, and Python waits for the writer's process."""
    cleanup = partial(engine.saves.append, "cleanup")
    engine.checkpoint_engine = SimpleNamespace(is_decoupled=lambda: True, cleanup=cleanup)
    os.kill(os.getpid(), signal.SIGUSR1)
    preemption.end_step(engine)
    assert engine.saves == [("folder", {"mine": 1}), "commit"]
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(SystemExit):
        preemption.end_step(engine)
    assert engine.saves == [("folder", {"mine": 1}), "commit", ("folder", {"mine": 1}), "commit", "cleanup"]


def test_a_process_that_the_script_has_forked_ends_as_it_did(engine: Engine) -> None:
    """Else ``Process.terminate`` and the end of a pool would wait for ever."""
    context = multiprocessing.get_context("fork")
    begun = context.Event()
    child = context.Process(target=lambda: (begun.set(), time.sleep(20)))
    child.start()
    assert begun.wait(20)  # a signal at the moment of the fork is lost in any process
    child.terminate()
    child.join(10)
    assert child.exitcode == -signal.SIGTERM
    assert not preemption._arrived[signal.SIGTERM]
