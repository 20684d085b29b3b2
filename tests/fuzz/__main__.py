"""`python -m tests.fuzz`: failures of earlier runs first, then fresh numbers until the time has passed."""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing as mp
import os
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from itertools import chain
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from tests.fuzz.kinds import FOREIGN, KINDS, SOURCES, write_once

CPU_SECONDS = 20.0
"""Limit of a case; the largest file has 30 KB."""
MEMORY = 300 << 20
"""Bytes by which a case may raise the peak memory of the process."""
HUNG = 180.0
"""Seconds after which a process is killed with its case."""
DATABASE = Path(".fuzz")
_KEPT = 3  # cases of one cause that are shown and kept
_LIMIT = 3 << 30  # bytes of address space, in addition to the initial size
_CONTEXT = mp.get_context("fork")


class Outcome(NamedTuple):
    """The result of a case; `error` is empty if it passed, and `mark` is equal for failures of one cause."""

    kind: str
    number: int
    error: str = ""
    mark: str = ""
    seconds: float = 0.0


class TooSlow(BaseException):
    """A case has used up its processor time."""


def run_case(kind: str, number: int, root: Path) -> Outcome:
    """Run a case in this process. Return its error as its outcome."""
    error, mark, start = "", "", time.process_time()
    with suppress(OSError):  # resets the peak
        Path("/proc/self/clear_refs").write_text("5")
    held = _read_peak()
    try:
        with _timer(), open(os.devnull, "w") as sink, redirect_stdout(sink), redirect_stderr(sink):
            KINDS[kind](random.Random(f"{kind} {number}"), root)
        if (rise := _read_peak() - held) > MEMORY:
            error, mark = f"{rise >> 20} MiB of memory were taken", "memory"
    except BaseException as caught:  # noqa: BLE001 - any error is a result
        error, mark = traceback.format_exc(), _mark(caught)
    return Outcome(kind, number, error, mark, time.process_time() - start)


def _mark(error: BaseException) -> str:
    """Return the kind of error and the innermost line of the package."""
    frames = traceback.extract_tb(error.__traceback__)
    last = ([frame for frame in frames if "deepspeed_ucp/" in frame.filename] or list(frames))[-1]
    line = str(error).partition("\n")[0][:80] if isinstance(error, AssertionError) else ""
    return f"{type(error).__name__} at {last.filename.rpartition('deepspeed_ucp/')[2]}:{last.name} {line}".strip()


@contextmanager
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


def _read_peak() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


def run_apart(kind: str, number: int, root: Path) -> Outcome:
    """Run a case in a child, which is killed if it hangs."""
    receiver, sender = _CONTEXT.Pipe(duplex=False)
    child = _CONTEXT.Process(target=_serve, args=(sender, kind, number, root))
    child.start()
    sender.close()
    try:
        if not receiver.poll(HUNG):
            return Outcome(kind, number, f"did not come back within {HUNG:.0f} s", "hung")
        found: Outcome = receiver.recv()
        return found
    except (EOFError, OSError):
        child.join()
        return Outcome(kind, number, f"the process ended with exit code {child.exitcode}", f"ended {child.exitcode}")
    finally:
        child.kill()
        child.join()


def _serve(connection: Connection, kind: str, number: int, root: Path) -> None:
    """Run a case in a child with limits, and send its outcome."""
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + _LIMIT, resource.RLIM_INFINITY))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles interrupts
    os.environ["TMPDIR"] = tempfile.tempdir = str(root)
    connection.send(run_case(kind, number, root))


def note(outcome: Outcome, causes: Counter[str]) -> None:
    """Show and keep a failure, or remove one that is fixed."""
    path, cause = DATABASE / f"{outcome.kind}-{outcome.number}.json", f"{outcome.kind}: {outcome.mark}"
    if not outcome.error:
        path.unlink(missing_ok=True)
        return
    causes[cause] += 1
    if causes[cause] <= _KEPT:
        DATABASE.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"mark": outcome.mark, "error": outcome.error}, indent=1))
        tail = outcome.error.strip().splitlines()[-12:]
        print(f"FAILURE {outcome.kind}:{outcome.number} ({outcome.mark})", *tail, sep="\n    ", flush=True)


def draw_cases(kinds: list[str], seconds: float) -> Iterator[list[str]]:
    """Yield kinds in turn, each with a fresh number, until the time has passed."""
    fresh, end = random.SystemRandom(), time.monotonic() + seconds
    while True:
        for kind in kinds:
            if time.monotonic() >= end:
                return
            yield [kind, str(fresh.randrange(10**12))]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--case", metavar="KIND:NUMBER", help="only this one, as a failure names it")
    options = parser.parse_args()
    causes, counts, slowest = Counter[str](), Counter[str](), Outcome("none", 0)
    again = (path.stem.split("-") for path in sorted(DATABASE.glob("*.json")))
    cases: Iterable[list[str]] = (
        [options.case.split(":")]
        if options.case
        else chain([case for case in again if case[0] in options.kinds], draw_cases(options.kinds, options.seconds))
    )
    with suppress(KeyboardInterrupt), tempfile.TemporaryDirectory(prefix="ucp-fuzz-") as root:
        for source in [*SOURCES, *FOREIGN]:
            write_once(Path(root), source.name)  # for all children
        for kind, number in cases:
            outcome = run_apart(kind, int(number), Path(root))
            slowest = max(slowest, outcome, key=lambda each: each.seconds)
            counts[kind] += 1
            note(outcome, causes)
    print(", ".join(f"{counts[kind]} {kind}" for kind in options.kinds), f"= {sum(counts.values())} cases")
    print(f"slowest: {slowest.kind}:{slowest.number}, {slowest.seconds:.1f} s of processor time")
    for cause, count in causes.most_common():
        print(f"{count:6d} failed: {cause}")
    return 1 if causes else 0


if __name__ == "__main__":
    sys.exit(main())
