"""Comparison of saved and live update rules, for the param groups of every optimizer class of torch and DeepSpeed."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import deepspeed.ops.adam.cpu_adam
import deepspeed.ops.adam.fused_adam
import deepspeed.ops.lamb.fused_lamb
import deepspeed.ops.lion.cpu_lion
import deepspeed.ops.lion.fused_lion
import pytest
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.lamb import FusedLamb
from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from torch.optim import lr_scheduler as torch_schedules

from deepspeed_ucp.engine.rule import find_doubt, find_edits, find_one_sided, find_other_rule, list_args, watch_edits
from deepspeed_ucp.formats.deepspeed.headers import Unread
from tests.engine.test_engine_references import SCHEDULERS

BUILDERS = {
    DeepSpeedCPUAdam: (deepspeed.ops.adam.cpu_adam, "CPUAdamBuilder"),
    FusedAdam: (deepspeed.ops.adam.fused_adam, "FusedAdamBuilder"),
    FusedLamb: (deepspeed.ops.lamb.fused_lamb, "FusedLambBuilder"),
    DeepSpeedCPULion: (deepspeed.ops.lion.cpu_lion, "CPULionBuilder"),
    FusedLion: (deepspeed.ops.lion.fused_lion, "FusedLionBuilder"),
}
"""DeepSpeed's classes and their kernel builders, which the tests replace."""

MOMENTS = {"exp_avg", "exp_avg_sq"}
DS_STATES = {DeepSpeedCPUAdam: MOMENTS, FusedAdam: MOMENTS, FusedLamb: MOMENTS}

SAME_RULE = (
    {"Adam", "AdamW", "FusedAdam", "DeepSpeedCPUAdam"},  # with equal or no weight decay
    {"FusedLion", "DeepSpeedCPULion"},
)


def list_torch() -> list[type]:
    found = [value for value in vars(torch.optim).values() if isinstance(value, type)]
    dense = [kind for kind in found if issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer]
    return [kind for kind in dense if kind.__name__ not in ("LBFGS", "SparseAdam")]


KINDS = [*list_torch(), *BUILDERS]
UNACTING = ("fused", "foreach", "capturable", "differentiable")
NEEDED: dict[str, dict[str, Any]] = {"nesterov": {"momentum": 0.9}}
"""Other arguments that an argument needs."""


def make(kind: Any, **options: Any) -> Any:
    param = torch.nn.Parameter(torch.ones(3, 2))
    if kind not in BUILDERS:
        return kind([param], **options)
    with mock.patch.object(*BUILDERS[kind], mock.MagicMock()), mock.patch("cpuinfo.get_cpu_info", dict):  # slow
        return kind([param], **options)


def group_of(optimizer: Any) -> dict[str, Any]:
    return {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}


def states_of(kind: Any) -> set[str]:
    if kind in BUILDERS:
        return DS_STATES.get(kind, {"exp_avg"})
    optimizer = make(kind, **({"momentum": 0.9} if kind is torch.optim.SGD else {}))
    (param,) = optimizer.param_groups[0]["params"]
    param.grad = torch.ones_like(param)
    optimizer.step()
    return {name for name, value in optimizer.state[param].items() if value.shape == param.shape}


def find(live: Any, saved: Any, configured: Any = None) -> str:
    saved = saved if isinstance(saved, dict) else group_of(saved)
    return find_other_rule(live, live.param_groups[0], saved, configured or {})


def test_another_optimizer_class_with_equal_states_is_detected() -> None:
    """Classes with the same update rule have the same effective keys."""
    states = {kind: states_of(kind) for kind in KINDS}
    pairs = [(saved, live) for saved in KINDS for live in KINDS if states[saved] == states[live]]
    assert len(pairs) > 2 * len(KINDS)
    for saved, live in pairs:
        is_same = saved is live or any({saved.__name__, live.__name__} <= family for family in SAME_RULE)
        optimizer, group = make(live), group_of(make(saved))
        found = find(optimizer, {**group, "weight_decay": 0.0})
        assert bool(found) is not is_same, (saved, live)
        assert not found or live.__name__ in found
        one_sided = find_one_sided(optimizer, [(optimizer.param_groups[0], group)])
        assert not (one_sided and is_same), (saved, live)


def list_changes(
    optimizer: Any, *saved: dict[str, Any], scheduler: Any = None, configured: Any = None, **options: Any
) -> str:
    pairs = [(optimizer.param_groups[0], group) for group in saved]
    return find_edits(optimizer, pairs, scheduler, configured or {}, **{"takes_saved": True, **options})


def test_every_changed_entry_of_an_optimizer_is_described(subtests: pytest.Subtests) -> None:
    """Switches are described in both directions. Choices of kernels are ignored."""
    for kind in KINDS:
        optimizer = make(kind)
        group = group_of(optimizer)
        assert list_changes(optimizer, group) == ""
        for key, value in group.items():
            with subtests.test(kind=kind.__name__, key=key):
                if isinstance(value, bool) or (value is None and key in UNACTING):
                    check_switch(kind, key, bool(value))
                elif isinstance(value, int | float | tuple) and key in list_args(optimizer, group):
                    other = tuple(each and each / 2 for each in value) if isinstance(value, tuple) else value / 2 + 0.25
                    text = list_changes(optimizer, {**group, key: other})
                    assert f"saved: {key} " in text and '"param_groups": "live"' in text


def check_switch(kind: type, key: str, plain: bool) -> None:
    decay = {} if key == "bias_correction" or "weight_decay" not in group_of(make(kind)) else {"weight_decay": 0.5}
    optimizer = make(kind, **decay, **NEEDED.get(key, {}))
    live = group_of(optimizer)
    there = find(optimizer, {**live, key: not plain})
    optimizer.param_groups[0][key] = not plain
    back = find(optimizer, live)
    if key in UNACTING:
        assert (there, back) == ("", "")
    else:
        assert there.startswith(f"{key} {not plain} → {plain}")
        assert back.startswith(f"{key} {plain} → {not plain}") or (kind, key) == (DeepSpeedCPUAdam, "amsgrad")


# -- hyper-parameters that only one side has


def test_hyper_parameters_that_only_one_side_has_are_described() -> None:
    live = make(FusedAdam)
    group, saved = live.param_groups[0], group_of(make(ADAMW))
    del saved["lr"], saved["decoupled_weight_decay"]
    front, kept = "the saved param groups do not have ", "(this run's are kept)"
    ignored = "and have maximize, scale (ignored: FusedAdam does not have them)"
    for fields, text in (
        ({"step": 3}, f"{front}lr, betas, eps {kept}"),  # weight_decay is 0 and has no effect
        (saved, f"{front}lr {kept}"),
        (saved | {"maximize": True, "scale": Unread("f", "1")}, f"{front}lr {kept} {ignored}"),
        (saved | {"lr": 0.5, "maximize": True}, ""),  # refused as another update rule
        (saved | {"lr": Unread("function f", "1")}, f"{front}lr {kept}"),
    ):
        assert find_one_sided(live, [(group, fields)] * 2) == text


# -- weight decay of Adam

OLD = ("decoupled_weight_decay",)
"""Keys that Adam's groups do not have in torch before 2.7."""


def decay(kind: Any, *without: str, **options: Any) -> dict[str, Any]:
    made = group_of(make(kind, weight_decay=0.1, **options))
    return {key: value for key, value in made.items() if key not in without}


def by_config(kind: str, **params: Any) -> dict[str, Any]:
    return {"type": kind, "params": params}


ADAM, ADAMW = torch.optim.Adam, torch.optim.AdamW
L2_CPU, L2_FUSED = partial(make, DeepSpeedCPUAdam, adamw_mode=False), partial(make, FusedAdam, adam_w_mode=False)


def list_decays() -> dict[str, tuple[Any, dict[str, Any], dict[str, Any], str]]:
    """List live optimizers, saved groups and configurations. A function, because the first optimizer imports slowly."""
    adamw, adam, cpu, fused = (partial(make, kind) for kind in (ADAMW, ADAM, DeepSpeedCPUAdam, FusedAdam))
    coupled, other = by_config("adam", adam_w_mode=False), "other"
    return {
        "Adam→AdamW": (adamw, decay(ADAM), {}, other),
        "AdamW→Adam": (adam, decay(ADAMW), {}, other),
        "AdamW→FusedAdam": (fused, decay(ADAMW), {}, ""),
        "AdamW→CPU": (cpu, decay(ADAMW), {}, ""),
        "Adam→FusedAdam": (fused, decay(ADAM), {}, other),
        "Adam→CPU, both L2": (L2_CPU, decay(ADAM), {}, ""),
        "AdamW→CPU, L2": (L2_CPU, decay(ADAMW), {}, other),
        "CPU→Fused": (fused, decay(DeepSpeedCPUAdam), {}, ""),
        "CPU→Fused by config": (fused, decay(DeepSpeedCPUAdam), by_config("Adam"), ""),
        "CPU→AdamW": (adamw, decay(DeepSpeedCPUAdam), {}, ""),
        "Fused→Adam": (adam, decay(FusedAdam), {}, "doubt"),
        "Fused→Adam by config": (adam, decay(FusedAdam), by_config("AdamW"), other),
        "adam_w_mode false→true": (fused, decay(FusedAdam), by_config("Adam", adam_w_mode=False), other),
        "adam_w_mode false→false": (L2_FUSED, decay(FusedAdam), coupled, ""),
        "adam_w_mode true→false": (L2_FUSED, decay(FusedAdam), by_config("Adam", adam_w_mode=True), other),
        "the same client FusedAdam": (L2_FUSED, decay(FusedAdam), {}, ""),
        "older torch, AdamW": (adamw, decay(ADAMW, *OLD), {}, ""),
        "older torch, AdamW→CPU": (cpu, decay(ADAMW, *OLD), {}, "doubt"),
        "older torch, Adam": (adam, decay(ADAM, *OLD), {}, "doubt"),
        "older torch without maximize": (adamw, decay(ADAMW, *OLD, "maximize", "foreach"), {}, ""),
        "no decay": (adamw, {**decay(ADAM), "weight_decay": 0}, {}, ""),
        "an elastic save": (adamw, {"step": 3}, coupled, ""),
    }


def test_coupled_and_decoupled_weight_decay_of_adam_are_distinguished(subtests: pytest.Subtests) -> None:
    for case, (made, saved, configured, expected) in list_decays().items():
        with subtests.test(case=case):
            live = made()
            other, doubt = find(live, saved, configured), find_doubt(live, live.param_groups[0], saved, configured, {})
            assert ("other" if other else "doubt" if doubt else "") == expected
            if other:
                assert "decoupled_weight_decay" in other and "0.1" in other


def test_adam_w_mode_that_only_the_live_config_has_is_ignored() -> None:
    """Releases before 0.19 remove adam_w_mode from the ds_config."""
    live, saved = L2_FUSED(), decay(FusedAdam)
    ask = partial(find_doubt, live, live.param_groups[0], saved, by_config("Adam", lr=1.0))
    assert "does not" in ask(by_config("Adam", adam_w_mode=False))
    assert ask(by_config("Adam")) == ""


def test_older_torch_distinguishes_adamw_by_its_class() -> None:
    for kind in (ADAM, ADAMW):
        live = make(kind, weight_decay=0.1)
        del live.param_groups[0]["decoupled_weight_decay"]
        same = live.param_groups[0], decay(kind, *OLD)
        assert (find(live, same[1]), find_doubt(live, *same, {}, {})) == ("", "")
    assert "decoupled_weight_decay True → False" in find(make(ADAM), decay(ADAMW))


# -- entries that an optimizer adds to its groups


class Estimating(torch.optim.Optimizer):
    """Has estimates, counts and a mode among its defaults, like Prodigy and ScheduleFree."""

    def __init__(self, params: Any, lr: float = 1.0, betas: tuple[float, float] = (0.9, 0.99), cautious: bool = False):
        kept = {"d": 1e-6, "k": 0, "train_mode": False}
        super().__init__(params, {"lr": lr, "betas": betas, "cautious": cautious, **kept})


class Derived(Estimating):
    """Passes its arguments to the base class."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)


def test_entries_that_an_optimizer_adds_to_its_groups_are_not_compared() -> None:
    live = make(Derived)
    saved = {**group_of(live), "d": 0.5, "k": 7, "train_mode": True, "step": 3}
    assert find(live, saved) == ""
    assert list_changes(live, saved) == ""
    assert find(live, {**saved, "cautious": True}) == "cautious True → False"
    assert "betas (0.5, 0.9) → (0.9, 0.99)" in list_changes(live, {**saved, "betas": [0.5, 0.9]})


def test_keys_that_the_user_adds_to_groups_do_not_change_the_rule() -> None:
    """They count as hyper-parameters."""
    live = make(ADAMW)
    live.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))], "lr_scale": 0.5, "label": "b", "mine": True})
    group, saved = live.param_groups[1], {**group_of(live), "lr_scale": 0.25, "label": "b", "mine": False}
    assert find_other_rule(live, group, saved, {}) == ""
    text = find_edits(live, [(group, saved)], None, {}, takes_saved=True)
    assert "saved: lr_scale 0.25 → 0.5, mine False → True;" in text


# -- schedulers

SCHEDULES = {name: make_schedule for name, make_schedule in SCHEDULERS.items() if name != "ReduceLROnPlateau"}
TORCHS = [name for name in SCHEDULES if hasattr(torch_schedules, name)]


def run_saved(name: str) -> dict[str, Any]:
    optimizer = make(ADAMW, lr=0.02)
    scheduler = SCHEDULES[name](optimizer)
    for _ in range(4):
        optimizer.step()
        scheduler.step()
    return group_of(optimizer)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step")
def test_changes_by_a_scheduler_are_not_described(name: str) -> None:
    """This holds if only a trainer knows the scheduler, or if it is created after the load."""
    saved, live = run_saved(name), make(ADAMW, lr=0.02)
    assert list_changes(live, saved, scheduler=SCHEDULES[name](live)) == ""
    if name in TORCHS and name != "CyclicLR":  # it cycles betas without a mark in the groups
        assert list_changes(live, saved) == ""
    if name in TORCHS and "Cyc" not in name:
        assert list_changes(make(ADAMW, lr=0.02), saved) == ""


@pytest.mark.parametrize("name", [name for name in TORCHS if "Cyc" not in name])
@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step")
def test_a_changed_initial_rate_is_described(name: str) -> None:
    saved, live = run_saved(name), make(ADAMW, lr=0.5)
    assert "initial_lr 0.02 → 0.5; this run's are kept" in list_changes(live, saved, takes_saved=False)
    assert "initial_lr" in list_changes(live, saved, with_scheduler=False)
    for scheduler in (None, SCHEDULES[name](live)):
        text = list_changes(live, saved, scheduler=scheduler)
        assert "initial_lr 0.02 → 0.5; the saved ones are taken" in text and "load_lr_scheduler_states=False" in text
    assert list_changes(live, saved, scheduler=scheduler, takes_saved=False) == ""  # restored rates are used
    assert list_changes(live, saved, scheduler=scheduler, with_scheduler=False) == ""  # live rates are used


def test_a_learning_rate_that_the_script_changes_is_not_described() -> None:
    live = make(ADAMW, lr=0.5)
    saved = {**group_of(live), "lr": 0.123}
    assert list_changes(live, saved, configured=by_config("AdamW", lr=0.5)) == ""
    assert "lr 0.123 → 0.5" in list_changes(live, saved, configured=by_config("AdamW", lr=0.25))


@pytest.mark.parametrize(
    ("takes_saved", "words"),
    [(True, 'the saved ones are taken. "checkpoint"'), (False, 'this run\'s are kept ("param_groups" is "live")')],
)
def test_changes_are_counted_over_param_groups(takes_saved: bool, words: str) -> None:
    live = make(ADAMW, lr=0.5, weight_decay=0.1)
    saved = {**group_of(live), "lr": 0.25}
    text = list_changes(live, saved, {**saved, "weight_decay": 0.0}, takes_saved=takes_saved)
    assert "saved: lr 0.25 → 0.5, weight_decay 0 → 0.1 (1 of 2 param groups); " in text and words in text
    live.param_groups[0]["lr"] = torch.tensor(0.1)  # in float32
    assert list_changes(live, {**saved, "lr": 0.1}, takes_saved=takes_saved) == ""
    assert "lr 0.1001 → 0.1" in list_changes(live, {**saved, "lr": 0.1001}, takes_saved=takes_saved)


def test_values_that_deepspeeds_load_replaces_are_described() -> None:
    live = make(ADAMW, lr=torch.tensor(0.5))
    engine = SimpleNamespace(optimizer=live, basic_optimizer=live, lr_scheduler=None)
    describe = watch_edits(engine)
    assert describe(None) == ""
    live.param_groups[0]["lr"].fill_(0.25)
    assert "lr 0.25 → 0.5; the saved ones are taken" in describe(None)
    assert describe({"ds_config": {"optimizer": by_config("AdamW", lr=0.5)}}) == ""
    assert watch_edits(SimpleNamespace(optimizer=None, lr_scheduler=None))({}) == ""
