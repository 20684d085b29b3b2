"""A training run is killed twice and resumed on other ranks, next to an uninterrupted one. Part of `make demo`.

    reference   4 ranks, ZeRO-1, to the end
    segment 1   4 ranks, ZeRO-1, killed with SIGKILL
    segment 2   2 ranks, ZeRO-3, resumed from segment 1's checkpoint, killed with SIGKILL
    segment 3   3 ranks, ZeRO-2, resumed from segment 2's checkpoint, to the end

Exits with 1 if a restored state differs by a bit from the saved one, or if a loss differs from the uninterrupted one by
more than these bounds:

*First step after a resume.* The killed run took this step too, with the same weights and the same batch. The two losses
differ only by rounding in the forward pass: another micro batch size may block a bf16 product differently, and ZeRO-3
adds a bias in a separate step. bf16 rounds to 2^-9 of a value, so the loss of a sequence may differ by this factor. The
mean over the 24 sequences of the batch gives 2^-9 · loss / √24, about 0.001. Measured: at most 0.0001.

*Later steps.* Another number of ranks sums the bf16 gradients in another order, so updates differ in their last bits
and the runs drift apart. The drift must stay below a tenth of the median change of the reference's loss from one step
to the next, about 0.008: a resume must change the loss far less than a batch does. Measured: 0.0005. Measured for wrong
states, from the checkpoint of step 20: 0.03 with moments and step count zeroed, 0.08 with the moments zeroed, 0.20 with
exp_avg zeroed, 0.13 with the moments shifted by 1000 elements, 0.18 with the scheduler restarted, 1.8 for a fresh
start. Masters rounded to bf16 give 0.007, which losses do not reveal. Therefore the state is also compared to the bit.
"""

from __future__ import annotations

import importlib
import itertools
import json
import math
import multiprocessing
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from deepspeed_ucp.testing.world import PRELOAD

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from multiprocessing.process import BaseProcess

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
OUT = ROOT / "demo_out"
LINES_OF_A_COMMAND = 11
BATCH = 24  # divisible by 4, 2 and 3
STEPS = 60
SAVE_EVERY = 10
FIRST_STEP_BOUND = 2.0**-9 / math.sqrt(BATCH)  # of the loss
DRIFT_BOUND = 0.1  # of the median change of the loss from step to step
LONGEST = 600.0  # seconds of a launch
BASE_CONFIG = {
    "train_batch_size": BATCH,
    "steps_per_print": 1 << 30,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"betas": [0.9, 0.95], "weight_decay": 0.1, "torch_adam": True}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"total_num_steps": STEPS, "warmup_num_steps": 10, "warmup_max_lr": 1e-3, "warmup_type": "linear"},
    },
    "gradient_clipping": 1.0,
}


@dataclass(frozen=True)
class Segment:
    """One launch, which is killed after the log line of step `kill_after`."""

    name: str
    ranks: int
    stage: int
    resumes_at: int = 0
    kill_after: int | None = None


REFERENCE = Segment("reference", ranks=4, stage=1)
SEGMENTS = (
    Segment("segment 1", ranks=4, stage=1, kill_after=23),
    Segment("segment 2", ranks=2, stage=3, resumes_at=20, kill_after=43),
    Segment("segment 3", ranks=3, stage=2, resumes_at=40),
)


@dataclass
class Outcome:
    """The log of a launch."""

    segment: Segment
    exit_codes: Sequence[int | None] = ()
    seconds: float = 0.0
    losses: dict[int, float] = field(default_factory=dict)
    held_out_loss: float | None = None
    loaded: Mapping[str, Any] = field(default_factory=dict)
    digests: dict[tuple[str, int], dict[str, str]] = field(default_factory=dict)  # by ("saved" or "loaded", step)

    def take(self, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind == "step":
            self.losses[event["step"]] = event["loss"]
        elif kind == "digest":
            self.digests[event["when"], event["step"]] = event["atoms"]
        elif kind == "loaded":
            self.loaded = event
        elif kind == "finished":
            self.held_out_loss = event["held_out_loss"]


class DemoFailed(Exception):
    """A launch failed."""


class Launcher:
    """Launches train.py and follows its log.

    The ranks are forked from a process that has imported torch and DeepSpeed, which takes seconds per rank.
    """

    def __init__(self, work: Path) -> None:
        self.work, self.began = work, time.monotonic()
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload([*PRELOAD, "train"])

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self.began:5.0f} s  {text}", flush=True)

    def run(self, segment: Segment, checkpoints: Path, save_every: int) -> Outcome:
        """Launch the segment and follow its log to its end, or to the step after which it is killed."""
        self.say(f"{segment.name}: starting {segment.ranks} ranks with ZeRO-{segment.stage}")
        began = time.monotonic()
        outcome = Outcome(segment)
        log = self.work / f"{segment.name}.jsonl".replace(" ", "_")
        options = {"checkpoint_dir": checkpoints, "save_every": save_every, "log": log}
        arguments = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        with self._launch(segment, {"universal": True}, [*arguments, "--digest"]) as launch:
            for event in follow(log, launch.is_alive):
                outcome.take(event)
                self._report(segment, event)
                if segment.kill_after is not None and event.get("step") == segment.kill_after:
                    launch.kill()
                    self.say(f"{segment.name}: killed all its processes with SIGKILL after step {segment.kill_after}")
        outcome.exit_codes, outcome.seconds = launch.exit_codes, time.monotonic() - began
        self._check_exit(outcome)
        return outcome

    def refusal_without_plugin(self, checkpoints: Path) -> list[str]:
        """Launch the same resume without the plugin. Return the last lines of its error."""
        segment = Segment("plugin off", ranks=2, stage=3)
        self.say(f"{segment.name}: the same resume on 2 ranks with ZeRO-3, by DeepSpeed alone")
        with self._launch(segment, {}, ["--checkpoint_dir", str(checkpoints)]) as launch:
            launch.wait()
        if not any(launch.exit_codes):
            return ["DeepSpeed loaded it without the plugin"]
        lines = self._output(segment).read_text(errors="replace").splitlines()
        errors = [i for i, line in enumerate(lines) if re.match(r"\w+(Error|Exception)\b", line)] or [len(lines) - 1]
        return lines[max(0, errors[0] - 2) : errors[0] + 1]

    def _launch(self, segment: Segment, checkpoint: dict[str, object], arguments: Sequence[str]) -> Launch:
        config = self.work / f"{segment.name}.json".replace(" ", "_")
        zero = {"stage": segment.stage}
        config.write_text(json.dumps(BASE_CONFIG | {"zero_optimization": zero, "checkpoint": checkpoint}, indent=1))
        options = ["--deepspeed_config", str(config), "--steps", str(STEPS), *arguments]
        environment, output = make_environment(segment.ranks), self._output(segment)
        processes = []
        for rank in range(segment.ranks):
            variables = environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            processes.append(self.context.Process(target=run_rank, args=(variables, options, output)))
        return Launch(processes)

    def _output(self, segment: Segment) -> Path:
        return self.work / f"{segment.name}.out".replace(" ", "_")

    def _report(self, segment: Segment, event: Mapping[str, Any]) -> None:
        kind, step = event["event"], event.get("step")
        if kind == "step" and step % 10 == 0:
            self.say(f"{segment.name}: step {step:3}  loss {event['loss']:.4f}")
        elif kind == "loaded" and event["path"]:
            self.say(f"{segment.name}: resumed from step {step} in {event['seconds']:.2f} s; {event['reason']}")
        elif kind == "saved":
            self.say(f"{segment.name}: step {step:3}  checkpoint saved")

    def _check_exit(self, outcome: Outcome) -> None:
        segment = outcome.segment
        expected = 0 if segment.kill_after is None else -signal.SIGKILL
        if {*outcome.exit_codes} != {expected}:
            tail = self._output(segment).read_text(errors="replace").splitlines()[-40:]
            raise DemoFailed(
                f"{segment.name} ended with {outcome.exit_codes} instead of {expected}:\n" + "\n".join(tail)
            )


class Launch:
    """The ranks of a launch. The context manager kills the remaining ones at its end."""

    def __init__(self, processes: Sequence[BaseProcess]) -> None:
        self.processes = processes

    @property
    def exit_codes(self) -> list[int | None]:
        return [process.exitcode for process in self.processes]

    def __enter__(self) -> Launch:
        for process in self.processes:
            process.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self.wait()

    def is_alive(self) -> bool:
        """Return False if all ranks have ended. If one failed, kill the others, as a launcher does."""
        if any(self.exit_codes):
            self.kill()
        return any(process.is_alive() for process in self.processes)

    def kill(self) -> None:
        for process in self.processes:
            process.kill()

    def wait(self) -> None:
        for process in self.processes:
            process.join(LONGEST)


def run_rank(variables: Mapping[str, str], arguments: Sequence[str], output: Path) -> None:
    """Run train.py in this forked process, with the variables of a launcher."""
    os.environ |= variables
    for number in (1, 2):
        os.dup2(os.open(output, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600), number)
    import torch

    torch.set_num_threads(int(variables["OMP_NUM_THREADS"]))
    # Without the shared-memory operator DeepSpeed uses gloo; its compilation takes a minute.
    vars(importlib.import_module("deepspeed.comm.torch"))["build_shm_op"] = lambda: None
    sys.argv = [str(HERE / "train.py"), *arguments]
    runpy.run_path(sys.argv[0], run_name="__main__")


def follow(log: Path, is_alive: Callable[[], bool]) -> Iterator[dict[str, Any]]:
    """Yield the events of a growing file of JSON lines until its writer has ended."""
    position = 0
    while True:
        ending = not is_alive()
        if log.exists():
            with log.open("rb") as file:
                file.seek(position)
                for line in file:
                    if not line.endswith(b"\n"):
                        break  # incomplete: read this line again later
                    position += len(line)
                    yield json.loads(line)
        if ending:
            return
        time.sleep(0.05)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def make_environment(ranks: int) -> dict[str, str]:
    """Make a launcher's variables. On a machine without accelerators the ranks share the cores."""
    threads = str(max(1, (os.cpu_count() or 1) // ranks))
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
    return {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": threads, **meeting}


def differences(outcome: Outcome, reference: Outcome) -> dict[int, float]:
    return {step: abs(loss - reference.losses[step]) for step, loss in outcome.losses.items()}


def drift_bound(reference: Outcome) -> float:
    """Return a tenth of the median change of the reference's loss between two steps, without its steep beginning."""
    losses = [reference.losses[step] for step in range(STEPS // 4, STEPS + 1)]
    return DRIFT_BOUND * median(abs(b - a) for a, b in itertools.pairwise(losses))


def find_faults(reference: Outcome, outcomes: Sequence[Outcome]) -> list[str]:
    """List differences between the interrupted and the uninterrupted run that exceed the bounds."""
    faults = []
    bound = drift_bound(reference)
    for before, outcome in zip([None, *outcomes], outcomes, strict=False):
        name, deltas = outcome.segment.name, differences(outcome, reference)
        worst = max(deltas, key=deltas.__getitem__)
        if deltas[worst] > bound:
            faults.append(f"{name}: the loss of step {worst} is {deltas[worst]:.2g} off, more than {bound:.2g}")
        if before is not None:
            faults += _resume_faults(before, outcome)
    final = abs(outcomes[-1].held_out_loss - reference.held_out_loss)
    if final > bound:
        faults.append(f"the final loss on held-out text is {final:.2g} off, more than {bound:.2g}")
    return faults


def _resume_faults(before: Outcome, outcome: Outcome) -> list[str]:
    name, step = outcome.segment.name, outcome.segment.resumes_at
    if outcome.loaded.get("step") != step or not outcome.loaded.get("by_plugin"):
        return [f"{name}: expected the plugin to resume at step {step}, found {dict(outcome.loaded)}"]
    faults = []
    equal, total = count_equal_atoms(before, outcome)
    if not equal == total > 0:
        faults.append(
            f"{name}: only {equal} of {total} tensors are bit-equal to those that {before.segment.name} saved"
        )
    first, bound = first_difference(before, outcome), FIRST_STEP_BOUND * outcome.losses[step + 1]
    if first > bound:
        faults.append(f"{name}: the first loss is {first:.2g} off that of {before.segment.name}, more than {bound:.2g}")
    return faults


def first_difference(before: Outcome, outcome: Outcome) -> float:
    """Return the difference between the first loss after the resume and the killed run's loss of this step."""
    step = outcome.segment.resumes_at + 1
    return abs(outcome.losses[step] - before.losses[step])


def count_equal_atoms(before: Outcome, outcome: Outcome) -> tuple[int, int]:
    """Count the tensors that were restored to the bit, and all tensors of both sides."""
    step = outcome.segment.resumes_at
    saved, restored = before.digests.get(("saved", step), {}), outcome.digests.get(("loaded", step), {})
    return sum(saved.get(atom) == sha for atom, sha in restored.items()), len(saved.keys() | restored.keys())


def make_table(reference: Outcome, outcomes: Sequence[Outcome]) -> str:
    """One line per launch: max |Δ| to the reference, first |Δ| to the killed run's loss of this step."""
    rows = [("", "ranks", "ZeRO", "steps", "max |Δ loss|", "first |Δ loss|", "state restored", "seconds")]
    for before, outcome in zip([None, None, *outcomes], [reference, *outcomes], strict=False):
        segment = outcome.segment
        steps = f"{min(outcome.losses)}-{max(outcome.losses)}" + (" killed" if segment.kill_after else "")
        worst = "" if outcome is reference else f"{max(differences(outcome, reference).values()):.1e}"
        resumed = ("", "") if before is None else _describe_resume(before, outcome)
        ranks, stage = str(segment.ranks), str(segment.stage)
        rows.append((segment.name, ranks, stage, steps, worst, *resumed, f"{outcome.seconds:.0f}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def _describe_resume(before: Outcome, outcome: Outcome) -> tuple[str, str]:
    equal, total = count_equal_atoms(before, outcome)
    by = "by the plugin" if outcome.loaded["by_plugin"] else "NOT by the plugin"
    return f"{first_difference(before, outcome):.1e}", f"{equal} of {total} tensors to the bit, {by}"


def make_picture(reference: Outcome, outcomes: Sequence[Outcome]) -> Path:
    """Draw the curves to demo_out/resume.png."""
    from plot import Curve, draw  # here, because the ranks import this module and need no plots

    curves = []
    for outcome, after in zip(outcomes, [*outcomes[1:], None], strict=True):
        segment = outcome.segment
        label = f"{segment.name}: {segment.ranks} ranks, ZeRO-{segment.stage}"
        kept = after.segment.resumes_at if after else STEPS
        curves.append(Curve(label, outcome.losses, kept, bool(segment.kill_after)))
    picture = OUT / "resume.png"
    draw(Curve("uninterrupted: 4 ranks, ZeRO-1", reference.losses, STEPS), curves, drift_bound(reference), picture)
    return picture


def run_all(launcher: Launcher) -> tuple[Outcome, list[Outcome]]:
    checkpoints = launcher.work / "checkpoints"
    reference = launcher.run(REFERENCE, launcher.work / "none", save_every=0)
    return reference, [launcher.run(segment, checkpoints, SAVE_EVERY) for segment in SEGMENTS]


def look_at(checkpoints: Path) -> list[str]:
    """Verify, convert, compare and inspect the last checkpoint with `ds_ucp`; return faults."""
    converted = checkpoints / "converted"
    commands = (
        ["verify", checkpoints],
        ["convert", checkpoints, converted, "--no-latest"],
        ["diff", checkpoints, converted],
        ["inspect", checkpoints],
    )
    faults = []
    print("\nThe last checkpoint by ds_ucp:")
    for command in commands:
        words = [str(word) for word in command]
        done = subprocess.run(
            [sys.executable, "-m", "deepspeed_ucp", *words], capture_output=True, text=True, check=False
        )
        lines = (done.stdout if done.returncode == 0 else done.stderr).replace(f"{checkpoints}/", "").splitlines()
        shown = lines if len(lines) < LINES_OF_A_COMMAND else [*lines[:LINES_OF_A_COMMAND], "…"]
        short = " ".join(words).replace(str(checkpoints), "checkpoints").replace(f"{ROOT}/", "")
        print(f"  $ ds_ucp {short}\n" + "\n".join(f"    {line}" for line in shown))
        if done.returncode:
            faults.append(f"ds_ucp {short} ended with {done.returncode}")
    return faults


def main() -> int:
    OUT.mkdir(exist_ok=True)
    (OUT / ".gitignore").write_text("*\n")
    with tempfile.TemporaryDirectory(dir=OUT, prefix="run-") as work:
        launcher = Launcher(Path(work))
        try:
            reference, outcomes = run_all(launcher)
            faults = find_faults(reference, outcomes)
        except DemoFailed as error:
            print(f"\nFAILED: {error}")
            return 1
        refusal = launcher.refusal_without_plugin(launcher.work / "checkpoints")
        print("\nWithout the plugin DeepSpeed refuses:\n" + "\n".join(f"    {line}" for line in refusal))
        faults += look_at(launcher.work / "checkpoints")
        picture = make_picture(reference, outcomes)
    print(f"\n{make_table(reference, outcomes)}\n")
    print(
        f"Bounds: first step after a resume {FIRST_STEP_BOUND * min(reference.losses.values()):.1e} or more, "
        f"later {drift_bound(reference):.1e}. Final loss on held-out text: {outcomes[-1].held_out_loss:.4f}, "
        f"uninterrupted {reference.held_out_loss:.4f}."
    )
    print(f"Curves: {picture}.")
    print(f"{time.monotonic() - launcher.began:.0f} s in total.")
    for fault in faults:
        print(f"FAILED: {fault}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
