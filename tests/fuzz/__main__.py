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
from contextlib import suppress
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.fuzz.kinds import FOREIGN, KINDS, SOURCES, write_once
from tests.fuzz.worker import Outcome, serve

HUNG = 180.0
"""Seconds after which a process is killed with its case."""
DATABASE = Path(".fuzz")
_KEPT = 3  # cases of one cause that are shown and kept
_CONTEXT = mp.get_context("fork")


def run_apart(kind: str, number: int, root: Path) -> Outcome:
    """Run a case in a child, which is killed if it hangs."""
    receiver, sender = _CONTEXT.Pipe(duplex=False)
    child = _CONTEXT.Process(target=serve, args=(sender, kind, number, root))
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
    failures, counts, slowest = Failures(DATABASE), Counter[str](), Outcome("none", 0)
    if options.case:
        kind, _, number = options.case.partition(":")
        cases: Iterable[tuple[str, int]] = [(kind, int(number))]
    else:
        again = [case for case in failures.list() if case[0] in options.kinds]
        cases = chain(again, draw_cases(options.kinds, options.seconds))
    with suppress(KeyboardInterrupt), TemporaryDirectory(prefix="ucp-fuzz-") as root:
        for source in [*SOURCES, *FOREIGN]:
            write_once(Path(root), source.name)  # for all children
        for case in cases:
            outcome = run_apart(*case, Path(root))
            slowest = max(slowest, outcome, key=lambda each: each.seconds)
            counts[case[0]] += 1
            failures.note(outcome)
    print(", ".join(f"{counts[kind]} {kind}" for kind in options.kinds), f"= {sum(counts.values())} cases")
    print(f"slowest: {slowest.kind}:{slowest.number}, {slowest.seconds:.1f} s of processor time")
    for cause, count in failures.causes.most_common():
        print(f"{count:6d} failed: {cause}")
    return 1 if failures.causes else 0


if __name__ == "__main__":
    sys.exit(main())
