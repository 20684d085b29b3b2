"""Engines of DeepSpeed's Muon. Each kind of engine keeps momentum in another object."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import deepspeed
import torch
from torch import Tensor, nn

from tests.support.engines import kinds
from tests.support.engines.kinds import ON_CPU


@dataclass(frozen=True)
class Kind(kinds.Kind):
    """Muon; ``in_memory``: ZeRO 3 keeps the momentum in memory; ``sums``: dtype of gradient sums."""

    precision: str = "bf16"
    offload: bool = False
    in_memory: bool = False
    sums: str = ""

    universal: ClassVar[Any] = True

    def is_alike(self, source: Any) -> bool:
        """Return True for the same topology, which includes neither replicas nor the place of ZeRO 3's momentum."""
        alike = source.but(in_memory=False, world=self.world) == self.but(in_memory=False)
        return alike and (source.world == self.world or (source.stage, source.precision) == (0, "fp32"))

    def is_direct(self, source: Any) -> bool:
        return self.in_memory or self.has_low_momentum() or not self.is_alike(source)

    def has_low_momentum(self) -> bool:
        """Return True if the momentum has the gradients' dtype, not the masters', to which DeepSpeed would cast it."""
        is_low = self.precision == "bf16" and self.sums != "fp32"
        return is_low and (self.stage == 3 or (self.stage > 0 and not self.offload))

    def find_tolerance(self, source: Any) -> float | None:
        return 0.0 if self.is_alike(source) and source.world == self.world else None

    @property
    def ds_config(self) -> dict[str, Any]:
        zero: dict[str, Any] = ON_CPU if self.offload else {}
        if self.stage == 3:
            zero = {**zero, "reduce_scatter": False, "sub_group_size": 40, "stage3_param_persistence_threshold": 0}
            zero["save_muon_momentum_buffer_in_memory"] = self.in_memory
        params: dict[str, Any] = {"lr": 0.02, "muon_lr": 0.05, "momentum": 0.9}
        if self.stage == 0:  # DeepSpeed's Adam counts the steps of only the last parameter
            params["torch_adam"] = True
        more = {"data_types": {"grad_accum_dtype": self.sums}} if self.sums else {}
        return self.make_config(zero, optimizer={"type": "Muon", "params": params}, **more)


class Model(nn.Module):
    """Matrices of several shapes for Muon, one of them unused; an embedding, biases and a scale for Adam."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 5)
        self.wide = nn.Linear(5, 11)
        self.square = nn.Linear(11, 11, bias=False)
        self.narrow = nn.Linear(11, 3)
        self.unused = nn.Parameter(torch.randn(3, 2))
        self.last = nn.Linear(3, 1)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.embed, self.wide, self.square, self.narrow, self.last):
            x = torch.tanh(layer(x))
        return x * self.scale


def make(kind: Kind, seed: int) -> Any:
    torch.manual_seed(seed)
    module = Model()
    return deepspeed.initialize(model=module, model_parameters=module.parameters(), config=kind.ds_config)[0]


def step(engine: Any) -> float:
    return kinds.step_on_noise(engine, (Kind.batch, 4), loss_of=measure)


def measure(output: Tensor, batch: Tensor) -> Tensor:
    return (output.float() - batch[:, :1]).pow(2).mean()
