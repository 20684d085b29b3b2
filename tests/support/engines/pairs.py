"""Engines of each kind in two topologies; runs that save each step with the plugin and without it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import deepspeed
import torch

from deepspeed_ucp.engine_state import find_state
from deepspeed_ucp.testing.ranks import train as train_steps
from tests.support.engines import autoep, experts, muon, nvme
from tests.support.engines.cases import FEATURES, Case
from tests.support.engines.kinds import ON_CPU, SUMS_IN_FP32, Kind
from tests.support.engines.models import MODELS
from tests.support.engines.parallel import pipe, plain
from tests.support.engines.ranks import Local, describe, uninstalled
from tests.support.engines.saves import close


@dataclass(frozen=True)
class Idle(Case):
    """An engine without optimizer; its buffers change in each forward pass."""


def make(kind: Idle, seed: int) -> Any:
    torch.manual_seed(seed)
    return deepspeed.initialize(model=MODELS["mixed"](), config=kind.ds_config)[0]


def step(engine: Any) -> float:
    return float(engine(torch.ones(1, FEATURES)).sum())


FUSED, LORA, FROZEN = {"optimizer": "fused_adam"}, {"model": "lora"}, {"frozen": True}
LETTERS, EVEN = pipe(1, 2, method="uniform", world=2, model="eBBh"), plain(2, world=2, model="even")
KINDS: dict[str, tuple[Kind, Kind, dict[str, Any]]] = {
    "zero1": (Case(1, 2, "bf16"), Case(3, 2), {}),
    "zero2": (Case(2, 2), Case(0, 2), {}),
    "zero3": (Case(3, 2, "bf16"), Case(1, 2, "bf16"), {}),
    "bf16": (Case(1, 2, "bf16", config=SUMS_IN_FP32), Case(3, 2, "bf16"), {}),
    "fp16_fused": (Case(0, 2, "fp16"), Case(1, 2), FUSED),
    "fp16_unfused": (Case(0, 2, "fp16"), Case(2, 2, "bf16"), {}),
    "torch": (Case(0, 2), Case(2, 2), {}),
    "pipeline": (LETTERS, LETTERS.but(pp=1), {}),
    "experts": (experts.Spread(2, 2, ep=(2, 1)), experts.Spread(1, 2, ep=(1, 2)), {}),
    "offload": (Case(2, 2, zero=ON_CPU), Case(3, 2), {}),
    "nvme": (nvme.Kind(3, 2, optimizer="nvme", frozen=True), nvme.Kind(1, 2, frozen=True), {}),
    "autotp": (EVEN, EVEN.but(tp=1, stage=3), {}),
    "lora": (Case(1, 2), Case(3, 2), LORA),
    "muon": (muon.Kind(2, 2), muon.Kind(3, 2), {}),
    "autoep": (autoep.Spread(2, 2, ep=2), autoep.Spread(1, 2), FROZEN),
    "params": (Case(3, 2, "bf16", zero={**ON_CPU, "offload_param": {"device": "cpu"}}), Case(2, 2), {}),
    "none": (Idle(0), Idle(3), {}),
}
"""Source, target and options of both on two ranks."""


def save(name: str, folder: str, own: str, swap: str, steps: int = 2) -> Local:
    """Train, save by DeepSpeed alone and by the plugin, and train on at once. Returns the engine at the last save."""
    kind, _, options = KINDS[name]
    trained = kind.training(1, swap, **options)()
    engine = next(trained)
    for number in range(steps):
        train_steps(trained, 1)
        local = describe(engine, kind.read)
        with uninstalled():
            engine.save_checkpoint(own, str(number))
        engine.save_checkpoint(folder, str(number))
        train_steps(trained, 1)
        assert not find_state(engine).saver.is_owner or find_state(engine).saver.wait()
    close(engine)
    return local


def load_elsewhere(name: str, folder: str, swap: str) -> Local:
    """Load in another topology."""
    _, kind, options = KINDS[name]
    engine = next(kind.training(3, swap, **options)())
    path, _ = engine.load_checkpoint(folder)
    local = describe(engine, kind.read)
    local.path = path
    engine.destroy()
    return local
