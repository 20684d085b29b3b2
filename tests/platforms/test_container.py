"""A stand-in for a container: process 1 of a namespace gets SIGTERM, and SIGKILL after the grace period."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.platforms.jobs import Run, Steps

NAMESPACE = ("unshare", "--pid", "--fork", "--kill-child=KILL")  # the child is process 1 and sets the exit code


def can_make_namespaces() -> bool:
    try:
        return subprocess.run([*NAMESPACE, "true"], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not can_make_namespaces(), reason="no unshare (util-linux), or no namespaces of processes")
@pytest.mark.exhaustive  # tests/test_preemption.py tests the signal, tests/engine the save
@pytest.mark.engine
def test_a_drained_pod_saves_within_the_grace_period_and_fails(reference: Steps, tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.hold(3)
    variables = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}
    variables |= {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "PYTHONUNBUFFERED": 1}
    command = [*NAMESPACE, sys.executable, "-m", "deepspeed_ucp", "run", *run.command]
    with run.start(*command, **variables) as container:
        run.wait_for_step(3, starts=1)
        children = Path(f"/proc/{container.pid}/task/{container.pid}/children").read_text().split()
        os.kill(int(children[0]), signal.SIGTERM)  # process 1, like a container runtime
        assert container.wait(timeout=60) == 143, run.output.read_text()
    with run.start(*command, **variables) as container:
        run.wait_for_end(container)
    run.check(reference, (1, 0), (1, 3))
