"""Plan single ranks of jobs with thousands of ranks, with the real planner; fails above a limit of time or memory.

python bench/scale.py --quick     tiny models: does everything run?
python bench/scale.py             writes its section of docs/benchmarks.md
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the plugin of this checkout, even if another one is installed
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))

from jobs import JOBS, QUICK_JOBS, Job  # noqa: E402
from report import MIB, make_table, write_part  # noqa: E402
from scale_plan import Planned, make_job_script, plan_rank  # noqa: E402

SECONDS, PEAK_MIB = 5.0, 1024.0


def plan_job(name: str, job: Job, count: int) -> list[Planned]:
    """Plan some ranks of a job, the first and the last among them, in a process each."""
    ranks, plans = sorted({number * (job.ranks - 1) // max(count - 1, 1) for number in range(count)}), []
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as pool:
        script = pool.submit(make_job_script, name, ranks).result()
        for rank in ranks:
            plans.append(plan := pool.submit(plan_rank, name, script, rank).result())
            text = f"rank {rank} plans in {plan.seconds:.2f} s, {plan.peak_bytes / MIB:.0f} MiB"
            print(f"{job.title}: {text}", file=sys.stderr, flush=True)
    return plans


def make_row(title: str, plans: Sequence[Planned]) -> list[str]:
    """Make the row of a job; each figure is that of the worst rank."""
    return [
        title,
        f"{max(plan.seconds for plan in plans):.2f}",
        f"{max(plan.peak_bytes for plan in plans) / MIB:.0f}",
        f"{plans[0].records:,}",
        f"{max(sum(plan.received.values()) for plan in plans) / MIB:.1f}",
        f"{max(plan.requests for plan in plans):,}",
    ]


def make_section(rows: Sequence[Sequence[str]], command: str) -> str:
    """Make the section of docs/benchmarks.md."""
    limits = f"seconds (≤ {SECONDS:g})", f"peak MiB (≤ {PEAK_MIB:g})"
    header = ("one rank of", *limits, "records", "received MiB", "reads")
    return f"""## At scale

`{command}`. The planner is real; files, peers and storage are simulated. Models of 10^12 parameters: a GPT
(TP8 PP64), and 128 layers of 256 experts. The worst of some ranks: processor time until the list of reads is made, and
data received in collectives. The command fails above a limit.

{make_table(header, rows)}"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", nargs="+", choices=JOBS, help="plan these only")
    parser.add_argument("--samples", type=int, default=2, help="number of ranks of each job")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    jobs = QUICK_JOBS if args.quick else {name: JOBS[name] for name in args.jobs or JOBS}
    rows, excesses = [], []
    for name, job in jobs.items():
        plans = plan_job(name, job, args.samples)
        rows.append(make_row(job.title, plans))
        if any(plan.seconds > SECONDS or plan.peak_bytes > PEAK_MIB * MIB for plan in plans):
            excesses.append(f"{job.title}: a plan exceeds {SECONDS:g} s or {PEAK_MIB:g} MiB")
    section = make_section(rows, " ".join(["bench/scale.py", *sys.argv[1:]]))
    print(section)
    if not (args.quick or args.jobs):
        write_part("bench/scale.py", section)
    if excesses:
        sys.exit("\n".join(excesses))


if __name__ == "__main__":
    main()
