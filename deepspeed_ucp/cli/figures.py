"""Figures in words, and tables."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..errors import escape


def format_bytes(nbytes: float) -> str:
    """Bytes in binary units with three digits: ``512 B``, ``1.50 GiB``."""
    return _scale(nbytes, 1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"), " ")


def format_count(count: float) -> str:
    """A count with three digits: ``512``, ``304 M``, ``1.02 T``."""
    return _scale(count, 1000, ("", "k", "M", "G", "T", "P"), " ").rstrip()


def count_of(number: int, noun: str) -> str:
    """``1 file``, ``5 files``."""
    return f"{number} {noun}{'s' * (number != 1)}"


def _scale(value: float, base: int, units: Sequence[str], space: str) -> str:
    at = 0
    while at + 1 < len(units) and abs(value) >= base - 0.5:
        value, at = value / base, at + 1
    digits = 0 if at == 0 and value == int(value) else max(0, 2 - int(math.log10(max(abs(value), 1))))
    return f"{value:.{digits}f}{space}{units[at]}"


def format_duration(seconds: float) -> str:
    """Seconds as ``0.42 s``, ``50 s``, ``3 min 20 s``, ``2 h 05 min``."""
    if not math.isfinite(seconds):
        return "for ever"
    if seconds < 10:
        return f"{seconds:.2f} s"
    whole = round(seconds)
    if whole < 120:
        return f"{whole} s"
    if whole < 7200:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def format_table(
    rows: Sequence[Sequence[object]], header: Sequence[str] = (), *, right: Sequence[int] = ()
) -> list[str]:
    """Lines of columns with two spaces between; ``right`` names the columns that are aligned to the right."""
    cells = [[escape(str(cell)) for cell in row] for row in ([header, *rows] if header else rows)]
    widths = [max(len(row[at]) for row in cells) for at in range(len(cells[0]))] if cells else []
    lines = []
    for row in cells:
        padded = [c.rjust(w) if at in right else c.ljust(w) for at, (c, w) in enumerate(zip(row, widths, strict=True))]
        lines.append("  ".join(padded).rstrip())
    return lines
