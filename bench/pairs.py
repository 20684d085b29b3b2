"""Compare two checkouts: a resume and a conversion by each, in turns; prints the ratios of the medians.

    python bench/pairs.py --other ../before --limit 1.05

The ratio is this checkout's seconds over the other one's. The exit code is 1 if one is above the limit.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
from pathlib import Path
from statistics import median

BENCH = Path(__file__).resolve().parent
ROOT = os.environ.get("PAIRS_ROOT", str(BENCH.parent))  # the variable is set for a resume by one of the checkouts
os.environ |= {"DS_ACCELERATOR": "cpu", "PYTHONPATH": ROOT}
sys.path.insert(0, ROOT)

import engines  # noqa: E402
from cold import make_cold  # noqa: E402
from commands import CommandResult, run_command  # noqa: E402
from engines import Engine  # noqa: E402
from report import format_range, make_table  # noqa: E402

import deepspeed_ucp  # noqa: E402
from deepspeed_ucp.testing import World  # noqa: E402

TAG = "global_step1"
SAVED, RESUMED = Engine(4, 1), Engine(2, 3, {"universal": True})


def resume(folder: Path, params_m: float) -> float:
    """Load on two ranks at ZeRO 3; return the seconds of the slowest one."""
    with World(RESUMED.ranks, timeout=600) as world:
        ranks = world.run(engines.load, RESUMED, params_m, folder, TAG, with_plugin=True)
    return max(rank["seconds"] for rank in ranks)


def run_checkout(root: Path, arguments: list[str], folder: Path) -> CommandResult:
    """Run Python with the package of a checkout."""
    make_cold(folder)
    log, environment = folder.with_name("log"), {**os.environ, "PYTHONPATH": str(root), "PAIRS_ROOT": str(root)}
    result = run_command([sys.executable, *arguments], log, env=environment, cwd=root)
    if result.code:
        raise RuntimeError(f"{root}: exit code {result.code}\n{log.read_text(errors='replace')[-2000:]}")
    return result


def measure_resume(root: Path, folder: Path, params_m: float) -> float:
    """Measure a resume by a checkout, without the start of its processes."""
    options = ["--resume", str(folder), "--params-m", str(params_m)]
    answer = json.loads(run_checkout(root, [str(BENCH / "pairs.py"), *options], folder).output.splitlines()[-1])
    if answer["package"] != str(root / "deepspeed_ucp"):
        raise RuntimeError(f"{root} was not measured, but {answer['package']}")
    return float(answer["seconds"])


def measure_convert(root: Path, folder: Path, params_m: float) -> float:
    """Measure `ds_ucp convert` by a checkout, with the interpreter's start."""
    output = folder.with_name("converted")
    shutil.rmtree(output, ignore_errors=True)
    return run_checkout(root, ["-m", "deepspeed_ucp", "convert", str(folder), str(output), "--quiet"], folder).seconds


MEASUREMENTS = {"resume, 4 ranks ZeRO-1 → 2 ranks ZeRO-3": measure_resume, "`ds_ucp convert`": measure_convert}


def compare(other: Path, params_m: float, rounds: int, folder: Path) -> list[tuple[str, list[float], list[float]]]:
    """Return the seconds of both checkouts, measured in each round in an order that is drawn."""
    with World(SAVED.ranks, timeout=600) as world:
        world.run(engines.save, SAVED, params_m, folder)
    roots, rows = (BENCH.parent, other.resolve()), []
    for name, measure in MEASUREMENTS.items():
        seconds: dict[Path, list[float]] = {root: [] for root in roots}
        for number in range(rounds):
            for root in random.Random(number).sample(roots, 2):
                seconds[root].append(measure(root, folder, params_m))
            print(f"round {number + 1}/{rounds}  {name}: {[seconds[root][-1] for root in roots]}", file=sys.stderr)
        rows.append((name, *seconds.values()))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--other", type=Path, help="the other checkout")
    parser.add_argument("--params-m", type=float, default=150)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--limit", type=float, default=1.1)
    parser.add_argument("--resume", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.resume:
        package = str(Path(deepspeed_ucp.__file__).parent)
        print(json.dumps({"seconds": resume(args.resume, args.params_m), "package": package}))
        return
    out = BENCH.parent / "bench_out"
    out.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out) as folder:
        rows = compare(args.other, args.params_m, args.rounds, Path(folder, "checkpoint"))
    ratios = [median(this) / median(other) for _, this, other in rows]
    cells = [
        [name, format_range(this), format_range(other), f"{ratio:.3f}"]
        for (name, this, other), ratio in zip(rows, ratios, strict=True)
    ]
    print(make_table(("seconds", "this", "other", "this ÷ other"), cells))
    sys.exit(max(ratios) > args.limit)


if __name__ == "__main__":
    main()
