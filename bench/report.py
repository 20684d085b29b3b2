"""From measurements to medians, tables and targets: the sections of docs/benchmarks.md."""

from __future__ import annotations

import os
import platform
import textwrap
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import torch
from floor import DIRECT

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

AT_SCALE = ("<!-- at scale: written by bench/scale.py -->", "<!-- end of at scale -->")
SAVES = ("<!-- saves: written by bench/saves.py -->", "<!-- end of saves -->")
"""Marks around the parts of docs/benchmarks.md that other commands write."""

MIB = 1 << 20
WINDOW_MIB = 256  # the plugin's default window_mb
ALLOWANCE_MIB = 64


@dataclass(frozen=True)
class Measured:
    """One load (or floor): seconds of the slowest rank, bytes and processor time of all, memory of the worst one.

    `fault` is the error of an upstream load (its seconds are 0 then), or describes its wrong values.
    """

    case: str
    round: int
    seconds: float
    storage_bytes: int
    busy: float = 0.0
    extra_bytes: int = 0
    kept_bytes: int = 0
    phases: Mapping[str, float] = field(default_factory=dict)
    fault: str = ""

    def tell(self) -> str:
        """One line for who waits."""
        return (
            f"{self.case:13}  {self.seconds:7.2f} s  {self.busy:5.2f} s busy  "
            f"{self.storage_bytes / (1 << 30):6.2f} GiB from storage  "
            f"extra {self.extra_bytes >> 20} MiB, kept {self.kept_bytes >> 20} MiB  {self.fault}"
        )


@dataclass(frozen=True)
class Case:
    """A row of the table.

    Attributes:
        floor, upstream: the cases that it is held against; where upstream has no way, something that is no case.
        storage_limit: bytes from storage over bytes of state that are asked for.
        floor_limit, own_limit: time over the floor's, and over that of DeepSpeed's own load, that are asked for.
        index_limit: the same of what comes before DeepSpeed's own load, over that load.
        twin, twin_limit: the case that loads the same state from a tag, and the time over its that is asked for.
    """

    name: str
    title: str
    floor: str = ""
    upstream: str = ""
    storage_limit: float = 1.02
    floor_limit: float | None = None
    own_limit: float | None = None
    index_limit: float | None = None
    twin: str = ""
    twin_limit: float | None = None

    @property
    def is_ours(self) -> bool:
        return self.name.startswith("ours")

    @property
    def is_upstream(self) -> bool:
        return self.name.startswith("upstream")

    @property
    def is_floor(self) -> bool:
        return self.name.startswith("floor")


@dataclass(frozen=True)
class Target:
    """A figure that was asked for.

    Attributes:
        value: None when this run did not measure it.
    """

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


@dataclass(frozen=True)
class Results:
    """All measurements of a suite, by case and round.

    Attributes:
        parameters: of the model, without padding.
        state_bytes: of its fp32 masters and moments.
        conversion_seconds: of upstream's conversion, None where it was not run.
        conversion_failures: attempts at it that failed before.
        command: that measured.
        import_seconds: of what the plugin imports at a process's first load.
    """

    measured: tuple[Measured, ...]
    parameters: int
    state_bytes: int
    conversion_seconds: float | None
    conversion_failures: int
    command: str
    import_seconds: float = 0.0

    @property
    def rounds(self) -> int:
        return len({m.round for m in self.measured})

    def of(self, case: str) -> list[Measured]:
        return [m for m in self.measured if m.case == case and m.seconds]

    def faults(self, case: str) -> list[str]:
        return list(dict.fromkeys(m.fault for m in self.measured if m.case == case and m.fault))

    def seconds(self, case: str) -> dict[int, float]:
        """By round; upstream's loads have the conversion before them added."""
        offset = self.conversion_seconds or 0.0 if case.startswith("upstream") else 0.0
        return {m.round: m.seconds + offset for m in self.of(case)}

    def ratio(self, case: str, other: str) -> float | None:
        """The median of the per-round ratios of the seconds of two cases; of two ways to read the faster counts."""
        above, below = self.seconds(case), take_faster(self.seconds(other), self.seconds(other + DIRECT))
        ratios = [above[r] / below[r] for r in above.keys() & below.keys()]
        return median(ratios) if ratios else None

    def share(self, case: str, phase: str, other: str) -> float | None:
        """The median of the per-round ratios of two phases of a case."""
        ratios = [m.phases[phase] / m.phases[other] for m in self.of(case) if {phase, other} <= m.phases.keys()]
        return median(ratios) if ratios else None

    def storage_factor(self, case: str) -> float | None:
        """Bytes from storage over bytes of state, the worst round."""
        return max((m.storage_bytes / self.state_bytes for m in self.of(case)), default=None)

    def extra_mib(self, case: str) -> float | None:
        """Peak memory of the worst rank and round beyond what the engine needs, in MiB."""
        return max((max(m.extra_bytes, m.extra_bytes + m.kept_bytes) / MIB for m in self.of(case)), default=None)


def take_faster(one: Mapping[int, float], other: Mapping[int, float]) -> dict[int, float]:
    """By round the less of both, where both are there."""
    return {round_: min(seconds, other.get(round_, seconds)) for round_, seconds in one.items()}


def explain(results: Results) -> str:
    """How the loads were measured, the same in all sections."""
    return f"""*Upstream* is DeepSpeed's offline conversion and its load. Each of {results.rounds} rounds runs all cases
with an empty page cache, and compares every loaded state with the saved one.

* **Seconds** of `engine.load_checkpoint` on the slowest rank, median (min-max); the first load of a process takes
  {results.import_seconds:.2f} s more for imports. Ratios are medians of the rounds' ratios.
* **Floor**: as many processes and threads read the same bytes once, through the page cache or past it.
* **Extra MiB**: peak resident size of the worst rank beyond engine and state.
* **Targets** of all loads: at most 1.02 times the state from storage, and {WINDOW_MIB + ALLOWANCE_MIB} MiB extra."""


def make_section(results: Results, cases: Sequence[Case], title: str, about: str) -> str:
    """One suite's section of docs/benchmarks.md."""
    notes = _conversion_note(results, cases) + _fault_notes(results, cases) + _tell_targets(results, cases)
    return f"""## {title}

`{results.command}`. {about}

{cases_table(results, cases)}

{notes}"""


def _tell_targets(results: Results, cases: Sequence[Case]) -> str:
    targets = make_targets(results, cases)
    return f"{describe_targets(targets)}\n\n" if targets else ""


def _conversion_note(results: Results, cases: Sequence[Case]) -> str:
    if results.conversion_seconds is None:
        return ""
    loads = [median(m.seconds for m in results.of(c.name)) for c in cases if c.is_upstream and results.of(c.name)]
    told = ", ".join(f"{seconds:.1f}" for seconds in loads) or "none"
    return (
        f"Upstream: one conversion of {results.conversion_seconds:.1f} s and a load of {told} s."
        f"{_tell_failures(results.conversion_failures)}\n\n"
    )


def _tell_failures(count: int) -> str:
    if not count:
        return ""
    return f" The conversion failed {count} time{'s' * (count > 1)} before:\ntwo pipeline stages write the same files."


def _fault_notes(results: Results, cases: Sequence[Case]) -> str:
    faults: dict[str, list[str]] = {}
    for case in cases:
        for fault in results.faults(case.name):
            faults.setdefault(fault, []).append(case.title)
    notes = [f"* {'; '.join(titles)}: {fault}" for fault, titles in faults.items()]
    return "\n".join(notes) + "\n\n" if notes else ""


def make_targets(results: Results, cases: Sequence[Case]) -> list[Target]:
    targets = []
    for case in (c for c in cases if c.index_limit is not None):
        share = results.share(case.name, "index", "own load")
        text = f"{case.title}: index and decision ÷ load"
        targets.append(Target(text, share, case.index_limit or 0.0))
    for case in (c for c in cases if c.is_ours):
        name, limit = case.title, WINDOW_MIB + ALLOWANCE_MIB
        if case.own_limit is not None:
            own, upstream = results.ratio(case.name, "deepspeed"), results.ratio(case.upstream, case.name)
            targets.append(Target(f"{name}: ÷ DeepSpeed's", own, case.own_limit))
            if any(c.name == case.upstream for c in cases):
                targets.append(Target(f"{name}: upstream's ÷ this", upstream, 15.0, at_least=True))
        if case.floor_limit is not None:
            ratio = results.ratio(case.name, case.floor)
            targets.append(Target(f"{name}: ÷ floor", ratio, case.floor_limit))
        if case.twin_limit is not None:
            ratio = results.ratio(case.name, case.twin)
            targets.append(Target(f"{name}: ÷ that of a tag", ratio, case.twin_limit))
        factor, extra = results.storage_factor(case.name), results.extra_mib(case.name)
        targets += [
            Target(f"{name}: bytes from storage over bytes of state", factor, case.storage_limit),
            Target(f"{name}: extra memory of the worst rank", extra, limit, unit=" MiB"),
        ]
    return targets


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose columns also line up as plain text."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in [header, *rows]]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    head, *others = ["| " + " | ".join(line) + " |" for line in lines]
    return "\n".join([head, rule, *others])


def cases_table(results: Results, cases: Sequence[Case]) -> str:
    beside = {case.twin: "÷ that of a tag" for case in cases if case.twin}
    header = ["load", "seconds", "extra MiB"]
    header += [*beside.values(), "÷ floor", "upstream's ÷ this"]
    shown = [case for case in cases if not case.is_floor and any(m.case == case.name for m in results.measured)]
    rows = [_row(results, case, tuple(beside)) for case in shown]
    kept = [i for i in range(len(header)) if i == 0 or any(row[i] for row in rows)]
    return table([header[i] for i in kept], [[row[i] for i in kept] for row in rows])


def _row(results: Results, case: Case, beside: Sequence[str] = ()) -> list[str]:
    measured = results.of(case.name)
    own = [_ratio(results.ratio(case.name, other)) for other in beside]
    if not measured:
        return [case.title, "cannot load it", "", *("" for _ in beside), "", ""]
    seconds = list(results.seconds(case.name).values())
    wrong = " (other values)" if results.faults(case.name) else ""
    return [
        case.title,
        f"{median(seconds):.2f} ({min(seconds):.2f}-{max(seconds):.2f}){wrong}",
        f"{results.extra_mib(case.name):.0f}",
        *own,
        _ratio(results.ratio(case.name, case.floor)),
        _ratio(results.ratio(case.upstream, case.name)),
    ]


SUMMARY = ("", "seconds", "÷ floor", "upstream's ÷ this", "extra MiB a rank")
"""Header of README's table."""


def summarise_loads(results: Results, cases: Sequence[Case], source: str) -> list[list[str]]:
    """Rows of README's table: what of ours was measured."""
    rows = []
    for case in cases:
        if case.is_ours and results.of(case.name):
            row = dict(zip(_KEYS, _row(results, case), strict=True))
            seconds = f"{median(results.seconds(case.name).values()):.1f}"
            target = case.title.removeprefix("ours, ")
            extra = row["extra"]
            upstream = row["upstream"] or ("cannot" if case.upstream else "")
            rows.append([f"resume: {source} → {target}", seconds, row["floor"], upstream, extra])
    return rows


_KEYS = ("title", "seconds", "extra", "floor", "upstream")


def put_sections(page: str, sections: Iterable[str]) -> str:
    """A page with these sections, each in the place of the one with its title, or at the end."""
    head, *held = f"\n{page}".split("\n## ")
    found = {text.partition("\n")[0]: text for text in held}
    found |= {text.partition("\n")[0]: text for text in (each.strip().removeprefix("## ") for each in sections)}
    return "\n\n## ".join(text.strip() for text in [head, *found.values()])


def find_part(page: str, marks: tuple[str, str]) -> str:
    """What lies between two marks of a page, with these; empty where they are not there."""
    _, begin, rest = page.partition(marks[0])
    inner, end, _ = rest.partition(marks[1])
    return f"{begin}{inner}{end}" if end else ""


def put_part(page: str, marks: tuple[str, str], part: str) -> str:
    """The page with a part between its marks, at its end where these are not there yet."""
    marked = f"{marks[0]}\n\n{part.strip()}\n\n{marks[1]}"
    known = find_part(page, marks)
    return page.replace(known, marked) if known else f"{page.rstrip()}\n\n{marked}\n"


def describe_targets(targets: Sequence[Target]) -> str:
    """Count the targets that are reached, and list the others by figure and limit."""
    missed: dict[str, dict[str, list[str]]] = {}
    for target in (each for each in targets if not each.reached):
        value = "not measured" if target.value is None else f"{target.value:.3g}{target.unit}"
        limit = f"{'≥' if target.at_least else '≤'} {target.limit:.3g}{target.unit}"
        missed.setdefault(target.text.rpartition(": ")[2], {}).setdefault(limit, []).append(value)
    reached = f"Targets reached: {sum(bool(each.reached) for each in targets)} of {len(targets)}."
    figures = [f"{figure} {_list_limits(limits)}" for figure, limits in missed.items()]
    return textwrap.fill(f"{reached} Missed: {'; '.join(figures)}.", 120) if missed else reached


def _list_limits(limits: Mapping[str, Sequence[str]]) -> str:
    return ", ".join(f"{limit} ({', '.join(values)})" for limit, values in limits.items())


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


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
