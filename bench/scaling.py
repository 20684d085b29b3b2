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

`{found["command"]}`. The ZeRO-1 checkpoint, with all starts, until the output is durable.

{_list_runs(runs)}
"""


def _list_runs(runs: Sequence[Run]) -> str:
    lines = []
    for name, pair in PAIRS.items():
        one, two = (median(take_seconds(run, DURABLE) for run in runs if run.case == case) for case in pair)
        lines.append(f"* 1 and 2 {name}: {one:.2f} and {two:.2f} s, speed-up {speed_up(runs, *pair) or 0:.2f}")
    return "\n".join(lines)


def speed_up(runs: Sequence[Run], first: str, second: str) -> float | None:
    """The median of per-round ratios."""
    seconds = {(run.case, run.round): take_seconds(run, DURABLE) for run in runs}
    rounds = {run.round for run in runs if (second, run.round) in seconds and (first, run.round) in seconds}
    return median(seconds[first, r] / seconds[second, r] for r in rounds) if rounds else None
