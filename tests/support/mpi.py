"""Launches of several processes: ``mpirun``, and what ``torchrun`` sets."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest

MPIRUN = shutil.which("mpirun", path=os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")]))

needs_mpi = pytest.mark.skipif(MPIRUN is None or find_spec("mpi4py") is None, reason="needs mpirun and mpi4py ([mpi])")

_ROOT = str(Path(__file__).parents[2])


def run_mpi(size: int, arguments: Sequence[str], *, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """``mpirun -np SIZE python ARGUMENTS``, also as root and on fewer cores."""
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    command = [str(MPIRUN), "--oversubscribe", "-np", str(size), sys.executable, *arguments]
    env = {**os.environ, **root, "PYTHONPATH": _ROOT}
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False, env=env)


def run_torch(size: int, arguments: Sequence[str], *, timeout: float = 120) -> list[tuple[int, str, str]]:
    """``python ARGUMENTS`` on every rank, in torchrun's environment; exit code, output and errors of each."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PYTHONPATH": _ROOT}
    ranks = [
        subprocess.Popen(
            [sys.executable, *arguments],
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    told = [rank.communicate(timeout=timeout) for rank in ranks]
    return [(rank.returncode, *texts) for rank, texts in zip(ranks, told, strict=True)]
