"""Runs a test module in a private mount namespace."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run_in_namespace(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a module in a private mount namespace; skip the test if the system does not allow it."""
    apart = ["unshare", "--map-root-user", "--mount"]
    if subprocess.run([*apart, "mount", "-t", "tmpfs", "x", "/mnt"], capture_output=True, check=False).returncode:
        pytest.skip("this system does not let a process mount file systems")
    command = [*apart, sys.executable, "-m", module, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
