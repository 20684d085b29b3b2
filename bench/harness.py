"""The harness: cases, their measurement in rounds on one checkpoint, and the table of the results."""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

import engines
from cold import make_cold
from commands import run_command
from engines import Topology
from fingerprint import STATES, Sums, find_differing, join_parts
from floor import list_pieces, measure_floor
from report import GIB, MIB, Ratio, format_range, make_table

from deepspeed_ucp.testing import World

TAG = "global_step1"
TIMEOUT = 1800.0  # seconds of one measurement
ATTEMPTS = 6  # at upstream's conversion: two of its processes may write one file of a pipeline's tied modules at once
CONVERSION = """
import time
from deepspeed.checkpoint import ds_to_universal
start = time.perf_counter()
ds_to_universal.main(ds_to_universal.parse_arguments())
print(time.perf_counter() - start)
"""
"""Upstream's conversion without the interpreter's start and the imports, which a load does not need either."""

MOST_EXTRA_MIB = 320.0  # window_mb (256) plus 64 MiB
EXCESS = 1.02  # highest ratio of bytes read or written to bytes of state


def log(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Run:
    """One measurement of a case.

    Attributes:
        seconds: duration on the slowest rank; 0 if it failed.
        sync_seconds: further seconds of ``os.sync``.
        storage_bytes, written_bytes: sums of all ranks.
        memory_bytes: highest extra memory of a rank beyond engine and state, or peak of a command's processes.
        fault: the error, or a description of wrong values.
    """

    seconds: float
    sync_seconds: float = 0.0
    storage_bytes: int = 0
    written_bytes: int = 0
    memory_bytes: int = 0
    fault: str = ""

    @property
    def durable_seconds(self) -> float:
        return self.seconds + self.sync_seconds

    def __str__(self) -> str:
        return (
            f"{self.seconds:7.2f} s + {self.sync_seconds:.2f} s sync  {self.storage_bytes / GIB:6.2f} GiB read, "
            f"{self.written_bytes / GIB:.2f} written  {self.memory_bytes >> 20} MiB  {self.fault}"
        )


class UpstreamError(RuntimeError):
    """Upstream failed, which is a result."""


@dataclass(frozen=True)
class Case:
    """A row of a table.

    Attributes:
        floor: name of the floor case, and the highest ratio of this case's time to the floor's.
        upstream: name of upstream's case, and the lowest ratio of its time to this case's.
        most_read, most_written: highest ratios of bytes to the bytes of state.
        most_extra_mib: highest extra memory in MiB.
        hidden: it is only a floor of others.
    """

    name: str
    title: str
    measure: Callable[[Bench], Run]
    floor: tuple[str, float | None] = ("", None)
    upstream: tuple[str, float | None] = ("", None)
    most_read: float | None = None
    most_written: float | None = None
    most_extra_mib: float | None = None
    hidden: bool = False


@dataclass(frozen=True)
class Source:
    """A checkpoint: the topology that saves it, and options of conversions of it."""

    name: str
    topology: Topology
    upstream_options: tuple[str, ...] = ()
    options: tuple[str, ...] = ()


@dataclass
class Bench:
    """A source's checkpoint, on which cases are measured.

    Attributes:
        folder: everything is below it.
        notes: facts for the text below the table.
    """

    source: Source
    folder: Path
    params_m: float
    parameters: int = 0
    saved: dict[str, Sums] = field(default_factory=dict)
    notes: dict[str, None] = field(default_factory=dict)

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint"

    @property
    def output(self) -> Path:
        """The destination of a command; the folder around it is removed after each run."""
        return self.folder / "out" / "output"

    @property
    def weights(self) -> Path:
        """A folder that keeps an export."""
        return self.folder / "weights"

    @property
    def state_bytes(self) -> int:
        """Size of fp32 masters and two moments, without padding."""
        return self.parameters * 4 * len(STATES)

    def save(self) -> None:
        """Train a step in the source's topology and save, unless the folder has that checkpoint."""
        note, topology = self.folder / "saved.json", self.source.topology
        if not note.exists() or json.loads(note.read_text())["params_m"] != self.params_m:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(parents=True)
            log(f"{self.source.name}: training one step on {topology.ranks} ranks, and saving")
            saved = self.run_ranks(topology.ranks, engines.save, topology, self.params_m, self.checkpoint)
            fingerprint = join_parts(part for rank in saved for part in rank["parts"])
            facts = {"params_m": self.params_m, "parameters": saved[0]["parameters"], "fingerprint": fingerprint}
            note.write_text(json.dumps(facts))
        facts = json.loads(note.read_text())
        self.parameters, self.saved = facts["parameters"], facts["fingerprint"]
        log(f"{self.source.name}: {self.parameters / 1e6:.1f} M parameters, {self.state_bytes / GIB:.2f} GiB of state")

    def run_ranks(self, ranks: int, function: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
        """Run a function on new ranks; return their results."""
        with World(ranks, timeout=TIMEOUT) as world:
            return world.run(function, *args, **options)

    @cached_property
    def universal(self) -> tuple[Path, float]:
        """Folder and duration of upstream's conversion, which is made once."""
        folder = self.folder / "universal"
        paths = ["--input_folder", str(self.checkpoint / TAG), "--output_folder", str(folder / TAG)]
        command = [sys.executable, "-c", CONVERSION, *self.source.upstream_options, *paths]
        for failures in range(ATTEMPTS):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            log("converting with deepspeed.checkpoint.ds_to_universal")
            make_cold(self.checkpoint)
            result = run_command(command, self.folder / "convert.log")
            if result.code == 0:
                seconds = float(result.output.split()[-1])
                failed = f", after {failures} failed attempts" if failures else ""
                self.notes[f"Upstream's seconds contain its conversion: {seconds:.1f} s{failed}."] = None
                return folder, seconds
        raise UpstreamError(f"its conversion fails {ATTEMPTS} times: see {self.folder / 'convert.log'}")

    def run(self, cases: Sequence[Case], rounds: int) -> Results:
        """Measure all cases in each round, in an order shuffled by the round; skip a case after it has failed."""
        self.notes.clear()
        results: dict[str, list[Run]] = {case.name: [] for case in cases}
        for number in range(rounds):
            for case in random.Random(number).sample(cases, len(cases)):
                if any(not run.seconds for run in results[case.name]):
                    continue
                run = case.measure(self)
                results[case.name].append(run)
                log(f"round {number + 1}/{rounds}  {case.name:16}  {run}")
        return Results(cases, results, self.state_bytes, [*self.notes])


@dataclass(frozen=True)
class Load:
    """A load: by the plugin, by DeepSpeed (`with_plugin` false), or by DeepSpeed from its universal checkpoint.

    Attributes:
        is_direct: fail if the plugin leaves the load to DeepSpeed.
    """

    topology: Topology
    with_plugin: bool = True
    is_direct: bool = True
    is_upstream: bool = False

    def __call__(self, bench: Bench) -> Run:
        """Raises RuntimeError if a load of the plugin or of DeepSpeed's own checkpoint has other values than saved."""
        try:
            folder, conversion = bench.universal if self.is_upstream else (bench.checkpoint, 0.0)
        except UpstreamError as error:
            return Run(0.0, fault=str(error))
        arguments = (self.topology, bench.params_m, folder, TAG)
        ranks = bench.run_ranks(self.topology.ranks, engines.load, *arguments, with_plugin=self.with_plugin)
        if self.with_plugin and self.is_direct and not all(rank["direct"] for rank in ranks):
            raise RuntimeError("the plugin left the load to DeepSpeed")
        differing = find_differing(join_parts(part for rank in ranks for part in rank["parts"]), bench.saved)
        fault = f"loads other values of {', '.join(differing[:3])}" if differing else ""
        if fault and not self.is_upstream:
            raise RuntimeError(fault)
        return Run(
            seconds=max(rank["seconds"] for rank in ranks) + conversion,
            storage_bytes=sum(rank["storage_bytes"] for rank in ranks),
            memory_bytes=max(rank["extra_bytes"] for rank in ranks),
            fault=fault,
        )


@dataclass(frozen=True)
class Floor:
    """The shortest time in which so many ranks read some files of a checkpoint."""

    ranks: int
    pattern: str = "*_optim_states.pt"

    def __call__(self, bench: Bench) -> Run:
        pieces = list_pieces(bench.checkpoint / TAG, self.pattern)
        ranks = bench.run_ranks(self.ranks, measure_floor, pieces, bench.checkpoint)
        return Run(max(rank["seconds"] for rank in ranks), storage_bytes=sum(rank["storage_bytes"] for rank in ranks))


@dataclass(frozen=True)
class Command:
    """A command.

    Attributes:
        prepare: makes further input of the command.
        check: raises if the output is wrong.
        is_upstream: it may fail, and is then tried again.
    """

    make: Callable[[Bench], list[str]]
    prepare: Callable[[Bench], None] | None = None
    check: Callable[[Bench], None] | None = None
    is_upstream: bool = False

    def __call__(self, bench: Bench) -> Run:
        """Raises RuntimeError if the command fails, except upstream's, or if its output is wrong."""
        if self.prepare:
            self.prepare(bench)
        errors = bench.folder / "command.log"
        try:
            for _ in range(ATTEMPTS if self.is_upstream else 1):
                shutil.rmtree(bench.output.parent, ignore_errors=True)
                bench.output.parent.mkdir()
                command = self.make(bench)
                os.sync()  # earlier output must not be written meanwhile
                make_cold(bench.checkpoint, bench.weights)
                result = run_command(command, errors)
                if result.code == 0:
                    start = time.perf_counter()
                    os.sync()
                    synced = time.perf_counter() - start
                    if self.check:
                        self.check(bench)
                    io = result.io
                    return Run(result.seconds, synced, io.storage, io.written, result.peak_bytes)
            tail = errors.read_text(errors="replace").strip()[-2000:]
            if not self.is_upstream:
                raise RuntimeError(f"{' '.join(command)}: exit code {result.code}\n{tail}")
            return Run(0.0, fault=f"fails: {tail.splitlines()[-1][:200]}")
        finally:
            shutil.rmtree(bench.output.parent, ignore_errors=True)


@dataclass(frozen=True)
class Results:
    """All measurements of some cases on one checkpoint, by round."""

    cases: Sequence[Case]
    runs: Mapping[str, Sequence[Run]]
    state_bytes: int
    notes: Sequence[str]

    def ratio(self, above: str, below: str, limit: float | None = None, *, lower: bool = False) -> Ratio | None:
        """Compare the durable seconds of two cases, if both ran."""
        above_runs, below_runs = self.runs.get(above, ()), self.runs.get(below, ())
        if not (above_runs and below_runs and all(run.seconds for run in (*above_runs, *below_runs))):
            return None
        values, others = ([run.durable_seconds for run in runs] for runs in (above_runs, below_runs))
        return Ratio(values, others, limit, lower)

    def describe(self) -> str:
        """Make the table, and the text below it."""
        header = ["", "seconds", "durable", "extra MiB", "peak MiB", "÷ floor", "upstream's ÷ this"]
        rows = [self._make_row(case) for case in self.cases if not case.hidden or len(self.cases) == 1]
        faults = {
            f"{case.title}: {run.fault}": None for case in self.cases for run in self.runs[case.name] if run.fault
        }
        return "\n\n".join([make_table(header, rows), *self.notes, *(f"* {fault}" for fault in faults)])

    def _make_row(self, case: Case) -> list[str]:
        runs = [run for run in self.runs[case.name] if run.seconds]
        if not runs:
            return [case.title, "fails", "", "", "", "", ""]
        is_load, is_floor = isinstance(case.measure, Load), case.name.startswith("floor")
        writes = any(run.written_bytes > self.state_bytes // 10 for run in runs) and not is_load
        memory = "" if is_floor else f"{max(run.memory_bytes for run in runs) / MIB:.0f}"
        return [
            case.title,
            format_range([run.seconds for run in runs]) + (" (other values)" if any(run.fault for run in runs) else ""),
            f"{median(run.durable_seconds for run in runs):.2f}" if writes else "",
            memory if is_load else "",
            "" if is_load else memory,
            str(self.ratio(case.name, *case.floor) or ""),
            str(self.ratio(case.upstream[0], case.name, case.upstream[1], lower=True) or ""),
        ]

    def make_readme_row(self, title: str, case: Case) -> list[str]:
        floor, upstream = self.ratio(case.name, case.floor[0]), self.ratio(case.upstream[0], case.name)
        seconds = median(run.durable_seconds for run in self.runs[case.name])
        memory = max(run.memory_bytes for run in self.runs[case.name])
        return [title, f"{seconds:.1f}", str(floor or ""), str(upstream or ""), f"{memory / MIB:.0f}"]

    def list_excesses(self) -> list[str]:
        """List the cases that break a promise of the plugin."""
        found = []
        for case in self.cases:
            for text, limit, value in (
                ("times the state read", case.most_read, lambda run: run.storage_bytes / self.state_bytes),
                ("times the state written", case.most_written, lambda run: run.written_bytes / self.state_bytes),
                ("MiB beyond engine and state", case.most_extra_mib, lambda run: run.memory_bytes / MIB),
            ):
                worst = max(map(value, self.runs[case.name]))
                if limit is not None and worst > limit:
                    found.append(f"{case.title}: {worst:.2f} {text}, at most {limit:g} allowed")
        return found
