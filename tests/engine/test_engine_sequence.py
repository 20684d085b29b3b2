"""Sequence parallelism (Ulysses, ALST) in each way of giving batch sizes, to the same and to other topologies.

With an mpu of ALST's kind DeepSpeed computes its batch sizes with ``/``: the saved counters are floats.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist

from deepspeed_ucp.testing import Launch, WorldPool
from deepspeed_ucp.testing.resume import SavedRun, resume_each, save_run
from tests.support.engines.cases import FEATURES, enable, make_engine

BATCH = 24  # samples per step, in up to two micro batches of up to four data-parallel ranks
TOKENS = 8  # per sample
ACCUMULATION = 2
STEPS = (2, 2)

WAYS = ("train", "micro", "micro-accumulation", "train-accumulation", "train-micro", "all")
"""Batch sizes that a ds_config gives; DeepSpeed derives the others."""

FLOATS = {"micro", "micro-accumulation"}
"""Ways whose number of samples is a float in ALST's saves."""


@dataclass(frozen=True)
class Spread:
    """One launch.

    Attributes:
        kind: "alst" passes `deepspeed.runtime.sequence_parallel.parallel_state_sp` as the mpu, as ALST and Accelerate
            do: DeepSpeed then computes its number of data-parallel ranks as a float; "mpu" passes an mpu of Megatron's
            kind; "none": only data parallelism.
        sp: sequence-parallel ranks.
        way: one of `WAYS`.
    """

    kind: str
    stage: int
    way: str = "train"
    world: int = 4
    sp: int = 1
    precision: str = "fp32"

    def __str__(self) -> str:
        return f"{self.kind}-sp{self.sp}-dp{self.dp}-zero{self.stage}-{self.precision}-{self.way}"

    @property
    def dp(self) -> int:
        return self.world // self.sp

    @property
    def launch(self) -> Launch:
        accumulation = ACCUMULATION if self.way.endswith("accumulation") or self.way == "all" else 1
        config: dict[str, Any] = {
            "zero_optimization": {"stage": self.stage, "stage3_param_persistence_threshold": 0},
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 1 << 30,
            **enable(self.precision),
        }
        if accumulation > 1:
            config["gradient_accumulation_steps"] = accumulation
        if self.way.startswith("train") or self.way == "all":
            config["train_batch_size"] = BATCH
        if "micro" in self.way or self.way == "all":
            config["train_micro_batch_size_per_gpu"] = BATCH // (self.dp * accumulation)
        return Launch(self.world, config)

    def training(self, seed: int) -> Any:
        """Return the function that makes and trains the engine."""
        return partial(train, self.kind, self.sp, seed)


# --- on the ranks


def train(kind: str, sp: int, seed: int, ds_config: dict[str, Any]) -> Generator[Any, None, None]:
    """Yields the engine, then the loss of each step, of the same samples on any ranks."""
    engine = make_engine(ds_config, scheduler=True, seed=seed, mpu=make_mpu(kind, sp))
    # DeepSpeed adds the gradients of a sequence group, except if ZeRO 3 averages over all ranks.
    sums = 1 if engine.zero_optimization_stage() == 3 and engine.zero_reduce_scatter() else sp
    yield engine
    rank, dp = dist.get_rank(), dist.get_world_size() // sp
    while True:
        generator = torch.Generator().manual_seed(1000 + engine.global_steps)
        samples = torch.randn(BATCH, TOKENS, FEATURES + 1, generator=generator)
        micros = samples.chunk(dp)[rank // sp].chunk(int(engine.gradient_accumulation_steps()))
        total = 0.0
        for micro in micros:
            tokens = micro.chunk(sp, 1)[rank % sp].reshape(-1, FEATURES + 1).to(engine.device)
            loss = (engine(tokens[:, :FEATURES]).float().squeeze(-1) - tokens[:, FEATURES]).square().mean()
            engine.backward(loss / sums)
            engine.step()
            total += loss.item() / len(micros)
        yield total


def make_mpu(kind: str, sp: int) -> Any:
    """Make the object that gives DeepSpeed the groups; None for data parallelism alone."""
    if kind == "none":
        return None
    if not dist.is_initialized():
        deepspeed.init_distributed()
    if kind == "alst":
        from deepspeed.runtime.sequence_parallel import parallel_state_sp

        parallel_state_sp._SEQUENCE_PARALLEL_GROUP = parallel_state_sp._SEQUENCE_DATA_PARALLEL_GROUP = None
        parallel_state_sp.initialize_sequence_parallel(sp)
        return parallel_state_sp
    rank, world = dist.get_rank(), dist.get_world_size()
    lines = {
        "model_parallel": [[each] for each in range(world)],
        "sequence_parallel": [list(range(first, first + sp)) for first in range(0, world, sp)],
        "data_parallel": [list(range(first, world, sp)) for first in range(sp)],
        "sequence_data_parallel": [list(range(world))],
    }
    mpu = SimpleNamespace()
    for name, groups in lines.items():
        made = [(ranks, dist.new_group(ranks)) for ranks in groups]
        ranks, group = next(each for each in made if rank in each[0])
        values = {"rank": ranks.index(rank), "world_size": len(ranks), "group": group}
        for key, value in values.items():
            setattr(mpu, f"get_{name}_{key}", lambda value=value: value)
    return mpu


# --- tests


Save = Callable[[Spread], SavedRun]


@pytest.fixture(scope="module")
def save(ucp_worlds: WorldPool, tmp_path_factory: pytest.TempPathFactory) -> Save:
    """Train a source from distinct weights and save it, once."""
    root = tmp_path_factory.mktemp("sequence")

    @functools.cache
    def get(source: Spread) -> SavedRun:
        name = str(source)
        return save_run(source.training(sum(map(ord, name))), source.launch, STEPS, root / name, ucp_worlds)

    return get


@pytest.fixture
def check(save: Save, ucp_worlds: WorldPool, subtests: pytest.Subtests) -> Callable[..., None]:
    """Load each source into one engine: all bits, all counters, and the losses that follow."""

    def run(sources: Sequence[Spread], target: Spread) -> None:
        runs = [save(source) for source in sources]
        judges = resume_each(target.training(1), runs, target.launch, ucp_worlds)
        for source, saved, judge in zip(sources, runs, judges, strict=True):
            with subtests.test(f"{source}→{target}"):
                report = judge()
                same = (source.stage, source.world, source.precision) == (target.stage, target.world, target.precision)
                is_plain = not any(saved.folder.glob("*/*_mp_rank_01_*"))  # before 0.19.8 ALST's ranks name files
                assert report.direct is not (same and is_plain)  # ranks of a sequence group partition like others
                assert report.parameters == 10 and report.states >= 38
                assert read_samples(saved.folder) == STEPS[0] * BATCH
                is_float = source.kind == "alst" and source.way in FLOATS
                assert isinstance(read_samples(saved.folder), float) == is_float

    return run


def list_sources(kind: str, stages: Sequence[int], precision: str = "fp32") -> list[Spread]:
    return [Spread(kind, stage, way, sp=2, precision=precision) for stage in stages for way in WAYS]


def read_samples(folder: Path) -> Any:
    """Read the number of samples that DeepSpeed saved."""
    path = next(folder.glob("global_step*/*model_states.pt"))
    return torch.load(path, map_location="cpu", weights_only=False)["global_samples"]


TARGETS = [
    Spread("alst", 1, "micro", sp=2),
    Spread("alst", 3, "micro-accumulation", sp=2),
    Spread("alst", 2, "train-micro", sp=4),
    Spread("alst", 3, "train", sp=4),
    Spread("none", 1, "train", world=3),
    Spread("none", 3, "all", world=4),
]


@pytest.mark.releases
@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_alst(target: Spread, check: Callable[..., None]) -> None:
    check(list_sources("alst", (1, 3)), target)


@pytest.mark.releases
def test_alst_in_bf16(check: Callable[..., None]) -> None:
    check(list_sources("alst", (2,), "bf16"), Spread("alst", 3, "micro", sp=4, precision="bf16"))


def test_from_data_parallelism_to_alst(check: Callable[..., None]) -> None:
    check([Spread("none", stage, "micro", world=2) for stage in (0, 1, 3)], Spread("alst", 1, "micro", sp=2))


@pytest.mark.engine_smoke
@pytest.mark.parametrize(
    "target", [Spread("mpu", 1, "micro", sp=2), Spread("mpu", 2, "all", sp=4), Spread("none", 1, world=3)], ids=str
)
def test_ulysses(target: Spread, check: Callable[..., None]) -> None:
    """Below stage 3, which partitions parameters only over the data-parallel ranks of such an mpu."""
    check(list_sources("mpu", (1,)), target)
