"""Measure loads and commands against the floor of the machine, DeepSpeed and upstream (`make bench`).

    python bench/run.py --quick     a tiny model and one round: does everything run?
    python bench/run.py             writes docs/benchmarks.md and README's table

The page cache is emptied before each measurement, and the loaded and converted states are compared with the saved ones.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path
from textwrap import fill

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the plugin of this checkout, even if another one is installed
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))

from cases import SECTIONS, SOURCES  # noqa: E402
from harness import Bench, Results  # noqa: E402
from report import GIB, describe_machine, make_table, write_part  # noqa: E402

README_ROWS = {
    "ours-2": "resume: ZeRO-1, 4 ranks → 2 ranks ZeRO-1",
    "ours-zero3": "resume: ZeRO-1, 4 ranks → 2 ranks ZeRO-3",
    "ours-tp4": "resume: TP2 PP2, ZeRO-1 → TP4",
    "ours-convert": "`ds_ucp convert`: ZeRO-1, 4 ranks",
    "ours-export": "`ds_ucp export`: ZeRO-1, 4 ranks",
}
"""Titles in README's table by case."""

README_HEADER = ("", "seconds", "÷ floor", "upstream's ÷ this", "extra MiB a rank")


def measure(args: argparse.Namespace, folder: Path) -> tuple[list[str], list[Results]]:
    """Measure the chosen cases; return the sections of docs/benchmarks.md and the results."""
    texts, all_results = [], []
    for source in SOURCES:
        bench = Bench(source, folder / source.topology.__class__.__name__, args.params_m)
        for section in (section for section in SECTIONS if section.source is source):
            cases = [case for case in section.cases if not args.only or case.name in args.only]
            if not cases:
                continue
            bench.save()
            results = bench.run(cases, args.rounds)
            about = section.about.format(size_m=bench.parameters / 1e6, state_gib=bench.state_bytes / GIB)
            texts.append(f"## {section.title}\n\n{fill(about, 120)}\n\n{results.describe()}")
            all_results.append(results)
            print(f"{texts[-1]}\n", flush=True)
        if not args.keep:
            shutil.rmtree(bench.folder, ignore_errors=True)
    return texts, all_results


def make_page(texts: list[str], rounds: int, command: str) -> str:
    """Make the part of docs/benchmarks.md."""
    sections = "\n\n".join(texts)
    return f"""`{command}` on {describe_machine()}.

*Upstream* is DeepSpeed's offline conversion and its load. Each of {rounds} rounds runs all cases with an empty page
cache. Figures are medians (min-max); a limit in brackets is a target.

* **Seconds**: `engine.load_checkpoint` on the slowest rank, without imports.
* **Floor**: as many processes and threads read the same bytes once.
* **Extra MiB**: peak resident size of the worst rank beyond engine and state. The command fails if it exceeds 320, or
  if a load reads more than 1.02 times the state from the storage.

{sections}"""


def parse_arguments() -> argparse.Namespace:
    names = sorted({case.name for section in SECTIONS for case in section.cases})
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params-m", type=float, help="millions of parameters (default 300, with --quick 4)")
    parser.add_argument("--rounds", type=int, help="default 3, with --quick 1")
    parser.add_argument("--only", nargs="+", choices=names, metavar="CASE", help=f"any of {', '.join(names)}")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep checkpoints there, and use them if they exist")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    args.params_m = args.params_m or (4 if args.quick else 300)
    args.rounds = args.rounds or (1 if args.quick else 3)
    return args


def main() -> None:
    args = parse_arguments()
    folder = args.keep or ROOT / "bench_out" / "work"
    try:
        texts, all_results = measure(args, folder)
    finally:
        if not args.keep:
            shutil.rmtree(folder, ignore_errors=True)
    if not (args.quick or args.only):
        command = " ".join(["bench/run.py", *sys.argv[1:]])
        write_part("bench/run.py", make_page(texts, args.rounds, command))
        first = {case.name: (results, case) for results in reversed(all_results) for case in results.cases}
        rows = [first[name][0].make_readme_row(title, first[name][1]) for name, title in README_ROWS.items()]
        table = f"Measured by `{command}`:\n\n{make_table(README_HEADER, rows)}"
        write_part("bench/run.py", table, ROOT / "README.md")
    excesses = [text for results in all_results for text in results.list_excesses()]
    if excesses and not args.quick:
        sys.exit("\n".join(excesses))


if __name__ == "__main__":
    main()
