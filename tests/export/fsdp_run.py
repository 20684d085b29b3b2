"""A small model trained by torch alone, and by FSDP2 on the ranks of a group."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict


class Net(torch.nn.Module):
    """Matrices, of which one has rows that do not divide by two, a norm, a buffer.

    Shards have multiples of 32 elements, or fewer than 32 where the whole has: torch's vectorised loops round
    otherwise than its loops for what is left over, so that halves of other sizes would differ from wholes by a bit.
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
    """A batch per step, the same on every rank; the losses.

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


def load(checkpoint: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """On every rank of a group: the model under FSDP2 with other weights, and then with those of a checkpoint."""
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    model, optimizer = build(seed=1, shard=lambda module: fully_shard(module, mesh=mesh))
    weights, states = get_state_dict(model, optimizer)
    tree = {"model": weights, "optim": states}
    dcp.load(tree, checkpoint_id=checkpoint)
    set_state_dict(model, optimizer, model_state_dict=tree["model"], optim_state_dict=tree["optim"])
    return model, optimizer


def resume(checkpoint: str) -> dict[str, Any]:
    """On every rank of a group: load, take steps 3 and 4; the losses and, on rank 0, what came out."""
    model, optimizer = load(checkpoint)
    losses = train(model, optimizer, range(3, 5))
    weights, states = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    return {"losses": losses, "model": weights, "optim": states}


def copy(checkpoint: str, folder: str) -> None:
    """On every rank of a group: load, and save as FSDP2 has it."""
    weights, states = get_state_dict(*load(checkpoint))
    dcp.save({"model": weights, "optim": states}, checkpoint_id=folder)
