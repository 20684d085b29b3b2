"""Objects with references to an optimizer still change it after a resume in another or an unchanged topology."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime import lr_schedules
from torch import Tensor
from torch.optim import lr_scheduler

from deepspeed_ucp.testing import WorldPool
from tests.support.covering import params
from tests.support.engines.cases import Case, compute_loss, make_engine
from tests.support.engines.kinds import ON_CPU, SUMS_IN_FP32
from tests.support.engines.ranks import walk

BEFORE, AFTER = 3, 5
"""Steps before a save and after it."""


class Holder:
    """Changes rates and betas by the step number, in the optimizer's first list of param groups or its first dicts.

    Args:
        dicts: keep the dicts of the list.
        whole: the state dict has all attributes, like that of torch's schedulers.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, dicts: bool = False, whole: bool = False) -> None:
        self.groups: Sequence[dict[str, Any]] = optimizer.param_groups
        if dicts:
            self.groups = tuple(self.groups)
        self.rates = [group["lr"] for group in self.groups]
        self.steps, self.whole = 0, whole

    def step(self) -> None:
        self.steps += 1
        for group, rate in zip(self.groups, self.rates, strict=True):
            group.update(lr=rate / (1 + self.steps), betas=(0.8 + 0.01 * self.steps, 0.95))

    def get_last_lr(self) -> list[float]:
        return [group["lr"] for group in self.groups]

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self)) if self.whole else {"steps": self.steps, "rates": self.rates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


def _sequence(optimizer: Any) -> Any:
    parts = [lr_scheduler.ConstantLR(optimizer, 0.5, 9), lr_scheduler.ExponentialLR(optimizer, 0.8)]
    return lr_scheduler.SequentialLR(optimizer, parts, [5])


def _chain(optimizer: Any) -> Any:
    parts = [lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 5), lr_scheduler.StepLR(optimizer, 2, 0.7)]
    return lr_scheduler.ChainedScheduler(parts, optimizer)


HOLDERS: dict[str, Callable[[Any], Any]] = {
    "KeepsList": Holder,
    "KeepsDicts": partial(Holder, dicts=True),
    "SavesGroups": partial(Holder, whole=True),
}
CONFIGURED: dict[str, dict[str, Any]] = {
    "WarmupLR": {"warmup_min_lr": 0.001, "warmup_max_lr": 0.05, "warmup_num_steps": 5},
    "WarmupCosineLR": {"total_num_steps": 12, "warmup_min_ratio": 0.1, "warmup_num_steps": 3},
    "OneCycle": {"cycle_min_lr": 0.001, "cycle_max_lr": 0.1, "cycle_first_step_size": 4},
    "LRRangeTest": {"lr_range_test_min_lr": 0.001, "lr_range_test_step_size": 2},
}
"""Parameters of DeepSpeed's schedulers, which a ds_config can name."""
SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "CosineAnnealingLR": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 7),
    "CosineAnnealingWarmRestarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 2, 2),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=12),
    "CyclicLR": lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.001, 0.1, 3),
    "ReduceLROnPlateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0),
    "SequentialLR": _sequence,
    "ChainedScheduler": _chain,
    **{name: partial(getattr(lr_schedules, name), **params) for name, params in CONFIGURED.items()},
}
"""Factories of the schedulers of torch and DeepSpeed, by name.

Those without a row load their numbers like one of these, such as those of transformers.
"""

SAME = (*HOLDERS, "LambdaLR", "OneCycleLR", "ReduceLROnPlateau", "SequentialLR", "ChainedScheduler", "OneCycle")
"""They differ in their references and outputs. In the same topology, which DeepSpeed loads, others are exhaustive."""

WAYS = ("given", "callable", "own")
"""A scheduler is an argument of `initialize`, is made by a callable, or is made and stepped by the script."""


def list_ways(name: str) -> tuple[str, ...]:
    """List the ways to use a scheduler. DeepSpeed's schedulers can also be named in the ds_config."""
    if name == "SavesGroups":  # a script that loads its state would replace its groups by copies
        return WAYS[:2]
    return (*WAYS, "config") if name in CONFIGURED else WAYS


# --- on the ranks


Trace = tuple[list[list[float]], list[float]]
"""Learning rates and betas of the param groups before the first step and after each; losses of the steps."""


class Training:
    def __init__(self, case: Case, name: str, way: str, seed: int) -> None:
        make, config = {**HOLDERS, **SCHEDULERS}[name], case.on().ds_config
        if way == "config":
            config["scheduler"] = {"type": name, "params": CONFIGURED[name]}
        given = {"given": make, "callable": lambda _: make}
        self.engine = make_engine(config, "plain", scheduler=given.get(way, False), seed=seed)
        self.own = make(self.engine.basic_optimizer) if way == "own" else None
        self.needs_loss = name == "ReduceLROnPlateau"

    def train(self, steps: int) -> Trace:
        hyper, losses = [self._read_hyper()], list[float]()
        for _ in range(steps):
            losses.append(self._step())
            hyper.append(self._read_hyper())
        return hyper, losses

    def _read_hyper(self) -> list[float]:
        groups = self.engine.basic_optimizer.param_groups
        return [float(value) for group in groups for value in (group["lr"], *group["betas"])]

    def _step(self) -> float:
        loss = compute_loss(self.engine)
        self.engine.backward(loss)
        mean = loss.detach() / torch.distributed.get_world_size()
        torch.distributed.all_reduce(mean)
        # The sum depends on the number of ranks in its last bits.
        arguments = {"metrics": round(mean.item(), 4)} if self.needs_loss else {}
        self.engine.step(arguments)
        if self.own is not None:
            self.own.step(**arguments)
        return mean.item()

    def load(self, folder: str) -> bool:
        """Return True for the plugin's loader."""
        _, client_state = self.engine.load_checkpoint(folder)
        if self.own is not None:
            self.own.load_state_dict(client_state["own"])
        return bool(self.engine.ucp_report.direct)


def run_each(
    case: Case, rows: Sequence[tuple[str, str]], root: str, *, resume: bool = False
) -> list[tuple[bool, Trace]]:
    """Train with each scheduler and save, or resume.

    Return True for the plugin's loader, and a trace of the steps after it.
    """
    found = []
    for name, way in rows:
        training, folder, direct = Training(case, name, way, seed=int(resume)), f"{root}/{name}-{way}", False
        if resume:
            direct = training.load(folder)
        else:
            training.train(BEFORE)
            own = training.own
            training.engine.save_checkpoint(folder, client_state={"own": own.state_dict()} if own else {})
        found.append((direct, training.train(AFTER)))
        training.engine.destroy()
    return found


def list_replaced(case: Case, folder: str) -> tuple[bool, list[str]]:
    """Load into a trained engine. Return True for the plugin's loader, and the names of replaced objects."""
    training = Training(case, "LambdaLR", "given", seed=1)
    training.train(1)
    before = dict(_list_objects(training.engine))
    is_direct = training.load(f"{folder}/LambdaLR-given")
    after = dict(_list_objects(training.engine))
    training.engine.destroy()
    return is_direct, sorted(name for name in before.keys() | after.keys() if before.get(name) is not after.get(name))


def _list_objects(engine: Any) -> Iterator[tuple[str, Any]]:
    """List param groups, parameters, masters, states, the scheduler and the loss scalers by name."""
    wrapper, inner = engine.optimizer, engine.basic_optimizer
    parts = {"wrapper": wrapper.param_groups, "groups": inner.param_groups, "states": [*inner.state.values()]}
    is_cut = engine.zero_optimization_stage() == 3  # it makes new lists of parameters in every step
    for name, value in walk(parts):
        if name.count(".") and isinstance(value, dict | list | Tensor) and not (is_cut and ".params" in name):
            yield name, None if name == ".states" else value
    yield from {"wrapper": wrapper, "optimizer": inner, "scheduler": engine.lr_scheduler, "state": inner.state}.items()
    for name, param in engine.module.named_parameters():
        yield from {name: param, f"{name} ds_tensor": getattr(param, "ds_tensor", None)}.items()
    for name in ("loss_scaler", "loss_scale_config", "torch_autocast_gradscaler"):
        yield name, getattr(wrapper, name, None)
    yield "torch_autocast_z0_gradscaler", getattr(engine, "torch_autocast_z0_gradscaler", None)


# --- tests

STAGES = (0, 1, 2, 3)
CASES: list[Any] = [(2, 3, False)]
CASES += [pytest.param(*pair, True, marks=pytest.mark.exhaustive) for pair in product(STAGES, STAGES)]
"""Stages of the saving run and of the other topology; True if each scheduler is tried in every way."""
LOSS_TOLERANCE = 1e-4

AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "float16"}}
"""Has a GradScaler of torch."""
TRAINED = [Case(stage, 1, precision) for stage in STAGES for precision in ("fp32", "bf16", "fp16")]
TRAINED += [Case(stage, 1, config=AUTOCAST) for stage in STAGES]
TRAINED += [Case(stage, 1, zero=ON_CPU) for stage in (2, 3)]
TRAINED += [Case(1, 1, "bf16", config=SUMS_IN_FP32)]  # BF16_Optimizer
OF_EACH = [TRAINED[place] for place in (0, 1, 2, 5, 7, 9, 11, 12, 13, 17, 18)]
"""Every stage, precision, wrapper and loss scaler."""


def list_rows(turn: int, every: bool) -> list[tuple[str, str]]:
    """List schedulers with a way to pass each to the engine, which depends on the turn."""
    found = []
    for number, name in enumerate((*HOLDERS, *SCHEDULERS)):
        ways = list_ways(name)
        found += [(name, way) for way in (ways if every else [ways[(number + turn) % len(ways)]])]
    return found


@pytest.mark.parametrize(("stage", "other", "every"), CASES)
def test_schedulers_continue_like_in_the_uninterrupted_run(
    stage: int, other: int, every: bool, tmp_path: Path, ucp_worlds: WorldPool, subtests: pytest.Subtests
) -> None:
    """Compare rates, betas and losses of five steps, in the same topology and at another stage.

    Every rank has a whole scheduler: a second rank is exhaustive.
    """
    case, rows = Case(stage, 1), list_rows(stage, every)
    traces = dict(zip(rows, ucp_worlds.get(1).run(run_each, case, rows, str(tmp_path))[0], strict=True))
    same = {row: trace for row, trace in traces.items() if every or row[0] in SAME}
    for target, expected in ((case, same), (Case(other, 1 + every), traces)):
        found = ucp_worlds.get(target.world).run(run_each, target, [*expected], str(tmp_path), resume=True)[0]
        gap = 0 if target == case else LOSS_TOLERANCE
        for ((name, way), (_, before)), (is_direct, after) in zip(expected.items(), found, strict=True):
            with subtests.test(f"{name}-{way}-{case}→{target}"):
                assert is_direct is (target != case and (stage or other) != 0)
                assert after[0] == [pytest.approx(each, rel=1e-6) for each in before[0]]
                assert after[1] == pytest.approx(before[1], rel=gap)


@pytest.mark.parametrize("case", params(OF_EACH, TRAINED, str))
def test_a_load_replaces_no_object_of_a_trained_engine(case: Case, tmp_path: Path, ucp_worlds: WorldPool) -> None:
    """These are param groups and their list in each layer, parameters, masters, states, scheduler and loss scalers."""
    world = ucp_worlds.get(1)
    world.run(run_each, case, [("LambdaLR", "given")], str(tmp_path))
    for target in (case, case.but(stage=(case.stage + 1) % 4, zero={})):
        ((is_direct, replaced),) = world.run(list_replaced, target, str(tmp_path))
        assert (is_direct, replaced) == (target != case, [])
