"""Engines of each kind in two topologies; runs that save each step with the plugin and without it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import deepspeed
import torch

from deepspeed_ucp.engine_state import find_state
from deepspeed_ucp.testing.capture import capture
from deepspeed_ucp.testing.compare import compare
from deepspeed_ucp.testing.ranks import train as train_steps
from tests.support.engines import autoep, cases, experts, muon, nvme, parallel
from tests.support.engines.cases import Case
from tests.support.engines.models import MODELS
from tests.support.engines.parallel import Launch
from tests.support.engines.ranks import capture_rank, describe, uninstalled
from tests.support.engines.saves import close

Training = Callable[[int, str], Callable[[], Generator[Any, None, None]]]
"""Returns the function that makes and trains an engine, by seed and folder of swap files."""


@dataclass(frozen=True)
class Kind:
    """A kind of engine on two ranks.

    Attributes:
        source, target: trainings in two topologies.
        read: returns a state on a rank.
        differ: lists differences between the states of all ranks of the source and of the target.
    """

    source: Training
    target: Training
    read: Callable[[Any], Any]
    differ: Callable[[Sequence[Any], Sequence[Any]], list[str]]


def of_cases(source: Case, target: Case, **options: Any) -> Kind:
    def make(case: Case) -> Training:
        return lambda seed, _: case.training(**options, seed=seed)

    return Kind(make(source), make(target), capture, _differ_captured)


def _differ_captured(saved: Sequence[Any], loaded: Sequence[Any]) -> list[str]:
    return [line for each in loaded for line in compare(saved[0], each)[1]]


def of_launches(model: str, source: Launch, target: Launch) -> Kind:
    def make(launch: Launch) -> Training:
        return lambda seed, _: parallel.training(model, launch, {}, seed)

    def differ(saved: Sequence[Any], loaded: Sequence[Any]) -> list[str]:
        return parallel.compare_joined(saved, loaded, model)[1]

    return Kind(make(source), make(target), partial(describe, read=capture_rank), differ)


def of_kinds(source: Any, target: Any, **options: Any) -> Kind:
    def differ(saved: Sequence[Any], loaded: Sequence[Any]) -> list[str]:
        want, got = source.join(saved), target.join(loaded)
        return [str(key) for key in want.keys() | got.keys() if key not in want or not want[key].equal(got[key])]

    return Kind(partial(source.training, **options), partial(target.training, **options), source.read, differ)


def without_optimizer(stage: int) -> Training:
    """Train nothing; buffers change in each forward pass."""

    def run(seed: int) -> Generator[Any, None, None]:
        torch.manual_seed(seed)
        engine, *_ = deepspeed.initialize(model=MODELS["mixed"](), config=Case(stage, 2).ds_config)
        yield engine
        while True:
            yield float(engine(torch.ones(1, cases.FEATURES)).sum())

    return lambda seed, _: partial(run, seed)


OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
PARAMS = {"offload_param": {"device": "cpu"}}
SUMS = {"data_types": {"grad_accum_dtype": "fp32"}}

KINDS = {
    "zero1": of_cases(Case(1, 2, "bf16"), Case(3, 2)),
    "zero2": of_cases(Case(2, 2), Case(0, 2)),
    "zero3": of_cases(Case(3, 2, "bf16"), Case(1, 2, "bf16")),
    "bf16": of_cases(Case(1, 2, "bf16", config=SUMS), Case(3, 2, "bf16")),
    "fp16_fused": of_cases(Case(0, 2, "fp16"), Case(1, 2), optimizer="fused_adam"),
    "fp16_unfused": of_cases(Case(0, 2, "fp16"), Case(2, 2, "bf16")),
    "torch": of_cases(Case(0, 2), Case(2, 2)),
    "pipeline": of_launches("eBBh", Launch(1, 2, method="uniform", world=2), Launch(1, 1, method="uniform", world=2)),
    "experts": of_kinds(experts.Spread(2, 2, "fp32", (2, 1)), experts.Spread(2, 1, "fp32", (1, 2))),
    "offload": of_cases(Case(2, 2, zero=OFFLOAD), Case(3, 2)),
    "nvme": Kind(
        nvme.Kind(2, optimizer="nvme", frozen=True).training,
        nvme.Kind(2, 1, frozen=True).training,
        capture,
        _differ_captured,
    ),
    "autotp": of_launches("even", Launch(2, pipeline=False, world=2), Launch(1, stage=3, pipeline=False, world=2)),
    "lora": of_cases(Case(1, 2), Case(3, 2), model="lora"),
    "muon": of_kinds(muon.Kind(2, 2), muon.Kind(2, 3)),
    "autoep": of_kinds(autoep.Spread(2, 2, "fp32", 2), autoep.Spread(2, 1, "fp32", 1), frozen=True),
    "params": of_cases(Case(3, 2, "bf16", zero={**OFFLOAD, **PARAMS}), Case(2, 2)),
    "none": Kind(without_optimizer(0), without_optimizer(3), capture, _differ_captured),
}


def save(name: str, folder: str, own: str, swap: str, steps: int = 2) -> list[Any]:
    """Train, save by DeepSpeed alone and by the plugin, and train on at once. Returns the state at each save."""
    kind, states = KINDS[name], list[Any]()
    trained = kind.source(1, swap)()
    engine = next(trained)
    for number in range(steps):
        train_steps(trained, 1)
        states.append(kind.read(engine))
        with uninstalled():
            engine.save_checkpoint(own, str(number))
        engine.save_checkpoint(folder, str(number))
        train_steps(trained, 1)
        assert not find_state(engine).saver.is_owner or find_state(engine).saver.wait(60)
    close(engine)
    return states


def load_elsewhere(name: str, folder: str, swap: str) -> tuple[str, Any]:
    """Load in another topology. Returns the path of the save and the state."""
    kind = KINDS[name]
    engine = next(kind.target(3, swap)())
    path, _ = engine.load_checkpoint(folder)
    state = kind.read(engine)
    engine.destroy()
    return path, state
