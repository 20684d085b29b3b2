"""An engine whose model has modules and parameters under several names. Imported on the ranks only."""

from __future__ import annotations

from typing import Any

import deepspeed
import torch

import deepspeed_ucp  # noqa: F401


class Net(torch.nn.Module):
    """A block and a norm are registered twice; a weight is shared by two modules.

    Args:
        unclear: of the second layer two siblings may be the first one.
    """

    def __init__(self, *, unclear: bool) -> None:
        super().__init__()
        self.layer = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        if unclear:
            self.other = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        self.again = self.layer
        self.norm = torch.nn.BatchNorm1d(4)
        self.second_norm = self.norm
        self.embed, self.head = (torch.nn.Linear(4, 4, bias=False) for _ in range(2))
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.embed(self.second_norm(self.again(self.norm(self.layer(x)))))).square().mean()


def save(folder: str, stage: int, *, unclear: bool) -> dict[str, torch.Tensor]:
    """Save after a step; the model's state dict."""
    torch.manual_seed(0)
    model = Net(unclear=unclear)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "Adam", "params": {"torch_adam": True, "lr": 0.1}},
        "zero_optimization": {"stage": stage},
        "checkpoint": {"universal": True},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    engine.backward(engine(torch.randn(2, 4)))
    engine.step()
    engine.save_checkpoint(folder)
    params = list(engine.module.parameters())
    with deepspeed.zero.GatheredParameters(params, enabled=stage == 3):
        held = {name: tensor.detach().clone() for name, tensor in engine.module.state_dict().items()}
    engine.destroy()
    return held
