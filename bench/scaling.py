"""Scaling of a conversion over workers and MPI ranks of this machine."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from commands import DURABLE, Run, take_seconds
from offline import Bench, Job, Source, convert_ours
from report import table


def convert_by_ranks(source: Source, *, ranks: int) -> list[str]:
    """One worker on each of some MPI ranks; `mpirun` is the one beside this interpreter."""
    beside = Path(sys.executable).parent / "mpirun"
    mpirun = str(beside) if beside.exists() else shutil.which("mpirun") or "mpirun"
    root = ["--allow-run-as-root"] * (os.geteuid() == 0)
    launch = [mpirun, *root, "--oversubscribe", "--bind-to", "none", "-np", str(ranks)]
    return [*launch, *convert_ours(source, "--workers", "1")]


def convert_by_workers(source: Source, *, workers: int) -> list[str]:
    return convert_ours(source, "--workers", str(workers))


JOBS = (
    Job("ours-workers-1", "1 worker", partial(convert_by_workers, workers=1)),
    Job("ours-workers-2", "2 workers", partial(convert_by_workers, workers=2)),
    Job("ours-ranks-1", "1 MPI rank of 1 worker", partial(convert_by_ranks, ranks=1)),
    Job("ours-ranks-2", "2 MPI ranks of 1 worker", partial(convert_by_ranks, ranks=2)),
)
PAIRS = {"workers": ("ours-workers-1", "ours-workers-2"), "MPI ranks": ("ours-ranks-1", "ours-ranks-2")}


def measure_scaling(source: Source, rounds: int, say: Callable[[str], None], only: Sequence[str] | None) -> list[Run]:
    """Of the machine: 1 and 2 workers, 1 and 2 MPI ranks."""
    return Bench(source, JOBS, say).run(rounds, only)


def make_scaling_section(found: dict[str, Any]) -> str:
    """The section of docs/benchmarks.md."""
    runs = [Run(**run) for run in found["runs"]]
    return f"""## Strong scaling of a conversion

Written by `{found["command"]}`. The ZeRO-1 checkpoint of above, converted by workers
(threads) of one process, and by MPI ranks of one worker each. Seconds are from start to end, all starts included, until
the output is durable.

{_runs_table(runs)}
"""


def _runs_table(runs: Sequence[Run]) -> str:
    rows = []
    for job in JOBS:
        seconds = [take_seconds(run, DURABLE) for run in runs if run.case == job.name]
        first = next(names[0] for names in PAIRS.values() if job.name in names)
        if seconds:
            told = f"{median(seconds):.2f} ({min(seconds):.2f}-{max(seconds):.2f})"
            rows.append([job.title, told, f"{speed_up(runs, first, job.name) or 0:.2f}"])
    return table(["converted by", "seconds, median (min-max)", "speed-up"], rows)


def speed_up(runs: Sequence[Run], first: str, second: str) -> float | None:
    """The median of per-round ratios."""
    seconds = {(run.case, run.round): take_seconds(run, DURABLE) for run in runs}
    rounds = {run.round for run in runs if (second, run.round) in seconds and (first, run.round) in seconds}
    return median(seconds[first, r] / seconds[second, r] for r in rounds) if rounds else None
