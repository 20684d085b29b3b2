"""Measure saves that do not stop training, and resumes from memory, against floors and other programs.

    python bench/saves.py --quick     a tiny model and one round: does everything run?
    python bench/saves.py             writes its section of docs/benchmarks.md

Nothing else may run on the machine meanwhile.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*sys.path[:2], os.environ.get("PYTHONPATH")]))

import psutil  # noqa: E402
import saves_ranks  # noqa: E402
from cold import make_cold  # noqa: E402
from harness import log  # noqa: E402
from report import MIB, Ratio, describe_machine, format_limit, format_range, make_table, write_part  # noqa: E402
from saves_ranks import Figures, Plan  # noqa: E402

from deepspeed_ucp.testing import WorldPool  # noqa: E402

RANKS = 4
TARGETS = {"2 ranks ZeRO-1": (2, 1), "4 ranks ZeRO-3": (4, 3)}
"""Ranks and ZeRO stage of the engines that resume."""

SAVES = (
    ("stall", "one copy of the state", "copy", 1.3),
    ("stall", "DeepSpeed's own save, durable", "deepspeed", 0.15),
    ("stall", "torch's `async_save`, by a process", "torch", 1.0),
    ("durable", "`cp` and `sync`", "cp", 1.15),
)
"""Rows of the table: the figure, and the title, the figure and the limit of its comparison."""

RESUMES = (
    ("seconds", "one copy of the state", "again", 2.0),
    ("seconds", "from the disk, cache cold", "cold seconds", 0.6),
)
MEMORY = (("extra", "a save", 64), ("writer", "the writer", None))
"""Anonymous memory: the figure, its title, and its limit in MiB."""


def measure_resumes(
    worlds: WorldPool, plan: Plan, ranks: int, targets: Mapping[str, tuple[int, int]]
) -> dict[str, list[Figures]]:
    """Load one save from memory, and from a disk with a cold cache, in each round."""
    worlds.get(ranks).run(saves_ranks.save_once, plan)
    figures: dict[str, list[Figures]] = {name: [] for name in targets}
    for number in range(plan.rounds):
        for name, (count, stage) in targets.items():
            merged: Figures = {}
            for from_memory in random.Random(number).sample([False, True], 2):
                worlds.close()  # DeepSpeed keeps the memory of destroyed engines at ZeRO 3
                make_cold(Path(plan.folder))
                loaded = worlds.get(count).run(saves_ranks.resume, plan, stage, from_memory=from_memory)[0]
                merged |= loaded if from_memory else {f"cold {key}": value for key, value in loaded.items()}
            figures[name].append(merged)
            log(f"round {number + 1}/{plan.rounds}  {name}: {merged['seconds']:.2f} s")
    return figures


def join_ranks(ranks: Sequence[Sequence[Figures]]) -> list[Figures]:
    """Return the first rank's figures by round, with the largest extra memory of all ranks."""
    return [{**each[0], "extra": max(rank["extra"] for rank in each)} for each in zip(*ranks, strict=True)]


def end_writers(memory: str) -> None:
    """End the writer processes of saves below a folder, which outlive their ranks."""
    for process in psutil.process_iter(["cmdline"]):
        if any(argument.startswith(memory) for argument in process.info["cmdline"] or ()):
            process.kill()
            process.wait(10)


def measure(params_m: float, rounds: int, memory_root: str) -> tuple[list[Figures], dict[str, list[Figures]]]:
    """Return the figures of saves by round, and of resumes by target and round."""
    out = ROOT / "bench_out"
    out.mkdir(exist_ok=True)
    with ExitStack() as stack:
        memory = stack.enter_context(tempfile.TemporaryDirectory(prefix="ucp-bench-", dir=memory_root))
        stack.callback(end_writers, memory)
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="ucp-bench-", dir=out))
        plan = Plan(params_m, rounds, memory, folder)
        with WorldPool(timeout=3600) as worlds:
            log("saves")
            saves = join_ranks(worlds.get(RANKS).run(saves_ranks.measure_saves, plan))
        with WorldPool(timeout=3600) as worlds:
            log("resumes")
            return saves, measure_resumes(worlds, replace(plan, folder=f"{folder}/resumed"), RANKS, TARGETS)


def make_rows(title: str, rounds: Sequence[Figures], comparisons: Sequence[tuple]) -> list[list[str]]:
    rows = []
    for figure, other_title, other, limit in comparisons:
        values, others = ([each[name] for each in rounds] for name in (figure, other))
        ratio = str(Ratio(values, others, limit))
        rows.append([title.format(figure), format_range(values), other_title, format_range(others), ratio])
    return rows


def make_section(
    saves: Sequence[Figures], resumes: Mapping[str, Sequence[Figures]], command: str, params_m: float
) -> str:
    """Make the section of docs/benchmarks.md."""
    rows = make_rows("{}", saves, SAVES)
    for name, rounds in resumes.items():
        rows += make_rows(f"resume from memory, → {name}", rounds, RESUMES)
    memory = [
        f"{title} {format_range([each[key] / MIB for each in saves], 0)} MiB{format_limit(limit, ' MiB')}"
        for key, title, limit in MEMORY
    ]
    return f"""## Saves that do not stop training

`{command}` on {describe_machine()}.
{params_m:g} M parameters, {RANKS} ranks, ZeRO-1 in bf16, AdamW; {len(saves)} rounds.

*Stall*: until `save_checkpoint` returns on all ranks, with reused memory. torch's `async_save` keeps its shared memory,
which is faster than its default. *Durable*: from there until the seal is in the folder.

{make_table(("ours", "seconds", "compared with", "seconds", "ratio"), rows)}

Anonymous memory: {", ".join(memory)}."""


def main() -> None:
    """Measure, print, and write unless the model is tiny."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params-m", type=float, help="millions of parameters (default 300, with --quick 20)")
    parser.add_argument("--rounds", type=int, help="default 5, with --quick 1")
    parser.add_argument("--memory", default="/dev/shm", help="folder in memory")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    size, rounds = args.params_m or (20 if args.quick else 300), args.rounds or (1 if args.quick else 5)
    saves, resumes = measure(size, rounds, args.memory)
    section = make_section(saves, resumes, " ".join(["bench/saves.py", *sys.argv[1:]]), size)
    print(section)
    if not args.quick:
        write_part("bench/saves.py", section)


if __name__ == "__main__":
    main()
