"""Schedulers and other objects that hold references to a live optimizer. Imported on the ranks only."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import deepspeed
import torch
import transformers
from deepspeed.runtime import lr_schedules
from torch.optim import lr_scheduler

import deepspeed_ucp  # noqa: F401 - enables the plugin
from tests.support.engines.cases import BATCH, Case, allow_fp16_on_cpu, forget_autocast
from tests.support.engines.models import OPTIMIZERS, Plain, param_groups
from tests.support.engines.ranks import uninstalled

BEFORE, AFTER = 3, 5
"""Steps before a save and after it."""

ON = {"checkpoint": {"universal": True}}


class KeepsList:
    """Divides the learning rates by the step number, in the optimizer's first list of param groups."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.groups: Sequence[dict[str, Any]] = optimizer.param_groups
        self.rates = [group["lr"] for group in self.groups]
        self.steps = 0

    def step(self) -> None:
        self.steps += 1
        for group, rate in zip(self.groups, self.rates, strict=True):
            group["lr"] = rate / (1 + self.steps)

    def get_last_lr(self) -> list[float]:
        return [group["lr"] for group in self.groups]

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "rates": self.rates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


class KeepsDicts(KeepsList):
    """Like KeepsList, but keeps the dicts of the list."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer)
        self.groups = tuple(optimizer.param_groups)


class KeepsBetas(KeepsList):
    """Like KeepsList, and sets betas too."""

    def step(self) -> None:
        super().step()
        for group in self.groups:
            group["betas"] = (0.8 + 0.01 * self.steps, 0.95)


class SavesGroups(KeepsList):
    """Like KeepsList, with all attributes in its state dict, as torch's schedulers have them."""

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))


def _shrink(step: int) -> float:
    return 1.0 / (1 + step)


def _sequence(optimizer: Any) -> Any:
    parts = [lr_scheduler.ConstantLR(optimizer, 0.5, 9), lr_scheduler.ExponentialLR(optimizer, 0.8)]
    return lr_scheduler.SequentialLR(optimizer, parts, [5])


def _chain(optimizer: Any) -> Any:
    parts = [lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 5), lr_scheduler.StepLR(optimizer, 2, 0.7)]
    return lr_scheduler.ChainedScheduler(parts, optimizer)


HOLDERS: dict[str, Callable[[Any], Any]] = {
    "KeepsList": KeepsList,
    "KeepsDicts": KeepsDicts,
    "KeepsBetas": KeepsBetas,
    "SavesGroups": SavesGroups,
}
CONFIGURED: dict[str, dict[str, Any]] = {
    "WarmupLR": {"warmup_min_lr": 0.001, "warmup_max_lr": 0.05, "warmup_num_steps": 5},
    "WarmupDecayLR": {"total_num_steps": 12, "warmup_min_lr": 0.001, "warmup_max_lr": 0.05, "warmup_num_steps": 5},
    "WarmupCosineLR": {"total_num_steps": 12, "warmup_min_ratio": 0.1, "warmup_num_steps": 3},
    "OneCycle": {"cycle_min_lr": 0.001, "cycle_max_lr": 0.1, "cycle_first_step_size": 4},
    "LRRangeTest": {"lr_range_test_min_lr": 0.001, "lr_range_test_step_size": 2},
}
"""Parameters of DeepSpeed's schedulers, which a ds_config can name."""
SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, _shrink),
    "MultiplicativeLR": lambda optimizer: lr_scheduler.MultiplicativeLR(optimizer, lambda _: 0.9),
    "StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, 2, 0.5),
    "MultiStepLR": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [2, 4, 6], 0.5),
    "ConstantLR": lambda optimizer: lr_scheduler.ConstantLR(optimizer, 0.3, 5),
    "LinearLR": lambda optimizer: lr_scheduler.LinearLR(optimizer, 0.2, 1.0, 6),
    "ExponentialLR": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.8),
    "PolynomialLR": lambda optimizer: lr_scheduler.PolynomialLR(optimizer, 9),
    "CosineAnnealingLR": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 7),
    "CosineAnnealingWarmRestarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 2, 2),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=12),
    "CyclicLR": lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.001, 0.1, 3),
    "ReduceLROnPlateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0),
    "SequentialLR": _sequence,
    "ChainedScheduler": _chain,
    "linear": lambda optimizer: transformers.get_linear_schedule_with_warmup(optimizer, 2, 12),
    "inverse_sqrt": lambda optimizer: transformers.get_inverse_sqrt_schedule(optimizer, 2),
    "wsd": lambda optimizer: transformers.get_wsd_schedule(optimizer, 2, 4, num_training_steps=9),
    **{name: partial(getattr(lr_schedules, name), **params) for name, params in CONFIGURED.items()},
}
"""Factories of the schedulers of torch, transformers and DeepSpeed, by name."""
if hasattr(transformers.optimization, "GreedyLR"):
    SCHEDULERS["GreedyLR"] = lambda optimizer: transformers.optimization.GreedyLR(optimizer, patience=1)

WAYS = ("given", "callable", "own")
"""A scheduler is an argument of `initialize`, is made by a callable, or is made and stepped by the script."""


def list_ways(name: str) -> tuple[str, ...]:
    """List the ways to use a scheduler. DeepSpeed's schedulers can also be named in the ds_config."""
    if name == "SavesGroups":  # a script that loads its state would replace its groups by copies
        return WAYS[:2]
    return (*WAYS, "config") if name in CONFIGURED else WAYS


@dataclass(frozen=True)
class Trace:
    """Losses of steps; learning rates and betas of the param groups before the first step and after each."""

    hyper: list[list[float]]
    losses: list[float]


class Training:
    """An engine of two param groups and a scheduler."""

    def __init__(self, case: Case, name: str, way: str, seed: int) -> None:
        allow_fp16_on_cpu()
        forget_autocast()
        torch.manual_seed(seed)
        module = Plain()
        optimizer = OPTIMIZERS["adamw"](param_groups(module))
        make = {**HOLDERS, **SCHEDULERS}[name]
        given = make(optimizer) if way == "given" else make if way == "callable" else None
        config = {**case.ds_config, **ON}
        if way == "config":
            config["scheduler"] = {"type": name, "params": CONFIGURED[name]}
        self.engine = deepspeed.initialize(model=module, optimizer=optimizer, lr_scheduler=given, config=config)[0]
        self.own = make(self.engine.basic_optimizer) if way == "own" else None
        self.needs_loss = name in ("ReduceLROnPlateau", "GreedyLR")

    def train(self, steps: int) -> Trace:
        trace = Trace([self._read_hyper()], [])
        for _ in range(steps):
            trace.losses.append(self._step())
            trace.hyper.append(self._read_hyper())
        return trace

    def _read_hyper(self) -> list[float]:
        groups = self.engine.basic_optimizer.param_groups
        return [float(value) for group in groups for value in (group["lr"], *group["betas"])]

    def _step(self) -> float:
        rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
        generator = torch.Generator().manual_seed(1000 + self.engine.global_steps)
        batch = torch.randn(BATCH, 14, generator=generator).chunk(ranks)[rank]
        loss = (self.engine(batch[:, :13]).float().squeeze(-1) - batch[:, 13]).square().mean()
        self.engine.backward(loss)
        mean = loss.detach().clone()
        torch.distributed.all_reduce(mean)
        known = round(mean.item() / ranks, 4)  # the sum depends on the number of ranks in its last bits
        arguments = {"metrics": known} if self.needs_loss else {}
        self.engine.step(arguments)
        if self.own is not None:
            self.own.step(**arguments)
        return mean.item() / ranks

    def save(self, folder: str) -> None:
        self.engine.save_checkpoint(folder, client_state={"own": self.own.state_dict()} if self.own else {})

    def load(self, folder: str) -> None:
        _, client_state = self.engine.load_checkpoint(folder)
        if self.own is not None:
            self.own.load_state_dict(client_state["own"])


def train_each(case: Case, rows: Sequence[tuple[str, str]], folder: str) -> list[Trace]:
    """Train with each scheduler, save and train on. Returns a trace of the steps after the save."""
    found = []
    for name, way in rows:
        training = Training(case, name, way, seed=0)
        training.train(BEFORE)
        training.save(os.path.join(folder, f"{name}-{way}"))
        found.append(training.train(AFTER))
        training.engine.destroy()
    return found


def resume_each(
    case: Case, rows: Sequence[tuple[str, str]], folder: str, *, plugin: bool = True
) -> list[tuple[bool, Trace]]:
    """Resume each run. Returns True for the plugin's own loader, and a trace of the steps after the load."""
    found = []
    with nullcontext() if plugin else uninstalled():
        for name, way in rows:
            training = Training(case, name, way, seed=1)
            training.load(os.path.join(folder, f"{name}-{way}"))
            report = getattr(training.engine, "ucp_report", None)
            found.append((bool(report and report.direct), training.train(AFTER)))
            training.engine.destroy()
    return found


def list_replaced(case: Case, folder: str, *, plugin: bool = True) -> tuple[bool, list[str]]:
    """Load into a trained engine. Returns True for the plugin's own loader, and the names of replaced objects."""
    with nullcontext() if plugin else uninstalled():
        training = Training(case, "LambdaLR", "given", seed=1)
        training.train(1)
        before = dict(_list_objects(training.engine))
        training.load(os.path.join(folder, "LambdaLR-given"))
        after = dict(_list_objects(training.engine))
        report = getattr(training.engine, "ucp_report", None)
        training.engine.destroy()
    replaced = [name for name in before.keys() | after.keys() if before.get(name) is not after.get(name)]
    return bool(report and report.direct), sorted(replaced)


def _list_objects(engine: Any) -> Iterator[tuple[str, Any]]:
    """List param groups, parameters, masters, states, the scheduler and the loss scalers by name."""
    wrapper, inner = engine.optimizer, engine.basic_optimizer
    yield from {"wrapper": wrapper, "optimizer": inner, "scheduler": engine.lr_scheduler}.items()
    yield "wrapper's groups", wrapper.param_groups
    yield "optimizer's groups", inner.param_groups
    for number, group in enumerate(inner.param_groups):
        yield f"group {number}", group
        yield f"wrapper's group {number}", wrapper.param_groups[number]
        if engine.zero_optimization_stage() < 3:  # stage 3 makes new lists in every step
            yield f"params of group {number}", group["params"]
            yield from ((f"master {number}.{place}", param) for place, param in enumerate(group["params"]))
    yield "state", inner.state
    for number, state in enumerate(inner.state.values()):
        yield f"state {number}", state
        yield from ((f"state {number} {name}", value) for name, value in state.items())
    for name, param in engine.module.named_parameters():
        yield name, param
        if hasattr(param, "ds_tensor"):
            yield f"{name} ds_tensor", param.ds_tensor
    for name in ("loss_scaler", "loss_scale_config", "torch_autocast_gradscaler"):
        if getattr(wrapper, name, None) is not None:
            yield name, getattr(wrapper, name)
    yield "torch_autocast_z0_gradscaler", getattr(engine, "torch_autocast_z0_gradscaler", None)
