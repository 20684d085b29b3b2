"""The paper's correctness figures at small scale: resumes under other topologies on the source's own loss curve.

    python examples/megatron_gpt/figures.py fig7a      one source, many targets
    python examples/megatron_gpt/figures.py fig7b      many sources, one target
    python examples/megatron_gpt/figures.py fig8       dense with a padded vocabulary, and GQA with SwiGLU
    python examples/megatron_gpt/figures.py fig9       mixture of experts

Each trains the source to step 100, saves, and lets it go on to step 200; each target resumes from the checkpoint and
trains steps 101 to 200 on the same batches. A table is printed, and written with the curves as JSON and PNG to
`--out`. The exit code is 1 when a bit of the restored state differs, or when a loss leaves its bound.

*The bound.* Given the same state and the same batches, a target's losses differ from the source's only because numbers
are summed in another order and rounded elsewhere: over micro batches and data-parallel ranks, over tensor-parallel
parts of a row, over pieces of the sequence. How far such differences carry a run is measured, not assumed: the source
is resumed on its own topology with the samples of each batch shuffled, RERUNS times with different shuffles. That
changes the order of sums and nothing else. The bound is SPREAD times the largest gap of these re-runs. SPREAD covers
that a shuffle exchanges only the sums over samples, and that the largest of a few re-runs underestimates the largest of
many. `moments forgotten` shows that the bound is sharp: the same resume with exp_avg and exp_avg_sq set to zero.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from config import PRESETS, Degrees, GPTConfig
from curves import draw
from runs import Job, count_differing_bits, merge_stages, resume, train_source

from deepspeed_ucp.testing import WorldPool

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from runs import Atoms

HERE = Path(__file__).resolve().parent
OUT = HERE.parents[1] / "figures_out"
BATCH = 8
SAVE_AT, STEPS = 100, 200
RERUNS = 3
SPREAD = 4.0
PRECISIONS: Mapping[str, dict[str, Any]] = {"fp32": {}, "bf16": {"bf16": {"enabled": True}}}


@dataclass(frozen=True)
class Place:
    """A topology; `plain` builds have no PipelineModule, as ZeRO 2 and 3 and sequence parallelism want it."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    sp: int = 1
    stage: int = 1

    @property
    def plain(self) -> bool:
        return self.stage > 1 or self.sp > 1

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.dp * self.sp

    @property
    def label(self) -> str:
        sp = f" SP{self.sp}" if self.sp > 1 else ""
        return f"TP{self.tp} PP{self.pp}{sp} DP{self.dp} ZeRO-{self.stage}"


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
    """A line of the table: a resume, or a re-run that measures the bound."""

    model: str
    precision: str
    source: str
    target: str
    losses: dict[int, float]
    loader: str
    bits: int
    tensors: int
    gap: float
    bound: float | None = None

    @property
    def fault(self) -> str | None:
        where = f"{self.model}, {self.precision}, {self.source} → {self.target}"
        if self.bits:
            return f"{where}: {self.bits} bits of the restored state differ"
        if self.bound is not None and not self.gap <= self.bound:
            return f"{where}: a loss is {self.gap:.2g} off, more than {self.bound:.2g}"
        return None


@dataclass
class Curves:
    """A source's own losses from the save on, what resumes of its checkpoint gave, and the bound for them."""

    title: str
    losses: dict[int, float]
    bound: float
    rows: list[Row]


SOURCE = Place(tp=2, pp=2, dp=2)
TARGETS = (
    Place(),
    Place(pp=2, dp=2),
    Place(tp=4, dp=2),
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
FEW = (Place(dp=2), Place(tp=4), Place(tp=2, dp=2, stage=3))


def make_plans(figure: str) -> list[Plan]:
    tiny = PRESETS["tiny"]
    if figure == "fig7a":
        return [Plan("dense", tiny, SOURCE, TARGETS)]
    if figure == "fig7b":
        return [Plan("dense", tiny, source, [Place(tp=2, pp=2)]) for source in SOURCES]
    source = Place(tp=2, pp=2)
    if figure == "fig8":
        # 250 tokens are padded to 288 rows under every degree, so that the softmax has the same terms.
        padded = Plan("dense, padded", replace(tiny, vocabulary=250), source, FEW, {1: 288, 2: 144, 4: 72})
        return [padded, Plan("GQA, SwiGLU", PRESETS["tiny-llama"], source, FEW)]
    return [Plan("MoE, GQA, SwiGLU", PRESETS["tiny-moe"], source, FEW)]


class Experiment:
    """Runs plans on worlds of this machine, each in a folder of its own."""

    def __init__(self, pool: WorldPool, work: Path, steps: int, save_at: int) -> None:
        self.pool, self.work, self.steps, self.save_at = pool, work, steps, save_at
        self._sources: dict[Any, Any] = {}
        self.began = time.monotonic()

    def run(self, plan: Plan, precision: str) -> Curves:
        """Train the source, re-run it with other orders of sums, then resume it at every target."""
        folder = str(self.work / f"{len(list(self.work.iterdir())):02}")
        job = self.make_job(plan, plan.source, precision)
        outcomes = self.pool.get(job.ranks).run(train_source, job, folder, self.save_at)
        saved = merge_stages(outcomes)
        losses = {step: loss for step, loss in outcomes[0].losses.items() if step > self.save_at}
        self.say(f"{plan.model}, {precision}: {plan.source.label} trained and saved")

        def attempt(name: str, job: Job) -> Row:
            row = self.resume(plan, precision, name, job, folder, saved, losses)
            self.say(f"{plan.model}, {precision}: {row.source} → {name}: {row.bits} bits, gap {row.gap:.1e}")
            return row

        rows = [attempt(f"re-run {seed}, shuffled", replace(job, order_seed=seed)) for seed in range(1, RERUNS + 1)]
        bound = SPREAD * max(row.gap for row in rows)
        rows.append(attempt("moments forgotten", replace(job, forget_moments=True)))
        jobs = {place.label: self.make_job(plan, place, precision, plan.source) for place in plan.targets}
        rows += [replace(attempt(name, job), bound=bound) for name, job in jobs.items()]
        return Curves(f"{plan.model}, {precision}, from {plan.source.label}", losses, bound, rows)

    def make_job(self, plan: Plan, place: Place, precision: str, source: Place | None = None) -> Job:
        config = replace(plan.config, vocabulary_divisor=plan.divisors.get(place.tp, plan.config.vocabulary_divisor))
        degrees = Degrees(place.tp, place.pp, place.sp, pipeline=not place.plain)
        ds_config = make_ds_config(place, precision, source or place)
        return Job(config, degrees, place.ranks, ds_config, self.steps)

    def resume(
        self, plan: Plan, precision: str, name: str, job: Job, folder: str, saved: Atoms, losses: Mapping[int, float]
    ) -> Row:
        outcomes = self.pool.get(job.ranks).run(resume, job, folder)
        bits, tensors = count_differing_bits(saved, merge_stages(outcomes))
        found = outcomes[0].losses
        gap = max(abs(found[step] - losses[step]) for step in losses)
        return Row(plan.model, precision, plan.source.label, name, found, outcomes[0].loader, bits, tensors, gap)

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self.began:5.0f} s  {text}", flush=True)


def make_ds_config(place: Place, precision: str, source: Place) -> dict[str, Any]:
    """DeepSpeed's configuration of a topology, to resume what `source` has saved."""
    universal: dict[str, Any] = {}
    if source.plain != place.plain:
        rules = "pipeline_to_plain.yaml" if place.plain else "plain_to_pipeline.yaml"
        universal["patterns"] = str(HERE / rules)
    return {
        "train_batch_size": BATCH,
        "train_micro_batch_size_per_gpu": BATCH // place.dp // min(place.pp, 2),
        "steps_per_print": 1 << 30,
        "optimizer": {"type": "AdamW", "params": {"betas": [0.9, 0.95], "weight_decay": 0.1, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 20, "warmup_max_lr": 1e-3}},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": place.stage, "stage3_param_persistence_threshold": 0},
        "checkpoint": {"universal": universal},
        **PRECISIONS[precision],
    }


def make_table(rows: Sequence[Row]) -> str:
    """A Markdown table."""
    header = ("model", "precision", "source", "resumed as", "loaded by", "bits differing", "largest gap", "bound")
    lines = [header, tuple("---" for _ in header)]
    for row in rows:
        bits = f"{row.bits} of {row.tensors} tensors"
        bound = "" if row.bound is None else f"{row.bound:.1e}"
        lines.append((row.model, row.precision, row.source, row.target, row.loader, bits, f"{row.gap:.1e}", bound))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figure", choices=("fig7a", "fig7b", "fig8", "fig9"))
    parser.add_argument("--precision", choices=(*PRECISIONS, "both"), default="both")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--save-at", type=int, default=SAVE_AT)
    parser.add_argument("--out", type=Path, default=OUT)
    return parser.parse_args()


def main() -> int:
    args = parse_arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    precisions = PRECISIONS if args.precision == "both" else [args.precision]
    with WorldPool() as pool, tempfile.TemporaryDirectory(prefix="megatron-figures-") as work:
        experiment = Experiment(pool, Path(work), args.steps, args.save_at)
        curves = [experiment.run(plan, precision) for precision in precisions for plan in make_plans(args.figure)]
    rows = [row for curve in curves for row in curve.rows]
    table = make_table(rows)
    (args.out / f"{args.figure}.json").write_text(json.dumps([asdict(curve) for curve in curves], indent=1))
    (args.out / f"{args.figure}.md").write_text(table + "\n")
    draw(args.figure, curves, args.out / f"{args.figure}.png")
    print(f"\n{table}\n\nBound: {SPREAD:g} times the largest gap of the re-runs. Curves: {args.out / args.figure}.png")
    faults = [row.fault for row in rows if row.fault]
    for fault in faults:
        print(f"FAILED: {fault}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
