"""A small model trained by torch alone, and by FSDP2 on the ranks of a group."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


class Net(torch.nn.Module):
    """Matrices (one with an odd number of rows), a norm and a buffer.

    Shards have multiples of 32 elements, or the whole has fewer than 32: torch's vectorised loops round
    differently from its loops for the remainder, so other halves would differ from wholes by a bit.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(6, 64)
        self.norm = torch.nn.LayerNorm(64)
        self.second = torch.nn.Linear(64, 5)
        self.register_buffer("scale", torch.tensor([0.5, 1.5, 1.0, 2.0, 0.25]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.norm(self.first(x)))) * self.scale


def build(seed: int = 0, shard: Any = None) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """The model, and AdamW with two param groups."""
    torch.manual_seed(seed)
    model = Net()
    if shard is not None:
        for layer in (model.first, model.second):
            shard(layer)
        shard(model)
    params = list(model.parameters())
    groups = [
        {"params": [p for p in params if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0, "lr": 3e-3},
    ]
    return model, torch.optim.AdamW(groups, lr=1e-2, foreach=False)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: Iterable[int]) -> list[float]:
    """Train on a batch per step, equal on all ranks; return the losses.

    With one thread: gradients of a norm are summed up in an order that depends on the threads.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return [_step(model, optimizer, step) for step in steps]
    finally:
        torch.set_num_threads(threads)


def _step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> float:
    x, y = torch.randn(2, 8, 6, generator=torch.Generator().manual_seed(step)).unbind()
    loss = (model(x) - y[:, :5]).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.item())


def build_sharded(seed: int = 0) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """The model and AdamW under FSDP2; on all ranks of a group."""
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    return build(seed, shard=lambda module: fully_shard(module, mesh=mesh))


def load(checkpoint: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Load a checkpoint under FSDP2 into a model with other weights; on all ranks of a group."""
    model, optimizer = build_sharded(seed=1)
    weights, states = get_state_dict(model, optimizer)
    tree = {"model": weights, "optim": states}
    dcp.load(tree, checkpoint_id=checkpoint)
    set_state_dict(model, optimizer, model_state_dict=tree["model"], optim_state_dict=tree["optim"])
    return model, optimizer


def copy(checkpoint: str, folder: str) -> None:
    """Load, and save with FSDP2; on all ranks of a group."""
    save_sharded(folder, *load(checkpoint))


def save_sharded(folder: str, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": states}, checkpoint_id=folder)
