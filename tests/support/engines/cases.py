"""Data parallelism with every ZeRO stage: engines of the models and optimizers of `models.py`."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import deepspeed
import torch
from packaging.version import Version
from torch.optim.lr_scheduler import LambdaLR

from deepspeed_ucp.testing.capture import CapturedEngine, capture
from deepspeed_ucp.testing.compare import compare
from tests.releases import DEEPSPEED
from tests.support import fsdp_run
from tests.support.engines.kinds import Kind, prepare, take_step
from tests.support.engines.models import MODELS, OPTIMIZERS, param_groups

BATCH = 60  # samples per step; 1, 2, 3, 4, 5 and 6 ranks share them evenly
FEATURES = 13
MIXED: dict[str, Any] = {"scheduler": True}
SMALL: dict[str, Any] = {"model": "plain", "scheduler": True}
"""Options of `make` for most tests, which therefore share saved runs."""


@dataclass(frozen=True)
class Case(Kind):
    """Data parallelism."""

    batch: ClassVar[int] = BATCH

    @property
    def ds_config(self) -> dict[str, Any]:
        return {"gradient_accumulation_steps": 1, **self.make_config()}

    @property
    def read(self) -> Callable[[Any], CapturedEngine]:
        return capture

    def join(self, ranks: Sequence[Any]) -> CapturedEngine:
        first, *others = (local.state for local in ranks)
        for other in others:
            # In a fresh engine copies may be other roundings of the masters than `compare` expects.
            found = [line for line in compare(first, other)[1] if ", state value:" not in line]
            found += [
                name for name, each in first.parameters.items() if not each.value.equal(other.parameters[name].value)
            ]
            assert not found, f"ranks differ: {found[:5]}"
        return first

    def compare(self, saved: CapturedEngine, loaded: CapturedEngine, **options: Any) -> tuple[int, list[str]]:
        return compare(saved, loaded, **options)

    def is_direct(self, source: Any) -> bool:
        """Return True except in the same topology.

        At stage 0 every rank has the whole state, and another size is the same topology, except with BF16_Optimizer,
        which releases before 0.17.6 use for bf16.
        """
        ours, theirs = (each.but(config={**each.config, "checkpoint": {}}) for each in (self, source))
        same = ours == theirs or (source.stage == self.stage == 0 and source.precision == self.precision)
        return not (same and not (source.stage == 0 and source.precision == "bf16" and Version("0.17.6") > DEEPSPEED))


class Built(Case):
    """Data parallelism of the module that `build` of a subclass makes."""

    @property
    def ds_config(self) -> dict[str, Any]:
        zero = {"stage3_param_persistence_threshold": 0}
        return self.make_config(zero, optimizer={"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}})

    def make(self, seed: int, **options: Any) -> Any:
        module: Any = self.build(**options)  # type: ignore[attr-defined]
        trained = [param for param in module.parameters() if param.requires_grad]
        return deepspeed.initialize(model=module, model_parameters=trained, config=self.ds_config)[0]


@dataclass(frozen=True)
class Idle(Case):
    """An engine without optimizer; its buffers change in each forward pass."""

    def make(self, seed: int, model: str = "mixed") -> Any:
        return deepspeed.initialize(model=MODELS[model](), config=self.ds_config)[0]

    @staticmethod
    def step(engine: Any) -> float:
        return float(engine(torch.ones(1, FEATURES)).sum())


@dataclass(frozen=True)
class NetCase(Case):
    """Data parallelism of the model of `fsdp_run`."""

    def make(self, seed: int) -> Any:
        model, optimizer = fsdp_run.build(seed)
        return deepspeed.initialize(model=model, optimizer=optimizer, config=self.ds_config)[0]

    @staticmethod
    def step(engine: Any) -> float:
        x, y = torch.randn(2, 8, 6, generator=torch.Generator().manual_seed(engine.global_steps)).unbind()
        return take_step(engine, (engine(x) - y[:, :5]).square().mean())


def make(case: Case, seed: int, **options: Any) -> Any:
    return make_engine(case.ds_config, seed=seed, **options)


def step(engine: Any) -> float:
    loss = compute_loss(engine)
    engine.backward(loss)
    engine.step()
    return loss.item()


def train_engine(engine: Any) -> Generator[float, None, None]:
    while True:
        yield step(engine)


def compute_loss(engine: Any) -> torch.Tensor:
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    generator = torch.Generator().manual_seed(1000 + engine.global_steps)
    batch = torch.randn(BATCH, FEATURES + 1, generator=generator).chunk(ranks)[rank].to(engine.device)
    return (engine(batch[:, :FEATURES]).float().squeeze(-1) - batch[:, FEATURES]).square().mean()


def make_engine(
    ds_config: dict[str, Any],
    model: str = "mixed",
    optimizer: str = "adamw",
    scheduler: bool | Callable[[Any], Any] = False,
    reverse_groups: bool = False,
    seed: int = 0,
    zero_init: bool = False,
    mpu: Any = None,
) -> Any:
    """Make a DeepSpeed engine of a model and an optimizer by name.

    Args:
        scheduler: add a learning-rate scheduler, by default LambdaLR; the callable takes the optimizer.
        zero_init: build the model under `deepspeed.zero.Init`, partitioned from the start.
    """
    prepare(seed)
    with deepspeed.zero.Init(config_dict_or_path=ds_config) if zero_init else nullcontext():
        module = MODELS[model]()
    groups = param_groups(module, uniform=optimizer.endswith("_uniform"), by_dtype=optimizer.endswith("_by_dtype"))
    if reverse_groups:
        groups = groups[::-1]
    inner = OPTIMIZERS[optimizer.removesuffix("_uniform").removesuffix("_by_dtype")](groups)
    schedule = scheduler(inner) if callable(scheduler) else None
    if scheduler is True:
        schedule = LambdaLR(inner, lambda step: 1.0 / (1 + step))
    engine, *_ = deepspeed.initialize(model=module, optimizer=inner, lr_scheduler=schedule, config=ds_config, mpu=mpu)
    return engine


def build_op(name: str) -> None:
    from deepspeed.accelerator import get_accelerator

    get_accelerator().create_op_builder(name).load()
