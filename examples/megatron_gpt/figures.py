"""Repeat the correctness figures of the paper at small scale: losses after resumes under other topologies.

    python examples/megatron_gpt/figures.py fig7a      one source, many targets
    python examples/megatron_gpt/figures.py fig7b      many sources, one target
    python examples/megatron_gpt/figures.py fig8       dense with a padded vocabulary, and GQA with SwiGLU
    python examples/megatron_gpt/figures.py fig9       mixture of experts
    python examples/megatron_gpt/figures.py experts    DeepSpeed's experts, expert-parallel degrees 1, 2 and 4
    python examples/megatron_gpt/figures.py demo       short: 4 ranks with TP2 PP2, resumed on 2 ranks in three ways

Each source trains to step 100, saves, and continues to step 200. Each target resumes from the checkpoint and trains
steps 101 to 200 on the same batches. The script prints a table and writes it with the curves (JSON, PNG) to `--out`.
The exit code is 1 if a bit of a restored state differs, or if a loss exceeds its bound.

*The bound.* With the same state and batches, the losses of a target differ from those of the source only by the order
of sums and by rounding: over micro batches, data-parallel ranks, tensor-parallel parts of a row, and parts of the
sequence. Re-runs measure the effect: the source resumes in its topology with the samples of each batch shuffled, RERUNS
times with different shuffles (once for each of several sources). This changes only the order of sums. The bound is
SPREAD times the largest gap of the re-runs. The factor is needed for two reasons: a shuffle changes only sums over
samples, while other tensor-parallel ranks also round other partial sums, and the maximum of a few re-runs
underestimates the maximum of many. `moments forgotten` is an example beyond the bound: a resume with both moments set
to zero.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from config import PRESETS, Degrees, GPTConfig
from runs import PLUGIN, Job, count_differing_bits, merge_stages, resume, train_source

from deepspeed_ucp.testing import WorldPool

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from runs import Atoms

HERE = Path(__file__).resolve().parent
OUT = HERE.parents[1] / "figures_out"
BATCH = 8
STEPS, DEMO_STEPS = 200, 24  # saved after half of them
RERUNS = 3
SPREAD = 4.0
RERUN = "re-run, samples shuffled,"
PRECISIONS: Mapping[str, dict[str, Any]] = {"fp32": {}, "bf16": {"bf16": {"enabled": True}}}


@dataclass(frozen=True)
class Place:
    """A topology; ZeRO 2 and 3, sequence parallelism and experts need the `plain` build, without a PipelineModule."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    sp: int = 1
    stage: int = 1
    ep: int = 0  # 0: no experts of DeepSpeed

    @property
    def plain(self) -> bool:
        return self.stage > 1 or self.sp > 1 or self.ep > 0

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.dp * self.sp

    @property
    def label(self) -> str:
        sp = f" SP{self.sp}" if self.sp > 1 else ""
        ways = f"EP{self.ep}" if self.ep else f"TP{self.tp} PP{self.pp}{sp}"
        return f"{ways} DP{self.dp} ZeRO-{self.stage}"


@dataclass(frozen=True)
class Plan:
    """One source and its targets; `divisors` gives a tensor-parallel degree another vocabulary padding."""

    model: str
    config: GPTConfig
    source: Place
    targets: Sequence[Place]
    divisors: Mapping[int, int] = field(default_factory=dict)


@dataclass
class Row:
    """A line of the table: a resume in another topology, or a control in the source's topology without a bound."""

    model: str
    precision: str
    source: str
    target: str
    is_control: bool
    losses: dict[int, float]
    loader: str
    bits: int
    tensors: int
    gap: float

    @property
    def where(self) -> str:
        return f"{self.model}, {self.precision}: {self.source} → {self.target}"


@dataclass
class Panel:
    """A model in a precision: losses of the sources after their saves, and all resumes from these saves."""

    model: str
    precision: str
    sources: dict[str, dict[int, float]] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)

    @property
    def bound(self) -> float:
        """Return the maximum gap of a target, at least the resolution of losses, which are fp32 numbers."""
        reruns = [row.gap for row in self.rows if row.target.startswith(RERUN)]
        resolution = 2 * float(np.spacing(np.float32(max(max(losses.values()) for losses in self.sources.values()))))
        return SPREAD * max([*reruns, resolution])

    def find_faults(self) -> list[str]:
        """List differing bits, exceeded bounds, and loads by DeepSpeed."""
        targets, bound = [row for row in self.rows if not row.is_control], self.bound
        faults = [f"{row.where}: {row.bits} bits of the restored state differ" for row in self.rows if row.bits]
        faults += [
            f"{row.where}: a loss is {row.gap:.2g} off, over {bound:.2g}" for row in targets if not row.gap <= bound
        ]
        return faults + [f"{row.where}: loaded by {row.loader}" for row in targets if row.loader != PLUGIN]


SOURCE = Place(tp=2, pp=2, dp=2)
TARGETS = (
    Place(),
    Place(pp=2, dp=2),
    Place(tp=4),
    Place(pp=4),
    Place(dp=2, sp=2, stage=1),
    Place(tp=2, dp=2, stage=2),
    Place(tp=2, sp=2, stage=3),
    Place(dp=4, stage=3),
)
SOURCES = (
    Place(dp=2),
    Place(pp=2, dp=2),
    Place(tp=4),
    Place(tp=2, pp=2, dp=2),
    Place(dp=2, sp=2, stage=2),
    Place(tp=2, dp=2, stage=2),
    Place(tp=2, dp=2, stage=3),
)
EXPERTS = (
    Place(ep=1),
    Place(dp=2, ep=2, stage=2),
    Place(dp=4, ep=1),
    Place(dp=4, ep=4, stage=2),
    Place(dp=4, ep=2, stage=0),
)
FEW = (Place(dp=2), Place(tp=4), Place(tp=2, dp=2, stage=3))


def make_plans(figure: str) -> list[Plan]:
    tiny = PRESETS["tiny"]
    if figure == "fig7a":
        return [Plan("dense", tiny, SOURCE, TARGETS)]
    if figure == "fig7b":
        return [Plan("dense", tiny, source, [Place(tp=2, pp=2)]) for source in SOURCES]
    if figure == "experts":
        return [Plan("DeepSpeed's experts", PRESETS["tiny-moe-ep"], Place(dp=4, ep=2), EXPERTS)]
    source = Place(tp=2, pp=2)
    if figure == "demo":
        return [Plan("dense", tiny, source, (Place(dp=2, stage=3), Place(tp=2), Place(sp=2, stage=2)))]
    if figure == "fig8":
        # All degrees pad 250 tokens to 288 rows, so that the softmax has the same terms.
        padded = Plan("dense, padded", replace(tiny, vocabulary=250), source, FEW, {1: 288, 2: 144, 4: 72})
        return [padded, Plan("GQA, SwiGLU", PRESETS["tiny-llama"], source, FEW)]
    return [Plan("MoE, GQA, SwiGLU", PRESETS["tiny-moe"], source, FEW)]


class Experiment:
    """Runs plans with ranks on this machine, each plan in a separate folder."""

    def __init__(self, pool: WorldPool, work: Path, steps: int, save_at: int, reruns: int) -> None:
        self.pool, self.work, self.steps, self.save_at, self.reruns = pool, work, steps, save_at, reruns
        self.began = time.monotonic()

    def run(self, plans: Sequence[Plan], precision: str) -> Panel:
        """Train the sources of a model, re-run them with other orders of sums, and resume them at their targets."""
        panel = Panel(plans[0].model, precision)
        for number, plan in enumerate(plans):
            folder = str(self.work / f"{plan.model}-{precision}-{number}")
            job = self.make_job(plan, plan.source, precision)
            outcomes = self.pool.get(job.ranks).run(train_source, job, folder, self.save_at)
            saved, steps = merge_stages(outcomes), f"step {self.save_at}"
            panel.sources[plan.source.label] = {s: x for s, x in outcomes[0].losses.items() if s > self.save_at}
            self.say(f"{plan.model}, {precision}: {plan.source.label} trained to step {self.steps}, saved at {steps}")
            controls = self.make_controls(job, 1 if len(plans) > 1 else self.reruns, forget=number == 0)
            targets = {place.label: self.make_job(plan, place, precision) for place in plan.targets}
            for name, attempt in (controls | targets).items():
                self.say(f"resuming from {steps} on {attempt.ranks} ranks: {name}")
                row = self.resume(panel, plan.source.label, name, attempt, folder, saved)
                panel.rows.append(replace(row, is_control=name in controls))
                self.say(f"{row.where}: {row.bits} bits differ, largest gap of a loss {row.gap:.1e}")
            shutil.rmtree(folder)
        return panel

    def make_job(self, plan: Plan, place: Place, precision: str) -> Job:
        config = replace(plan.config, vocabulary_divisor=plan.divisors.get(place.tp, plan.config.vocabulary_divisor))
        degrees = Degrees(place.tp, place.pp, place.sp, ep=max(place.ep, 1), pipeline=not place.plain)
        return Job(config, degrees, place.ranks, make_ds_config(place, precision), self.steps)

    def make_controls(self, job: Job, reruns: int, forget: bool) -> dict[str, Job]:
        controls = {f"{RERUN} {seed}": replace(job, order_seed=seed) for seed in range(1, reruns + 1)}
        return controls | ({"moments forgotten": replace(job, forget_moments=True)} if forget else {})

    def resume(self, panel: Panel, source: str, name: str, job: Job, folder: str, saved: Atoms) -> Row:
        outcomes = self.pool.get(job.ranks).run(resume, job, folder)
        bits, tensors = count_differing_bits(saved, merge_stages(outcomes))
        found, losses = outcomes[0].losses, panel.sources[source]
        gap = max(abs(found[step] - losses[step]) for step in losses)
        loader = outcomes[0].loader
        return Row(panel.model, panel.precision, source, name, False, found, loader, bits, tensors, gap)

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self.began:5.0f} s  {text}", flush=True)


def make_ds_config(place: Place, precision: str) -> dict[str, Any]:
    """Make the ds_config of a topology."""
    return {
        "train_batch_size": BATCH,
        "train_micro_batch_size_per_gpu": BATCH // place.dp // min(place.pp, 2),
        "steps_per_print": 1 << 30,
        "optimizer": {"type": "AdamW", "params": {"betas": [0.9, 0.95], "weight_decay": 0.1, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 20, "warmup_max_lr": 1e-3}},
        # DeepSpeed clips by a mean of the expert-parallel ranks' norms, which changes with their number.
        "gradient_clipping": 0.0 if place.ep else 1.0,
        "zero_optimization": {"stage": place.stage, "stage3_param_persistence_threshold": 0},
        "checkpoint": {"universal": {"patterns": str(HERE / "names.yaml")}},
        **PRECISIONS[precision],
    }


def make_table(panels: Sequence[Panel]) -> str:
    """Make a Markdown table."""
    header = ("model", "precision", "source", "resumed as", "loaded by", "bits differing", "largest gap", "bound")
    lines = [header, tuple("---" for _ in header)]
    for panel in panels:
        for row in panel.rows:
            bits = f"{row.bits} in {row.tensors} tensors"
            bound = "" if row.is_control else f"{panel.bound:.1e}"
            lines.append((row.model, row.precision, row.source, row.target, row.loader, bits, f"{row.gap:.1e}", bound))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figure", choices=("fig7a", "fig7b", "fig8", "fig9", "experts", "demo"))
    parser.add_argument("--precision", choices=(*PRECISIONS, "both"), help="default: fp32 for the demo, otherwise both")
    parser.add_argument("--steps", type=int, help=f"default: {DEMO_STEPS} for the demo, otherwise {STEPS}")
    parser.add_argument("--save-at", type=int, help="default: half of the steps")
    parser.add_argument("--out", type=Path, default=OUT, help="folder for the table, the curves and the picture")
    args = parser.parse_args()
    is_demo = args.figure == "demo"
    args.precision = args.precision or ("fp32" if is_demo else "both")
    args.steps = args.steps or (DEMO_STEPS if is_demo else STEPS)
    args.save_at = args.save_at or args.steps // 2
    args.reruns = 1 if is_demo else RERUNS
    return args


def main() -> int:
    args = parse_arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    precisions = PRECISIONS if args.precision == "both" else [args.precision]
    with WorldPool(timeout=1800) as pool, tempfile.TemporaryDirectory(prefix="megatron-figures-") as work:
        experiment = Experiment(pool, Path(work), args.steps, args.save_at, args.reruns)
        plans = {name: list(same) for name, same in itertools.groupby(make_plans(args.figure), key=lambda p: p.model)}
        panels = [experiment.run(same, precision) for same in plans.values() for precision in precisions]
    table, path = make_table(panels), args.out / f"megatron_{args.figure}"
    path.with_suffix(".json").write_text(json.dumps([{**asdict(p), "bound": p.bound} for p in panels], indent=1))
    path.with_suffix(".md").write_text(table + "\n")
    from curves import draw  # here, because the ranks import this module and need no plots

    draw(args.figure, panels, path.with_suffix(".png"))
    print(f"\n{table}\n\nBound: {SPREAD:g} times the largest gap of the re-runs. Curves: {path.with_suffix('.png')}")
    faults = [fault for panel in panels for fault in panel.find_faults()]
    for fault in faults:
        print(f"FAILED: {fault}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
