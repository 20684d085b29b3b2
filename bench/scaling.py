"""How a conversion scales: over workers and MPI ranks here, and in virtual time over nodes against a slow store."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import simulation
from commands import DURABLE, Run, take_seconds
from offline import Bench, Job, Source, convert_ours
from report import Target, describe_targets, table

NODES = ((1, 1), (1, 2), (1, 4), (1, 8), (2, 8), (4, 8), (8, 8))  # (nodes, workers on each)
STORE = simulation.Store()
SMALL = {"hidden": 4096, "vocabulary": 71680}  # for the executor's threads: 14 B parameters
BALANCE, EFFICIENCY = 1.05, 0.9


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


def simulate_scaling(say: Callable[[str], None], *, quick: bool) -> dict[str, Any]:
    """In virtual time: the plan for 176 B parameters, and the executor itself for a smaller model of the same kind."""
    sizes = {"hidden": 256, "vocabulary": 4480} if quick else SMALL
    large, small = simulation.list_bloom(), simulation.list_bloom(**sizes)
    found: dict[str, Any] = {"store": asdict(STORE), "large": [], "small": []}
    for nodes, workers in NODES:
        found["large"].append(_tell(large, simulation.simulate(large, nodes, workers, STORE), nodes, workers))
        say(f"176 B on {nodes} x {workers} workers: {found['large'][-1]['seconds'] / 60:.1f} virtual minutes")
    for nodes, workers in NODES:
        executed = simulation.execute_virtually(small, nodes, workers, STORE)
        found["small"].append(_tell(small, executed, nodes, workers))
        say(f"the executor on {nodes} x {workers} workers: {executed.seconds:.1f} virtual seconds")
    return found


def _tell(shapes: dict[str, Any], found: simulation.Simulated, nodes: int, workers: int) -> dict[str, Any]:
    return {
        "parameters": simulation.count_parameters(shapes),
        "nodes": nodes,
        "workers": workers,
        "seconds": found.seconds,
        "node_imbalance": found.node_imbalance,
        "worker_imbalance": found.worker_imbalance,
    }


def make_scaling_section(found: dict[str, Any]) -> str:
    """The section of docs/benchmarks.md."""
    runs = [Run(**run) for run in found["runs"]]
    simulated, store = found["simulated"], found["simulated"]["store"]
    large, small = simulated["large"], simulated["small"]
    return f"""## Strong scaling of a conversion

Written by `{found["command"]}`. The ZeRO-1 checkpoint of above, converted by workers
(threads) of one process, and by MPI ranks of one worker each. Seconds are from start to end, all starts included, until
the output is durable.

{_runs_table(runs)}

A slow store on many nodes, in virtual time: every request waits {store["latency"] * 1e3:.0f} ms, then its bytes come or
go at {store["bandwidth"] / 1e6:.0f} MB/s; nothing else takes time. The plan is the real one for BLOOM
({large[0]["parameters"] / 1e9:.0f} B parameters, fp32 masters and two moments). *Share* is the largest over the mean.

{_simulated_table(large, 3600, "hours")}

The same by the converter's own threads, for {small[0]["parameters"] / 1e9:.1f} B parameters in as many layers:

{_simulated_table(small, 1, "seconds")}

{describe_targets(make_scaling_targets(found))}
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


def _simulated_table(found: Sequence[dict[str, Any]], unit: float, name: str) -> str:
    header = ["nodes × workers", name, "speed-up", "efficiency", "largest node's share", "largest worker's share"]
    rows = []
    for each in found:
        workers = each["nodes"] * each["workers"]
        rate = found[0]["seconds"] / each["seconds"]
        rows.append(
            [
                f"{each['nodes']} × {each['workers']}",
                f"{each['seconds'] / unit:.3g}",
                f"{rate:.1f}",
                f"{100 * rate / workers:.0f} %",
                f"{each['node_imbalance']:.3f}",
                f"{each['worker_imbalance']:.3f}",
            ]
        )
    return table(header, rows)


def make_scaling_targets(found: dict[str, Any]) -> list[Target]:
    first, last = (found["simulated"]["large"][i] for i in (0, -1))
    workers = last["nodes"] * last["workers"]
    efficiency = first["seconds"] / last["seconds"] / workers
    all_ = "all wait for the one that has most"
    return [
        Target(
            f"176 B, {workers} workers: largest worker's share over the mean", last["worker_imbalance"], BALANCE, all_
        ),
        Target(
            f"176 B, {last['nodes']} nodes: largest node's share over the mean", last["node_imbalance"], BALANCE, all_
        ),
        Target(f"176 B, {workers} workers: efficiency in virtual time", efficiency, EFFICIENCY, all_, at_least=True),
    ]
