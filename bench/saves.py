"""What saves cost that do not stop training, each against a floor and against others, on the same engine.

    python bench/saves.py --params-m 20 --rounds 2     prints a table: does everything run?
    python bench/saves.py                              writes its section of docs/benchmarks.md

`--dlrover FOLDER` measures DLRover's flash checkpoint as well, which is no dependency of anything here:
`pip install --target FOLDER dlrover==0.6.1`. Nothing else may run on the machine meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*sys.path[:2], os.environ.get("PYTHONPATH")]))

import psutil  # noqa: E402
import saves_ranks  # noqa: E402
from cold import make_cold  # noqa: E402
from peers import remove_flash  # noqa: E402
from report import SAVES, describe_machine, put_part  # noqa: E402
from saves_ranks import Figures, Plan  # noqa: E402
from saves_report import make_section  # noqa: E402

from deepspeed_ucp.config import SaveOptions  # noqa: E402
from deepspeed_ucp.testing import WorldPool  # noqa: E402

TARGETS = {"2 ranks ZeRO-1": (2, 1), "4 ranks ZeRO-3": (4, 3)}
"""Ranks and ZeRO stage of what resumes."""

RANKS, PARAMS_M, ROUNDS = 4, 300.0, 5


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def measure_resumes(
    worlds: WorldPool, plan: Plan, ranks: int, targets: Mapping[str, tuple[int, int]]
) -> dict[str, Any]:
    """Loads of one save, from memory and from a disk whose cache is cold, beside each other in each round."""
    worlds.get(ranks).run(saves_ranks.save_once, plan)
    found: dict[str, list[Figures]] = {name: [] for name in targets}
    for round_ in range(plan.rounds):
        for name, (count, stage) in targets.items():
            told: Figures = {}
            for cold in random.Random(round_).sample([False, True], 2):
                worlds.close()  # DeepSpeed keeps the memory of engines at ZeRO 3 that have been destroyed
                make_cold(Path(plan.folder))
                loaded = worlds.get(count).run(saves_ranks.resume, plan, stage, cold=cold)[0]
                told |= {f"cold {key}": value for key, value in loaded.items()} if cold else loaded
            found[name].append(told)
    return found


def measure_lost_node(worlds: WorldPool, plan: Plan) -> list[Figures]:
    """Two nodes save, one's memory is gone, and the other one resumes alone; both are on this machine, whose memory has
    four copies and two engines."""
    found = []
    for round_ in range(plan.rounds):
        with tempfile.TemporaryDirectory(dir=plan.memory) as memory:
            part = replace(
                plan, memory="$NODE_MEMORY", folder=f"{plan.folder}/lost{round_}", options={"copies": 1, "wait_s": 600}
            )
            for node in range(2):
                Path(memory, f"node{node}").mkdir()
            worlds.get(2).run(saves_ranks.on_node, saves_ranks.save_once, memory, part)
            end_writers(memory)
            subprocess.run(["rm", "-r", f"{memory}/node1"], check=True)
            loaded = worlds.get(1).run(saves_ranks.on_node, saves_ranks.resume, memory, part, 1)
        found.append(loaded[0])
    return found


def end_writers(memory: str) -> None:
    """End the processes that write what lies below a folder: they outlive their ranks."""
    for process in psutil.process_iter(["cmdline"]):
        if any(argument.startswith(memory) for argument in process.info["cmdline"] or ()):
            process.kill()
            process.wait(10)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    run = f"ucp-bench-{uuid.uuid4().hex[:8]}"
    out = ROOT / "bench_out"
    out.mkdir(exist_ok=True)
    with ExitStack() as stack:
        memory = stack.enter_context(tempfile.TemporaryDirectory(prefix=f"{run}-", dir=args.memory))
        stack.callback(end_writers, memory)
        stack.callback(remove_flash, run)
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix=f"{run}-", dir=out))
        flash = str(args.dlrover.resolve()) if args.dlrover else ""
        plan = Plan(args.params_m, args.rounds, memory, folder, flash, run)
        with WorldPool(timeout=3600) as worlds:
            say("saves")
            found: dict[str, Any] = {"saves": worlds.get(args.ranks).run(saves_ranks.measure_saves, plan)[0]}
        with WorldPool(timeout=3600) as worlds:
            say("resumes")
            found["resumes"] = measure_resumes(worlds, replace(plan, folder=f"{folder}/resumed"), args.ranks, TARGETS)
            if "copies" in SaveOptions.model_fields:
                say("a lost node")
                found["lost"] = measure_lost_node(worlds, replace(plan, params_m=plan.params_m / 3))
    return found


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params-m", type=float, default=PARAMS_M)
    parser.add_argument("--ranks", type=int, default=RANKS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--memory", default="/dev/shm", help="folder in memory")
    parser.add_argument("--dlrover", type=Path, metavar="FOLDER", help="that DLRover is installed in")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    found = measure(args)
    command = " ".join(["python", *sys.argv]).replace(str(args.dlrover), "FOLDER")
    found |= {"command": command, "machine": describe_machine(), "params_m": args.params_m, "ranks": args.ranks}
    (ROOT / "bench_out" / "saves.json").write_text(json.dumps(found, indent=1))
    section = make_section(found)
    is_whole = args.params_m >= PARAMS_M and args.ranks == RANKS and args.rounds >= 3
    page = (ROOT / "docs" if is_whole else ROOT / "bench_out") / "benchmarks.md"
    page.write_text(put_part(page.read_text() if page.exists() else "", SAVES, section))
    print(f"{section}\n\nwritten to {page}")


if __name__ == "__main__":
    main()
