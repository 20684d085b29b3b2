"""The tables of `offline`: medians, ratios and targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from commands import CACHED, DURABLE, INSIDE, Run, take_seconds
from floor import DIRECT
from offline import BEST, Job, Source
from report import MIB, Target, describe_targets, table, take_faster


@dataclass(frozen=True)
class Found:
    """The runs of a table's jobs on one checkpoint."""

    runs: tuple[Run, ...]
    parameters: int
    state_bytes: int
    file_bytes: int
    workers: tuple[int, int]
    command: str

    @classmethod
    def of(cls, runs: Sequence[Run], source: Source, command: str) -> Found:
        size = sum(file.stat().st_size for file in source.folder.glob("*.pt"))
        return cls(tuple(runs), source.parameters, source.state_bytes, size, source.workers, command)

    @classmethod
    def restore(cls, data: dict[str, Any]) -> Found:
        """From JSON."""
        return cls(**{**data, "runs": tuple(Run(**run) for run in data["runs"]), "workers": tuple(data["workers"])})

    def data(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def rounds(self) -> int:
        return len({run.round for run in self.runs})

    def of_job(self, name: str) -> list[Run]:
        return [run for run in self.runs if run.case == name and not run.fault]

    def fault(self, name: str) -> str:
        return next((run.fault for run in self.runs if run.case == name and run.fault), "")

    def seconds(self, name: str, kind: str) -> dict[int, float]:
        return {run.round: take_seconds(run, kind) for run in self.of_job(name)}

    def ratio(self, above: str, below: str, kind: str) -> float | None:
        """The median of the per-round ratios of the seconds of two jobs; of two ways to read the faster counts."""
        left = self.seconds(above, kind)
        right = take_faster(self.seconds(below, kind), self.seconds(below + DIRECT, kind))
        ratios = [left[r] / right[r] for r in left.keys() & right.keys()]
        return median(ratios) if ratios else None


def commands_table(found: Found, jobs: Sequence[Job]) -> str:
    """Every job's time, bytes and memory."""
    header = ["command", "seconds", "durable", "peak MiB", "÷ floor", "upstream's ÷ this"]
    rows = [_row(found, job) for job in jobs if any(run.case == job.name for run in found.runs)]
    kept = [i for i in range(len(header)) if i == 0 or any(row[i] for row in rows)]
    return table([header[i] for i in kept], [[row[i] for i in kept] for row in rows])


def _row(found: Found, job: Job) -> list[str]:
    runs = found.of_job(job.name)
    if not runs:
        return [job.title, found.fault(job.name), *[""] * 4]
    seconds = [run.seconds for run in runs]
    writes = any(run.written_bytes > found.state_bytes // 10 for run in runs)
    return [
        job.title,
        f"{median(seconds):.2f} ({min(seconds):.2f}-{max(seconds):.2f})",
        f"{median(take_seconds(run, DURABLE) for run in runs):.2f}" if writes else "",
        f"{max(run.peak_bytes for run in runs) / MIB:.0f}" if job.command and not job.name.startswith("floor") else "",
        _tell(found.ratio(job.name, job.floor, job.judged)),
        _tell(found.ratio(job.rival, job.name, DURABLE)),
    ]


def _tell(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def convert_targets(found: Found, title: str) -> list[Target]:
    runs = found.of_job("ours-convert")
    read = max((run.storage_bytes / found.state_bytes for run in runs), default=None)
    written = max((run.written_bytes / found.state_bytes for run in runs), default=None)
    faster = found.ratio("upstream-convert", "ours-convert", DURABLE)
    floors = {kind: found.ratio("ours-convert", "floor-cp", kind) for kind in (DURABLE, CACHED)}
    return [
        Target(f"{title}: upstream's defaults ÷ this", faster, 10, at_least=True),
        Target(f"{title}: ÷ floor", floors[DURABLE], 1.0),
        Target(f"{title}: ÷ floor in the page cache", floors[CACHED], 1.0),
        Target(f"{title}: bytes from storage over bytes of state", read, 1.02),
        Target(f"{title}: bytes written over bytes of state", written, 1.02),
    ]


def export_targets(found: Found, title: str) -> list[Target]:
    ratio = found.ratio("upstream-fp32", "ours-export", DURABLE)
    floor = found.ratio("ours-export", "floor-weights", DURABLE)
    return [
        Target(f"{title}: upstream's ÷ this", ratio, 5, at_least=True),
        Target(f"{title}: ÷ floor", floor, 1.1),
    ]


def verify_targets(found: Found, title: str) -> list[Target]:
    inside = found.ratio("ours-verify", "floor-files", INSIDE)
    return [Target(f"{title}: ÷ floor", inside, 1.0)]


EXPLAINED = """*Seconds* include the interpreter's start, *durable* and the ratios also
fsync(2). *Peak MiB* counts all processes. Outputs are compared with the saved state."""


def make_offline_section(name: str, found: dict[str, Found], titles: dict[str, str], jobs: Sequence[Job]) -> str:
    """A section of docs/benchmarks.md.

    Args:
        name: "convert", "export" or "verify".
        found: by checkpoint.
        titles: of the checkpoints.
    """
    heading, about, make_targets = SECTIONS[name]
    first = next(iter(found.values()))
    parts = [f"## {heading}", f"`{first.command}`. {about}"]
    targets = []
    for key, each in found.items():
        parts += [f"{titles[key]}{_tell_workers(each)}:", commands_table(each, jobs)]
        targets += make_targets(each, titles[key])
    return "\n\n".join([*parts, describe_targets(targets)]) + "\n"


def _tell_workers(found: Found) -> str:
    extracting, merging = found.workers
    return f" (best workers: {extracting} extracting, {merging} merging)" if found.of_job(BEST) else ""


def summarise(found: dict[str, Found], titles: dict[str, str], jobs: Sequence[Job]) -> list[list[str]]:
    """Rows of README's table: what of ours was measured."""
    rows = []
    for key, each in found.items():
        for job in jobs:
            if job.is_ours and each.of_job(job.name):
                seconds = median(take_seconds(run, job.judged) for run in each.of_job(job.name))
                row, title = _row(each, job), job.title.removeprefix("ours, ")
                title += ", start-up aside" * (job.judged == INSIDE)
                rows.append([f"{title}: {titles[key]}", f"{seconds:.1f}", row[4], row[5], row[3]])
    return rows


SECTIONS: dict[str, tuple[str, str, Any]] = {
    "convert": (
        "Atomic checkpoints: `ds_ucp convert`",
        f"""Upstream is `python -m deepspeed.checkpoint.ds_to_universal`; the floor is
`cp` of masters and moments. {EXPLAINED}""",
        convert_targets,
    ),
    "export": (
        "Consolidated weights: `ds_ucp export`",
        """The fp32 weights as safetensors. Upstream is the script in every checkpoint
folder; the floor is `cp` of the output.""",
        export_targets,
    ),
    "verify": (
        "Checking a checkpoint: `ds_ucp verify`",
        """The floor reads the same files once with as many threads; *÷ floor* excludes
the start-up.""",
        verify_targets,
    ),
}
