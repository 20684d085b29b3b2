"""Compare update rules and hyper-parameters of saved and live param groups.

Checkpoints do not contain the optimizer's class. Param groups say more about it than states: Adam, NAdam, RAdam and
LAMB have states of the same names. Arguments of the constructor are compared; other entries that optimizers keep there
(the step of FusedAdam, the estimates of Prodigy) are not.
"""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from ..errors import shorten
from ..model.topology import drop_labels
from ..model.wrappers import USE_MUON
from .optimizer import adopt_hyper

Fields = Mapping[str, Any]
"""A param group, or a section of a ds_config."""

KEEP_LIVE = '"checkpoint": {"universal": {"param_groups": "live"}}'

_IDLE = frozenset(
    ("params", "param_names", "step", "lr", "initial_lr", "foreach", "fused", "capturable", "differentiable")
)
"""Keys that do not affect a step: bookkeeping and the choice of kernels. Learning rates are compared separately."""

_DECOUPLED = "decoupled_weight_decay"

_MARKS = (
    ("NAdam", ("momentum_decay",)),
    ("LAMB", ("max_coeff",)),
    ("Muon", ("ns_steps",)),
    ("SGD", ("dampening",)),
    ("Adam", ("betas", "amsgrad")),
    ("Adam", ("betas", "bias_correction")),
    ("RAdam", ("betas", "eps")),
)
"""Rules and the hyper-parameters that identify them among rules with the same states; the first match counts."""

_ON = ("bias_correction", "correct_bias")
"""Switches that are on if an optimizer does not have them."""

_SWITCHES = (*_ON, "amsgrad", "centered", "maximize", "nesterov")


def find_other_rule(optimizer: Any, live: Fields, saved: Fields, configured: Fields) -> str:
    """Describe the difference between a group's saved and live update rules, if any.

    Args:
        configured: the ``optimizer`` section of the saved ds_config, or empty.
    """
    if "lr" not in saved:  # an elastic save has no hyper-parameters
        return ""
    marks, kind = (_identify_rule(saved), _identify_rule(live)), type(optimizer).__name__
    if marks[0] != marks[1]:
        like = marks[0] or "another optimizer"
        return f"the saved param groups are like those of {like}, this run's optimizer is {kind}"
    arguments = [key for key in list_args(optimizer, live) if key in getattr(optimizer, "defaults", {})]
    faults = [
        f"{key} is in no saved group, {live[key]} here" for key in arguments if _is_added(live[key], key in saved)
    ]
    for key in sorted({*arguments, *_SWITCHES} - {_DECOUPLED}):
        old, new = _read_switch(saved, key), _read_switch(live, key)
        if old != new and (isinstance(old, (bool, str)) or isinstance(new, (bool, str))):
            faults.append(f"{key} {old} → {new}")
    modes = _read_saved_mode(saved, configured), _read_live_mode(optimizer, live)
    if saved.get("weight_decay") and None not in modes and modes[0] != modes[1]:
        faults.append(f"{_DECOUPLED} {modes[0]} → {modes[1]} (weight_decay {saved['weight_decay']})")
    return shorten(faults)


def find_doubt(optimizer: Any, live: Fields, saved: Fields, configured: Fields, live_configured: Fields) -> str:
    """Describe a possible change of Adam between coupled and decoupled weight decay.

    Torch before 2.7 does not save it. DeepSpeed's own Adam decouples by default; the ds_config has the setting, but
    before 0.19 without ``adam_w_mode``. Returns an empty text if a change is excluded or certain.
    """
    mode, is_deepspeed = _read_live_mode(optimizer, live), ["bias_correction" in fields for fields in (saved, live)]
    if mode is None or not saved.get("weight_decay") or _read_saved_mode(saved, configured) is not None:
        return ""
    is_configured = bool(configured) and "adam_w_mode" in _read_params(live_configured)
    changed = is_deepspeed[0] != is_deepspeed[1] or _DECOUPLED in live or is_configured
    if not changed or (mode and (is_deepspeed[0] or not is_deepspeed[1])):  # the default
        return ""
    return (
        f"The checkpoint does not record whether the saved run's Adam decoupled its weight decay "
        f"({_show(saved['weight_decay'])}), as AdamW does; this run's {type(optimizer).__name__} "
        f"{'does' if mode else 'does not'}. Use the same kind of Adam as the saved run."
    )


def find_edits(
    optimizer: Any,
    pairs: Iterable[tuple[Fields, Fields]],
    scheduler: Any,
    configured: Fields,
    *,
    takes_saved: bool,
    with_scheduler: bool = True,
) -> str:
    """Describe hyper-parameters that differ from the saved, and which values are used.

    Changes by a scheduler do not count: the initial rates are compared, if the groups have them.

    Args:
        pairs: live and saved hyper-parameters of each param group.
        configured: the ``optimizer`` section of the saved ds_config.
        takes_saved: the saved values are used, else the live values.
        with_scheduler: the scheduler's saved state is loaded.
    """
    pairs, edits = list(pairs), Counter[str]()
    for live, saved in pairs:
        rate = _find_rate(live, saved, scheduler, configured)
        if "initial_lr" in live and not (takes_saved and with_scheduler):  # the scheduler sets the rates anyway
            rate = {}
        cycles = hasattr(scheduler, "get_mom") or bool(getattr(scheduler, "cycle_momentum", False))
        cycled = ("betas", "momentum") if cycles or "max_momentum" in {*live, *saved} else ()
        keys = [key for key in list_args(optimizer, live) if key in saved and key not in cycled]
        values = {**rate, **{key: (saved[key], live[key]) for key in keys}}
        edits.update(f"{key} {_show(old)} → {_show(new)}" for key, (old, new) in values.items() if _differ(old, new))
    if not edits:
        return ""
    number = len(pairs)
    counts = [text if n == number else f"{text} ({n} of {number} param groups)" for text, n in edits.items()]
    action = f"the saved ones are taken. {KEEP_LIVE} keeps this run's"
    if any(text.startswith("initial_lr") for text in edits):
        action += ", for a scheduler's with load_lr_scheduler_states=False"
    action = action if takes_saved else 'this run\'s are kept ("param_groups" is "live")'
    return f"hyper-parameters of this run differ from the saved: {shorten(counts)}; {action}."


def find_one_sided(optimizer: Any, pairs: Iterable[tuple[Fields, Fields]]) -> str:
    """Describe effective hyper-parameters that only one side has.

    Applies to loads that use saved values. Excludes switches that :func:`find_other_rule` compares.
    """
    added, dropped = dict[str, None](), dict[str, None]()
    for live, saved in pairs:
        adopted, labelless = adopt_hyper(live, saved), drop_labels(live)
        keys = [key for key in ("lr", *list_args(optimizer, labelless)) if key in labelless and key not in adopted]
        added |= dict.fromkeys(key for key in keys if _is_added(labelless[key], known=False))
        idle = {*labelless, *adopted, *_IDLE, *((*_SWITCHES, _DECOUPLED) if "lr" in saved else ())}
        dropped |= dict.fromkeys(key for key, value in saved.items() if key not in idle and value)
    texts = [f"do not have {shorten(added)} (this run's are kept)"] * bool(added)
    texts += [f"have {shorten(dropped)} (ignored: {type(optimizer).__name__} does not have them)"] * bool(dropped)
    return f"the saved param groups {' and '.join(texts)}" if texts else ""


def watch_edits(engine: Any, *, with_scheduler: bool = True) -> Callable[[Fields | None], str]:
    """Return a function that describes hyper-parameters replaced after this call.

    It takes the loaded client state and returns a text like :func:`find_edits`.
    """
    before = _copy_groups(engine)
    describe_schedule = watch_schedule(engine.lr_scheduler if with_scheduler else None)

    def describe(client_state: Fields | None) -> str:
        config = (client_state or {}).get("ds_config")
        schedule = describe_schedule() or (compare_schedules(engine, config) if with_scheduler else "")
        if not before:
            return schedule
        configured = config.get("optimizer") if isinstance(config, dict) else None
        pairs = zip(before, _copy_groups(engine), strict=False)
        options = {"takes_saved": True, "with_scheduler": with_scheduler}
        edits = find_edits(engine.basic_optimizer, pairs, engine.lr_scheduler, configured or {}, **options)
        return " ".join(filter(None, (edits, schedule)))

    return describe


def watch_schedule(scheduler: Any) -> Callable[[], str]:
    """Return a function that describes settings of a scheduler replaced afterwards."""
    before = _read_settings(scheduler)

    def describe() -> str:
        after = _read_settings(scheduler)
        edits = [
            f"{key} {_show(after[key])} → {_show(value)}"
            for key, value in before.items()
            if key in after and _differ(after[key], value)
        ]
        advice = "the saved ones are taken. load_lr_scheduler_states=False keeps this run's schedule."
        return f"settings of this run's lr_scheduler differ from the saved: {shorten(edits)}; {advice}" if edits else ""

    return describe


def is_deepspeed_scheduler(scheduler: Any) -> bool:
    """Return True for DeepSpeed's own schedulers, whose state is only a position."""
    return type(scheduler).__module__.startswith("deepspeed")


def read_scheduler(config: Any) -> Fields:
    """Return the ``scheduler`` section of a saved ds_config, or an empty dict."""
    section = config.get("scheduler") if isinstance(config, Mapping) else None
    return section if isinstance(section, Mapping) else {}


def compare_schedules(engine: Any, config: Any) -> str:
    """Describe how a DeepSpeed scheduler's settings differ from a saved ds_config's."""
    saved, live = read_scheduler(config).get("params"), getattr(engine, "_config", None)
    live = getattr(live, "scheduler_params", None)
    if not (isinstance(saved, Mapping) and isinstance(live, Mapping) and is_deepspeed_scheduler(engine.lr_scheduler)):
        return ""
    edits = [
        f"{key} {_show(saved.get(key))} → {_show(live.get(key))}"
        for key in {**saved, **live}
        if _differ(saved.get(key), live.get(key))
    ]
    advice = "this run's are used from the saved position on."
    return f"settings of this run's lr_scheduler differ from the saved: {shorten(edits)}; {advice}" if edits else ""


def _read_settings(scheduler: Any) -> Fields:
    """Return a scheduler's settings: the arguments of its constructor in its state."""
    if not hasattr(scheduler, "state_dict"):
        return {}
    state, names = scheduler.state_dict(), inspect.signature(type(scheduler)).parameters
    settings = {name: state[name] for name in names if name in state and name != "last_epoch"}
    return {name: [*value.elements()] if isinstance(value, Counter) else value for name, value in settings.items()}


def _copy_groups(engine: Any) -> list[dict[str, Any]]:
    """Copy the param groups, with numbers for tensors that loads fill in place."""
    groups = getattr(getattr(engine, "optimizer", None), "param_groups", ())  # an engine may have none
    return [
        {k: v.item() if isinstance(v, torch.Tensor) and v.numel() == 1 else v for k, v in group.items()}
        for group in map(drop_labels, groups)
    ]


def read_configured(engine: Any) -> Fields:
    """Return the ``optimizer`` section of a live engine's ds_config, or an empty dict."""
    config = getattr(engine, "_config", None)
    params = getattr(config, "optimizer_params", None)
    return {"type": getattr(config, "optimizer_name", None), "params": params} if params else {}


def list_args(optimizer: Any, live: Fields) -> list[str]:
    """List a live param group's effective arguments of constructors, and users' keys."""
    makers = [vars(kind)["__init__"] for kind in type(optimizer).__mro__ if "__init__" in vars(kind)]
    arguments = {name for maker in makers for name in inspect.signature(maker).parameters}
    defaults = getattr(optimizer, "defaults", {})
    return [key for key in live if key not in _IDLE and (key in arguments or key not in defaults)]


def _identify_rule(fields: Fields) -> str:  # empty if unknown
    if USE_MUON in fields:
        return "Muon" if fields[USE_MUON] else "Adam"
    return next((rule for rule, keys in _MARKS if fields.keys() >= set(keys)), "")


def _is_added(value: Any, known: bool) -> bool:
    """Return True for an effective number that the saved optimizer did not have."""
    return not known and bool(value) and not isinstance(value, (bool, str))


def _read_switch(fields: Fields, key: str) -> Any:
    value = fields.get(key)
    return key in _ON if value is None else value


def _read_params(configured: Fields) -> Fields:
    params = configured.get("params")
    return params if isinstance(params, dict) else {}


def _read_saved_mode(saved: Fields, configured: Fields) -> bool | None:
    """Return True if the saved weight decay is decoupled, or None if unknown."""
    if _DECOUPLED in saved or "bias_correction" not in saved:
        return saved.get(_DECOUPLED)
    kind, mode = str(configured.get("type")).lower(), _read_params(configured).get("adam_w_mode")
    return {"adamw": True, "adam": mode if isinstance(mode, bool) else None}.get(kind)


def _read_live_mode(optimizer: Any, live: Fields) -> bool | None:
    mode = live.get(_DECOUPLED, getattr(optimizer, "adam_w_mode", None))
    if mode is None and isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)):
        return isinstance(optimizer, torch.optim.AdamW)  # before 2.7
    return None if mode is None else bool(mode)


def _find_rate(live: Fields, saved: Fields, scheduler: Any, configured: Fields) -> dict[str, tuple[Any, Any]]:
    """Find (saved, live) learning rates, by name, that no scheduler of this run sets."""
    if not ("lr" in live and "lr" in saved):
        return {}
    if "initial_lr" in saved and ("initial_lr" in live or scheduler is None):
        return {"initial_lr": (saved["initial_lr"], live.get("initial_lr", live["lr"]))}
    is_moved = not _differ(_read_params(configured).get("lr"), live["lr"])  # by the script, from the same initial rate
    return {} if scheduler is not None or "initial_lr" in live or is_moved else {"lr": (saved["lr"], live["lr"])}


def _differ(old: Any, new: Any) -> bool:
    """Return True if two plain values differ by more than a tensor's rounding."""
    if isinstance(old, (list, tuple)) and isinstance(new, (list, tuple)):
        return len(old) != len(new) or any(map(_differ, old, new))
    values = [value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value for value in (old, new)]
    if all(isinstance(value, (int, float)) for value in values):
        return not math.isclose(*values, rel_tol=1e-6)
    return all(isinstance(value, (str, int, float, bool, type(None))) for value in values) and values[0] != values[1]


def _show(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_show, value))})"
    return f"{float(value):.6g}" if isinstance(value, (float, torch.Tensor)) else str(value)
