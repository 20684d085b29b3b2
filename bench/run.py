"""`make bench`: how long resuming, converting, exporting and checking take, against the storage and upstream.

All cases run in one go on one checkpoint, in rounds; before every measurement the page cache is emptied and checked.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the plugin of this checkout, also when it is not installed
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))

from loads import Bench  # noqa: E402
from offline import Bench as OfflineBench  # noqa: E402
from report import (  # noqa: E402
    AT_SCALE,
    SAVES,
    SUMMARY,
    Results,
    describe_machine,
    explain,
    find_part,
    make_section,
    put_part,
    put_sections,
    summarise,
    table,
)
from suites import OFFLINE, SUITES, Suite  # noqa: E402

import deepspeed_ucp  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

TITLES = {suite.name: suite.short for suite in SUITES}
ALL = (*SUITES, *OFFLINE)
README_ROWS = (
    "resume: ZeRO-1, 4 ranks → 2 ranks ZeRO-1",
    "resume: ZeRO-1, 4 ranks → 2 ranks ZeRO-3",
    "resume: TP2 PP2, ZeRO-1 → TP4",
    "`ds_ucp convert`: ZeRO-1, 4 ranks",
    "`ds_ucp export`: ZeRO-1, 4 ranks",
)
"""Titles of the rows that README shows; docs/benchmarks.md has all."""

TITLE = "# Benchmarks\n\nHow long do loads, saves and commands take, compared with the hardware and other programs?"
Found = dict[str, dict[str, Any]]
"""Results as JSON, by suite and checkpoint."""

FIGURES = ("<!-- figures: written by make bench -->", "<!-- end of figures -->")


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


def run_source(suite: Suite, folder: Path, args: argparse.Namespace, found: Found) -> None:
    """Measure all chosen cases of one suite's checkpoint; results go into `found`."""
    folder.mkdir(parents=True, exist_ok=True)
    bench = Bench(suite, folder.resolve(), args.params_m * suite.share, say)
    bench.save()
    if suite.name in args.suites:
        note(found, suite.name, suite.name, bench.run(args.rounds, args.only, tell_command()))
    for offline in OFFLINE:
        if offline.name in args.suites and suite in offline.sources:
            say(f"suite {offline.name}: {suite.short}")
            commands = OfflineBench(bench.describe(), offline.cases, say)
            note(found, offline.name, suite.name, commands.run(args.rounds, args.only, tell_command()))


def note(found: Found, suite: str, source: str, results: Results | None) -> None:
    if results is not None:
        found.setdefault(suite, {})[source] = results.data()


def tell_command() -> str:
    return " ".join(sys.argv)


def make_page(found: Found, before: str = "") -> str:
    """docs/benchmarks.md from the results of all suites that have been measured; other sections as they were before."""
    sections, newest = [], None
    for suite in (each for each in ALL if each.name in found):
        results = restore(found[suite.name])
        about = suite.about
        if isinstance(suite, Suite):
            newest = results[suite.name]
            about = suite.tell(newest)
        titles = {"" if isinstance(suite, Suite) else TITLES[source]: each for source, each in results.items()}
        sections.append(make_section(suite.title, about, titles, suite.cases))
    if before:
        return put_sections(before, sections)
    how = f"{explain(newest)}\n\n" if newest else ""
    return f"{TITLE}\n\n`make bench` on {describe_machine()}.\n\n{how}" + "\n".join(sections)


def restore(found: Mapping[str, Any]) -> dict[str, Results]:
    return {source: Results.restore(data) for source, data in found.items()}


def update_readme(found: Found) -> None:
    """Put the figures between README's marks, where there are any, and what they come from."""
    file = ROOT / "README.md"
    page = file.read_text()
    if not find_part(page, FIGURES):
        return
    rows: list[list[str]] = []
    sizes: dict[str, list[int]] = {}
    for suite in (each for each in ALL if each.name in found):
        for source, results in restore(found[suite.name]).items():
            rows += summarise(results, suite.cases, TITLES[source])
            sizes.setdefault(results.command, []).append(results.parameters)
    shown = [row for row in rows if row[0] in README_ROWS]
    file.write_text(put_part(page, FIGURES, f"{_tell_sources(sizes)}\n\n{table(SUMMARY, shown)}"))


def _tell_sources(sizes: dict[str, list[int]]) -> str:
    """Which commands have measured, each with the parameters of its models."""
    told = []
    for command, parameters in sizes.items():
        low, high = round(min(parameters) / 1e6), round(max(parameters) / 1e6)
        told.append(f"`{command}` ({low if low == high else f'{low} to {high}'} M parameters)")
    return "Measured by " + ",\n".join(told) + ":"


def is_wanted(suite: Suite, names: Sequence[str]) -> bool:
    """Return True if chosen cases need this suite's checkpoint."""
    return suite.name in names or any(each.name in names and suite in each.sources for each in OFFLINE)


def parse_arguments() -> argparse.Namespace:
    names = [suite.name for suite in ALL]
    cases = sorted({case.name for suite in ALL for case in suite.cases})
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--suites", nargs="+", choices=names, default=names, help="measure these; the last results of the others stay"
    )
    parser.add_argument("--params-m", type=float, help="millions of parameters (default 300, with --quick 4)")
    parser.add_argument("--rounds", type=int, help="default 3, with --quick 1")
    parser.add_argument("--only", nargs="+", choices=cases, help="measure these cases only")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep checkpoints there, and use them when they exist")
    parser.add_argument("--output", type=Path, help="default docs/benchmarks.md; in bench_out/ with --only or --quick")
    parser.add_argument("--quick", action="store_true", help="a tiny model and one round: does everything run?")
    args = parser.parse_args()
    args.params_m = args.params_m or (4 if args.quick else 300)
    args.rounds = args.rounds or (1 if args.quick else 3)
    args.partial = bool(args.only) or args.quick
    return args


def main() -> None:
    args = parse_arguments()
    deepspeed_ucp.uninstall()  # the ranks are forked
    out = ROOT / "bench_out"
    out.mkdir(exist_ok=True)
    (out / ".gitignore").write_text("*\n")
    note = out / ("partial.json" if args.partial else "results.json")
    found: Found = json.loads(note.read_text()) if note.exists() and not args.partial else {}
    folder = args.keep or out / "work"
    try:
        for suite in SUITES:
            if not is_wanted(suite, args.suites):
                continue
            say(f"suite {suite.name}: {suite.title}")
            run_source(suite, folder / suite.name, args, found)
            note.write_text(json.dumps(found, indent=1))
            if not args.keep:  # two checkpoints may be more than the disk has room for
                shutil.rmtree(folder / suite.name)
        note.write_text(json.dumps(found, indent=1))
        is_whole = not args.partial and {*found} == {suite.name for suite in ALL}
        output = args.output or (out if args.partial else ROOT / "docs") / "benchmarks.md"
        before = output.read_text() if output.exists() else ""
        kept = [part for part in (find_part(before, marks) for marks in (AT_SCALE, SAVES)) if part]
        for part in kept:
            before = before.replace(part, "")
        page = make_page(found, "" if is_whole or args.partial else before)
        for part in kept:
            page = f"{page.rstrip()}\n\n{part}\n"
        output.write_text(page)
        if is_whole and not args.output:
            update_readme(found)
        print(f"\n{page}\nwritten to {output}")
    finally:
        if not args.keep:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
