"""From measurements to medians, tables and targets: the sections of docs/benchmarks.md."""

from __future__ import annotations

import os
import platform
import textwrap
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

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
DURABLE, CACHED, INSIDE = "durable", "cached", "inside"


@dataclass(frozen=True)
class Run:
    """One measurement of a case: of the slowest rank its seconds, of the worst one its memory, else sums.

    Attributes:
        seconds: duration of a load or a command; 0 if it failed.
        sync_seconds: until the output was durable after that.
        inside_seconds: duration as the command reports it, without its start.
        durable_seconds: the part of `seconds` in which the command itself made its output durable.
        busy: processor time.
        extra_bytes: peak resident size beyond the size after the load; kept_bytes: growth that the load leaves behind.
        peak_bytes: the highest resident size of one process, or the highest sum of proportional sizes.
        fault: the error, or a description of wrong values.
    """

    case: str
    round: int
    seconds: float
    sync_seconds: float = 0.0
    inside_seconds: float | None = None
    durable_seconds: float = 0.0
    busy: float = 0.0
    storage_bytes: int = 0
    written_bytes: int = 0
    extra_bytes: int = 0
    kept_bytes: int = 0
    peak_bytes: int = 0
    phases: Mapping[str, float] = field(default_factory=dict)
    fault: str = ""

    def take_seconds(self, kind: str) -> float:
        """Return the seconds until the output is durable, until it is in the page cache, or without the start."""
        if kind == DURABLE:
            return self.seconds + self.sync_seconds
        if kind == CACHED:
            return self.seconds - self.durable_seconds
        return self.seconds if self.inside_seconds is None else self.inside_seconds

    def tell(self) -> str:
        """One line for the log."""
        memory = max(self.extra_bytes, self.extra_bytes + self.kept_bytes, self.peak_bytes)
        return (
            f"{self.case:16}  {self.seconds:7.2f} s + {self.sync_seconds:.2f} s sync  {self.busy:5.2f} s busy  "
            f"{self.storage_bytes / (1 << 30):6.2f} GiB read, {self.written_bytes / (1 << 30):.2f} written  "
            f"{memory >> 20} MiB  {self.fault}"
        )


@dataclass(frozen=True)
class Case:
    """A row of a table.

    Attributes:
        floor, upstream: the cases that it is compared with.
        limits: the targets, by their names in `FIGURES`.
        twin: a further case that it is compared with, and the title of this column.
        judged: the kind of seconds that is compared with the floor's.
    """

    name: str
    title: str
    floor: str = ""
    upstream: str = ""
    limits: Mapping[str, float] = field(default_factory=dict)
    twin: tuple[str, str] = ("", "")
    judged: str = DURABLE

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
    """All measurements on one checkpoint, by case and round.

    Attributes:
        parameters: number of the model's parameters, without padding.
        state_bytes: size of fp32 masters and moments.
        command: the command that measured.
        conversion_seconds: duration of upstream's conversion before its loads; None if it was not run.
        conversion_failures: failed attempts at it.
        import_seconds: duration of the plugin's imports at the first load of a process; None if commands were measured.
        workers: upstream's fastest (extracting, merging) workers, if they were searched.
    """

    runs: tuple[Run, ...]
    parameters: int
    state_bytes: int
    command: str
    conversion_seconds: float | None = None
    conversion_failures: int = 0
    import_seconds: float | None = None
    workers: tuple[int, int] | None = None

    @classmethod
    def restore(cls, data: dict[str, Any]) -> Results:
        """Restore from JSON."""
        workers = tuple(data["workers"]) if data["workers"] else None
        return cls(**{**data, "runs": tuple(Run(**run) for run in data["runs"]), "workers": workers})

    def data(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def rounds(self) -> int:
        return len({run.round for run in self.runs})

    @property
    def are_loads(self) -> bool:
        return self.import_seconds is not None

    def of(self, case: str) -> list[Run]:
        return [run for run in self.runs if run.case == case and run.seconds]

    def faults(self, case: str) -> list[str]:
        return list(dict.fromkeys(run.fault for run in self.runs if run.case == case and run.fault))

    def seconds(self, case: str, kind: str = DURABLE) -> dict[int, float]:
        """Return the seconds by round; upstream's loads include the conversion."""
        offset = self.conversion_seconds or 0.0 if case.startswith("upstream") else 0.0
        return {run.round: run.take_seconds(kind) + offset for run in self.of(case)}

    def ratio(self, case: str, other: str, kind: str = DURABLE) -> float | None:
        """Return the median of the rounds' ratios of two cases; of two ways to read the faster one counts."""
        above = self.seconds(case, kind)
        below = take_faster(self.seconds(other, kind), self.seconds(other + DIRECT, kind))
        ratios = [above[r] / below[r] for r in above.keys() & below.keys()]
        return median(ratios) if ratios else None

    def share(self, case: str, phase: str, other: str) -> float | None:
        """Return the median of the rounds' ratios of two phases of a case."""
        ratios = [run.phases[phase] / run.phases[other] for run in self.of(case) if {phase, other} <= run.phases.keys()]
        return median(ratios) if ratios else None

    def bytes_factor(self, case: str, kind: str) -> float | None:
        """Return the bytes ("storage_bytes" or "written_bytes") over the bytes of state, in the worst round."""
        return max((getattr(run, kind) / self.state_bytes for run in self.of(case)), default=None)

    def extra_mib(self, case: str) -> float | None:
        """Return the peak memory beyond the engine's, of the worst rank and round."""
        return max((max(m.extra_bytes, m.extra_bytes + m.kept_bytes) / MIB for m in self.of(case)), default=None)

    def peak_mib(self, case: str) -> float | None:
        return max((run.peak_bytes / MIB for run in self.of(case)), default=None)


def take_faster(one: Mapping[int, float], other: Mapping[int, float]) -> dict[int, float]:
    """Return the smaller value of each round, if both are there."""
    return {round_: min(seconds, other.get(round_, seconds)) for round_, seconds in one.items()}


AT_LEAST = "upstream"
"""The figure whose limit is a lower bound."""

FIGURES: dict[str, tuple[str, Callable[[Results, Case], float | None]]] = {
    "index": ("index and decision ÷ load", lambda results, case: results.share(case.name, "index", "own load")),
    "own": ("÷ DeepSpeed's", lambda results, case: results.ratio(case.name, "deepspeed")),
    AT_LEAST: ("upstream's ÷ this", lambda results, case: results.ratio(case.upstream, case.name)),
    "floor": ("÷ floor", lambda results, case: results.ratio(case.name, case.floor, case.judged)),
    "cached": ("÷ floor in the page cache", lambda results, case: results.ratio(case.name, case.floor, CACHED)),
    "twin": ("÷ that of a tag", lambda results, case: results.ratio(case.name, case.twin[0])),
    "read": (
        "bytes from storage over bytes of state",
        lambda results, case: results.bytes_factor(case.name, "storage_bytes"),
    ),
    "written": (
        "bytes written over bytes of state",
        lambda results, case: results.bytes_factor(case.name, "written_bytes"),
    ),
    "extra": ("extra memory of the worst rank", lambda results, case: results.extra_mib(case.name)),
}
"""Figures with targets: text and value."""

LOAD = {"read": 1.02, "extra": WINDOW_MIB + ALLOWANCE_MIB}
"""Limits of every load of ours, unless its case has another one."""


def make_targets(results: Results, cases: Sequence[Case]) -> list[Target]:
    targets = []
    for case in cases:
        for name, limit in case.limits.items():
            text, find = FIGURES[name]
            unit = " MiB" if name == "extra" else ""
            targets.append(Target(f"{case.title}: {text}", find(results, case), limit, name == AT_LEAST, unit))
    return targets


def explain(results: Results) -> str:
    """Describe the method of the loads, which all sections share."""
    return f"""*Upstream* is DeepSpeed's offline conversion and its load. Each of {results.rounds} rounds runs all cases
with an empty page cache, and compares loaded states with saved ones. Figures are medians (min-max).

* **Seconds**: `engine.load_checkpoint` on the slowest rank, without {results.import_seconds:.2f} s of imports.
* **Floor**: as many processes and threads read the same bytes once.
* **Extra MiB**: peak resident size of the worst rank beyond engine and state.
* **Targets** of all loads: at most 1.02 times the state from storage, and {WINDOW_MIB + ALLOWANCE_MIB} MiB extra."""


def make_section(title: str, about: str, found: Mapping[str, Results], cases: Sequence[Case]) -> str:
    """Make a section of docs/benchmarks.md.

    Args:
        found: results by the title of their checkpoint, which is shown if it is not empty.
    """
    parts, targets = [f"## {title}", f"`{next(iter(found.values())).command}`. {about}"], []
    for source, results in found.items():
        extracting, merging = results.workers or (0, 0)
        workers = f" (best workers: {extracting} extracting, {merging} merging)" if results.workers else ""
        parts += [f"{source}{workers}:"] if source else []
        parts += [cases_table(results, cases), *_conversion_note(results, cases), *_fault_notes(results, cases)]
        targets += make_targets(results, cases)
    return "\n\n".join([*parts, *([describe_targets(targets)] if targets else [])]) + "\n"


def _conversion_note(results: Results, cases: Sequence[Case]) -> list[str]:
    if results.conversion_seconds is None:
        return []
    loads = [median(m.seconds for m in results.of(c.name)) for c in cases if c.is_upstream and results.of(c.name)]
    seconds, count = ", ".join(f"{each:.1f}" for each in loads) or "none", results.conversion_failures
    note = f"Upstream: one conversion of {results.conversion_seconds:.1f} s and a load of {seconds} s."
    if count:
        note += (
            f" The conversion failed {count} time{'s' * (count > 1)} before:\ntwo pipeline stages write the same files."
        )
    return [note]


def _fault_notes(results: Results, cases: Sequence[Case]) -> list[str]:
    faults: dict[str, list[str]] = {}
    for case in cases:
        for fault in results.faults(case.name):
            faults.setdefault(fault, []).append(case.title)
    notes = [f"* {'; '.join(titles)}: {fault}" for fault, titles in faults.items()]
    return ["\n".join(notes)] if notes else []


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose columns also line up as plain text."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in [header, *rows]]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    head, *others = ["| " + " | ".join(line) + " |" for line in lines]
    return "\n".join([head, rule, *others])


COLUMNS = ("seconds", "durable", "extra MiB", "peak MiB", "twin", "÷ floor", "upstream's ÷ this")


def cases_table(results: Results, cases: Sequence[Case]) -> str:
    """Make the table of all cases that ran. Floors of loads are left out; empty columns too."""
    shown = [case for case in cases if any(run.case == case.name for run in results.runs)]
    shown = [case for case in shown if not (case.is_floor and results.are_loads)]
    rows = [(case.title, make_row(results, case)) for case in shown]
    twin = next((case.twin[1] for case in shown if case.twin[1]), "")
    kept = [column for column in COLUMNS if any(row[column] for _, row in rows)]
    header = ["load" if results.are_loads else "command", *(twin if name == "twin" else name for name in kept)]
    return table(header, [[title, *(row[column] for column in kept)] for title, row in rows])


def make_row(results: Results, case: Case) -> dict[str, str]:
    """Make the cells of a case, by column."""
    runs = results.of(case.name)
    if not runs:
        return {**dict.fromkeys(COLUMNS, ""), "seconds": "cannot load it" if results.are_loads else "fails"}
    seconds = [run.seconds + (results.conversion_seconds or 0.0) * case.is_upstream for run in runs]
    wrong = " (other values)" if results.faults(case.name) else ""
    writes = any(run.written_bytes > results.state_bytes // 10 for run in runs)
    is_load = results.are_loads
    return {
        "seconds": f"{median(seconds):.2f} ({min(seconds):.2f}-{max(seconds):.2f}){wrong}",
        "durable": f"{median(run.take_seconds(DURABLE) for run in runs):.2f}" if writes and not is_load else "",
        "extra MiB": _show(results.extra_mib(case.name), 0) if is_load else "",
        "peak MiB": "" if is_load or case.is_floor else _show(results.peak_mib(case.name), 0),
        "twin": _show(results.ratio(case.name, case.twin[0])),
        "÷ floor": _show(results.ratio(case.name, case.floor, case.judged)),
        "upstream's ÷ this": _show(results.ratio(case.upstream, case.name)),
    }


SUMMARY = ("", "seconds", "÷ floor", "upstream's ÷ this", "extra MiB a rank")
"""Header of README's table."""


def summarise(results: Results, cases: Sequence[Case], source: str) -> list[list[str]]:
    """Make rows of README's table: all cases of ours that ran."""
    rows = []
    for case in (each for each in cases if each.is_ours and results.of(each.name)):
        row, target = make_row(results, case), case.title.removeprefix("ours, ")
        title = f"resume: {source} → {target}" if results.are_loads else f"{target}: {source}"
        seconds = f"{median(results.seconds(case.name, case.judged).values()):.1f}"
        upstream = row["upstream's ÷ this"] or ("cannot" if case.upstream else "")
        rows.append([title, seconds, row["÷ floor"], upstream, row["extra MiB"] or row["peak MiB"]])
    return rows


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


def _show(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"
