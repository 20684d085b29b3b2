"""Jobs of thousands of ranks over the real planner: one rank's plan and all ranks' reads.

    python bench/scale.py --quick     tiny models: does everything run?
    python bench/scale.py             writes its section of docs/benchmarks.md

Each rank's plan is made in a process of its own (`scale_plan.py`); results stay in bench_out/scale.json, so that
`--jobs` and `--whole` measure some of them anew.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the plugin of this checkout, also when it is not installed
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))

from collectives import AllRanks  # noqa: E402
from grid import PER_NODE  # noqa: E402
from jobs import JOBS, Job  # noqa: E402
from report import AT_SCALE, MIB, Target, describe_targets, put_part, table  # noqa: E402
from sample import JobTarget  # noqa: E402
from scale_plan import FOLDER, SIZES, stand_in  # noqa: E402
from whole import count_exchanged, imbalance, plan_all, sum_nodes  # noqa: E402

from deepspeed_ucp.formats.open import open_checkpoint  # noqa: E402
from deepspeed_ucp.io.memory import pause_collection  # noqa: E402

PLANNED = ("dense1-1k", "dense3-1k", "moe-1k", "dense1-10k", "dense3-10k", "moe-10k")
WHOLE = ("dense1-1k", "moe-1k", "dense1-10k", "dense3-mid")
QUICK = ("dense1-quick", "dense3-quick", "moe-quick")
SECONDS, PEAK_MIB = 5.0, 1024.0
BEHIND = (
    "rounds",
    "copies",
    "checks.send_checks",
    "scale_plan.follow",
    "scale_plan._exchange",
    "duplicates._check_master_samples",
)
"""Steps behind the plan."""


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def choose_ranks(job: Job, count: int) -> list[int]:
    """Spread over the job, the first and the last among them."""
    return sorted({number * (job.ranks - 1) // max(count - 1, 1) for number in range(count)})


def plan_job(name: str, count: int, folder: Path) -> dict[str, Any]:
    """Plans of some ranks, each in a process of its own."""
    job = JOBS[name]()
    ranks, found = list(map(str, choose_ranks(job, count))), []
    options = ["--job", name, "--script", str(folder / f"{name}.pickle")]
    _call([*options, "--make", *ranks])
    for rank in ranks:
        found.append(json.loads(_call([*options, "--rank", rank])))
        say(f"{job.title}: rank {rank} plans in {_seconds(found[-1]):.2f} s, {found[-1]['peak_bytes'] / MIB:.0f} MiB")
    (folder / f"{name}.pickle").unlink()
    return {"title": job.title, "parameters": job.parameters, "ranks": found}


def _call(options: Sequence[str]) -> str:
    script = str(Path(__file__).with_name("scale_plan.py"))
    return subprocess.run([sys.executable, script, *options], stdout=subprocess.PIPE, check=True, text=True).stdout


def _seconds(planned: dict[str, Any]) -> float:
    return float(sum(planned["phases"].values()))


def load_job(name: str) -> dict[str, Any]:
    """Plan all ranks of a job."""
    job = JOBS[name]()
    headers = {header.name: header for header in job.source.headers()}
    with stand_in({n: h.size for n, h in headers.items()}, headers.__getitem__), pause_collection():
        index = open_checkpoint(FOLDER, AllRanks(0, job.ranks))
        say(f"{job.title}: all ranks plan")
        plans = plan_all(index, JobTarget(index, job), SIZES, say)
    read = [sum(each[2] for each in plan.reads) for plan in plans]
    requests = [len(plan.reads) for plan in plans]
    own, inside, outside = count_exchanged(plans, PER_NODE)
    return {
        "title": job.title,
        "ranks": job.ranks,
        "read": sum(read),
        "requests": sum(requests),
        "most_requests": max(requests),
        "node_requests": max(sum_nodes(requests, PER_NODE)),
        "node_imbalance": imbalance(sum_nodes(read, PER_NODE)),
        "wanted_imbalance": imbalance(sum_nodes([plan.wanted for plan in plans], PER_NODE)),
        "rounds": max(len(plan.rounds) for plan in plans),
        "own": own,
        "inside": inside,
        "outside": outside,
    }


def make_scale_section(found: dict[str, Any]) -> str:
    """The section of docs/benchmarks.md."""
    plans, whole = list(found["plans"].values()), list(found["whole"].values())
    return f"""## At scale

`{found["command"]}`. The planner is real; files, peers and storage are simulated. Models of 10^12 parameters: a GPT
(TP8 PP64), and 128 layers of 256 experts. The worst of some ranks: processor time until the list of reads is made, and
data received in collectives.

{_plans_table(plans)}

{describe_targets(_make_targets(plans))}

All ranks' plans. *Balance*: bytes of the node (of {PER_NODE} ranks) that reads most over the mean; *of wants*: of the
wanted bytes. *Exchanged*: within and between nodes. The ZeRO-3 model has 13 B parameters.

{_reads_table(whole)}
"""


def _plans_table(plans: Sequence[dict[str, Any]]) -> str:
    header = [
        "one rank of",
        "seconds",
        "peak MiB",
        "records",
        "received MiB",
        "reads",
    ]
    rows = []
    for job in plans:
        ranks = job["ranks"]
        worst = max(ranks, key=_seconds)
        rows.append(
            [
                job["title"],
                f"{_seconds(worst):.2f}",
                f"{max(each['peak_bytes'] for each in ranks) / MIB:.0f}",
                f"{worst['records']:,}",
                f"{_heard(ranks) / MIB:.1f}",
                str(max(each["requests"] for each in ranks)),
            ]
        )
    return table(header, rows)


def _heard(ranks: Sequence[dict[str, Any]]) -> int:
    """Bytes that the worst rank receives up to the plan."""
    return max(
        sum(step["received"] for name, step in planned["steps"].items() if name not in BEHIND) for planned in ranks
    )


def _reads_table(whole: Sequence[dict[str, Any]]) -> str:
    header = ["job", "read TB", "reads of one rank", "balance", "of wants", "exchanged GB"]
    rows = [
        [
            each["title"],
            f"{each['read'] / 1e12:.3f}",
            f"{each['most_requests']:,}",
            f"{each['node_imbalance']:.3f}",
            f"{each['wanted_imbalance']:.3f}",
            f"{each['inside'] / 1e9:.2f} + {each['outside'] / 1e9:.2f}",
        ]
        for each in whole
    ]
    return table(header, rows)


def _make_targets(plans: Sequence[dict[str, Any]]) -> list[Target]:
    targets = []
    for job in plans:
        peak = max(each["peak_bytes"] for each in job["ranks"]) / MIB
        targets += [
            Target(f"{job['title']}: one rank's plan", max(map(_seconds, job["ranks"])), SECONDS, unit=" s"),
            Target(f"{job['title']}: peak memory of it", peak, PEAK_MIB, unit=" MiB"),
        ]
    return targets


def measure_scale(out: Path, plans: Sequence[str], whole: Sequence[str], count: int) -> dict[str, Any]:
    """Everything that is asked for; what was measured before of the others stays."""
    out.mkdir(parents=True, exist_ok=True)
    note = out / "scale.json"
    found: dict[str, Any] = json.loads(note.read_text()) if note.exists() else {"plans": {}, "whole": {}}
    for name in plans:
        found["plans"][name] = plan_job(name, count, out)
        note.write_text(json.dumps(found, indent=1))
    for name in whole:
        found["whole"][name] = load_job(name)
        note.write_text(json.dumps(found, indent=1))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", nargs="*", choices=JOBS, help="one rank's plans of these")
    parser.add_argument("--whole", nargs="*", choices=JOBS, help="all ranks' reads of these")
    parser.add_argument("--samples", type=int, default=2, help="ranks of each job whose plans are made")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, help="default bench_out, with --quick bench_out/quick")
    args = parser.parse_args()
    out = args.out or ROOT / "bench_out" / ("quick" if args.quick else "")
    plans, whole = (QUICK, QUICK) if args.quick else (PLANNED, WHOLE)
    chosen = [each if told is None else told for each, told in ((plans, args.jobs), (whole, args.whole))]
    found = measure_scale(out, *chosen, args.samples)
    found["command"] = "python bench/scale.py" + " --quick" * args.quick
    for kind, names in (("plans", plans), ("whole", whole)):
        found[kind] = {name: found[kind][name] for name in names if name in found[kind]}
    section = make_scale_section(found)
    folder = out if args.quick or args.out else ROOT / "docs"
    page = folder / "benchmarks.md"
    page.write_text(put_part(page.read_text() if page.exists() else "# Benchmarks\n", AT_SCALE, section))
    print(section)


if __name__ == "__main__":
    main()
