"""One case, in this process or in a child, and its outcome."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import resource
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

CPU_SECONDS = 20.0
"""Limit of a case; the largest file has 30 KB."""
MEMORY = 300 << 20
"""Bytes by which a case may raise the peak memory of the process."""
_LIMIT = 3 << 30  # bytes of address space, in addition to the initial size


@dataclass(frozen=True)
class Outcome:
    """The result of a case; `error` is empty if it passed, and `mark` is equal for failures of one cause."""

    kind: str
    number: int
    error: str = ""
    mark: str = ""
    seconds: float = 0.0


class TooSlow(BaseException):
    """A case has used up its processor time."""


def serve(connection: Connection, kind: str, number: int, root: Path) -> None:
    """Run a case in a child with limits, and send its outcome."""
    _limit()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles interrupts
    os.environ["TMPDIR"] = tempfile.tempdir = str(root)
    connection.send(run_case(kind, number, root))


def run_case(kind: str, number: int, root: Path) -> Outcome:
    """Run a case. Return its error as its outcome."""
    from tests.fuzz.kinds import KINDS

    start, held = time.process_time(), _reset_peak()
    try:
        with (
            _timer(),
            open(os.devnull, "w") as sink,
            contextlib.redirect_stdout(sink),
            contextlib.redirect_stderr(sink),
        ):
            KINDS[kind](random.Random(f"{kind} {number}"), root)
    except BaseException as error:  # noqa: BLE001 - any error is a result
        return Outcome(kind, number, traceback.format_exc(), _mark(error), time.process_time() - start)
    rise = _read_peak() - held
    if rise > MEMORY:
        return Outcome(kind, number, f"{rise >> 20} MiB of memory were taken", "memory", time.process_time() - start)
    return Outcome(kind, number, seconds=time.process_time() - start)


def _mark(error: BaseException) -> str:
    """Return the kind of error and the innermost line of the package."""
    frames = traceback.extract_tb(error.__traceback__)
    inside = [frame for frame in frames if "deepspeed_ucp/" in frame.filename] or list(frames)
    last = inside[-1]
    line = str(error).partition("\n")[0][:80] if isinstance(error, AssertionError) else ""
    return f"{type(error).__name__} at {last.filename.rpartition('deepspeed_ucp/')[2]}:{last.name} {line}".strip()


def _limit() -> None:
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + _LIMIT, resource.RLIM_INFINITY))


@contextlib.contextmanager
def _timer() -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise TooSlow(f"more than {CPU_SECONDS:.0f} s of processor time")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def _reset_peak() -> int:
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return _read_peak()


def _read_peak() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))
