"""What ranks do with engines of DeepSpeed's Muon; momentum is read where each kind of engine keeps it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.support.engines.going_on import Loaded, States, load_and_go_on, save_and_go_on

BATCH = 8


@dataclass(frozen=True)
class Kind:
    """An engine: ranks, ZeRO stage, precision, where states are kept, the dtype that gradients are summed in."""

    world: int
    stage: int
    precision: str = "bf16"
    offload: bool = False
    in_memory: bool = False
    sums: str = ""
    elastic: bool = False
    universal: bool = True

    def __str__(self) -> str:
        marks = (
            [self.sums] * bool(self.sums)
            + ["offload"] * self.offload
            + ["in-memory"] * self.in_memory
            + ["elastic"] * self.elastic
        )
        return "-".join([f"zero{self.stage}-{self.precision}-dp{self.world}", *marks])

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
            "checkpoint": {"universal": self.universal},
        }
        if self.precision != "fp32":
            config[self.precision] = {"enabled": True}
        if self.stage == 0:  # of single parameters DeepSpeed's own Adam counts the last one's steps alone
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
    losses = []
    for step in steps:
        batch = torch.randn(BATCH, 4, generator=torch.Generator().manual_seed(step))
        own = batch.chunk(dist.get_world_size())[dist.get_rank()].to(engine.device)
        loss = (engine(own.to(next(engine.module.parameters()).dtype)).float() - own[:, :1]).pow(2).mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def read_states(engine: Any) -> States:
    """Everything that this rank holds; partitions are gathered."""
    names = {id(param): name for name, param in engine.module.named_parameters()}
    wrapped = engine.optimizer
    found: States = {}
    if hasattr(wrapped, "fp16_groups") and hasattr(wrapped, "fp32_partitioned_groups_flat"):
        memory = getattr(wrapped, "muon_momentum_buffer_partitioned_groups_flat", {})
        for index, params in enumerate(wrapped.fp16_groups):
            master = wrapped.fp32_partitioned_groups_flat[index]
            states = {"fp32": master, **wrapped.optimizer.state[master]}
            if index in memory:
                states["momentum_buffer"] = memory[index]
            _take_sub_group(found, [(names[id(param)], param) for param in params], states)
    elif hasattr(wrapped, "partition_count"):
        flats = getattr(wrapped, "single_partition_of_fp32_groups", None) or wrapped.fp32_groups_flat_partition
        for index, master in enumerate(flats):
            params = getattr(wrapped, "round_robin_bit16_groups", None) or wrapped.bf16_groups
            named = [(names[id(param)], param) for param in params[index]]
            states = {"fp32": master, **wrapped.optimizer.state[master]}
            if hasattr(wrapped, "params_in_partition") and not wrapped.cpu_offload and "momentum_buffer" in states:
                held = wrapped.params_in_partition[index]
                pieces = states.pop("momentum_buffer").split([param.numel() for param in held])
                for param, piece in zip(held, pieces, strict=True):
                    found[names[id(param)], "momentum_buffer"] = piece.view(param.shape).clone()
            _take_group(found, named, states, wrapped.partition_count[index])
    else:
        masters = getattr(wrapped, "fp32_groups", None) or [group["params"] for group in wrapped.param_groups]
        own = getattr(wrapped, "fp16_groups", None) or masters
        for params, held in zip(own, masters, strict=True):
            for param, master in zip(params, held, strict=True):
                states = {"fp32": master, **getattr(wrapped, "optimizer", wrapped).state[master]}
                found.update({(names[id(param)], s): torch.as_tensor(t).detach().clone() for s, t in states.items()})
    return found


def _gather(tensor: Tensor) -> list[Tensor]:
    parts = [torch.empty_like(tensor.data) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor.data.contiguous())
    return parts


def _take_group(found: States, named: Sequence[tuple[str, Tensor]], states: dict[str, Any], parts: int) -> None:
    ends = list(accumulate(param.numel() for _, param in named))
    for state, tensor in states.items():
        whole = torch.cat(_gather(tensor)) if torch.is_tensor(tensor) and tensor.dim() else tensor
        for (name, param), end in zip(named, ends, strict=True):
            if torch.is_tensor(whole) and whole.dim():
                found[name, state] = whole[end - param.numel() : end].view(param.shape).clone()
            else:
                found[name, state] = torch.as_tensor(whole).clone()


def _take_sub_group(found: States, named: Sequence[tuple[str, Any]], states: dict[str, Any]) -> None:
    for state, tensor in states.items():
        parts = _gather(tensor) if torch.is_tensor(tensor) and tensor.dim() else []
        offset = 0
        for name, param in named:
            size = -(-param.ds_numel // dist.get_world_size())
            if parts:
                whole = torch.cat([part[offset : offset + size] for part in parts])
                found[name, state] = whole[: param.ds_numel].view(param.ds_shape).clone()
            else:
                found[name, state] = torch.as_tensor(tensor).clone()
            offset += size


def save(kind: Kind, folder: str, seed: int, steps: int = 3) -> tuple[States, list[float]]:
    """The losses are this rank's own."""
    return save_and_go_on(make(kind, seed), folder, train, read_states, steps)


def load_each(kind: Kind, folders: Sequence[str]) -> list[Loaded | str]:
    return load_and_go_on(make(kind, seed=77), folders, train, read_states, range(3, 5))


def load_by_deepspeed(kind: Kind, folder: str) -> list[float]:
    """The losses after DeepSpeed's own load."""
    engine = make(replace(kind, universal=False), seed=77)
    engine.load_checkpoint(folder)
    losses = train(engine, range(3, 5))
    engine.destroy()
    return losses
