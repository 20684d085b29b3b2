"""The recipes for torchrun and the deepspeed launcher: a rank is killed, and nobody does anything about it."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.platforms.jobs import RECIPES, SAVE_EVERY, Run, Steps, make_environment


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.parametrize("launcher", ["torchrun", pytest.param("deepspeed", marks=pytest.mark.exhaustive)])
def test_a_rank_that_is_killed_is_started_again(launcher: str, reference: Steps, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("localhost slots=1\n")
    run = Run(tmp_path)
    held = run.hold(SAVE_EVERY + 2)
    told = {"RANKS_PER_NODE": "1", "HEAD": "localhost:0", "HOSTFILE": str(tmp_path / "hosts")}
    environment = make_environment(**told, LAUNCHER="--no_local_rank")  # which the script would get as an argument
    with (tmp_path / "output").open("wb") as output:
        recipe = [str(RECIPES / launcher / "train.sh"), *run.command()]
        started = subprocess.Popen(recipe, env=environment, stdout=output, stderr=subprocess.STDOUT)
        try:
            run.wait_for_step(SAVE_EVERY + 2, starts=1, tell=(tmp_path / "output").read_text)
            os.kill(run.read("started")[-1]["pid"], signal.SIGKILL)
            held.unlink()
            assert started.wait(timeout=240) == 0, (tmp_path / "output").read_text()[-3000:]
        finally:
            started.terminate()
            started.wait()
    assert run.find_starts() == [(1, 0), (1, SAVE_EVERY)]
    run.check(reference)
