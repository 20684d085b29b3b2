"""Saves on signals, without an engine."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deepspeed_ucp import children, preemption
from deepspeed_ucp.comm import Comm
from deepspeed_ucp.engine_state import Preemption, find_state
from deepspeed_ucp.errors import UcpError
from tests.support.ranks import run_ranks
from tests.support.until import wait_until


class Engine(SimpleNamespace):
    """Records saves and commits."""

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
    children._signals.clear()


def test_a_repeated_signal_counts_once(engine: Engine) -> None:
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGUSR1)
        preemption.save_if_signaled(engine)
        preemption.save_if_signaled(engine)
    assert engine.saves == [("folder", {"mine": 1})] * 2
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(SystemExit) as end:
        preemption.save_if_signaled(engine)
    assert end.value.code == 0 and len(engine.saves) == 3


def test_a_client_state_that_fails_on_one_rank_is_an_error_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    here = threading.local()
    monkeypatch.setattr(preemption, "connect", lambda **_: here.comm)
    monkeypatch.setitem(preemption._arrived, signal.SIGUSR1, True)

    def work(number: int, comm: Comm) -> None:
        here.comm, engine = comm, Engine(saves=[])
        client_state = [].pop if number else dict[str, Any]
        find_state(engine).preemption = Preemption("folder", {signal.SIGUSR1: None}, client_state)
        with pytest.raises(UcpError, match="rank 1.*pop from empty list"):
            preemption.save_if_signaled(engine)
        assert not engine.saves

    run_ranks(2, work)


def test_a_save_by_deepspeeds_decoupled_writer_is_committed_before_exit(engine: Engine) -> None:
    """DeepSpeed would commit it in the next step, which is never run. Python would wait for the writer process."""
    cleanup = partial(engine.saves.append, "cleanup")
    engine.checkpoint_engine = SimpleNamespace(is_decoupled=lambda: True, cleanup=cleanup)
    os.kill(os.getpid(), signal.SIGUSR1)
    preemption.save_if_signaled(engine)
    assert engine.saves == [("folder", {"mine": 1}), "commit"]
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(SystemExit):
        preemption.save_if_signaled(engine)
    assert engine.saves == [("folder", {"mine": 1}), "commit", ("folder", {"mine": 1}), "commit", "cleanup"]


def test_a_signal_is_logged_when_it_is_received(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    """The save follows in the next step. If the process exits before it, the log reports the missing save."""
    for _ in range(2):
        signal.raise_signal(signal.SIGTERM)
    wait_until(lambda: "SIGTERM received: all ranks save at the end of the next step" in caplog.text)
    preemption._report_missing_save()
    assert "SIGTERM: no save was made" in caplog.text and not engine.saves
    with pytest.raises(SystemExit):
        preemption.save_if_signaled(engine)
    caplog.clear()
    preemption._report_missing_save()
    assert not caplog.text and len(engine.saves) == 1


def receive(number: int, caplog: pytest.LogCaptureFixture, **options: Any) -> tuple[object, str]:
    """Signal this rank; return its exit code or error (None if it continues) and the log line of `follow`."""
    caplog.set_level("INFO", "deepspeed_ucp")
    engine, code = Engine(saves=[]), None
    preemption.follow(engine, "folder", **options)
    logged = caplog.messages[-1]
    signal.raise_signal(number)
    try:
        preemption.save_if_signaled(engine)
    except SystemExit as end:
        code = end.code
    except preemption.Preempted as error:
        code = str(error)
    assert len(engine.saves) == 1
    return code, logged


RAISED = "saved to folder at step 7 on a signal, and ends"
RAY, KUBERNETES, SLURM = "RAY_RAYLET_PID", "KUBERNETES_SERVICE_HOST", "SLURM_JOB_ID"
TORCHRUN, HYPERPOD = "TORCHELASTIC_RUN_ID", "HYPERPOD_ELASTICAGENT_SOCKET_SERVER_PATH"


@pytest.mark.parametrize(
    ("variables", "name", "term", "usr1"),
    [
        ([], "no known platform", 0, None),
        ([KUBERNETES], "Kubernetes", 143, None),
        ([SLURM], "Slurm", 143, None),
        ([TORCHRUN, KUBERNETES], "torchrun", 143, None),
        ([TORCHRUN, HYPERPOD, KUBERNETES], "HyperPod", 143, 138),
        ([RAY, KUBERNETES], "Ray, as an error", RAISED, None),
        ([TORCHRUN, RAY], "torchrun", 143, None),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, list) else None,
)
@pytest.mark.usefixtures("engine")
def test_the_innermost_platform_chooses_the_exit_code(
    variables: list[str], name: str, term: object, usr1: object, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    for variable in variables:
        monkeypatch.setenv(variable, "1")
    continues = "continues" if usr1 is None else f"exits with {usr1}"
    logged = f"SIGTERM: saves and exits with {143 if term == RAISED else term}; SIGUSR1: saves and {continues} ({name})"
    assert receive(signal.SIGTERM, caplog) == (term, logged)
    assert receive(signal.SIGUSR1, caplog)[0] == usr1
    logged = "SIGTERM: saves and exits with 0 (set by the script)"
    assert receive(signal.SIGTERM, caplog, actions={signal.SIGTERM: 0}) == (0, logged)


@pytest.mark.parametrize(
    ("state", "requeue", "calls", "fault"),
    [
        ("RUNNING", "exit 0", ["show job -o 12", "requeue 12"], ""),
        ("RUNNING", "echo 'Job is not yours' >&2; exit 1", ["show job -o 12", "requeue 12"], "Job is not yours"),
        ("CANCELLED", "exit 0", ["show job -o 12"], "it is CANCELLED"),
        (None, "", [], "No such file or directory: 'scontrol'"),
    ],
    ids=["requeued", "refused", "cancelled", "no scontrol"],
)
@pytest.mark.usefixtures("engine")
def test_a_slurm_job_is_requeued_after_its_save(
    state: str | None, requeue: str, calls: list[str], fault: str, tmp_path: Path, monkeypatch: Any, caplog: Any
) -> None:
    """The test has a stand-in for scontrol; tests/platforms uses the real command."""
    if state is not None:
        (tmp_path / "scontrol").write_text(
            f"#!/bin/sh\necho $* >> {tmp_path}/calls\n"
            f"[ $1 = show ] && echo JobId=12 JobState={state} Reason=None && exit 0\n{requeue}\n"
        )
        (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin" if state is not None else str(tmp_path))
    monkeypatch.setenv(SLURM, "12")
    code, logged = receive(signal.SIGUSR1, caplog, requeue=True)
    assert (code, logged.partition("(")[2]) == (138, "Slurm, job 12 will be requeued)")
    assert (tmp_path / "calls").read_text().splitlines() == calls if calls else True
    errors = [each.getMessage() for each in caplog.records if each.levelname == "ERROR"]
    assert errors == [] if not fault else (len(errors) == 1 and fault in errors[0])
    code, _ = receive(signal.SIGTERM, caplog, requeue=True, actions={signal.SIGTERM: 0})
    assert code == int(bool(fault))


def test_rays_thread_handles_no_signals(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine(saves=[])
    monkeypatch.setenv(RAY, "1")
    with ThreadPoolExecutor(1) as threads:
        threads.submit(preemption.follow, engine, "folder").result()
        monkeypatch.delenv(RAY)
        with pytest.raises(ValueError):
            threads.submit(preemption.follow, engine, "folder").result()
    preemption.save_if_signaled(engine)
    assert not engine.saves and "receives no signals" in caplog.text


def test_a_second_follow_restores_a_replaced_handler(engine: Engine) -> None:
    """For example, the Trainer's save on SIGTERM resets the handler."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    preemption.follow(engine, "folder")
    signal.raise_signal(signal.SIGTERM)
    with pytest.raises(SystemExit):
        preemption.save_if_signaled(engine)
