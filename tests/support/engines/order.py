"""Stage-0 engines around layers that are alike, defined in some order and under some names. Imported on ranks only."""

from __future__ import annotations

from typing import Any

import deepspeed
import torch

import deepspeed_ucp  # noqa: F401 - enables the plugin
from tests.support.engines.cases import allow_fp16_on_cpu, enable
from tests.support.engines.going_on import States, read_optimizer

RENAMED = [{"from": r"(?P<x>[abc])\.(?P<y>.*)", "to": "{x}{x}.{y}"}]


class Layers(torch.nn.Module):
    """Its layers compute in alphabetical order, whatever they were defined in."""

    def __init__(self, names: str) -> None:
        super().__init__()
        for name in names.split():
            self.add_module(name, torch.nn.Linear(6, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _, layer in sorted(self.named_children()):
            x = torch.tanh(layer(x))
        return x.float().square().mean()


def make(names: str, precision: str, stage: int = 0, *, rename: Any = (), trains: bool = True, seed: int = 9) -> Any:
    allow_fp16_on_cpu()
    torch.manual_seed(seed)
    module = Layers(names)
    config: dict[str, Any] = {
        "train_batch_size": 1,
        "zero_optimization": {"stage": stage},
        "checkpoint": {"universal": {"patterns": {"rename": list(rename)}} if rename else True},
        **enable(precision),
    }
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01) if trains else None
    return deepspeed.initialize(model=module, optimizer=optimizer, config=config)[0]


def read(engine: Any) -> States:
    """Weights by their names, and of an optimizer at stage 0 masters and states."""
    names = {id(param): name for name, param in engine.module.named_parameters()}
    found = {(name, "weight"): param.detach().clone() for name, param in engine.module.named_parameters()}
    if engine.zero_optimization_stage() or not hasattr(engine.optimizer, "state"):
        return found
    states = read_optimizer(engine.optimizer)
    return found | {(names[number], state): each for number, held in states.items() for state, each in held.items()}


def save(folder: str, precision: str) -> States:
    engine = make("b a c", precision, seed=1)
    for step in range(3):
        torch.manual_seed(step)
        engine.backward(engine(torch.randn(1, 6).to(engine.module.a.weight)))
        engine.step()
    engine.save_checkpoint(folder)
    states = read(engine)
    engine.destroy()
    return states


def load(folder: str, *args: Any, **options: Any) -> tuple[bool, str, States]:
    engine = make(*args, **options)
    engine.load_checkpoint(folder)
    found = engine.ucp_report.direct, engine.ucp_report.reason, read(engine)
    assert engine.global_steps == 3
    engine.destroy()
    return found


def load_each(folder: str, precision: str) -> tuple[States, dict[str, tuple[bool, str, States]]]:
    """What was saved, and what each of some engines of the same topology made of it."""
    truth = save(folder, precision)
    return truth, {
        "same": load(folder, "b a c", precision),
        "moved": load(folder, "a b c", precision),
        "renamed": load(folder, "bb aa cc", precision, rename=RENAMED),
        "no optimizer": load(folder, "c b a", precision, trains=False),
    }
