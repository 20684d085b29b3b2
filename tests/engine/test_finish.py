"""The last phase of loads: stale copies, clipping, scaling, scalars of the optimizer, blocked engines, kept objects."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from deepspeed.runtime.lr_schedules import WarmupLR
from torch.optim.lr_scheduler import LambdaLR, MultiStepLR, SequentialLR, StepLR

from deepspeed_ucp.comm import Comm
from deepspeed_ucp.engine.finish import (
    check_scheduler,
    find_extra_states,
    list_scaling_changes,
    refresh_after_own_load,
    restore_helpers,
    restore_scaling,
)
from deepspeed_ucp.engine.guard import block_engine, unblock_engine
from deepspeed_ucp.engine.optimizer import probe_optimizer, restore_scalar
from deepspeed_ucp.engine.references import keep_references, replace_method
from deepspeed_ucp.engine.rule import watch_edits
from deepspeed_ucp.engine_state import find_state
from deepspeed_ucp.errors import CheckpointError, MismatchError
from tests.support.direct import UpstreamEngine
from tests.support.engines.ranks import is_same


@pytest.mark.parametrize(("engine", "refreshed"), [({"is_pipe_parallel": True}, True), ({}, False)])
def test_copies_of_a_pipeline_with_one_stage_are_refreshed(engine: dict[str, bool], refreshed: bool) -> None:
    """A tied module has no layer file if all its uses have a `forward_fn`."""
    target = Mock(engine=SimpleNamespace(**engine), parallel=SimpleNamespace(pp=1))
    target.unfiled.return_value = ["tied_modules.k.weight"]
    refresh_after_own_load(target, Comm(), with_states=True)
    assert (target.refresh_copies.called, target.gather_copies.called) == (refreshed, refreshed)


DYNAMIC, STATIC = {"dynamic": True, "cur_scale": 512.0, "scale_window": 1000}, {"dynamic": False, "cur_scale": 64.0}


@pytest.mark.parametrize(
    ("wrapped", "clip", "scaler", "logged"),
    [
        ({"clip_grad": 0.5}, 0.5, DYNAMIC, []),
        ({"clip_grad": 1.0}, 0.5, {}, ["gradient_clipping 0.5 → 1.0 (the saved value is used)"]),
        ({"clip_grad": 1.0}, None, {}, []),  # ZeRO 3 does not save it
        ({"clip_grad": 0.0, "compute_grad_norm": False}, 0.5, {}, ["gradient_clipping 0.5 → 0.0 (the value of this"]),
        ({}, 0.5, {}, ["gradient_clipping 0.5 → 2.0 (the value of this run is used)"]),  # stage 0 in fp32
        ({"loss_scaler": STATIC}, None, DYNAMIC, ["loss_scale dynamic → 64.0 (the value of this run is used)"]),
        ({}, None, STATIC, ["loss_scale 64.0 → dynamic (the value of this run is used)"]),
        ({"loss_scaler": STATIC}, None, {**STATIC, "cur_scale": 8.0}, ["loss_scale 8.0 → 64.0 (the value of this run"]),
        ({}, None, {**DYNAMIC, "scale_window": 9}, ["loss_scale_window 9 → 1000 (the saved value is used)"]),
        ({}, None, {"dynamic": True, "cur_scale": 1.0}, []),
    ],
)
def test_changed_clipping_and_loss_scaling_are_logged(wrapped: Any, clip: Any, scaler: Any, logged: list[str]) -> None:
    live = {**wrapped, "loss_scaler": SimpleNamespace(**wrapped.get("loss_scaler", DYNAMIC))}
    topology = SimpleNamespace(precision="float16")
    engine = SimpleNamespace(gradient_clipping=lambda: 2.0)
    target: Any = SimpleNamespace(wrapped=SimpleNamespace(**live), optimizer=1, engine=engine, topology=topology)
    index: Any = SimpleNamespace(clip_grad=clip, scaler=scaler, topology=topology)
    found = list_scaling_changes(target, index, with_states=True)
    assert len(found) == len(logged) and all(text.startswith(part) for text, part in zip(found, logged, strict=True))
    for text in list_scaling_changes(target, index, with_states=False):
        assert text.endswith("(the value of this run is used)")
    restore_scaling(target.wrapped, index)
    is_taken = any(text.startswith("gradient_clipping") and "saved value" in text for text in found)
    assert getattr(target.wrapped, "clip_grad", None) == (clip if is_taken else wrapped.get("clip_grad"))


@pytest.mark.parametrize("count", [1, 3])
def test_a_schedule_for_another_number_of_param_groups_is_refused(count: int) -> None:
    saved, live = (
        StepLR(torch.optim.SGD([{"params": [torch.zeros(1)]} for _ in range(n)], lr=1.0), 2) for n in (2, count)
    )
    with pytest.raises(MismatchError, match=f"has 2 param groups, this run's has {count}.*load_lr_scheduler_states"):
        check_scheduler(SimpleNamespace(lr_scheduler=live), {"lr_scheduler": saved.state_dict()})


def make_schedule(kind: Any, *settings: Any) -> Any:
    return kind(torch.optim.SGD([torch.zeros(1)], lr=1.0), *settings)


@pytest.mark.parametrize(
    ("kind", "saved", "live", "text"),
    [
        (StepLR, (2, 0.5), (2, 0.25), "gamma 0.5 → 0.25"),
        (StepLR, (2, 0.5), (2, 0.5), None),
        (MultiStepLR, ([2, 4],), ([2, 5],), "milestones (2, 4) → (2, 5)"),
        (WarmupLR, (0.0, 0.5), (0.0, 0.25), None),  # its state is a position alone
    ],
)
def test_replaced_settings_of_a_schedule_are_a_warning(kind: Any, saved: Any, live: Any, text: str | None) -> None:
    """DeepSpeed's own load replaces them too."""
    state, schedule = make_schedule(kind, *saved).state_dict(), make_schedule(kind, *live)
    engine = SimpleNamespace(lr_scheduler=schedule, optimizer=None, random_ltd_enabled=lambda: False)
    engine.training_dataloader, engine.module = None, torch.nn.Linear(1, 1)
    describe = watch_edits(engine)
    found = restore_helpers(engine, {"lr_scheduler": state, "global_steps": 1}, with_scheduler=True)
    assert [f"differ from the saved: {text}; the saved ones are taken" in line for line in found] == [True] * bool(text)
    assert describe({}) == "".join(found)


@pytest.mark.parametrize(
    ("saved", "text"),
    [
        ({"warmup_max_lr": 0.5}, ""),
        ({"warmup_max_lr": 0.25}, "warmup_max_lr 0.25 → 0.5"),
        ({"warmup_max_lr": 0.5, "warmup_num_steps": 9}, "warmup_num_steps 9 → None"),
    ],
)
def test_other_settings_of_a_deepspeed_scheduler_are_a_warning(saved: dict[str, Any], text: str) -> None:
    """Its state is a position alone: this run's settings are used, in DeepSpeed's own load too."""
    schedule = make_schedule(WarmupLR, 0.0, 0.5)
    engine = SimpleNamespace(lr_scheduler=schedule, optimizer=None, random_ltd_enabled=lambda: False)
    engine.training_dataloader, engine.module = None, torch.nn.Linear(1, 1)
    engine._config = SimpleNamespace(scheduler_params={"warmup_max_lr": 0.5})
    client = {"ds_config": {"scheduler": {"type": "WarmupLR", "params": saved}}}
    tree = {"lr_scheduler": schedule.state_dict(), "global_steps": 1, **client}
    check_scheduler(engine, tree)
    found = restore_helpers(engine, tree, with_scheduler=True)
    assert "".join(found) == watch_edits(engine)(client)
    assert [f"differ from the saved: {text}; this run's are used" in line for line in found] == [True] * bool(text)
    assert not restore_helpers(engine, tree, with_scheduler=False)
    assert watch_edits(engine, with_scheduler=False)(client) == ""


def test_a_deepspeed_scheduler_of_another_kind_is_refused() -> None:
    """Both save a position alone, so that their states look alike."""
    schedule = make_schedule(WarmupLR, 0.0, 0.5)
    tree = {"lr_scheduler": schedule.state_dict(), "ds_config": {"scheduler": {"type": "WarmupCosineLR"}}}
    with pytest.raises(MismatchError, match="is WarmupCosineLR, this run's is WarmupLR.*load_lr_scheduler_states"):
        check_scheduler(SimpleNamespace(lr_scheduler=schedule), tree)
    check_scheduler(SimpleNamespace(lr_scheduler=make_schedule(StepLR, 2)), {**tree, "lr_scheduler": None})


class Peak(torch.optim.SGD):
    """Keeps the largest norm of its gradients, initially the integer 0."""

    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            state = self.state[param]
            state["peak"] = max(state.get("peak", 0), param.grad.norm().item())
            state["count"] = torch.zeros((), dtype=torch.int64)


def test_saved_fractions_are_not_truncated_to_a_live_integer() -> None:
    kept = probe_optimizer(Peak([torch.nn.Parameter(torch.ones(3))]), 0, {}, torch.zeros(3))
    assert restore_scalar("peak", 3.75, kept) == 3.75
    assert type(restore_scalar("peak", 3.0, kept)) is int
    count = restore_scalar("count", 2.5, kept)
    assert count.item() == 2.5 and restore_scalar("count", 3.0, kept).dtype == torch.int64


class Counting(torch.nn.Linear):
    def get_extra_state(self) -> int:
        return 1

    def set_extra_state(self, state: int) -> None:
        """Do nothing."""


def test_the_extra_state_of_a_shared_module_has_every_name() -> None:
    module = torch.nn.Module()
    module.first = module.second = Counting(2, 2)
    assert find_extra_states(module).keys() == {key for key in module.state_dict() if key.endswith("_extra_state")}
    assert len(find_extra_states(module)) == 2


# --- a broken engine neither steps nor saves until a load succeeds


class Engine(UpstreamEngine):
    """An engine with some of the blocked methods."""

    def save_checkpoint(self, folder: str, **_: Any) -> str:
        return f"saved to {folder}"


def test_a_blocked_engine_raises_until_it_is_released() -> None:
    """A method that the script has replaced is restored."""
    engine: Any = Engine()
    assert block_engine(engine, OSError("gone."), with_states=True) == find_state(engine).broken
    for use in (engine.step, lambda: engine.save_checkpoint("here", tag="t")):
        with pytest.raises(CheckpointError, match="gone.*a part of the checkpoint"):
            use()
    assert not hasattr(engine, "train_batch")
    unblock_engine(engine)
    assert (engine.step(), engine.save_checkpoint("here")) == ("stepped", "saved to here")
    assert vars(engine).keys() <= {"_ucp_state"}
    engine.step = script_step = lambda: "the script's"
    for text in ("once", "twice"):
        block_engine(engine, OSError(text), with_states=False)
    with pytest.raises(CheckpointError, match="twice"):
        engine.step()
    unblock_engine(engine)
    assert engine.step is script_step


# --- loads update the existing objects of optimizers, loss scalers and schedulers


def make_optimizer(kind: Any = torch.optim.AdamW, **options: Any) -> Any:
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizer = kind([{"params": [param]} for param in params], **options)
    for group in optimizer.param_groups:
        group["lr"] = copy.deepcopy(group["lr"])  # groups share a tensor by default
        group["params"][0].grad = torch.ones(3)
    optimizer.step()
    return optimizer


def make_engine(optimizer: Any, scheduler: Any = None, wrapper: Any = None) -> Any:
    """Make an engine with the fields that a load reads."""
    wrapper = optimizer if wrapper is None else wrapper
    module = torch.nn.Linear(2, 2)
    return SimpleNamespace(
        optimizer=wrapper, basic_optimizer=optimizer, lr_scheduler=scheduler, module=module, global_rank=0
    )


def list_objects(optimizer: Any) -> Iterator[Any]:
    yield from (optimizer.param_groups, optimizer.state)
    for group in optimizer.param_groups:
        yield from (group, group["params"], group["lr"])
        for param in group["params"]:
            yield from (param, optimizer.state[param], *optimizer.state[param].values())


def change(state: dict[str, Any]) -> dict[str, Any]:
    state = copy.deepcopy(state)
    for number, group in enumerate(state["param_groups"]):
        group |= {"lr": group["lr"] * (2 + number), "betas": (0.1, 0.2)}
        state["state"][number] = {key: value + 1 for key, value in state["state"][number].items()}
    return state


class Combined(torch.optim.AdamW):
    """Delegates its last group to another optimizer, and again after a load, like DeepSpeed's Muon."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups)
        self.other = torch.optim.SGD([{**self.param_groups[-1]}])
        self.other.param_groups = self.param_groups[-1:]

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        self.other.param_groups = self.param_groups[-1:]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.AdamW, {}),
        (torch.optim.AdamW, {"lr": torch.tensor(0.25), "foreach": False}),
        (torch.optim.SGD, {"lr": 0.5, "momentum": 0.9}),
        (Combined, {}),
    ],
    ids=["adamw", "tensor", "sgd", "combined"],
)
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_load_changes_the_existing_objects_of_an_optimizer(kind: Any, options: Any, wrapped: bool) -> None:
    optimizer = make_optimizer(kind, **options)
    saved, expected = change(optimizer.state_dict()), make_optimizer(kind, **options)
    expected.load_state_dict(copy.deepcopy(saved))
    wrapper = SimpleNamespace(inside=[optimizer], param_groups=optimizer.param_groups) if wrapped else None
    engine, held = make_engine(optimizer, wrapper=wrapper), list(list_objects(optimizer))
    with keep_references(engine):
        optimizer.load_state_dict(saved)
    kept = zip(held, list_objects(optimizer), strict=True)
    assert [old for old, new in kept if old is not new and not isinstance(old, float)] == []
    assert is_same(optimizer.state_dict(), expected.state_dict())
    if kind is Combined:
        assert optimizer.other.param_groups[0] is optimizer.param_groups[-1]
    assert "__setstate__" not in vars(optimizer)


def test_groups_that_share_a_tensor_get_separate_loaded_values() -> None:
    optimizer = make_optimizer(lr=torch.tensor(0.25), foreach=False)
    saved = change(optimizer.state_dict())
    shared = optimizer.param_groups[0]["lr"] = optimizer.param_groups[1]["lr"]
    with keep_references(make_engine(optimizer)):
        optimizer.load_state_dict(saved)
    first, second = (group["lr"] for group in optimizer.param_groups)
    assert (first.item(), second.item()) == (0.5, 0.75)
    assert first is shared


class Replacing(torch.optim.SGD):
    """Replaces its param groups without torch's `load_state_dict`."""

    def load_state_dict(self, state_dict: Any) -> None:
        self.param_groups = [{**group} for group in self.param_groups]


def test_an_optimizer_that_replaces_its_param_groups_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    optimizer = make_optimizer(Replacing)
    with caplog.at_level(logging.WARNING, "deepspeed_ucp"), keep_references(make_engine(optimizer)):
        optimizer.load_state_dict(optimizer.state_dict())
    (message,) = caplog.messages
    assert message.startswith("Replacing.load_state_dict has replaced the optimizer's param groups")


def test_schedulers_keep_references_and_load_other_attributes() -> None:
    """A scheduler in another one has groups and parameters in attributes, which are part of its state dict."""
    optimizer = make_optimizer()
    parts: list[Any] = [LambdaLR(optimizer, lambda step: 1 / (1 + step)) for _ in range(2)]
    groups, params = optimizer.param_groups, [group["params"][0] for group in optimizer.param_groups]
    inner, scheduler = parts[0], SequentialLR(optimizer, parts, [5])
    vars(inner).update(groups=groups, params=params, numbers=[1, 2])
    saved = copy.deepcopy(scheduler.state_dict())
    saved["_schedulers"][0]["numbers"] = [3]
    with keep_references(make_engine(optimizer, scheduler)):
        scheduler.load_state_dict(saved)
    assert inner.groups is groups is optimizer.param_groups
    assert inner.params is params
    assert inner.numbers == [3]


def test_a_replaced_method_is_restored_after_an_error() -> None:
    holder = SimpleNamespace(own=len)
    with pytest.raises(TypeError), replace_method(holder, "own", max), replace_method(holder, "new", min):
        holder.own(holder.new(1, 2))
    assert vars(holder) == {"own": len}
