"""Engines under sequence parallelism: the ranks of a group share samples and split their tokens."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

from deepspeed_ucp.testing import Launch
from tests.support.engines.cases import FEATURES, enable, make_engine

BATCH = 24  # samples per step, in up to two micro batches of up to four data-parallel ranks
TOKENS = 8  # per sample
ACCUMULATION = 2

WAYS = ("train", "micro", "micro-accumulation", "train-accumulation", "train-micro", "all")
"""Batch sizes that a ds_config gives; DeepSpeed derives the others."""


@dataclass(frozen=True)
class Spread:
    """One launch.

    Attributes:
        kind: "alst" passes `deepspeed.runtime.sequence_parallel.parallel_state_sp` as the mpu, as ALST and Accelerate
            do: DeepSpeed then computes its number of data-parallel ranks as a float; "mpu" passes an mpu of Megatron's
            kind; "none" is data parallelism alone.
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
    def batch_sizes(self) -> dict[str, int]:
        accumulation = ACCUMULATION if self.way.endswith("accumulation") or self.way == "all" else 1
        given = {"train": self.way.startswith("train"), "micro": "micro" in self.way}
        sizes = {"gradient_accumulation_steps": accumulation} if accumulation > 1 else {}
        if given["train"] or self.way == "all":
            sizes["train_batch_size"] = BATCH
        if given["micro"] or self.way == "all":
            sizes["train_micro_batch_size_per_gpu"] = BATCH // (self.dp * accumulation)
        return sizes

    @property
    def launch(self) -> Launch:
        config: dict[str, Any] = {
            **self.batch_sizes,
            "zero_optimization": {"stage": self.stage, "stage3_param_persistence_threshold": 0},
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 1 << 30,
            **enable(self.precision),
        }
        return Launch(self.world, config)

    def training(self, seed: int) -> Any:
        """The function that makes the engine and trains it."""
        return partial(train, self.kind, self.sp, seed)


def train(kind: str, sp: int, seed: int, ds_config: dict[str, Any]) -> Generator[Any, None, None]:
    """Yields the engine, then the loss of each step, of the same samples on any ranks."""
    import torch

    engine = make_engine(ds_config, scheduler=True, seed=seed, mpu=make_mpu(kind, sp))
    yield engine
    rank, dp = torch.distributed.get_rank(), torch.distributed.get_world_size() // sp
    while True:
        generator = torch.Generator().manual_seed(1000 + engine.global_steps)
        samples = torch.randn(BATCH, TOKENS, FEATURES + 1, generator=generator)
        micros = samples.chunk(dp)[rank // sp].chunk(int(engine.gradient_accumulation_steps()))
        total = 0.0
        for micro in micros:
            tokens = micro.chunk(sp, 1)[rank % sp].reshape(-1, FEATURES + 1).to(engine.device)
            loss = (engine(tokens[:, :FEATURES]).float().squeeze(-1) - tokens[:, FEATURES]).square().mean()
            engine.backward(loss / _count_sums(engine, sp))
            engine.step()
            total += loss.item() / len(micros)
        yield total


def _count_sums(engine: Any, sp: int) -> int:
    """How many gradients DeepSpeed adds: those of a sequence group, except where ZeRO 3 averages over all ranks."""
    return 1 if engine.zero_optimization_stage() == 3 and engine.zero_reduce_scatter() else sp


def make_mpu(kind: str, sp: int) -> Any:
    """The object that tells DeepSpeed the groups; None for data parallelism alone."""
    import torch.distributed as dist

    if kind == "none":
        return None
    if not dist.is_initialized():
        import deepspeed

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
        setattr(mpu, f"get_{name}_rank", partial(ranks.index, rank))
        setattr(mpu, f"get_{name}_world_size", partial(len, ranks))
        setattr(mpu, f"get_{name}_group", partial(_identity, group))
    return mpu


def _identity(value: Any) -> Any:
    return value
