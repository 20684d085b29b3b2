"""examples/elastic_restart under real torchrun agents, also on a busy machine."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EVENTS = (
    "the first agent is killed",
    "a new agent joins",
    "a rank is stopped",
    "a process is killed",
    "a node is lost",
)


@pytest.mark.exhaustive  # minutes; `make demo` runs the same program
@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.timeout(1200)
def test_the_example_fulfils_every_promise_that_it_checks() -> None:
    picture = ROOT / "demo_out" / "elastic_restart.png"
    picture.unlink(missing_ok=True)
    command = [sys.executable, "-u", str(ROOT / "examples" / "elastic_restart" / "demo.py")]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    restarts = re.findall(r"^  (\D+?) +\d+ steps, [\d.]+ s(?: +[\d.]+ s){6}", done.stdout, re.MULTILINE)
    assert tuple(restarts) == EVENTS
    assert len(re.findall(r"^kept: ", done.stdout, re.MULTILINE)) == 6
    assert picture.read_bytes().startswith(b"\x89PNG")
