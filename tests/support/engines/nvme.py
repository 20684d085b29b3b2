"""Engines with optimizer states or parameters on NVMe; DeepSpeed itself reads the states."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, ClassVar

import deepspeed
import torch
from deepspeed.runtime.swap_tensor import optimizer_utils, partitioned_param_swapper, utils
from torch import Tensor, nn

from deepspeed_ucp.extensions import swapped
from tests.support.engines import aio as aio_standin
from tests.support.engines import kinds

AS_DEEPSPEED = bool({"UCP_EXHAUSTIVE", "UCP_TEST_AIO"} & os.environ.keys())
"""Use DeepSpeed's smallest swapped size, 1 MiB, instead of a sixteenth of it with smaller models."""
LEAST = 1 << 20 if AS_DEEPSPEED else 1 << 16
WIDTH = 1024 if AS_DEEPSPEED else 256
"""Rows and columns of a matrix whose fp32 partition on each of 4 ranks has the smallest swapped size."""
NARROW = WIDTH // 64


@dataclass(frozen=True)
class Kind(kinds.Kind):
    """An engine with devices of optimizer and parameters.

    Attributes:
        pipelined: ``read`` or ``both`` of swapping.
        frozen: one of the large matrices is frozen.
        early: the model is made under ``zero.Init``, partitioned from the start.
    """

    stage: int = 3
    precision: str = "bf16"
    optimizer: str = "none"
    params: str = "none"
    pipelined: str = ""
    frozen: bool = False
    muon: bool = False
    early: bool = False

    universal: ClassVar[Any] = True

    def list_options(self, folder: str) -> dict[str, Any]:
        return {"swap": f"{folder}-swap"}

    def is_direct(self, source: Any) -> bool:
        return "nvme" in (self.optimizer, self.params) or source != self

    def find_tolerance(self, source: Any) -> float | None:
        alike = (source.world, source.stage, source.precision) == (self.world, self.stage, self.precision)
        return 0.0 if alike else None

    def configure(self, swap: str) -> dict[str, Any]:
        zero: dict[str, Any] = {}
        if self.stage == 3:
            zero |= {"sub_group_size": WIDTH * WIDTH // 2 // self.world, "stage3_param_persistence_threshold": 100}
            zero["stage3_prefetch_bucket_size"] = 0  # DeepSpeed would fetch a parameter of a small model twice at once
            pipeline = {"pipeline_read": bool(self.pipelined), "pipeline_write": self.pipelined == "both"}
            buffers = {"max_in_cpu": 0, "buffer_size": 2 * WIDTH * WIDTH}
            for key, device, more in (
                ("offload_optimizer", self.optimizer, {**pipeline, "buffer_count": 12}),
                ("offload_param", self.params, buffers),
            ):
                if device != "none":
                    zero[key] = {"device": device, **({"nvme_path": swap, **more} if device == "nvme" else {})}
        optimizer = {"type": "AdamW", "params": {"lr": 0.001, "torch_adam": True}}
        if self.muon:
            optimizer = {"type": "Muon", "params": {"lr": 0.002, "muon_lr": 0.01, "momentum": 0.9}}
            zero["reduce_scatter"] = False
        schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 5, "warmup_max_lr": 0.002}}
        return self.make_config(zero, optimizer=optimizer, scheduler=schedule, aio={"block_size": LEAST})


class Model(nn.Module):
    """Three large matrices with small ones between and after them: some sub-groups stay in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(NARROW, WIDTH)
        self.large = nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Linear(WIDTH, NARROW).requires_grad_(False)
        self.middle = nn.Linear(NARROW, WIDTH, bias=False)
        self.other = nn.Linear(WIDTH, WIDTH, bias=False)
        self.third = nn.Linear(WIDTH, WIDTH // 2, bias=False)
        self.last = nn.Linear(WIDTH // 2, 3)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.first, self.large, self.frozen, self.middle, self.other, self.third, self.last):
            x = torch.tanh(layer(x))
        return x * self.scale


def make(kind: Kind, seed: int, swap: str) -> Any:
    aio_standin.install()
    for module in (utils, optimizer_utils, partitioned_param_swapper):
        module.MIN_AIO_BYTES = LEAST
    vars(swapped)["_LEAST"] = LEAST
    torch.manual_seed(seed)
    config = kind.configure(swap)
    with deepspeed.zero.Init(config_dict_or_path=config, enabled=kind.early):
        module = Model()
    module.other.requires_grad_(not kind.frozen)
    first, second = [], []
    for name, param in module.named_parameters():
        if param.requires_grad:
            (second if name == "other.weight" or "bias" in name else first).append(param)
    groups = [{"params": first}, {"params": second, "weight_decay": 0.1}]
    params = module.parameters() if kind.muon else groups
    return deepspeed.initialize(model=module, model_parameters=params, config=config)[0]


def step(engine: Any) -> float:
    return kinds.step_on_noise(engine, (Kind.batch, NARROW), loss_of=measure)


def measure(output: Tensor, batch: Tensor) -> Tensor:
    return (output.float() - batch[:, :3]).pow(2).mean()
