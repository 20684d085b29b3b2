"""A stand-in for a container: process 1 of a namespace gets SIGTERM, and SIGKILL after the grace period."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.platforms.jobs import LONGEST, Run, Steps, make_environment

NAMESPACE = ("unshare", "--pid", "--fork", "--kill-child=KILL")  # the child is process 1 and sets the exit code
GRACE = 60  # seconds


def find_reason() -> str:
    try:
        done = subprocess.run([*NAMESPACE, "true"], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "unshare is missing (util-linux)"
    return f"no namespaces of processes: {done.stderr.strip()}" if done.returncode else ""


pytestmark = pytest.mark.skipif(bool(find_reason()), reason=find_reason())


@contextmanager
def start(output: Path, *command: str, **variables: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a container with ``command`` as process 1."""
    environment = make_environment(KUBERNETES_SERVICE_HOST="10.0.0.1", PYTHONUNBUFFERED="1", **variables)
    with output.open("ab") as file:
        container = subprocess.Popen([*NAMESPACE, *command], env=environment, stdout=file, stderr=file)
    try:
        yield container
    finally:
        container.kill()
        container.wait()


def send(container: subprocess.Popen[bytes], number: int) -> None:
    """Send a signal to process 1, like a container runtime."""
    children = Path(f"/proc/{container.pid}/task/{container.pid}/children").read_text().split()
    os.kill(int(children[0]), number)


@pytest.mark.exhaustive  # tests/test_preemption.py tests the signal, tests/engine the save
@pytest.mark.engine
def test_a_drained_pod_saves_within_the_grace_period_and_fails(reference: Steps, tmp_path: Path) -> None:
    run, output = Run(tmp_path), tmp_path / "output"
    run.hold(3)
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    command = [sys.executable, "-m", "deepspeed_ucp", "run", *run.command()]
    with start(output, *command, **rank) as container:
        run.wait_for_step(3, starts=1, tell=output.read_text)
        send(container, signal.SIGTERM)
        assert container.wait(timeout=GRACE) == 143, output.read_text()
    with start(output, *command, **rank) as container:
        assert container.wait(timeout=LONGEST) == 0, output.read_text()
    assert run.find_starts() == [(1, 0), (1, 3)]
    run.check(reference)
