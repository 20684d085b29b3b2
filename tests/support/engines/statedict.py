"""Engines around a model whose state dict has names and tensors of its own. Imported on the ranks only."""

from __future__ import annotations

import json
from contextlib import nullcontext
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.zero import GatheredParameters

import deepspeed_ucp  # noqa: F401 - enables the plugin
from tests.support.engines.cases import forget_autocast
from tests.support.engines.ranks import listen


class Quantized(torch.nn.Module):
    """A frozen weight of bytes, as Linear4bit has it; its scales are in the state dict alone."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(8 * blocks, 1, dtype=torch.uint8), requires_grad=False)
        self.absmax, self.blocks = torch.ones(blocks), blocks

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight.absmax"] = self.absmax if keep_vars else self.absmax.detach()
        told = json.dumps({"blocks": self.blocks}).encode()
        destination[f"{prefix}weight.quant_state"] = torch.tensor(list(told), dtype=torch.uint8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scales = self.absmax.mean().to(x.dtype)
        return x + scales * 1e-3


class Body(torch.nn.Module):
    """Its state dict calls the norm otherwise, by a hook."""

    def __init__(self, blocks: int, *, bytes_first: bool) -> None:
        super().__init__()
        if bytes_first:
            self.base = Quantized(blocks)
        self.up = torch.nn.Linear(6, 10)
        if not bytes_first:
            self.base = Quantized(blocks)
        self.norm = torch.nn.BatchNorm1d(10)
        self.frozen = torch.nn.Linear(10, 6)
        self.frozen.requires_grad_(False)
        self._register_state_dict_hook(_rename)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(self.norm(self.up(self.base(x))))


def _rename(module: Any, state: Any, prefix: str, metadata: Any) -> None:
    for key in [key for key in state if key.startswith(f"{prefix}norm.")]:
        state[key.replace(f"{prefix}norm.", f"{prefix}bn.")] = state.pop(key)


class WithHead(torch.nn.Module):
    """A value head around a model, whose names stand in the state dict without a prefix."""

    def __init__(self, blocks: int = 4, *, bytes_first: bool = True) -> None:
        super().__init__()
        self.pretrained = Body(blocks, bytes_first=bytes_first)
        self.v_head = torch.nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.v_head(self.pretrained(x)).float().square().mean()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        found = self.pretrained.state_dict(*args, **kwargs)
        for key, value in self.v_head.state_dict(*args, **kwargs).items():
            found[f"v_head.{key}"] = value
        return found


def make(stage: int, seed: int, options: Any = None, blocks: int = 4, *, persist: bool = False) -> Any:
    forget_autocast()
    torch.manual_seed(seed)
    module = WithHead(blocks, bytes_first=stage < 3)  # ZeRO 3 takes the first parameter's dtype for the model's
    with torch.no_grad():
        module.pretrained.base.absmax.copy_(torch.rand(blocks) + seed)
        module.pretrained.base.weight.copy_(torch.randint(256, (8 * blocks, 1)))
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 10**4 * persist},
        "zero_allow_untested_optimizer": True,
        "checkpoint": {"universal": options or True},
        "steps_per_print": 10**6,
    }
    trained = [param for param in module.parameters() if param.requires_grad]
    return deepspeed.initialize(model=module, model_parameters=trained, config=config)[0]


def read(engine: Any) -> dict[str, torch.Tensor]:
    """Everything that the model holds, whole."""
    params = list(engine.module.parameters())
    partitioned = any(hasattr(param, "ds_id") for param in params)
    with GatheredParameters(params) if partitioned else nullcontext():
        found = {name: value.detach().clone() for name, value in engine.module.named_parameters()}
    found.update((name, value.clone()) for name, value in engine.module.named_buffers())
    return {**found, "absmax": engine.module.pretrained.base.absmax.clone()}


def train(engine: Any) -> None:
    for step in range(2):
        torch.manual_seed(10 * step)
        loss = engine(torch.randn(4, 6).to(engine.device))
        engine.backward(loss)
        engine.step()


def save_each(root: str, stages: list[int]) -> dict[int, dict[str, torch.Tensor]]:
    """Of each stage a save, in a folder of its own; what the model held."""
    found = {}
    for stage in stages:
        engine = make(stage, seed=1)
        train(engine)
        engine.save_checkpoint(f"{root}/{stage}")
        found[stage] = read(engine)
        engine.destroy()
    return found


def load(folder: str, stage: int, blocks: int = 4, **arguments: Any) -> tuple[dict[str, torch.Tensor], list[str]]:
    """What another model holds after a load by the plugin, and what was logged as a warning."""
    engine = make(stage, 2, {"same_topology": "direct"}, blocks)
    with listen() as log:
        engine.load_checkpoint(folder, **arguments)
    found = read(engine)
    train(engine)
    engine.destroy()
    return found, [message for level, message in log if level == "WARNING"]


def evaluate_after_fit(folder: str) -> tuple[list[float], float]:
    """Losses of two forward passes of an evaluating engine around a module that has trained on, after a load; truth."""
    engine = make(3, seed=1, persist=True)
    train(engine)
    engine.save_checkpoint(folder)
    engine.module.eval()
    truth = evaluate(engine)
    engine.module.train()
    train(engine)
    module = engine.module
    config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 3}}
    tester = deepspeed.initialize(model=module, config={**config, "checkpoint": {"universal": True}})[0]
    tester.module.eval()
    tester.load_checkpoint(folder, load_optimizer_states=False)
    found = [evaluate(tester), evaluate(tester)]
    tester.destroy()
    engine.destroy()
    return found, truth


def evaluate(engine: Any) -> float:
    torch.manual_seed(5)
    with torch.no_grad():
        return float(engine(torch.randn(4, 6).to(engine.device)))
