"""Engines of Adam or Muon, with optimizer states or parameters on the CPU or NVMe; DeepSpeed itself reads the states.

Each kind of engine keeps Muon's momentum in another object.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, ClassVar

import deepspeed
import torch
from deepspeed.runtime.swap_tensor import optimizer_utils, partitioned_param_swapper, utils
from torch import Tensor, nn

from deepspeed_ucp.extensions import swapped
from tests.support.engines import kinds
from tests.support.engines.standins import install_aio

AS_DEEPSPEED = bool({"UCP_EXHAUSTIVE", "UCP_TEST_AIO"} & os.environ.keys())
"""Use DeepSpeed's smallest swapped size, 1 MiB, instead of a sixteenth of it with smaller models."""
LEAST = 1 << 20 if AS_DEEPSPEED else 1 << 16
WIDTH = 1024 if AS_DEEPSPEED else 256
"""Rows and columns of a matrix whose fp32 partition on each of 4 ranks has the smallest swapped size."""


@dataclass(frozen=True)
class Kind(kinds.Kind):
    """An engine with devices of optimizer and parameters.

    Attributes:
        pipelined: ``read`` or ``both`` of swapping.
        frozen: one of the large matrices is frozen.
        early: the model is made under ``zero.Init``, partitioned from the start.
        in_memory: ZeRO 3 keeps Muon's momentum in memory.
        sums: dtype of gradient sums.
        small: no matrix has the smallest swapped size, since Muon's steps take long.
    """

    stage: int = 3
    precision: str = "bf16"
    optimizer: str = "none"
    params: str = "none"
    pipelined: str = ""
    frozen: bool = False
    muon: bool = False
    early: bool = False
    in_memory: bool = False
    sums: str = ""
    small: bool = False

    universal: ClassVar[Any] = True

    @property
    def widths(self) -> tuple[int, int]:
        """Rows and columns of a large matrix, and columns of a small one."""
        return (21, 5) if self.small else (WIDTH, WIDTH // 64)

    def list_options(self, folder: str) -> dict[str, Any]:
        return {"swap": f"{folder}-swap"}

    def is_alike(self, source: Any) -> bool:
        """Return True for the same topology, which includes neither replicas nor the place of ZeRO 3's momentum."""
        alike = source.but(in_memory=False, world=self.world) == self.but(in_memory=False)
        return alike and (source.world == self.world or (source.stage, source.precision) == (0, "fp32"))

    def is_direct(self, source: Any) -> bool:
        is_kept = "nvme" not in (self.optimizer, self.params) and not self.in_memory and not self.has_low_momentum()
        return not (is_kept and self.is_alike(source))

    def has_low_momentum(self) -> bool:
        """Return True if the momentum has the gradients' dtype, not the masters', to which DeepSpeed would cast it."""
        is_low = self.muon and self.precision == "bf16" and self.sums != "fp32"
        return is_low and (self.stage == 3 or (self.stage > 0 and self.optimizer != "cpu"))

    def find_tolerance(self, source: Any) -> float | None:
        alike = (source.world, source.stage, source.precision) == (self.world, self.stage, self.precision)
        is_same = not self.muon or "nvme" in (self.optimizer, source.optimizer) or self.is_alike(source)
        return 0.0 if alike and is_same else None

    def configure(self, swap: str) -> dict[str, Any]:
        zero: dict[str, Any] = {}
        if self.stage == 3:
            zero |= {
                "sub_group_size": self.widths[0] ** 2 // 2 // self.world,
                "stage3_param_persistence_threshold": 100,
            }
            zero["stage3_prefetch_bucket_size"] = 0  # DeepSpeed would fetch a parameter of a small model twice at once
        pipeline = {"pipeline_read": bool(self.pipelined), "pipeline_write": self.pipelined == "both"}
        buffers = {"max_in_cpu": 0, "buffer_size": 2 * WIDTH * WIDTH}
        for key, device, more in (
            ("offload_optimizer", self.optimizer, {**pipeline, "buffer_count": 12}),
            ("offload_param", self.params, buffers),
        ):
            if device != "none":
                zero[key] = {"device": device, **({"nvme_path": swap, **more} if device == "nvme" else {})}
        optimizer: dict[str, Any] = {"type": "AdamW", "params": {"lr": 0.001, "torch_adam": True}}
        if self.muon:
            optimizer = {"type": "Muon", "params": {"lr": 0.002, "muon_lr": 0.01, "momentum": 0.9}}
            if self.stage == 0:  # DeepSpeed's Adam counts the steps of only the last parameter
                optimizer["params"]["torch_adam"] = True
            if self.stage == 3:
                zero |= {"reduce_scatter": False, "save_muon_momentum_buffer_in_memory": self.in_memory}
        schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 5, "warmup_max_lr": 0.002}}
        more = {"data_types": {"grad_accum_dtype": self.sums}} if self.sums else {}
        return self.make_config(zero, optimizer=optimizer, scheduler=schedule, aio={"block_size": LEAST}, **more)

    @property
    def operator(self) -> str:
        return "fused_adam" if self.muon else ""


class Model(nn.Module):
    """Three large matrices with small ones between and after them: some sub-groups stay in memory.

    Muon trains matrices of several shapes; Adam biases, a scale, and in a small model an embedding.
    """

    def __init__(self, width: int, narrow: int, *, small: bool) -> None:
        super().__init__()
        self.add_module("embed" if small else "first", nn.Linear(narrow, width))
        self.large = nn.Linear(width, width)
        self.frozen = nn.Linear(width, narrow).requires_grad_(False)
        self.middle = nn.Linear(narrow, width, bias=False)
        self.other = nn.Linear(width, width, bias=False)
        self.unused = nn.Parameter(torch.randn(3, 2)) if small else None
        self.third = nn.Linear(width, width // 2, bias=False)
        self.last = nn.Linear(width // 2, 3)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        for layer in (next(self.children()), self.large, self.frozen, self.middle, self.other, self.third, self.last):
            x = torch.tanh(layer(x))
        return x * self.scale


def make(kind: Kind, seed: int, swap: str) -> Any:
    install_aio()
    for module in (utils, optimizer_utils, partitioned_param_swapper):
        module.MIN_AIO_BYTES = LEAST
    vars(swapped)["_LEAST"] = LEAST
    config = kind.configure(swap)
    with deepspeed.zero.Init(config_dict_or_path=config, enabled=kind.early):
        module = Model(*kind.widths, small=kind.small)
    module.other.requires_grad_(not kind.frozen)
    first, second = [], []
    for name, param in module.named_parameters():
        if param.requires_grad:
            (second if name == "other.weight" or "bias" in name else first).append(param)
    groups = [{"params": first}, {"params": second, "weight_decay": 0.1}]
    params = module.parameters() if kind.muon else groups
    return deepspeed.initialize(model=module, model_parameters=params, config=config)[0]


def step(engine: Any) -> float:
    return kinds.step_on_noise(engine, (Kind.batch, engine.module.frozen.out_features), loss_of=measure)


def measure(output: Tensor, batch: Tensor) -> Tensor:
    return (output.float() - batch[:, :3]).pow(2).mean()
