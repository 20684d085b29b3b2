"""The job of the recipes, and the check of its log."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

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


def wait_for(name: str, condition: Callable[[], Any], output: Path | None = None) -> None:
    """Wait until a condition is true; print the end of ``output`` after the timeout."""
    until = time.monotonic() + LONGEST
    while not condition():
        assert time.monotonic() < until, f"timeout: {name}\n{read_end(output)}"
        time.sleep(0.05)


def read_end(output: Path | None) -> str:
    return output.read_text(errors="replace")[-3000:] if output is not None and output.exists() else ""


class Run:
    """One run of the script, with all its restarts; its processes write to ``output``."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.output, self.programs = folder, folder / "output", folder / "programs"
        paths = ["--folder", str(folder / "checkpoints"), "--record", str(folder / "record")]
        self.command = [str(SCRIPT), *paths, "--steps", str(STEPS), "--save_every", str(SAVE_EVERY)]

    def write_program(self, name: str, text: str) -> str:
        """Write a stand-in for a program, which processes of the run find first; return its path."""
        path = self.programs / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)
        return str(path)

    @contextmanager
    def start(self, *command: object, **variables: object) -> Iterator[subprocess.Popen[bytes]]:
        """Start a process with environment variables; at the end kill it and all its children."""
        environment = make_environment(
            UCP_RUN=str(self.folder), **{name: str(each) for name, each in variables.items()}
        )
        environment["PATH"] = f"{self.programs}:{environment['PATH']}"
        with self.output.open("ab") as output:
            process = subprocess.Popen(list(map(str, command)), env=environment, stdout=output, stderr=output)
        try:
            yield process
        finally:
            kill_all(f"UCP_RUN={self.folder}")
            process.wait()

    def wait_for_end(self, process: subprocess.Popen[bytes], code: int = 0) -> None:
        assert process.wait(timeout=2 * LONGEST) == code, read_end(self.output)

    def read(self, event: str) -> list[dict[str, Any]]:
        path = self.folder / "record"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [each for line in lines if (each := json.loads(line))["event"] == event]

    def hold(self, step: int) -> Path:
        """Pause the ranks after a step until the returned file is removed or they get a signal."""
        path = self.folder / f"record-{step}"
        path.touch()
        return path

    def wait_for_step(self, step: int, starts: int) -> None:
        """Wait until the script has been started ``starts`` times and has completed a step."""

        def look() -> bool:
            begun = [each["time"] for each in self.read("started") if each["rank"] == 0]
            done = [each for each in self.read("step") if each["step"] >= step]
            return len(begun) >= starts and any(each["time"] > begun[starts - 1] for each in done)

        wait_for(f"step {step} of start {starts}", look, self.output)

    def check(self, reference: Steps, *starts: tuple[int, int]) -> None:
        """Check that all steps, including repeated ones, had the samples and losses of the reference.

        Args:
            starts: for each start the number of ranks and the step from which it resumed.
        """
        assert tuple((each["world"], each["step"]) for each in self.read("loaded") if each["rank"] == 0) == starts
        taken = self.read("step")
        assert {each["step"] for each in taken} == set(range(1, STEPS + 1))
        assert [each["samples"] for each in taken] == [reference[each["step"]]["samples"] for each in taken]
        worst = max(abs(each["loss"] - reference[each["step"]]["loss"]) for each in taken)
        assert worst < BOUND, worst


def find_processes(*variables: str) -> list[int]:
    """Find the processes that were started with all of these variables (`name=value`)."""
    wanted, found = {each.encode() for each in variables}, list[int]()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # it has ended or belongs to another user
            if wanted <= {*path.read_bytes().split(b"\0")}:
                found.append(int(path.parent.name))
    return found


def kill_all(*variables: str) -> None:
    """Kill the processes that were started with all of these variables, until none is left."""
    while found := find_processes(*variables):
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
