"""Output of the commands: tables, messages, progress, exit codes.

Every line is escaped, so that no name in a checkpoint can forge another line.
"""

from __future__ import annotations

import argparse
import io
import json
import logging
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

from ..errors import StorageError, escape, hide_secrets
from ..platforms import MPI_RANKS

OK = 0
FAULT = 1
ERROR = 2
INTERRUPTED = 130
BROKEN_PIPE = 141


def prepare_streams() -> None:
    """Open stdout and stderr if they are closed, and let them accept every character.

    Otherwise the next file that is opened would get the descriptor, and be written to.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(fd)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, io.TextIOWrapper(io.FileIO(os.devnull, "w")))
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def find_rank() -> int:
    """Return the rank under mpirun, torchrun, srun or deepspeed; 0 without a launcher.

    ``RANK`` alone is no launch: clusters set it for whole containers, in which people type commands.
    """
    names = (*(("RANK",) if "LOCAL_RANK" in os.environ else ()), *MPI_RANKS)
    return next((int(os.environ[key]) for key in names if os.environ.get(key, "").isdigit()), 0)


def emit(options: argparse.Namespace, data: Mapping[str, Any], lines: Iterable[str]) -> None:
    """Print ``data`` if ``--json`` is given, else ``lines``; on rank 0 only, flushed.

    Raises:
        StorageError: stdout cannot be written.
        BrokenPipeError: its reader has exited.
    """
    if find_rank():
        return
    try:
        print(to_json(data) if options.json else "\n".join(map(escape, lines)), flush=True)
    except OSError as error:
        # Flushing the buffer would raise again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            raise
        raise StorageError(f"the output cannot be written: {error.strerror}") from error


def to_json(data: Any) -> str:
    """Serialize to strict JSON in ASCII; NaN and infinities become strings."""
    return hide_secrets(json.dumps(_to_plain(data), indent=2, allow_nan=False))


def list_fields(result: Any) -> dict[str, Any]:
    """Return the fields of a dataclass instance as data for :func:`emit`."""
    return {field.name: getattr(result, field.name) for field in fields(result)}


def _to_plain(value: Any) -> Any:
    if is_dataclass(value):
        return _to_plain(list_fields(value))
    if isinstance(value, Mapping):
        return {str(key): _to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted(map(_to_plain, value), key=str)
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return value if value is None or isinstance(value, (str, int)) else str(value)


@contextmanager
def show_progress(options: argparse.Namespace, total: int, name: str) -> Iterator[Callable[[int], None]]:
    """Show a progress bar of bytes on stderr; yield a thread-safe callback for bytes.

    There is none if stderr is not a terminal, on ranks other than 0, with ``--quiet`` and with ``--json``.
    """
    from tqdm import tqdm

    silent = options.quiet or options.json or bool(find_rank()) or not sys.stderr.isatty()
    with tqdm(
        total=total, desc=name, unit="B", unit_scale=True, unit_divisor=1024,
        disable=silent, dynamic_ncols=True, mininterval=0.2, leave=False,
    ) as bar:  # fmt: skip

        def add(nbytes: int) -> None:
            with bar.get_lock():
                bar.update(nbytes)

        yield add


class Lines(logging.Handler):
    """Prints log records as short lines on stderr: ``ds_ucp: warning: …``."""

    def emit(self, record: logging.LogRecord) -> None:
        kind = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: "
        print_message(f"ds_ucp: {kind}{record.getMessage()}")


def print_message(text: str) -> None:
    """Print a message on stderr without breaking a progress bar."""
    first, *more = map(escape, text.split("\n"))
    shown = "\n".join([first, *(f"    {line}" for line in more)])
    if "tqdm" in sys.modules:
        sys.modules["tqdm"].tqdm.write(shown, file=sys.stderr)
    else:
        print(shown, file=sys.stderr)


def format_bytes(nbytes: float) -> str:
    """Format bytes in binary units with three digits: ``512 B``, ``1.50 GiB``."""
    return _format_scaled(nbytes, 1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"))


def format_both(nbytes: int) -> str:
    """Format bytes in binary and, from 1 GB, decimal units."""
    return format_bytes(nbytes) + (f" ({format_count(nbytes)}B)" if nbytes >= 1_000_000_000 else "")


def format_count(count: float) -> str:
    """Format a count with three digits: ``512``, ``304 M``, ``1.02 T``."""
    return _format_scaled(count, 1000, ("", "k", "M", "G", "T", "P")).rstrip()


def _format_scaled(value: float, base: int, units: Sequence[str]) -> str:
    at = 0
    while at + 1 < len(units) and abs(value) >= base - 0.5:
        value, at = value / base, at + 1
    digits = 0 if at == 0 and value == int(value) else max(0, 2 - int(math.log10(max(abs(value), 1))))
    return f"{value:.{digits}f} {units[at]}"


def format_duration(seconds: float) -> str:
    """Format seconds as ``0.42 s``, ``50 s``, ``3 min 20 s``, ``2 h 05 min``."""
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
    """Format rows as aligned columns; ``right`` numbers the right-aligned ones."""
    cells = [[escape(str(cell)) for cell in row] for row in ([header, *rows] if header else rows)]
    widths = [max(len(row[at]) for row in cells) for at in range(len(cells[0]))] if cells else []
    lines = []
    for row in cells:
        padded = [c.rjust(w) if at in right else c.ljust(w) for at, (c, w) in enumerate(zip(row, widths, strict=True))]
        lines.append("  ".join(padded).rstrip())
    return lines
