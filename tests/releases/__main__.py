"""`python -m tests.releases`: run tests marked `releases` in an environment per row, and load all rows' saves."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
ENVIRONMENTS = ROOT / ".venv-releases"
MARKS = ("<!-- releases: written by make test-releases -->", "<!-- end of releases -->")
NAMED = ("deepspeed", "torch", "transformers", "accelerate", "lightning")
SAVES = "tests/engine/test_engine_releases.py"

ROWS: dict[str, tuple[str, ...]] = {
    **{name: (f"deepspeed=={name}",) for name in ("0.16.0", "0.16.5", "0.16.9", "0.17.6", "0.18.6")},
    **{name: (f"deepspeed=={name}",) for name in ("0.19.2", "0.19.5", "0.19.8")},
    "oldest": ("torch==2.5.1", "transformers==4.57.1", "lightning==2.6.0"),
    "transformers-4": ("transformers==4.57.1",),
    "newest": ("torch", "transformers", "accelerate", "lightning"),
}
"""Packages over the main environment: releases of DeepSpeed, then of its dependencies."""


@dataclass
class Result:
    """Results of one row's tests.

    Attributes:
        versions: of `NAMED`.
        matrix, loads: counts of passed, failed and skipped tests, and of loads of other rows' saves.
        failed: messages of failed tests by name.
    """

    day: str
    versions: dict[str, str]
    matrix: dict[str, int] = field(default_factory=dict)
    loads: dict[str, int] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def add(self, counts: dict[str, int], report: ElementTree.Element) -> None:
        """Count the tests of a report; one whose subtests fail counts once."""
        found: dict[str, str] = {}
        for case in report.iter("testcase"):
            name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
            if bad := [*case.findall("failure"), *case.findall("error")]:
                self.failed.setdefault(name, (bad[0].get("message") or "")[:300])
                found[name] = "failed"
            else:
                found.setdefault(name, "passed" if case.find("skipped") is None else "skipped")
        counts.update(Counter(found.values()))


@dataclass(frozen=True)
class Row:
    """An environment with a few packages over the main one."""

    name: str
    folder: Path
    packages: tuple[str, ...]

    @property
    def python(self) -> str:
        return str(self.folder / "bin" / "python")

    def read_result(self) -> Result | None:
        path = self.folder / "result.json"
        return Result(**json.loads(path.read_text())) if path.exists() else None

    def write_result(self, result: Result) -> None:
        (self.folder / "result.json").write_text(json.dumps(asdict(result), indent=1))

    def make(self) -> None:
        """Create the environment once; the main environment provides `pip` and all other packages."""
        done = self.folder / "made.json"
        if done.exists() and json.loads(done.read_text()) == list(self.packages):
            return
        shutil.rmtree(self.folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(self.folder)], check=True)
        site = subprocess.check_output([self.python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"])
        (Path(site.decode().strip()) / "zz_main.pth").write_text(sysconfig.get_path("purelib"))
        install = [sys.executable, "-m", "pip", "--python", self.python, "install", "-q", "--upgrade"]
        strategy = ["--upgrade-strategy", "only-if-needed", "--no-build-isolation"]  # DeepSpeed's build needs torch
        subprocess.run([*install, *strategy, *self.packages], check=True, env={**os.environ, "DS_BUILD_OPS": "0"})
        done.write_text(json.dumps(self.packages))

    def read_versions(self) -> dict[str, str]:
        code = f"import importlib.metadata as m, json; print(json.dumps({{n: m.version(n) for n in {NAMED}}}))"
        return json.loads(subprocess.check_output([self.python, "-c", code]))  # type: ignore[no-any-return]

    def run(self, tests: list[str], saves: Path) -> ElementTree.Element:
        """Run tests in this environment. Return pytest's report."""
        report = self.folder / "report.xml"
        report.unlink(missing_ok=True)
        path = os.pathsep.join([str(self.folder / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])
        extensions = {"TORCH_EXTENSIONS_DIR": str(self.folder / "torch_extensions"), "PATH": path}
        environment = {**os.environ, "UCP_RELEASE_SAVES": str(saves), "UCP_RELEASE": self.name, **extensions}
        command = [self.python, "-m", "pytest", "-q", f"--junitxml={report}", *tests]
        command += ["-o", f"cache_dir={self.folder / 'cache'}"]
        with open(self.folder / "output.txt", "a") as output:
            subprocess.run(command, cwd=ROOT, env=environment, stdout=output, stderr=output, check=False)
        if not report.exists():
            raise SystemExit(f"{self.name}: pytest did not write a report. See {self.folder / 'output.txt'}")
        return ElementTree.parse(report).getroot()


def run_matrix(row: Row, saves: Path) -> None:
    log(f"{row.name}: {' '.join(row.packages)}")
    row.make()
    result = Result(time.strftime("%Y-%m-%d"), row.read_versions())
    begin = time.monotonic()
    (row.folder / "output.txt").unlink(missing_ok=True)
    # Importing all other files takes longer than running these tests.
    files = sorted(str(f.relative_to(ROOT)) for f in ROOT.glob("tests/*/test_*.py") if ".releases\n" in f.read_text())
    result.add(result.matrix, row.run(["-m", "releases", *files], saves))
    row.write_result(result)
    log(f"{row.name}: {format_counts(result.matrix)} in {time.monotonic() - begin:.0f} s")


def run_loads(row: Row, result: Result, saves: Path) -> None:
    result.loads = {}
    for name in [
        name for name in result.failed if name.startswith("test_engine_releases::") and "for_other" not in name
    ]:
        del result.failed[name]
    result.add(result.loads, row.run([SAVES, "-k", "saves_of_other"], saves))
    row.write_result(result)
    log(f"{row.name}: saves of other releases: {format_counts(result.loads)}")


def log(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


def format_counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{counts[key]} {key}" for key in ("passed", "failed", "skipped") if counts.get(key)) or "not run"


def make_table(results: dict[str, Result]) -> str:
    varying = [name for name in NAMED if len({each.versions[name] for each in results.values()}) > 1]
    common = {name: each.versions[name] for each in results.values() for name in NAMED if name not in varying}
    lines = [format_row(["row", *varying, "engine matrix", "saves of the others"]), "|---" * (len(varying) + 3) + "|"]
    notes: dict[str, list[str]] = {}
    for row, found in results.items():
        versions = [found.versions[name] for name in varying]
        lines.append(format_row([row, *versions, format_counts(found.matrix), format_counts(found.loads)]))
        for test, message in found.failed.items():
            # The first line, without paths, which differ from run to run:
            text = re.sub(r"/\S+/", "…/", message.strip().partition("\n")[0])[:160]
            notes.setdefault(f"failed: `{test}`: {text}", []).append(row)
    days = [each.day for each in results.values()]
    fixed = [f"{name} {version}" for name, version in common.items()]
    fixed.append(f"run from {min(days, default=None)} to {max(days, default=None)}")
    items = [f"* {', '.join(names)}: {note}" for note, names in notes.items()]
    return "\n".join([*lines, "", f"In all rows: {', '.join(fixed)}.", "", *items]).strip()


def format_row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def write_between(path: Path, text: str) -> None:
    head, first, rest = path.read_text().partition(MARKS[0])
    _, last, tail = rest.partition(MARKS[1])
    if not first or not last:
        raise SystemExit(f"{path}: lacks {MARKS[0]} and {MARKS[1]}")
    path.write_text(f"{head}{first}\n\n{text}\n\n{last}{tail}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.releases", description=__doc__)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"of {', '.join(ROWS)}; without any, those not run yet")
    args, saves = parser.parse_args(), ENVIRONMENTS / "saves"
    rows = [Row(name, ENVIRONMENTS / name, packages) for name, packages in ROWS.items()]
    if unknown := set(args.rows) - set(ROWS):
        parser.error(f"{', '.join(sorted(unknown))}: no such row")
    saves.mkdir(parents=True, exist_ok=True)
    for row in rows:
        if row.name in args.rows if args.rows else row.read_result() is None:
            run_matrix(row, saves)
    results = {row.name: result for row in rows if (result := row.read_result())}
    for row in rows:
        if row.name in results:
            run_loads(row, results[row.name], saves)
    table = make_table(results)
    write_between(ROOT / "docs" / "releases.md", table)
    print(table)
    return int(any(result.failed for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
