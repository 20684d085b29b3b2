"""Loads update the existing objects of optimizers, loss scalers and schedulers."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR, SequentialLR

from deepspeed_ucp.engine.references import keep_references, replace_method


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


def without_tensors(state: dict[str, Any]) -> Any:
    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(each) for key, each in value.items()}
        return value.tolist() if isinstance(value, torch.Tensor) else value

    return plain({**state, "param_groups": dict(enumerate(state["param_groups"]))})


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
    assert without_tensors(optimizer.state_dict()) == without_tensors(expected.state_dict())
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
        self.param_groups = [{**group, "lr": saved["lr"]} for group, saved in self._pair(state_dict)]

    def _pair(self, state_dict: Any) -> Any:
        return zip(self.param_groups, state_dict["param_groups"], strict=True)


def test_an_optimizer_that_replaces_its_param_groups_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    optimizer = make_optimizer(Replacing)
    with caplog.at_level(logging.WARNING, "deepspeed_ucp"), keep_references(make_engine(optimizer)):
        optimizer.load_state_dict(optimizer.state_dict())
    (message,) = caplog.messages
    assert message.startswith("Replacing.load_state_dict has replaced the optimizer's param groups")


class Holding(LambdaLR):
    """Keeps groups and parameters in attributes, which are part of its state dict."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer, lambda step: 1 / (1 + step))
        self.groups = optimizer.param_groups
        self.params = [param for group in self.groups for param in group["params"]]
        self.numbers = [1, 2]


def test_schedulers_keep_references_and_load_other_attributes() -> None:
    optimizer = make_optimizer()
    inner = Holding(optimizer)
    scheduler = SequentialLR(optimizer, [inner, Holding(optimizer)], [5])
    groups, params, saved = inner.groups, inner.params, copy.deepcopy(scheduler.state_dict())
    saved["_schedulers"][0]["numbers"] = [3]
    with keep_references(make_engine(optimizer, scheduler)):
        scheduler.load_state_dict(saved)
    assert inner.groups is groups is optimizer.param_groups
    assert inner.params is params
    assert inner.numbers == [3]


def test_a_loss_scaler_of_the_same_kind_is_kept() -> None:
    optimizer, scaler = make_optimizer(), SimpleNamespace(cur_scale=4.0)
    wrapper = SimpleNamespace(optimizer=optimizer, param_groups=optimizer.param_groups, loss_scaler=scaler)
    with keep_references(make_engine(optimizer, wrapper=wrapper)):
        wrapper.loss_scaler = SimpleNamespace(cur_scale=2.0)
    assert wrapper.loss_scaler is scaler
    assert scaler.cur_scale == 2.0


def test_a_replaced_method_is_restored_after_an_error() -> None:
    holder = SimpleNamespace(own=len)
    with pytest.raises(TypeError), replace_method(holder, "own", max), replace_method(holder, "new", min):
        holder.own(holder.new(1, 2))
    assert vars(holder) == {"own": len}
