"""From measurements to medians, tables and targets; the page docs/benchmarks.md."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import torch
from floor import THREADS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

MIB = 1 << 20
WINDOW_MIB = 256  # the plugin's default window_mb
ALLOWANCE_MIB = 64


@dataclass(frozen=True)
class Measured:
    """One load (or floor): seconds of the slowest rank; bytes summed over ranks, memory of the worst rank."""

    case: str
    round: int
    seconds: float
    storage_bytes: int
    requested_bytes: int
    extra_bytes: int = 0
    kept_bytes: int = 0
    reported_bytes: int = 0
    phases: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """A row of the table; `floor` names the floor that it is held against."""

    name: str
    title: str
    floor: str = ""
    is_ours: bool = False


@dataclass(frozen=True)
class Target:
    """A figure that was asked for; `value` is None when this run did not measure it."""

    text: str
    value: float | None
    limit: float
    at_least: bool = False
    unit: str = ""

    @property
    def reached(self) -> bool | None:
        if self.value is None:
            return None
        return self.value >= self.limit if self.at_least else self.value <= self.limit


class Results:
    """All measurements of a run, by case and round."""

    def __init__(self, measured: Sequence[Measured], state_bytes: int, conversion_seconds: float | None) -> None:
        self.measured, self.state_bytes, self.conversion_seconds = measured, state_bytes, conversion_seconds

    @property
    def rounds(self) -> int:
        return len({m.round for m in self.measured})

    def of(self, case: str) -> list[Measured]:
        return [m for m in self.measured if m.case == case]

    def seconds(self, case: str) -> dict[int, float]:
        """By round; upstream's load has the conversion before it added."""
        offset = self.conversion_seconds or 0.0 if case == "upstream" else 0.0
        return {m.round: m.seconds + offset for m in self.of(case)}

    def ratio(self, case: str, other: str) -> float | None:
        """The median of the per-round ratios of the seconds of two cases."""
        above, below = self.seconds(case), self.seconds(other)
        ratios = [above[r] / below[r] for r in above.keys() & below.keys()]
        return median(ratios) if ratios else None

    def storage_factor(self, case: str) -> float | None:
        """Bytes from storage over bytes of state, the worst round."""
        return max((m.storage_bytes / self.state_bytes for m in self.of(case)), default=None)

    def extra_mib(self, case: str) -> float | None:
        """Peak memory of the worst rank and round beyond what the engine needs, in MiB."""
        return max((max(m.extra_bytes, m.extra_bytes + m.kept_bytes) / MIB for m in self.of(case)), default=None)


def make_page(results: Results, cases: Sequence[Case], command: str) -> str:
    """The text of docs/benchmarks.md."""
    size_m, state_gib = results.state_bytes / 12e6, results.state_bytes / (1 << 30)
    return f"""# Benchmarks

Written by `{command}`.

{describe_machine()}.

A checkpoint of {size_m:.0f} M parameters in the shapes of a GPT, two param groups, AdamW, saved by 4 ranks under
ZeRO-1 in bf16: {state_gib:.2f} GiB of state (fp32 masters and two moments). The page cache is cold before every load
(dropped with posix_fadvise, checked with mincore). In each of {results.rounds} rounds all cases follow each other,
each round beginning with another; ratios are medians of per-round ratios.

{cases_table(results, cases)}

{_conversion_note(results)}The time is that of `engine.load_checkpoint` alone in an engine that is ready, after
a barrier, of the slowest rank. The floor is {THREADS} threads a process that `preadv` the records of the state once
into buffers that they reuse. *From storage* is `read_bytes` of /proc/self/io summed over ranks; *asked of read()* is
`rchar`, which also counts what the page cache holds because a neighbour has read it. *Extra memory a rank* is the peak
resident size during the load (VmHWM, reset before it) beyond the engine with its loaded state: the peak less the
resident size after, plus what the process holds after beyond its size before and the optimizer state that the load
allocated; the worst rank of all rounds. After each load the bits of the state are summed up and compared with those
that were saved.

## Targets

{targets_table(make_targets(results, cases))}

The window is {WINDOW_MIB} MiB, to which {ALLOWANCE_MIB} MiB are allowed.

## Where the time goes

Seconds in each phase, of the slowest rank, median over rounds. Phases may overlap.

{phases_table(results, cases)}
"""


def _conversion_note(results: Results) -> str:
    if results.conversion_seconds is None:
        return ""
    load = median(m.seconds for m in results.of("upstream"))
    return (
        f"Upstream's row is its conversion ({results.conversion_seconds:.1f} s, run once, without the start of its\n"
        f"interpreter) plus its load ({load:.1f} s).\n\n"
    )


def make_targets(results: Results, cases: Iterable[Case]) -> list[Target]:
    targets = []
    for case in (c for c in cases if c.is_ours):
        name, limit = case.title, WINDOW_MIB + ALLOWANCE_MIB
        targets += [
            Target(f"{name}: time over DeepSpeed's own load", results.ratio(case.name, "deepspeed"), 1.0),
            Target(f"{name}: time over the floor", results.ratio(case.name, case.floor), 1.5),
            Target(f"{name}: upstream's time over ours", results.ratio("upstream", case.name), 15.0, at_least=True),
            Target(f"{name}: bytes from storage over bytes of state", results.storage_factor(case.name), 1.02),
            Target(f"{name}: extra memory of the worst rank", results.extra_mib(case.name), limit, unit=" MiB"),
        ]
    return targets


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose columns also line up as plain text."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in [header, *rows]]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def cases_table(results: Results, cases: Iterable[Case]) -> str:
    header = [
        "load",
        "seconds, median (min-max)",
        "from storage",
        "× state",
        "asked of read()",
        "extra memory a rank",
        "÷ DeepSpeed's",
        "÷ floor",
    ]
    rows = [_row(results, case) for case in cases if results.of(case.name)]
    return table(header, rows)


def _row(results: Results, case: Case) -> list[str]:
    measured = results.of(case.name)
    seconds = list(results.seconds(case.name).values())
    extra = results.extra_mib(case.name)
    return [
        case.title,
        f"{median(seconds):.2f} ({min(seconds):.2f}-{max(seconds):.2f})",
        _gib(median(m.storage_bytes for m in measured)),
        f"{median(m.storage_bytes for m in measured) / results.state_bytes:.3f}",
        _gib(median(m.requested_bytes for m in measured)),
        f"{extra:.0f} MiB" if case.floor or case.name in ("deepspeed", "upstream") else "",
        _ratio(results.ratio(case.name, "deepspeed")),
        _ratio(results.ratio(case.name, case.floor)),
    ]


def phases_table(results: Results, cases: Iterable[Case]) -> str:
    """Ours, phase by phase: the slowest rank of each round, then the median over rounds."""
    ours = [c for c in cases if c.is_ours and results.of(c.name)]
    names = list(dict.fromkeys(phase for c in ours for m in results.of(c.name) for phase in m.phases))
    rows = [[name, *(_phase(results, c, name) for c in ours)] for name in names]
    return table(["phase", *(c.title for c in ours)], rows) if rows else ""


def _phase(results: Results, case: Case, phase: str) -> str:
    values = [m.phases[phase] for m in results.of(case.name) if phase in m.phases]
    return f"{median(values):.2f}" if values else ""


def targets_table(targets: Iterable[Target]) -> str:
    verdicts = {True: "reached", False: "**missed**", None: "not measured"}
    rows = [
        [
            target.text,
            "" if target.value is None else f"{target.value:.3g}{target.unit}",
            f"{'≥' if target.at_least else '≤'} {target.limit:g}{target.unit}",
            verdicts[target.reached],
        ]
        for target in targets
    ]
    return table(["target", "measured", "asked", ""], rows)


def describe_machine() -> str:
    """Processor, memory and versions, in one line."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    import deepspeed

    return (
        f"{_processor()}, {os.cpu_count()} cores, {memory:.0f} GiB of memory, Linux {platform.release()}; "
        f"Python {platform.python_version()}, torch {torch.__version__}, deepspeed {deepspeed.__version__}"
    )


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _gib(count: float) -> str:
    return f"{count / (1 << 30):.2f} GiB"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
