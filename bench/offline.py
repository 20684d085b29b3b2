"""What `ds_ucp convert`, `export` and `verify` take, against upstream's scripts and the least that the bytes allow."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from cold import make_cold
from commands import CommandResult, run_command, sync_folder
from fingerprint import STATES, Sums, sum_whole
from floor import DIRECT, allows_direct, file_pieces, floor_body
from ranks import Peer, Ranks
from report import INSIDE, Case, Results, Run
from rounds import run_in_turns

OURS = (sys.executable, "-m", "deepspeed_ucp")
UPSTREAM = "deepspeed.checkpoint.ds_to_universal"
WORKERS = ((1, 1), (2, 2), (4, 4))  # (extracting, merging), tried for upstream beside its default (4, 2)
BEST = "upstream-convert-best"
ATTEMPTS = 6


class CommandFailed(RuntimeError):
    """A command of ours failed, or wrote other values than were saved."""


@dataclass(frozen=True)
class Source:
    """A normal checkpoint that is worked on.

    Attributes:
        checkpoint: the folder with `latest`.
        tag: the one in it.
        out: a folder for what is written; it is removed after each run.
        logs: folder of the commands' error output.
        parameters: of the model, without padding.
        saved: the fingerprint of what was saved.
        options: of upstream's conversion.
        patterns: options of ours.
        workers: upstream's best (extracting, merging) workers.
    """

    checkpoint: Path
    tag: str
    out: Path
    logs: Path
    parameters: int
    saved: Mapping[str, Sums]
    options: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ()
    workers: tuple[int, int] | None = None

    @property
    def weights(self) -> Path:
        """A folder that keeps an export."""
        return self.out.with_name("weights")

    @property
    def folder(self) -> Path:
        return self.checkpoint / self.tag

    @property
    def state_bytes(self) -> int:
        """fp32 masters and two moments."""
        return self.parameters * 4 * len(STATES)

    @property
    def output(self) -> Path:
        """Where a command writes."""
        return self.out / f"{self.tag}_out"


Command = Callable[[Source], list[str]]


@dataclass(frozen=True)
class Job(Case):
    """A command.

    Attributes:
        command: the command; None is the floor that reads in a separate process.
        prepare: makes further input of the command, once.
        check: raises if the output is wrong; called once.
        start: the start of the same command alone, if it does not report its duration.
    """

    command: Command | None = None
    check: Callable[[Source], None] | None = None
    start: Sequence[str] = ()
    prepare: Command | None = None


def copy_states(source: Source) -> list[str]:
    """The files that hold masters and moments, and nothing else of the checkpoint."""
    return ["cp", *map(str, sorted(source.folder.glob("*_optim_states.pt"))), str(source.output)]


def copy_weights(source: Source) -> list[str]:
    """What an export has written."""
    return ["cp", *map(str, sorted(source.weights.glob("*.safetensors"))), str(source.output)]


def convert_upstream(source: Source, *options: str) -> list[str]:
    folders = ("--input_folder", str(source.folder), "--output_folder", str(source.output))
    return [sys.executable, "-m", UPSTREAM, *source.options, *options, *folders]


def convert_upstream_best(source: Source) -> list[str]:
    extracting, merging = map(str, source.workers or WORKERS[1])
    return convert_upstream(source, "--num_extract_workers", extracting, "--num_merge_workers", merging)


def convert_ours(source: Source, *options: str) -> list[str]:
    options = (*source.patterns, "--json", "--quiet", *options)
    return [*OURS, "convert", str(source.checkpoint), str(source.output), *options]


def export_upstream(source: Source) -> list[str]:
    script = str(source.checkpoint / "zero_to_fp32.py")
    return [sys.executable, script, str(source.checkpoint), str(source.output), "--safe_serialization"]


def export_ours(source: Source) -> list[str]:
    return _export(source, source.output)


def _export(source: Source, output: Path) -> list[str]:
    return [*OURS, "export", str(source.checkpoint), str(output), "--to", "hf", "--json", "--quiet"]


def keep_weights(source: Source) -> list[str]:
    """An export beside the checkpoint."""
    return [*_export(source, source.weights), "--overwrite"]


def verify_ours(source: Source) -> list[str]:
    return [*OURS, "verify", str(source.checkpoint), "--json", "--quiet"]


def check_converted(source: Source) -> None:
    """Every parameter's states in the atomic checkpoint are the saved ones."""
    zero = source.output / "zero"

    def read(name: str, state: str) -> torch.Tensor:
        return torch.load(zero / name / f"{state}.pt", mmap=True, weights_only=True)["param"]

    _compare(source, STATES, read)


def check_exported(source: Source) -> None:
    """Every parameter's exported weights are the saved masters."""
    from safetensors import safe_open

    files = [safe_open(path, "pt") for path in sorted(source.output.glob("*.safetensors"))]
    homes = {name: file for file in files for name in file.keys()}  # noqa: SIM118 (no mapping)
    _compare(source, ("fp32",), lambda name, _: homes[name].get_tensor(name))


def _compare(source: Source, states: Sequence[str], read: Callable[[str, str], torch.Tensor]) -> None:
    for name, sums in source.saved.items():
        for state in states:
            if sum_whole(read(name, state)) != sums[state]:
                raise CommandFailed(f"{source.output}: {state} of {name} is not what was saved")


UPSTREAM_START = (sys.executable, "-m", UPSTREAM, "--help")

CONVERT = (
    Job("floor-cp", "floor: `cp` of the optimizer's files", command=copy_states),
    Job("upstream-convert", "upstream, defaults", "floor-cp", command=convert_upstream, start=UPSTREAM_START),
    Job(BEST, "upstream, best workers", "floor-cp", command=convert_upstream_best, start=UPSTREAM_START),
    Job(
        "ours-convert",
        "ours, `ds_ucp convert`",
        "floor-cp",
        "upstream-convert",
        {"upstream": 10, "floor": 1.0, "cached": 1.0, "read": 1.02, "written": 1.02},
        command=convert_ours,
        check=check_converted,
    ),
)
EXPORT = (
    Job("floor-weights", "floor: `cp` of the exported weights", command=copy_weights, prepare=keep_weights),
    Job("upstream-fp32", "upstream, `zero_to_fp32.py --safe_serialization`", command=export_upstream),
    Job(
        "ours-export",
        "ours, `ds_ucp export`",
        "floor-weights",
        "upstream-fp32",
        {"upstream": 5, "floor": 1.1},
        command=export_ours,
        check=check_exported,
    ),
)
VERIFY = (
    Job("floor-files", "floor: all files read"),
    Job(f"floor-files{DIRECT}", "floor: all files read, O_DIRECT"),
    Job(
        "ours-verify",
        "ours, `ds_ucp verify`",
        "floor-files",
        limits={"floor": 1.0},
        judged=INSIDE,
        command=verify_ours,
    ),
)


def convert_by_ranks(source: Source, *, ranks: int) -> list[str]:
    """Convert with one worker on each of some MPI ranks, by this environment's `mpirun`."""
    beside = Path(sys.executable).parent / "mpirun"
    mpirun = str(beside) if beside.exists() else shutil.which("mpirun") or "mpirun"
    root = ["--allow-run-as-root"] * (os.geteuid() == 0)
    launch = [mpirun, *root, "--oversubscribe", "--bind-to", "none", "-np", str(ranks)]
    return [*launch, *convert_ours(source, "--workers", "1")]


def convert_by_workers(source: Source, *, workers: int) -> list[str]:
    return convert_ours(source, "--workers", str(workers))


def _make_pair(name: str, title: str, convert: Callable[..., list[str]], option: str) -> tuple[Job, Job]:
    twin = f"{name}-1", "÷ that of one"
    return (
        Job(f"{name}-1", f"1 {title}", command=partial(convert, **{option: 1})),
        Job(f"{name}-2", f"2 {title}s", twin=twin, command=partial(convert, **{option: 2})),
    )


SCALING = (
    *_make_pair("ours-workers", "worker", convert_by_workers, "workers"),
    *_make_pair("ours-ranks", "MPI rank", convert_by_ranks, "ranks"),
)


class Bench:
    """Measures jobs on one source."""

    def __init__(self, source: Source, jobs: Sequence[Job], say: Callable[[str], None]) -> None:
        self.source, self.jobs, self._say = source, {job.name: job for job in jobs}, say
        self._checked: set[str] = set()
        self._prepared: set[str] = set()
        self._starts: dict[Sequence[str], float] = {}

    def run(self, rounds: int, only: Sequence[str] | None, command: str) -> Results | None:
        """Measure the chosen jobs; return None if there are none."""
        chosen = [name for name in self.jobs if not only or name in only]
        if BEST in chosen:
            self.find_workers()
        runs = tuple(run_in_turns(chosen, rounds, self.measure, self._say))
        source = self.source
        if not runs:
            return None
        return Results(runs, source.parameters, source.state_bytes, command, workers=source.workers)

    def find_workers(self) -> None:
        """Note upstream's fastest numbers of workers in the source, by one cold run of each."""
        found = {}
        for workers in WORKERS:
            self.source = replace(self.source, workers=workers)
            run = self._measure_command(Job(BEST, "", convert_upstream_best), 0)
            found[workers] = run.seconds if not run.fault else float("inf")
            self._say(f"upstream with {workers[0]} extracting and {workers[1]} merging workers: {run.seconds:.1f} s")
        best = min(found, key=lambda workers: found[workers])
        self.source = replace(self.source, workers=best)

    def measure(self, name: str, round_: int) -> Run:
        """Raises CommandFailed where it is ours that fails."""
        job = self.jobs[name]
        return self._measure_floor(name, round_) if job.command is None else self._measure_command(job, round_)

    def _measure_floor(self, name: str, round_: int) -> Run:
        log = self.source.logs / f"{name}.log"
        pieces, direct = file_pieces(self.source.folder), name.endswith(DIRECT)
        if direct and not allows_direct(pieces[0].file):
            return Run(name, round_, 0.0, fault="this file system has no O_DIRECT")
        with Ranks(1, floor_body(pieces, direct=direct), log) as ranks:
            (told,) = ranks.run(before=lambda: make_cold(self.source.checkpoint))
        return Run(name, round_, told["seconds"], storage_bytes=told["io"].storage)

    def _measure_command(self, job: Job, round_: int) -> Run:
        try:
            for _ in range(ATTEMPTS if job.is_upstream else 1):  # two of upstream's processes may write one file
                told, synced = self._call(job)
                if not told.code:
                    return self._tell(job, round_, told, synced)
            log = self.source.logs / f"{job.name}.log"
            if not job.is_upstream:
                raise CommandFailed(f"{job.name}: exit code {told.code}; see {log}:\n{log.read_text()[-2000:]}")
            return Run(job.name, round_, 0.0, fault=f"fails; its last line is `{_last_line(log)}`")
        finally:
            shutil.rmtree(self.source.out, ignore_errors=True)

    def _prepare(self, job: Job) -> None:
        if job.prepare and job.name not in self._prepared:
            told = run_command(job.prepare(self.source), self.source.logs / f"{job.name}.log")
            if told.code:
                raise CommandFailed(f"{job.name}: exit code {told.code}; see {self.source.logs}")
            self._prepared.add(job.name)

    def _call(self, job: Job) -> tuple[CommandResult, float]:
        self._prepare(job)
        shutil.rmtree(self.source.out, ignore_errors=True)
        self.source.out.mkdir(parents=True)
        if job.is_floor:
            self.source.output.mkdir()
        os.sync()  # what others have written must not be written out meanwhile
        make_cold(self.source.checkpoint, self.source.weights)  # the latter where a job has prepared them
        command = job.command(self.source) if job.command else []
        told = run_command(command, self.source.logs / f"{job.name}.log")
        return told, sync_folder(self.source.out) if not told.code else 0.0

    def _tell(self, job: Job, round_: int, told: CommandResult, synced: float) -> Run:
        if job.check and job.name not in self._checked:
            self._check(job)
        data = told.data() if job.is_ours else {}
        phases = {name: float(seconds) for name, seconds in data.get("phases", {}).items()}
        return Run(
            job.name,
            round_,
            told.seconds,
            synced,
            inside_seconds=self._ask_inside(job, told, data),
            durable_seconds=phases.get("sync", 0.0) + phases.get("commit", 0.0),
            storage_bytes=told.io.storage,
            written_bytes=told.io.written,
            peak_bytes=told.peak_bytes,
            phases=phases,
        )

    def _check(self, job: Job) -> None:
        """In a process of its own: torch's threads here would be missing in every engine that is forked later."""

        def body(peer: Peer) -> None:
            peer.ready()
            if job.check:
                job.check(self.source)

        with Ranks(1, body, self.source.logs / f"{job.name}-check.log") as ranks:
            ranks.run()
        self._checked.add(job.name)

    def _ask_inside(self, job: Job, told: CommandResult, data: Mapping[str, Any]) -> float | None:
        if "seconds" in data:
            return float(data["seconds"])
        if not job.start:
            return None
        if job.start not in self._starts:
            run_command(job.start, self.source.logs / "start.log")  # its modules are in the page cache then
            self._starts[job.start] = run_command(job.start, self.source.logs / "start.log").seconds
        return told.seconds - self._starts[job.start]


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:200] if lines else ""
