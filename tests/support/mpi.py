"""Launches of several processes under ``mpirun`` or with the environment of ``torchrun``."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from deepspeed_ucp.testing.world import hold_port
from tests.support.forked import start_script

MPIRUN = shutil.which("mpirun", path=os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")]))

needs_mpi = pytest.mark.skipif(MPIRUN is None or find_spec("mpi4py") is None, reason="needs mpirun and mpi4py ([mpi])")

_ROOT = str(Path(__file__).parents[2])


def run_mpi(size: int, arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run ``mpirun -np SIZE python ARGUMENTS``, also as root and on fewer cores."""
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    command = [str(MPIRUN), "--oversubscribe", "-np", str(size), sys.executable, *arguments]
    env = {**os.environ, **root, "PYTHONPATH": _ROOT}
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, env=env)


def run_torch(size: int, arguments: Sequence[str]) -> list[tuple[int, str, str]]:
    """Run ``python SCRIPT ARGUMENTS`` on every rank in torchrun's environment.

    Returns:
        Exit code, output and errors of each rank.
    """
    script, end, found = Path(arguments[0]), time.monotonic() + 240, list[tuple[int, str, str]]()
    with hold_port() as port, TemporaryDirectory() as folder:
        shared = {"WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port.getsockname()[1]}
        logs = [(Path(folder, f"out{rank}"), Path(folder, f"err{rank}")) for rank in range(size)]
        ranks = [
            start_script(script, arguments[1:], out, {**shared, "RANK": rank, "LOCAL_RANK": rank}, errors=err)
            for rank, (out, err) in enumerate(logs)
        ]
        for rank in ranks:
            rank.join(max(0, end - time.monotonic()))
        for rank, (out, err) in zip(ranks, logs, strict=True):
            assert rank.exitcode is not None, [rank.kill() for rank in ranks]
            found.append((rank.exitcode, out.read_text(), err.read_text()))
    return found
