"""What an optimizer's step does, told by its param groups and its class: saved and live ones held against each other.

No checkpoint tells the optimizer's class. Its param groups tell more than its states do: Adam, NAdam, RAdam and LAMB
keep states of the same names. What its constructor was given is compared; what it keeps there for itself (the step of
FusedAdam, the estimates of Prodigy) is not.
"""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from ..errors import shorten
from ..experts import drop_fixed
from ..wrappers import USE_MUON
from .optimizer import adopt_hyper

Fields = Mapping[str, Any]
"""A param group."""

KEEP_LIVE = '"checkpoint": {"universal": {"param_groups": "live"}}'

_IDLE = frozenset(
    ("params", "param_names", "step", "lr", "initial_lr", "foreach", "fused", "capturable", "differentiable")
)
"""Keys that change no step: bookkeeping, and how kernels run. Learning rates are looked at apart."""

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
"""Hyper-parameters by which to know a rule among those whose states have the same names; the first that has all."""

_ON = ("bias_correction", "correct_bias")
"""Switches by which an optimizer steps that has none of the name."""

_SWITCHES = (*_ON, "amsgrad", "centered", "maximize", "nesterov")

_CYCLED = ("betas", "momentum")


def find_other_rule(optimizer: Any, live: Fields, saved: Fields, configured: Fields) -> str:
    """How the step that a live param group takes differs from the saved one's, in words; empty where nothing tells so.

    Args:
        optimizer: the live one, inside any wrapper.
        live: its param group.
        saved: hyper-parameters of the saved group that it continues.
        configured: the ``optimizer`` section of the saved ds_config, or nothing.
    """
    if "lr" not in saved:  # an elastic save: it tells nothing
        return ""
    marks, kind = (_find_mark(saved), _find_mark(live)), type(optimizer).__name__
    if marks[0] != marks[1]:
        like = marks[0] or "another optimizer"
        return f"the saved param groups are like those of {like}, this run's optimizer is {kind}"
    arguments = [key for key in list_given(optimizer, live) if key in getattr(optimizer, "defaults", {})]
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
    """What a save leaves open about Adam's weight decay, where something about the optimizer has changed; empty if not.

    Torch before 2.7 did not save whether it is decoupled. DeepSpeed's own Adam is by default; the ds_config tells, but
    before 0.19 without ``adam_w_mode``.
    """
    mode, ours = _read_live_mode(optimizer, live), ["bias_correction" in fields for fields in (saved, live)]
    if mode is None or not saved.get("weight_decay") or _read_saved_mode(saved, configured) is not None:
        return ""
    told_here = bool(configured) and "adam_w_mode" in _read_params(live_configured)
    changed = ours[0] != ours[1] or _DECOUPLED in live or told_here
    if not changed or (mode and (ours[0] or not ours[1])):  # the usual kind
        return ""
    return (
        f"The checkpoint does not tell whether the saved run's Adam decoupled its weight decay "
        f"({_show(saved['weight_decay'])}), as AdamW does; this run's {type(optimizer).__name__} "
        f"{'does' if mode else 'does not'}. Train on with the saved run's kind."
    )


def list_edits(
    optimizer: Any,
    pairs: Iterable[tuple[Fields, Fields]],
    scheduler: Any,
    configured: Fields,
    *,
    takes_saved: bool,
    with_scheduler: bool = True,
) -> str:
    """Hyper-parameters that the script has set otherwise than the saved run, and whose are taken; empty without any.

    What a scheduler moves is no edit: the rates before it are compared, where the groups tell them.

    Args:
        optimizer: the live one.
        pairs: per param group the live and the saved hyper-parameters.
        scheduler: the engine's, or None.
        configured: the ``optimizer`` section of the saved ds_config.
        takes_saved: the saved ones are taken, else the live ones.
        with_scheduler: a scheduler takes its saved state; else its own rates, as was asked for.
    """
    held, found = list(pairs), Counter[str]()
    for live, saved in held:
        rate = _find_rate(live, saved, scheduler, configured)
        if "initial_lr" in live and not (takes_saved and with_scheduler):  # the scheduler has its way in any case
            rate = {}
        cycles = hasattr(scheduler, "get_mom") or bool(getattr(scheduler, "cycle_momentum", False))
        cycled = _CYCLED if cycles or "max_momentum" in {*live, *saved} else ()
        keys = [key for key in list_given(optimizer, live) if key in saved and key not in cycled]
        values = {**rate, **{key: (saved[key], live[key]) for key in keys}}
        found.update(f"{key} {_show(old)} → {_show(new)}" for key, (old, new) in values.items() if _differ(old, new))
    if not found:
        return ""
    counts = [text if n == len(held) else f"{text} ({n} of {len(held)} param groups)" for text, n in found.items()]
    way = f"the saved ones are taken. {KEEP_LIVE} keeps this run's"
    if any(text.startswith("initial_lr") for text in found):
        way += ", for a scheduler's with load_lr_scheduler_states=False"
    way = way if takes_saved else 'this run\'s are kept ("param_groups" is "live")'
    return f"hyper-parameters of this run differ from the saved: {shorten(counts)}; {way}."


def list_one_sided(optimizer: Any, pairs: Iterable[tuple[Fields, Fields]]) -> str:
    """Hyper-parameters that act and that one side alone tells, where the saved ones are taken; empty without any.

    Switches, where they are told, are :func:`find_other_rule`'s.

    Args:
        optimizer, pairs: as for :func:`list_edits`.
    """
    stay, left = dict[str, None](), dict[str, None]()
    for live, saved in pairs:
        adopted, own = adopt_hyper(live, saved), drop_fixed(live)
        keys = [key for key in ("lr", *list_given(optimizer, own)) if key in own and key not in adopted]
        stay |= dict.fromkeys(key for key in keys if _is_added(own[key], known=False))
        idle = {*own, *adopted, *_IDLE, *((*_SWITCHES, _DECOUPLED) if "lr" in saved else ())}
        left |= dict.fromkeys(key for key, value in saved.items() if key not in idle and value)
    told = [f"do not tell {shorten(stay)} (this run's stay)"] * bool(stay)
    told += [f"tell {shorten(left)} (left out: {type(optimizer).__name__} has none)"] * bool(left)
    return f"the saved param groups {' and '.join(told)}" if told else ""


def watch_edits(engine: Any, *, with_scheduler: bool = True) -> Callable[[Fields | None], str]:
    """Note an engine's hyper-parameters before DeepSpeed's own load, which puts the saved ones in their place.

    Args:
        with_scheduler: as for :func:`list_edits`.

    Returns:
        What tells, after it and by the client state that it gave, what has been replaced that is no scheduler's.
    """
    held = _copy_groups(engine)

    def describe(client_state: Fields | None) -> str:
        if not held:
            return ""
        config = (client_state or {}).get("ds_config")
        configured = config.get("optimizer") if isinstance(config, dict) else None
        pairs = zip(held, _copy_groups(engine), strict=False)
        options = {"takes_saved": True, "with_scheduler": with_scheduler}
        return list_edits(engine.basic_optimizer, pairs, engine.lr_scheduler, configured or {}, **options)

    return describe


def _copy_groups(engine: Any) -> list[dict[str, Any]]:
    """Param groups as they are now; tensors in them are filled in place."""
    groups = getattr(getattr(engine, "optimizer", None), "param_groups", ())  # an engine may have none
    return [
        {k: v.item() if isinstance(v, torch.Tensor) and v.numel() == 1 else v for k, v in each.items()}
        for each in map(drop_fixed, groups)
    ]


def read_configured(engine: Any) -> Fields:
    """The ``optimizer`` section of a live engine's ds_config; empty where there is none."""
    config = getattr(engine, "_config", None)
    params = getattr(config, "optimizer_params", None)
    return {"type": getattr(config, "optimizer_name", None), "params": params} if params else {}


def list_given(optimizer: Any, live: Fields) -> list[str]:
    """Keys of a live param group that the user sets: the constructor's arguments, and what no constructor knows."""
    makers = [vars(kind)["__init__"] for kind in type(optimizer).__mro__ if "__init__" in vars(kind)]
    known = {name for maker in makers for name in inspect.signature(maker).parameters}
    defaults = getattr(optimizer, "defaults", {})
    return [key for key in live if key not in _IDLE and (key in known or key not in defaults)]


def _find_mark(fields: Fields) -> str:
    if USE_MUON in fields:
        return "Muon" if fields[USE_MUON] else "Adam"
    return next((rule for rule, keys in _MARKS if fields.keys() >= set(keys)), "")


def _is_added(value: Any, known: bool) -> bool:
    """Whether a live number acts that the saved optimizer did not know."""
    return not known and bool(value) and not isinstance(value, (bool, str))


def _read_switch(fields: Fields, key: str) -> Any:
    value = fields.get(key)
    return key in _ON if value is None else value


def _read_params(configured: Fields) -> Fields:
    params = configured.get("params")
    return params if isinstance(params, dict) else {}


def _read_saved_mode(saved: Fields, configured: Fields) -> bool | None:
    """Whether weight decay was decoupled; None where nothing tells (torch before 2.7, DeepSpeed's own Adam)."""
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
    """The learning rates to compare, saved and live; none where a scheduler of this run sets them."""
    if not ("lr" in live and "lr" in saved):
        return {}
    if "initial_lr" in saved and ("initial_lr" in live or scheduler is None):
        return {"initial_lr": (saved["initial_lr"], live.get("initial_lr", live["lr"]))}
    is_moved = not _differ(_read_params(configured).get("lr"), live["lr"])  # by the script, from the same start
    return {} if scheduler is not None or "initial_lr" in live or is_moved else {"lr": (saved["lr"], live["lr"])}


def _differ(old: Any, new: Any) -> bool:
    """Whether two values differ by more than a tensor's rounding; what is no plain data does not."""
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
