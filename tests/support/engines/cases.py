"""Cases of the engine tests: launches, engines of tiny models, training loops."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from packaging.version import Version

from deepspeed_ucp.testing import Launch
from tests.releases import DEEPSPEED, find_reason

BATCH = 60  # samples per step; 1, 2, 3, 4, 5 and 6 ranks share them evenly
FEATURES = 13
BF16_WITHOUT_ZERO = Version("0.17.6") > DEEPSPEED


def enable(precision: str) -> dict[str, Any]:
    """Returns the section of a ds_config for a precision; none for fp32."""
    scale = {"initial_scale_power": 8} if precision == "fp16" else {}
    return {} if precision == "fp32" else {precision: {"enabled": True, **scale}}


@dataclass(frozen=True)
class Case:
    """One launch of one of the trainings below.

    Attributes:
        stage: ZeRO stage.
        dp: number of ranks.
        precision: "fp32", "bf16" or "fp16".
        zero: further keys of `zero_optimization`.
        config: further top-level keys of the DeepSpeed configuration.
    """

    stage: int
    dp: int
    precision: str = "fp32"
    zero: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        name = f"zero{self.stage}-{self.precision}-dp{self.dp}"
        return "-".join([name, *self.zero, *self.config])

    @property
    def launch(self) -> Launch:
        return Launch(self.dp, self.ds_config)

    @property
    def ds_config(self) -> dict[str, Any]:
        config: dict[str, Any] = {
            "train_batch_size": BATCH,
            "gradient_accumulation_steps": 1,
            "zero_optimization": {"stage": self.stage, **self.zero},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": 1000000,
            **enable(self.precision),
        }
        return {**config, **self.config}

    def but(self, **changes: Any) -> Case:
        return replace(self, **changes)

    def on(self, **options: Any) -> Case:
        """Return the case with the plugin on, with these options."""
        return replace(self, config={**self.config, "checkpoint": {"universal": options or True}})

    def training(self, **options: Any) -> Any:
        """Return the function that makes and trains the engine."""
        return partial(train, self.ds_config, **options)


def saves_states(stage: int, precision: str) -> bool:
    """Return True if the release saves the optimizer's states."""
    return find_reason(f"saves/zero{stage}-{precision}") is None


def pair_id(pair: tuple[Case, Case]) -> str:
    """Return the id of a test that saves under one case and resumes under another."""
    return f"{pair[0]}->{pair[1]}"


def is_direct(source: Case, target: Case, report: Any) -> None:
    """Check that the plugin's loader ran, except in the same topology.

    At stage 0 every rank has the whole state, and another size is the same topology, except with BF16_Optimizer, which
    releases before 0.17.6 use for bf16.
    """
    same = source == target or (source.stage == target.stage == 0 and source.precision == target.precision)
    same = same and not (source.stage == 0 and source.precision == "bf16" and BF16_WITHOUT_ZERO)
    assert report.direct is not same


def directly(_source: Case, _target: Case, report: Any) -> None:
    """Check that the plugin's loader ran, in the same topology, too."""
    assert report.direct


def training(model: str = "mixed", optimizer: str = "adamw", **options: Any) -> Any:
    """Return a `train_fn` for `assert_resume_equivalent` with a model and an optimizer of `models.py`."""
    return partial(train, model=model, optimizer=optimizer, **options)


def train(ds_config: dict[str, Any], *args: Any, **options: Any) -> Generator[Any, None, None]:
    """Yields the engine of `make_engine`, then the loss of each step."""
    engine = make_engine(ds_config, *args, **options)
    yield engine
    yield from train_engine(engine)


def train_engine(engine: Any) -> Generator[float, None, None]:
    """Yields the loss of each step."""
    while True:
        loss = compute_loss(engine)
        engine.backward(loss)
        engine.step()
        yield loss.item()


def compute_loss(engine: Any) -> Any:
    """Return the loss of this rank's share of the global batch of a step."""
    import torch

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
        reverse_groups: reverse the order of the optimizer's groups.
        zero_init: build the model under `deepspeed.zero.Init`, partitioned from the start.
        mpu: model parallel unit, for parallelism other than data parallelism.
    """
    import deepspeed
    import torch
    from torch.optim.lr_scheduler import LambdaLR

    from tests.support.engines.models import MODELS, OPTIMIZERS, param_groups

    allow_fp16_on_cpu()
    forget_autocast()
    torch.manual_seed(seed)
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


def allow_fp16_on_cpu() -> None:
    """Let DeepSpeed use fp16 on a CPU without AMX-FP16, which torch supports."""
    import torch
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    CPU_Accelerator.is_fp16_supported = lambda self: True
    CPU_Accelerator.supported_dtypes = lambda self: [torch.float, torch.bfloat16, torch.float16]  # used by 0.16


def forget_autocast() -> None:
    """Undo the torch_autocast of an earlier engine, which DeepSpeed keeps for the whole process."""
    module: Any = sys.modules.get("deepspeed.runtime.torch_autocast")
    if module is not None:
        module.TORCH_AUTOCAST_INITIALIZED, module.TORCH_AUTOCAST_DTYPE = False, None


def build_op(name: str) -> None:
    """Compile one of DeepSpeed's operators, or load it."""
    from deepspeed.accelerator import get_accelerator

    get_accelerator().create_op_builder(name).load()
