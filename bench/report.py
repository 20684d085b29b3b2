"""From measurements to tables, and the pages that contain them."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

MIB, GIB = 1 << 20, 1 << 30
ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "benchmarks.md"


@dataclass(frozen=True)
class Ratio:
    """Two measurements by round, and the limit of the median of the rounds' ratios.

    Attributes:
        lower: the limit is a lower bound.
    """

    values: Sequence[float]
    others: Sequence[float]
    limit: float | None = None
    lower: bool = False

    @property
    def value(self) -> float:
        return median(value / other for value, other in zip(self.values, self.others, strict=True))

    def __str__(self) -> str:
        return f"{self.value:.2f}{format_limit(self.limit, lower=self.lower)}"


def format_limit(limit: float | None, unit: str = "", *, lower: bool = False) -> str:
    return "" if limit is None else f" ({'≥' if lower else '≤'} {limit:.3g}{unit})"


def format_range(values: Sequence[float], digits: int = 2) -> str:
    """Format the median, the minimum and the maximum."""
    middle, low, high = (f"{each:.{digits}f}" for each in (median(values), min(values), max(values)))
    return f"{middle} ({low}-{high})"


def make_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Make a Markdown table whose columns also line up as plain text; columns without cells are left out."""
    kept = [number for number in range(len(header)) if any(row[number] for row in rows)]
    lines = [[line[number] for number in kept] for line in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    first, *others = [" | ".join(map(str.ljust, line, widths)) for line in lines]
    rule = "|".join("-" * (width + 2) for width in widths)
    return "\n".join([f"| {first} |", f"|{rule}|", *(f"| {line} |" for line in others)])


def put_part(page: str, name: str, part: str) -> str:
    """Replace the part of a page between the marks of this name, or append it."""
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    before, _, rest = page.partition(begin)
    _, found, after = rest.partition(end)
    before, after = (before, after) if found else (page, "\n")
    return f"{before.rstrip()}\n\n{begin}\n\n{part.strip()}\n\n{end}{after}".lstrip()


def write_part(name: str, part: str, file: Path = PAGE) -> None:
    file.write_text(put_part(file.read_text(), name, part))
    print(f"written to {file}")


def describe_machine() -> str:
    """Describe processor, memory and versions in one line."""
    import deepspeed

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    processors = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return (
        f"{(processors or [platform.machine()])[0]}, {os.cpu_count()} cores, {memory:.0f} GiB of memory, Linux "
        f"{platform.release()}; Python {platform.python_version()}, torch {torch.__version__}, "
        f"deepspeed {deepspeed.__version__}"
    )
