"""Engines of DeepSpeed's Muon; momentum is read from the place in which each kind of engine keeps it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.support.engines import kinds
from tests.support.engines.cases import enable
from tests.support.engines.kinds import States, read_optimizer, train_on_noise

BATCH = 8


@dataclass(frozen=True)
class Kind(kinds.Kind):
    """An engine: ranks, ZeRO stage, precision, where states are kept, the dtype that gradients are summed in."""

    world: int
    stage: int
    precision: str = "bf16"
    offload: bool = False
    in_memory: bool = False
    sums: str = ""
    elastic: bool = False

    def __str__(self) -> str:
        marks = (
            [self.sums] * bool(self.sums)
            + ["offload"] * self.offload
            + ["in-memory"] * self.in_memory
            + ["elastic"] * self.elastic
        )
        return "-".join([f"zero{self.stage}-{self.precision}-dp{self.world}", *marks])

    def is_alike(self, source: Any) -> bool:
        """Return True for the same topology, which includes neither replicas nor the place of ZeRO 3's momentum."""
        alike = replace(source, in_memory=False, world=self.world) == replace(self, in_memory=False)
        return alike and (source.world == self.world or (source.stage, source.precision) == (0, "fp32"))

    def is_direct(self, source: Any) -> bool:
        return self.in_memory or not self.is_alike(source)

    def find_tolerance(self, source: Any) -> dict[str, float] | None:
        return {"rel": 0, "abs": 0} if self.is_alike(source) and source.world == self.world else None

    @property
    def config(self) -> dict[str, Any]:
        zero: dict[str, Any] = {"stage": self.stage}
        if self.elastic:
            zero["elastic_checkpoint"] = True
        if self.offload:
            zero["offload_optimizer"] = {"device": "cpu"}
        if self.stage == 3:
            zero.update(reduce_scatter=False, sub_group_size=40, stage3_param_persistence_threshold=0)
            zero["save_muon_momentum_buffer_in_memory"] = self.in_memory
        config: dict[str, Any] = {
            "train_batch_size": BATCH,
            "optimizer": {"type": "Muon", "params": {"lr": 0.02, "muon_lr": 0.05, "momentum": 0.9}},
            "zero_optimization": zero,
            "zero_force_ds_cpu_optimizer": False,
            "checkpoint": {"universal": True},
            **enable(self.precision),
        }
        if self.stage == 0:  # DeepSpeed's Adam counts the steps of the last parameter alone
            config["optimizer"]["params"]["torch_adam"] = True
        if self.sums:
            config["data_types"] = {"grad_accum_dtype": self.sums}
        return config


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
    torch._dynamo.config.disable = True  # the compiled update needs minutes
    torch.manual_seed(seed)
    module = Model()
    return deepspeed.initialize(model=module, model_parameters=module.parameters(), config=kind.config)[0]


def train(engine: Any, steps: range) -> list[float]:
    return train_on_noise(engine, steps, (BATCH, 4), (dist.get_rank(), dist.get_world_size()), measure)


def measure(output: Tensor, batch: Tensor) -> Tensor:
    return (output.float() - batch[:, :1]).pow(2).mean()


def read_states(engine: Any) -> States:
    """Read the optimizer states of this rank and its replicas."""
    names = {id(param): name for name, param in engine.module.named_parameters()}
    states = read_optimizer(engine.optimizer)
    return {(names[number], state): each for number, held in states.items() for state, each in held.items()}
