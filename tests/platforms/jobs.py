"""The job of the recipes, and the check of its log."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.forked import start_script

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "examples" / "platforms"
SCRIPT = Path(__file__).with_name("held.py")
STEPS, SAVE_EVERY = 24, 5
BOUND = 1e-5  # tolerance of a loss in nats: fp32 sums have another order
LONGEST = 120.0  # timeout in seconds

RANKS = 2
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={RANKS}"]
DEEPSPEED = [shutil.which("deepspeed") or "deepspeed", f"--num_gpus={RANKS}", "--no_python"]

Steps = dict[int, dict[str, Any]]


def make_environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    beside = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    fresh = {"PATH": beside, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    return {**os.environ, **fresh, **more}


def wait_for(name: str, condition: Callable[[], Any], tell: Callable[[], str] = str) -> Any:
    until = time.monotonic() + LONGEST
    while not (found := condition()):
        assert time.monotonic() < until, f"timeout: {name}\n{tell()}"
        time.sleep(0.05)
    return found


@dataclass
class Run:
    """One run of the script, with all its restarts."""

    folder: Path
    steps: int = STEPS

    def command(self) -> list[str]:
        """Return the script and its arguments."""
        names = {"--folder": "checkpoints", "--record": "record"}
        paths = [each for option, name in names.items() for each in (option, str(self.folder / name))]
        numbers = {"--steps": self.steps, "--save_every": SAVE_EVERY}
        return [str(SCRIPT), *paths, *(str(each) for option in numbers.items() for each in option)]

    def read(self, event: str) -> list[dict[str, Any]]:
        path = self.folder / "record"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [each for line in lines if (each := json.loads(line))["event"] == event]

    def hold(self, step: int) -> Path:
        """Pause the ranks after a step until the returned file is removed or they get a signal."""
        path = self.folder / f"record-{step}"
        path.touch()
        return path

    def wait_for_step(self, step: int, starts: int, tell: Callable[[], str] = str) -> None:
        """Wait until the script has been started ``starts`` times and has completed a step."""

        def look() -> bool:
            begun = [each["time"] for each in self.read("started") if each["rank"] == 0]
            done = [each for each in self.read("step") if each["step"] >= step]
            return len(begun) >= starts and any(each["time"] > begun[starts - 1] for each in done)

        wait_for(f"step {step} of start {starts}", look, tell)

    def find_starts(self) -> list[tuple[int, int]]:
        """Return for each start the number of ranks and the step from which it resumed."""
        return [(self.find_world(each["time"]), each["step"]) for each in self.read("loaded") if each["rank"] == 0]

    def find_world(self, moment: float) -> int:
        return [each["world"] for each in self.read("started") if each["time"] < moment][-1]

    def check(self, reference: Steps) -> None:
        """Check that all steps, including repeated ones, had the samples and losses of the reference."""
        taken = self.read("step")
        assert {each["step"] for each in taken} == set(range(1, self.steps + 1))
        assert [each["samples"] for each in taken] == [reference[each["step"]]["samples"] for each in taken]
        worst = max(abs(each["loss"] - reference[each["step"]]["loss"]) for each in taken)
        assert worst < BOUND, worst


def run_reference(folder: Path) -> Steps:
    """Run uninterrupted on one rank; return its steps."""
    run = Run(folder)
    alone = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}
    process = start_script(SCRIPT, run.command()[1:], folder / "output", alone)
    process.join()
    assert process.exitcode == 0, (folder / "output").read_text()[-2000:]
    return {each["step"]: each for each in run.read("step")}


def find_processes(*variables: str) -> list[int]:
    """Find the processes that were started with all of these variables (`name=value`)."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            theirs = path.read_bytes().split(b"\0")
        except OSError:  # it has ended or belongs to another user
            continue
        if all(each.encode() in theirs for each in variables):
            found.append(int(path.parent.name))
    return found


def kill(pids: list[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
