"""The complete benchmark of saves on tiny engines: it measures every figure."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "bench" / "saves.py"
pytestmark = pytest.mark.skipif(os.environ.get("DS_ACCELERATOR") == "cuda", reason="the benchmark is of processors")


@pytest.mark.exhaustive  # the benchmark is not part of the package
@pytest.mark.timeout(600)
def test_every_method_to_save_and_resume_is_measured(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--quick", "--params-m", "4", "--memory", str(tmp_path)]
    lines = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
    titles = [line.split("|")[1].strip() for line in lines if line.startswith("| ")][1:]
    assert len(titles) == 8 and set(titles[:4]) == {"stall", "durable"}
    assert not [*tmp_path.iterdir()]  # saves are deleted
