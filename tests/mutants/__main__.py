"""`python -m tests.mutants`: apply each mutant to a copy of the checkout and run the tests that must detect it."""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import yaml

ROOT = Path(__file__).parents[2]
TIMEOUT = 300  # seconds for the tests of one mutant
_MEMORY = 6 << 30  # bytes of address space


@dataclass(frozen=True)
class Mutant:
    """One mutant: replace `old`, which is in `file` exactly once, by `new`."""

    number: int
    file: str
    old: str
    new: str
    breaks: str
    tests: str

    def __str__(self) -> str:
        return f"{self.number:3d} {self.file}: {self.breaks}"


def read_mutants() -> list[Mutant]:
    rows = yaml.safe_load(Path(__file__).with_name("mutants.yaml").read_text())
    return [Mutant(number, **each) for number, each in enumerate(rows, 1)]


def find_stale(mutants: list[Mutant], root: Path = ROOT) -> list[str]:
    """List mutants whose text is not in the code exactly once."""
    stale = []
    for mutant in mutants:
        path = root / "deepspeed_ucp" / mutant.file
        count = path.read_text().count(mutant.old) if path.exists() else 0
        if count != 1:
            stale.append(f"{mutant}: its text occurs {count} times")
        stale += [f"{mutant}: {test} does not exist" for test in mutant.tests.split() if not (root / test).exists()]
    return stale


def copy_checkout(folder: Path) -> None:
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def run_tests(tests: list[str], root: Path) -> int:
    """Run pytest in a copy of the checkout. Return its exit code; a test that hangs has failed."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-o", "timeout=60", *tests]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    with open(root / "output", "w") as out:
        child = subprocess.Popen(command, cwd=root, env=environment, stdout=out, stderr=out, start_new_session=True)
    resource.prlimit(child.pid, resource.RLIMIT_AS, (_MEMORY, _MEMORY))  # an endless loop may fill it
    try:
        return child.wait(TIMEOUT)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, 9)
        return 1


def judge(mutant: Mutant, roots: SimpleQueue[Path]) -> tuple[Mutant, bool, float]:
    """Judge a mutant in a free copy of the checkout. Return it, whether tests detect it, and the seconds."""
    start, root = time.monotonic(), roots.get()
    path = root / "deepspeed_ucp" / mutant.file
    text = path.read_text()
    path.write_text(text.replace(mutant.old, mutant.new))
    try:
        code, output = run_tests(mutant.tests.split(), root), (root / "output").read_text()[-2000:]
    finally:
        path.write_text(text)
        roots.put(root)
    if code not in (0, 1, 2) and "MemoryError" not in output:
        raise RuntimeError(f"pytest ended with {code}: {output}")
    return mutant, code > 0, time.monotonic() - start


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("numbers", nargs="*", type=int, help="run only these mutants")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="number of concurrent runs")
    parser.add_argument("--list", action="store_true", help="list the mutants and the stale ones, and exit")
    options = parser.parse_args()
    mutants, missed = read_mutants(), []
    stale = find_stale(mutants)
    print(*stale, sep="\n", end="\n" if stale else "")
    if options.list:
        print(*mutants, sep="\n")
        return bool(stale)
    chosen = [each for each in mutants if not options.numbers or each.number in options.numbers]
    with tempfile.TemporaryDirectory(prefix="ucp-mutants-") as folder, ThreadPoolExecutor(options.jobs) as pool:
        roots: SimpleQueue[Path] = SimpleQueue()
        for number in range(options.jobs):
            copy_checkout(Path(folder) / str(number))
            roots.put(Path(folder) / str(number))
        for mutant, caught, seconds in pool.map(lambda each: judge(each, roots), chosen):
            print(f"{'caught' if caught else 'MISSED'} {mutant} ({seconds:.0f} s)", flush=True)
            missed += [] if caught else [mutant]
    print(f"{len(missed)} of {len(chosen)} mutants were missed")
    return 1 if missed or stale else 0


if __name__ == "__main__":
    sys.exit(main())
