"""Sequence parallelism (Ulysses, ALST) with each choice of configured batch sizes.

With an mpu of ALST's kind DeepSpeed computes its batch sizes with ``/``: the saved counters are floats.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import deepspeed
import torch
import torch.distributed as dist
from packaging.version import Version

from tests.releases import DEEPSPEED
from tests.support.engines.cases import FEATURES, Case, make_engine
from tests.support.engines.experts import ParallelState

TOKENS = 8  # per sample
WAYS = ("train", "micro", "micro-accumulation", "train-accumulation", "train-micro", "all")
"""Batch sizes that a ds_config gives; DeepSpeed derives the others."""
FLOATS = {"micro", "micro-accumulation"}
"""Ways whose number of samples is a float in ALST's saves."""


@dataclass(frozen=True)
class Spread(Case):
    """One launch.

    Attributes:
        mpu: "alst" passes `deepspeed.runtime.sequence_parallel.parallel_state_sp`, as ALST and Accelerate do: DeepSpeed
            then computes its number of data-parallel ranks as a float; "megatron" passes an mpu of Megatron's kind;
            empty: only data parallelism.
    """

    world: int = 4
    mpu: str = ""
    way: str = "train"
    sp: int = 1

    batch: ClassVar[int] = 24  # in up to two micro batches of up to four data-parallel ranks

    @property
    def ds_config(self) -> dict[str, Any]:
        config = self.make_config({"stage3_param_persistence_threshold": 0})
        accumulation = 2 if self.way.endswith("accumulation") or self.way == "all" else 1
        if accumulation > 1:
            config["gradient_accumulation_steps"] = accumulation
        if not self.way.startswith("train") and self.way != "all":
            del config["train_batch_size"]
        if "micro" in self.way or self.way == "all":
            config["train_micro_batch_size_per_gpu"] = self.batch // (self.world // self.sp * accumulation)
        return config

    def is_direct(self, source: Any) -> bool:
        """Ranks of a sequence group partition like others; before 0.19.8 ALST's ranks name files."""
        same = (source.stage, source.world, source.precision) == (self.stage, self.world, self.precision)
        return not same or (source.mpu == "alst" and Version("0.19.8") > DEEPSPEED)


def make(spread: Spread, seed: int, **options: Any) -> Any:
    engine = make_engine(spread.ds_config, seed=seed, mpu=make_mpu(spread.mpu, spread.sp), **options)
    engine.sp = spread.sp
    return engine


def step(engine: Any) -> float:
    # DeepSpeed adds the gradients of a sequence group, except if ZeRO 3 averages over all ranks.
    sums = 1 if engine.zero_optimization_stage() == 3 and engine.zero_reduce_scatter() else engine.sp
    rank, dp = dist.get_rank(), dist.get_world_size() // engine.sp
    generator = torch.Generator().manual_seed(1000 + engine.global_steps)
    samples = torch.randn(Spread.batch, TOKENS, FEATURES + 1, generator=generator)
    micros = samples.chunk(dp)[rank // engine.sp].chunk(int(engine.gradient_accumulation_steps()))
    total = 0.0
    for micro in micros:
        tokens = micro.chunk(engine.sp, 1)[rank % engine.sp].reshape(-1, FEATURES + 1).to(engine.device)
        loss = (engine(tokens[:, :FEATURES]).float().squeeze(-1) - tokens[:, FEATURES]).square().mean()
        engine.backward(loss / sums)
        engine.step()
        total += loss.item() / len(micros)
    return total


def make_mpu(kind: str, sp: int) -> Any:
    """Make the object that supplies DeepSpeed's groups; None for only data parallelism."""
    if not kind:
        return None
    if not dist.is_initialized():
        deepspeed.init_distributed()
    if kind == "alst":
        from deepspeed.runtime.sequence_parallel import parallel_state_sp

        parallel_state_sp._SEQUENCE_PARALLEL_GROUP = parallel_state_sp._SEQUENCE_DATA_PARALLEL_GROUP = None
        parallel_state_sp.initialize_sequence_parallel(sp)
        return parallel_state_sp
    return ParallelState(sp=sp).make_mpu()
