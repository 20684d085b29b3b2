"""Models whose state dict renames tensors of the module, and has additional ones."""

from __future__ import annotations

import json
from collections.abc import Generator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.runtime.zero import GatheredParameters

from deepspeed_ucp.testing import WorldPool
from deepspeed_ucp.testing.ranks import train as train_steps
from tests.support.engines.cases import forget_autocast
from tests.support.engines.ranks import Load, Local, load_each, save

BLOCKS = 4


class Quantized(torch.nn.Module):
    """A frozen weight of bytes, as in Linear4bit, with scales that only the state dict contains."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(8 * BLOCKS, 1, dtype=torch.uint8), requires_grad=False)
        self.absmax = torch.ones(BLOCKS)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight.absmax"] = self.absmax if keep_vars else self.absmax.detach()
        header = json.dumps({"blocks": BLOCKS}).encode()
        destination[f"{prefix}weight.quant_state"] = torch.tensor(list(header), dtype=torch.uint8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.absmax.mean().to(x.dtype) * 1e-3


class Body(torch.nn.Module):
    """A module whose state dict renames the norm, by a hook."""

    def __init__(self, *, bytes_first: bool) -> None:
        super().__init__()
        if bytes_first:
            self.base = Quantized()
        self.up = torch.nn.Linear(6, 10)
        if not bytes_first:
            self.base = Quantized()
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
    """A value head around a model, whose names have no prefix in the state dict."""

    def __init__(self, *, bytes_first: bool) -> None:
        super().__init__()
        self.pretrained = Body(bytes_first=bytes_first)
        self.v_head = torch.nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.v_head(self.pretrained(x)).float().square().mean()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        found = self.pretrained.state_dict(*args, **kwargs)
        for key, value in self.v_head.state_dict(*args, **kwargs).items():
            found[f"v_head.{key}"] = value
        return found


def train(stage: int, seed: int, options: Any = True, *, persist: bool = False) -> Generator[Any, None, None]:
    """Yields an engine, then the loss of each step."""
    forget_autocast()
    torch.manual_seed(seed)
    module = WithHead(bytes_first=stage < 3)  # ZeRO 3 takes the first parameter's dtype for the model's
    with torch.no_grad():
        module.pretrained.base.absmax.copy_(torch.rand(BLOCKS) + seed)
        module.pretrained.base.weight.copy_(torch.randint(256, (8 * BLOCKS, 1)))
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 10**4 * persist},
        "zero_allow_untested_optimizer": True,
        "checkpoint": {"universal": options},
        "steps_per_print": 10**6,
    }
    trained = [param for param in module.parameters() if param.requires_grad]
    engine = deepspeed.initialize(model=module, model_parameters=trained, config=config)[0]
    yield engine
    while True:
        torch.manual_seed(10 * engine.global_steps)
        loss = engine(torch.randn(4, 6).to(engine.device))
        engine.backward(loss)
        engine.step()
        yield loss.item()


def read(engine: Any) -> dict[str, torch.Tensor]:
    """Read parameters, buffers and scales, whole."""
    params = list(engine.module.parameters())
    partitioned = any(hasattr(param, "ds_id") for param in params)
    with GatheredParameters(params) if partitioned else nullcontext():
        found = {name: value.detach().clone() for name, value in engine.module.named_parameters()}
    found.update((name, value.clone()) for name, value in engine.module.named_buffers())
    return {**found, "absmax": engine.module.pretrained.base.absmax.clone()}


@pytest.fixture(scope="module")
def saved(ucp_worlds: WorldPool, tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[str, Local]]:
    """By stage the folder of a save, and the model at the save."""
    found = {}
    for stage in (0, 1, 2, 3):
        folder = str(tmp_path_factory.mktemp("heads"))
        found[stage] = folder, ucp_worlds.get(2).run(save, partial(train, stage, 1), folder, read=read)[0]
    return found


@pytest.mark.parametrize(("source", "target"), [(0, 3), (1, 2), (2, 0), (3, 1), (3, 3)])
def test_everything_comes_back(
    source: int, target: int, saved: dict[int, tuple[str, Local]], ucp_worlds: WorldPool
) -> None:
    """Trained and frozen weights, statistics, counters, and scales of quantized weights."""
    folder, before = saved[source]
    training = partial(train, target, 2, {"same_topology": "direct"})
    (local,), _ = ucp_worlds.get(2).run(load_each, training, [Load(folder, steps=2)], read=read)
    assert local.state.keys() == before.state.keys()
    assert [name for name, value in before.state.items() if not torch.equal(local.state[name], value)] == []
    assert not [text for text in local.list_messages("WARNING") if "differs" not in text]


def evaluate_after_fit(folder: str) -> tuple[list[float], float]:
    """Load into an evaluating engine around a module that has trained on. Returns two losses, and the expected one."""
    trained = train(3, 1, persist=True)
    engine = next(trained)
    train_steps(trained, 2)
    engine.save_checkpoint(folder)
    engine.module.eval()
    expected = evaluate(engine)
    engine.module.train()
    train_steps(trained, 2)
    config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 3}}
    config["checkpoint"] = {"universal": True}
    tester = deepspeed.initialize(model=engine.module, config=config)[0]
    tester.module.eval()
    tester.load_checkpoint(folder, load_optimizer_states=False)
    found = [evaluate(tester), evaluate(tester)]
    tester.destroy()
    engine.destroy()
    return found, expected


def evaluate(engine: Any) -> float:
    torch.manual_seed(5)
    with torch.no_grad():
        return float(engine(torch.randn(4, 6).to(engine.device)))


def test_an_evaluating_engine_around_a_module_that_has_trained(ucp_worlds: WorldPool, tmp_path: Path) -> None:
    """Small parameters that ZeRO 3 keeps gathered are updated by the load."""
    for found, expected in ucp_worlds.get(2).run(evaluate_after_fit, str(tmp_path)):
        assert found == [expected, expected]
