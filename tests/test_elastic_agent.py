"""Ranks under a real torchrun: they exit with their agent, and the agent's file timer kills hung ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from deepspeed_ucp import elastic_agent
from tests.support.interpreter import ROOT, run_python
from tests.support.until import wait_until

RANK = """
import os, pathlib, signal, subprocess, sys, time
import deepspeed_ucp
folder = pathlib.Path(sys.argv[1])
(folder / f"rank{os.environ['RANK']}").write_text(str(os.getpid()))
time.sleep(600)
"""

HANGS = """
import os, pathlib, signal, sys
from deepspeed_ucp import beacon
from deepspeed_ucp.beacon.torchelastic import set_limit
with (pathlib.Path(sys.argv[1]) / "starts").open("a") as starts:
    starts.write(os.environ["TORCHELASTIC_RESTART_COUNT"])
set_limit(1.5)
with beacon.phase("step"):
    pass
beacon.report_step(1)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    os.kill(os.getpid(), signal.SIGSTOP)
"""

SETTING = """
import ctypes
import deepspeed_ucp
number = ctypes.c_int()
ctypes.CDLL(None).prctl(2, ctypes.byref(number), 0, 0, 0)  # PR_GET_PDEATHSIG
print(number.value)
"""


@contextmanager
def torchrun(folder: Path, script: str, *options: str, **variables: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a script on two ranks; its argument is the folder."""
    (folder / "script.py").write_text(script)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **variables}
    with (folder / "output").open("wb") as output:
        agent = subprocess.Popen(
            [*command, str(folder / "script.py"), str(folder)], env=environment, stdout=output, stderr=output
        )
    try:
        yield agent
    finally:
        agent.terminate()
        agent.wait()


def is_alive(pid: int) -> bool:
    path = Path(f"/proc/{pid}/stat")
    return path.exists() and path.read_text().rpartition(")")[2].split()[0] not in "ZX"


@pytest.mark.parametrize(
    "options",
    [
        pytest.param((), id="popen"),
        pytest.param(("--start-method", "forkserver", "--run-path"), id="forkserver", marks=pytest.mark.exhaustive),
    ],
)
def test_ranks_exit_if_their_agent_is_killed(options: tuple[str, ...], tmp_path: Path) -> None:
    files = [tmp_path / "rank0", tmp_path / "rank1"]
    with torchrun(tmp_path, RANK, *options) as agent:
        wait_until(lambda: agent.poll() is not None or all(each.exists() and each.read_text() for each in files))
        assert agent.poll() is None, (tmp_path / "output").read_text()
        ranks = [int(each.read_text()) for each in files]
        try:
            agent.kill()
            wait_until(lambda: not any(map(is_alive, ranks)))
        finally:
            for each in filter(is_alive, ranks):
                os.kill(each, signal.SIGKILL)


@pytest.mark.exhaustive  # a rank that starts slowly looks like a hung one
def test_the_agent_kills_hung_ranks_and_restarts_them(tmp_path: Path) -> None:
    with torchrun(tmp_path, HANGS, "--max-restarts", "1", TORCHELASTIC_ENABLE_FILE_TIMER="1") as agent:
        assert agent.wait(timeout=120) == 0, (tmp_path / "output").read_text()
    assert (tmp_path / "starts").read_text() == "0011"


@pytest.mark.parametrize(
    ("variables", "number"),
    [
        ({}, 0),
        ({"TORCHELASTIC_RUN_ID": "x"}, signal.SIGKILL),
        ({"TORCHELASTIC_RUN_ID": "x", "DEEPSPEED_UCP_RANK_PID": "1"}, 0),
    ],
    ids=["no torchrun", "rank", "child of a rank"],
)
def test_only_ranks_are_bound_to_the_agent(variables: dict[str, str], number: int) -> None:
    assert int(run_python("-c", SETTING, **variables).stdout) == number


@pytest.mark.parametrize(
    ("parents", "orphan", "killed"),
    [((10, 10), False, False), ((10, 1), False, True), ((1, 1), True, True), ((1, 1), False, False)],
    ids=["agent lives", "ended during the call", "ended before", "agent is process 1"],
)
def test_a_rank_exits_if_its_agent_has_already_exited(
    parents: tuple[int, ...], orphan: bool, killed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    signals: list[tuple[int, int]] = []
    monkeypatch.setattr(elastic_agent.os, "getppid", iter(parents).__next__)
    monkeypatch.setattr(elastic_agent.os, "kill", lambda *sent: signals.append(sent))
    monkeypatch.setattr(elastic_agent.ctypes, "CDLL", lambda *_, **__: SimpleNamespace(prctl=lambda *_: 0))
    monkeypatch.setattr(elastic_agent, "_is_orphan", lambda parent: orphan)
    elastic_agent.end_with_agent({"TORCHELASTIC_RUN_ID": "x"})
    assert signals == [(os.getpid(), signal.SIGKILL)] * killed


def test_only_process_1_counts_as_a_substitute_parent() -> None:
    assert not elastic_agent._is_orphan(os.getpid())
