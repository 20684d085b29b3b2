"""`python -m tests.fuzz`: failures of earlier runs first, then fresh numbers until the time has passed."""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import random
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

from tests.fuzz.kinds import KINDS
from tests.fuzz.worker import Outcome, serve

HUNG = 180.0
"""Seconds after which a process is killed with its case."""
FRESH = 500  # cases after which a process is replaced
DATABASE = Path(".fuzz")
_KEPT = 3  # cases of one cause that are shown and kept


class Worker:
    """One process for many cases, which is replaced after a case that had to be killed."""

    def __init__(self) -> None:
        self._context = mp.get_context("fork")
        self._process: mp.process.BaseProcess | None = None
        self._cases = 0

    def run(self, kind: str, number: int) -> Outcome:
        if self._process is None or self._cases >= FRESH:
            self.close()
            self._start()
        self._cases += 1
        self._connection.send((kind, number))
        if not self._connection.poll(HUNG):
            self.close()
            return Outcome(kind, number, f"did not come back within {HUNG:.0f} s", "hung")
        try:
            found: Outcome = self._connection.recv()
        except (EOFError, OSError):
            code = self.close()
            return Outcome(kind, number, f"the process ended with exit code {code}", f"ended {code}")
        return found

    def close(self) -> int | None:
        if self._process is None:
            return None
        self._connection.close()
        self._process.join(5)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()
        code, self._process = self._process.exitcode, None
        return code

    def _start(self) -> None:
        self._connection, peer = self._context.Pipe()
        self._process = self._context.Process(target=serve, args=(peer,), daemon=True)
        self._process.start()
        peer.close()
        self._cases = 0


class Failures:
    """Failures in files, one per case, with which the next run begins."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.causes: Counter[str] = Counter()

    def list(self) -> list[tuple[str, int]]:
        kept = [path.stem.split("-") for path in sorted(self.folder.glob("*.json"))]
        return [(kind, int(number)) for kind, number in kept if kind in KINDS]

    def note(self, outcome: Outcome) -> None:
        """Show and keep a failure, or remove one that is fixed."""
        path = self.folder / f"{outcome.kind}-{outcome.number}.json"
        if not outcome.error:
            path.unlink(missing_ok=True)
            return
        self.causes[f"{outcome.kind}: {outcome.mark}"] += 1
        if self.causes[f"{outcome.kind}: {outcome.mark}"] > _KEPT:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"mark": outcome.mark, "error": outcome.error}, indent=1))
        tail = outcome.error.strip().splitlines()[-12:]
        print(f"FAILURE {outcome.kind}:{outcome.number} ({outcome.mark})", *tail, sep="\n    ", flush=True)


def draw_cases(kinds: list[str], seconds: float) -> Iterator[tuple[str, int]]:
    """Yield kinds in turn, each with a fresh number, until the time has passed."""
    fresh, end = random.SystemRandom(), time.monotonic() + seconds
    while True:
        for kind in kinds:
            if time.monotonic() >= end:
                return
            yield kind, fresh.randrange(10**12)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--case", metavar="KIND:NUMBER", help="only this one, as a failure names it")
    options = parser.parse_args()
    failures, worker, counts, slowest = Failures(DATABASE), Worker(), Counter[str](), Outcome("none", 0)
    if options.case:
        kind, _, number = options.case.partition(":")
        cases: Iterable[tuple[str, int]] = [(kind, int(number))]
    else:
        again = [case for case in failures.list() if case[0] in options.kinds]
        cases = chain(again, draw_cases(options.kinds, options.seconds))
    try:
        for case in cases:
            outcome = worker.run(*case)
            slowest = max(slowest, outcome, key=lambda each: each.seconds)
            counts[case[0]] += 1
            failures.note(outcome)
    except KeyboardInterrupt:
        pass
    finally:
        worker.close()
    print(", ".join(f"{counts[kind]} {kind}" for kind in options.kinds), f"= {sum(counts.values())} cases")
    print(f"slowest: {slowest.kind}:{slowest.number}, {slowest.seconds:.1f} s of processor time")
    for cause, count in failures.causes.most_common():
        print(f"{count:6d} failed: {cause}")
    return 1 if failures.causes else 0


if __name__ == "__main__":
    sys.exit(main())
