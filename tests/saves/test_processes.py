"""Whole jobs: one that ends, one that is killed after a save, and what the next one finds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.saves.saving import is_whole

SCRIPT = Path(__file__).parent / "script.py"
ROOT = Path(__file__).parents[2]


def run(folder: Path, memory: Path, steps: int, end: str) -> tuple[list[Any], int]:
    """What the job's load found, and its exit code."""
    command = [sys.executable, str(SCRIPT), str(folder), str(memory), str(steps), end]
    variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    variables |= {"PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    environment = {**os.environ, **variables}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    found = next((line for line in done.stdout.splitlines() if line.startswith("FOUND ")), None)
    assert found, done.stdout + done.stderr
    return json.loads(found.removeprefix("FOUND ")), done.returncode


@pytest.mark.timeout(300)
def test_jobs_one_after_the_other(tmp_path: Path) -> None:
    """The first ends, and waits; the second is killed, and its writer goes on; the third finds all in memory."""
    folder, memory = tmp_path / "place", tmp_path / "memory"
    found, code = run(folder, memory, 2, "ended")
    assert (found[1], code) == (0, 0)
    assert (folder / "latest").read_text() == "global_step2" and is_whole(str(folder / "global_step2"))
    found, code = run(folder, memory, 2, "killed")
    assert code == -9
    assert found[0].startswith(str(memory)) and found[1:] == [2, 2]
    found, code = run(folder, memory, 0, "ended")
    assert found[0].startswith(str(memory)) and found[1:] == [4, 4]
    end = time.monotonic() + 30
    while (folder / "latest").read_text() != "global_step4":
        assert time.monotonic() < end
        time.sleep(0.05)
    assert is_whole(str(folder / "global_step4"))
    assert [path for path in folder.iterdir() if path.name.startswith(".")] == []
