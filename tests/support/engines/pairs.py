"""Engines of every kind, and what ranks do with them where kinds are paired with ways of saving."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import deepspeed
import torch

from deepspeed_ucp.engine_state import find_state
from deepspeed_ucp.testing.capture import capture
from deepspeed_ucp.testing.compare import compare
from deepspeed_ucp.testing.ranks import train as train_steps
from tests.support.engines import autoep as engine_autoep
from tests.support.engines import cases, going_on, parallel
from tests.support.engines import experts as engine_experts
from tests.support.engines import muon as engine_muon
from tests.support.engines import nvme as engine_nvme
from tests.support.engines.cases import Case
from tests.support.engines.experts import Spread
from tests.support.engines.models import MODELS
from tests.support.engines.nvme import Kind as OnNvme
from tests.support.engines.parallel import Launch
from tests.support.engines.ranks import tell, uninstalled
from tests.support.engines.saves import close_saver

Training = Callable[[int, str], Generator[Any, None, None]]
"""By seed and folder of swap files: yields the engine, then the loss of each step."""


@dataclass(frozen=True)
class Kind:
    """An engine on two ranks.

    Attributes:
        source, target: what makes and trains it, and one in another topology.
        hold: what an engine holds on this rank, or of the whole model.
        differ: in what the whole model of the target's ranks differs from that of the source's.
    """

    source: Training
    target: Training
    hold: Callable[[Any], Any] = capture
    differ: Callable[[Sequence[Any], Sequence[Any]], list[str]] = lambda saved, loaded: [
        line for each in loaded for line in compare(saved[0], each)[1]
    ]


def of_case(case: Case, **options: Any) -> Training:
    return lambda seed, _: cases.train(case.ds_config, **options, seed=seed)


def of_launch(model: str, launch: Launch) -> Training:
    return lambda seed, _: parallel.training(model, launch, {}, seed)()


def of_launches(model: str, source: Launch, target: Launch, **options: Any) -> Kind:
    return Kind(of_launch(model, source), of_launch(model, target), tell, partial(_differ_joined, model), **options)


def of_module(make: Callable[[int, str], Any], train: Callable[[Any, range], list[float]]) -> Training:
    def go_on(seed: int, swap: str) -> Generator[Any, None, None]:
        engine = make(seed, swap)
        yield engine
        for step in count():
            yield from train(engine, range(step, step + 1))

    return go_on


def of_experts(spread: Spread) -> Training:
    return of_module(lambda seed, _: engine_experts.make(spread, seed), engine_experts.train)


def of_autoep(spread: engine_autoep.Spread) -> Training:
    return of_module(lambda seed, _: engine_autoep.make(spread, seed, frozen=True), engine_autoep.train)


def of_muon(kind: engine_muon.Kind) -> Training:
    return of_module(lambda seed, _: engine_muon.make(kind, seed), engine_muon.train)


def on_nvme(kind: OnNvme) -> Training:
    return of_module(partial(engine_nvme.make, kind), engine_nvme.train)


def without_optimizer(stage: int) -> Training:
    """Nothing is trained; what a forward pass counts changes."""

    def go_on(seed: int, _: str) -> Generator[Any, None, None]:
        torch.manual_seed(seed)
        engine, *_ = deepspeed.initialize(model=MODELS["mixed"](), config=Case(stage, 2).ds_config)
        yield engine
        while True:
            yield float(engine(torch.ones(1, cases.FEATURES)).sum())

    return go_on


def _differ_joined(model: str, saved: Sequence[Any], loaded: Sequence[Any]) -> list[str]:
    return parallel.compare_joined(saved, loaded, model)[1]


def _differ_states(saved: Sequence[Any], loaded: Sequence[Any]) -> list[str]:
    want, got = going_on.join(saved), going_on.join(loaded)
    return [str(key) for key in want.keys() | got.keys() if key not in want or not want[key].equal(got[key])]


def _differ_spread(saved: Sequence[Any], loaded: Sequence[Any]) -> list[str]:
    want, got = (engine_autoep.join(parts, spread) for parts, spread in zip((saved, loaded), AUTOEP, strict=True))
    return _differ_states([want], [got])


AUTOEP = engine_autoep.Spread(2, 2, "fp32", 2), engine_autoep.Spread(2, 1, "fp32", 1)
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
PARAMS = {"offload_param": {"device": "cpu"}}
SUMS = {"data_types": {"grad_accum_dtype": "fp32"}}

KINDS = {
    "zero1": Kind(of_case(Case(1, 2, "bf16")), of_case(Case(3, 2))),
    "zero2": Kind(of_case(Case(2, 2)), of_case(Case(0, 2))),
    "zero3": Kind(of_case(Case(3, 2, "bf16")), of_case(Case(1, 2, "bf16"))),
    "bf16": Kind(of_case(Case(1, 2, "bf16", config=SUMS)), of_case(Case(3, 2, "bf16"))),
    "fp16_fused": Kind(
        of_case(Case(0, 2, "fp16"), optimizer="fused_adam"), of_case(Case(1, 2), optimizer="fused_adam")
    ),
    "fp16_unfused": Kind(of_case(Case(0, 2, "fp16")), of_case(Case(2, 2, "bf16"))),
    "torch": Kind(of_case(Case(0, 2)), of_case(Case(2, 2))),
    "pipeline": of_launches("eBBh", Launch(1, 2, method="uniform", world=2), Launch(1, 1, method="uniform", world=2)),
    "experts": Kind(
        of_experts(Spread(2, 2, "fp32", (2, 1))),
        of_experts(Spread(2, 1, "fp32", (1, 2))),
        engine_experts.read_states,
        _differ_states,
    ),
    "offload": Kind(of_case(Case(2, 2, zero=OFFLOAD)), of_case(Case(3, 2))),
    "nvme": Kind(on_nvme(OnNvme(2, optimizer="nvme", frozen=True)), on_nvme(OnNvme(2, 1, frozen=True))),
    "autotp": of_launches("even", Launch(2, pipeline=False, world=2), Launch(1, stage=3, pipeline=False, world=2)),
    "lora": Kind(of_case(Case(1, 2), model="lora"), of_case(Case(3, 2), model="lora")),
    "muon": Kind(
        of_muon(engine_muon.Kind(2, 2)),
        of_muon(engine_muon.Kind(2, 3)),
        engine_muon.read_states,
        _differ_states,
    ),
    "autoep": Kind(
        of_autoep(AUTOEP[0]),
        of_autoep(AUTOEP[1]),
        engine_autoep.read_states,
        _differ_spread,
    ),
    "params": Kind(of_case(Case(3, 2, "bf16", zero={**OFFLOAD, **PARAMS})), of_case(Case(2, 2))),
    "none": Kind(without_optimizer(0), without_optimizer(3)),
}


def save(name: str, folder: str, own: str, swap: str, steps: int = 2) -> list[Any]:
    """Train and save, also by DeepSpeed alone, and train on at once; return the state held at each save."""
    kind, states = KINDS[name], list[Any]()
    trained = kind.source(1, swap)
    engine = next(trained)
    for number in range(steps):
        train_steps(trained, 1)
        states.append(kind.hold(engine))
        with uninstalled():
            engine.save_checkpoint(own, str(number))
        engine.save_checkpoint(folder, str(number))
        train_steps(trained, 1)
        assert not find_state(engine).saver.is_first or find_state(engine).saver.wait(60)
    close_saver(find_state(engine).saver)
    engine.destroy()
    return states


def load_elsewhere(name: str, folder: str, swap: str) -> tuple[str, Any]:
    """From where a load in another topology has come, and what is held then."""
    kind = KINDS[name]
    engine = next(kind.target(3, swap))
    path, _ = engine.load_checkpoint(folder)
    held = kind.hold(engine)
    engine.destroy()
    return path, held
