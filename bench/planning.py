"""Runs `plan.py`, each case in fresh processes, and makes its section of docs/benchmarks.md."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from report import MIB, Target, table, targets_table

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

CASES = ("zero1", "zero3")
SECONDS, PEAK_MIB = 5.0, 1024.0


def measure_plans(
    folder: Path, *, quick: bool, rounds: int, say: Callable[[str], None]
) -> dict[str, list[dict[str, Any]]]:
    """By case, what each round measured."""
    folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, list[dict[str, Any]]] = {}
    for case in CASES:
        say(f"plan {case}: working out what the other ranks say")
        script = folder / f"{case}.pickle"
        options = ["--case", case, "--script", str(script), *(["--quick"] if quick else [])]
        _call([*options, "--make"])
        found[case] = [json.loads(_call(options)) for _ in range(rounds)]
        for each in found[case]:
            say(f"plan {case}: {_seconds(each):.2f} s, {each['peak_bytes'] / MIB:.0f} MiB")
    return found


def _call(options: Sequence[str]) -> str:
    script = str(Path(__file__).with_name("plan.py"))
    return subprocess.run([sys.executable, script, *options], stdout=subprocess.PIPE, check=True, text=True).stdout


def _seconds(measured: dict[str, Any]) -> float:
    return float(sum(measured["phases"].values()))


def make_plan_section(found: dict[str, list[dict[str, Any]]]) -> str:
    """The section on planning."""
    cases = {rounds[0]["title"]: rounds for rounds in found.values()}
    rounds = first_rounds(cases)
    first, source, sizes = rounds[0], rounds[0]["source"], rounds[0]["source"]["sizes"]
    grid = f"TP{source['tp']} PP{source['pp']} DP{source['dp']}"
    ranks = source["tp"] * source["pp"] * source["dp"]
    return f"""## Planning for a model of 10^12 parameters

A GPT of {first["parameters"] / 1e12:.3g} · 10^12 parameters ({sizes["layers"]} layers, hidden size {sizes["hidden"]}:
the largest of the paper), saved by {ranks} ranks ({grid}, ZeRO-1, bf16), resumed by {first["ranks"]}.
The headers of the checkpoint's files are made in memory (`bench/synthetic.py`), and so is what the other ranks would
say in each collective: their shares of the headers, their part of the census, the claims that they make on the blocks
of the rank in question. Of their own judgement nothing is computed: they grant long claims and serve short ones.

Timed is everything that one rank, one of those that want the most, computes with the plugin's own functions up to its
finished plan: it unpickles what the ranks gather, builds the index, settles names and patterns (a family's rules; at
ZeRO-3 also `rename`), and works out its wants, its claims and its judgement of all claims on the blocks that it owns.
Each round is a fresh process; the slowest of {len(rounds)} rounds counts. *Peak* is the growth of the resident
size, and what is gathered on top. Rank 0 reads two headers more than its share, from which all learn what the folder
holds.

{_sizes_table(cases)}

### Targets: planning

{targets_table(_make_targets(cases))}

### Where the time goes: planning

Seconds, median over rounds.

{_phases_table(cases)}
"""


def first_rounds(cases: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    return next(iter(cases.values()))


def _sizes_table(cases: dict[str, list[dict[str, Any]]]) -> str:
    header = [
        "one rank of",
        "seconds",
        "of the processor",
        "peak",
        "headers it reads",
        "headers in all",
        "all ranks gather",
    ]
    header += ["claims it makes", "claims it judges", "bytes it wants", "bytes it reads", "reads"]
    rows = []
    for title, rounds in cases.items():
        one = rounds[0]
        rows.append(
            [
                title,
                f"{max(map(_seconds, rounds)):.2f}",
                f"{max(each['cpu_seconds'] for each in rounds):.2f}",
                f"{max(each['peak_bytes'] for each in rounds) / MIB:.0f} MiB",
                str(one["most_headers"]),
                str(one["headers"]),
                f"{one['gathered_bytes'] / MIB:.1f} MiB",
                str(one["claims"]),
                str(one["judged"]),
                f"{one['wanted_bytes'] / (1 << 30):.2f} GiB",
                f"{one['read_bytes'] / (1 << 30):.2f} GiB",
                str(one["requests"]),
            ]
        )
    return table(header, rows)


def _make_targets(cases: dict[str, list[dict[str, Any]]]) -> list[Target]:
    targets = []
    for title, rounds in cases.items():
        one = rounds[0]
        share = -(-one["headers"] // one["ranks"])  # headers are whole
        peak = max(each["peak_bytes"] for each in rounds) / MIB
        targets += [
            Target(f"{title}: one rank's plan", max(map(_seconds, rounds)), SECONDS, unit=" s"),
            Target(f"{title}: peak memory of it", peak, PEAK_MIB, unit=" MiB"),
            Target(f"{title}: headers read by one rank, 1/{one['ranks']} of them", one["most_headers"], share),
        ]
    return targets


def _phases_table(cases: dict[str, list[dict[str, Any]]]) -> str:
    names = list(first_rounds(cases)[0]["phases"])
    rows = [[name, *(f"{median(each['phases'][name] for each in r):.2f}" for r in cases.values())] for name in names]
    return table(["phase", *cases], rows)
