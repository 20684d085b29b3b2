"""Find an optimizer's states, and restore saved hyper-parameters and scalars."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..model.topology import drop_labels
from ..model.wrappers import MOMENTUM, USE_MUON

_ALWAYS_KEPT = ("initial_lr", "step")
"""Hyper-parameters that are not added by the optimizer's constructor, but by lr schedulers or FusedAdam's step."""


@dataclass(frozen=True, slots=True)
class StateKinds:
    """States of a parameter after a step.

    Attributes:
        elementwise: state name → dtype.
        scalars: state name → example value (tensor or number), whose form a restored value gets.
        other: name → shape or type of other states.
        lazy: the optimizer makes the states in a step, not at construction.
    """

    elementwise: dict[str, torch.dtype]
    scalars: dict[str, Any]
    other: dict[str, str]
    lazy: bool = True


def probe_optimizer(optimizer: Any, group: int, hyper: Mapping[str, Any], like: torch.Tensor) -> StateKinds | None:
    """Find an optimizer's states by one step of a copy on a probe parameter.

    Args:
        optimizer: the optimizer, which is not changed.
        group: param group whose hyper-parameters are used.
        hyper: saved hyper-parameters that will replace them.
        like: tensor with the device, dtype and number of dimensions of the probe parameter.

    Returns:
        None if the optimizer cannot be probed (it needs state from construction, or missing kernels).

    Example:
        >>> adam = torch.optim.Adam([torch.zeros(4)])
        >>> probe_optimizer(adam, 0, {}, torch.zeros(4)).elementwise
        {'exp_avg': torch.float32, 'exp_avg_sq': torch.float32}
    """
    if is_muon_group(optimizer, group):  # DeepSpeed makes the state outside of the optimizer's step
        return StateKinds({MOMENTUM: like.dtype}, {}, {})
    dims = max(like.dim(), 1)  # states of a 0-dim parameter would look like scalars
    shape = (5, 3, *(2,) * dims)[:dims]
    live = optimizer.param_groups[group]
    # Another optimizer's hyper-parameters may have other types; then only the live ones are used.
    for fields in ({**live, **adopt_hyper(live, hyper)}, live):
        param = torch.zeros(shape, dtype=like.dtype, device=like.device)
        state = _step_shadow(optimizer, fields, param, torch.zeros_like(param))
        if state is not None:
            return _classify_states(state, param.shape)
    stepped = next((param for param in live["params"] if optimizer.state.get(param)), None)
    return None if stepped is None else replace(_classify_states(optimizer.state[stepped], stepped.shape), lazy=False)


def is_muon_group(optimizer: Any, group: int) -> bool:
    """Return True if Muon, not its built-in Adam, trains a param group."""
    return "muon" in type(optimizer).__name__.lower() and bool(optimizer.param_groups[group].get(USE_MUON))


def depends_on_cut(optimizer: Any, group: int, like: torch.Tensor) -> bool:
    """Return True if steps on halves differ from one on a whole; False if unknown."""
    live = optimizer.param_groups[group]
    # The halves have other norms than the whole.
    whole = torch.tensor((0.5, 1.0, 2.0, 40.0, 70.0, 90.0), dtype=like.dtype, device=like.device)
    gradient = whole.flip(0)
    parts = [part.clone() for part in whole.chunk(2)]
    for param, grad in ((whole, gradient), *zip(parts, gradient.chunk(2), strict=True)):
        if _step_shadow(optimizer, live, param, grad.clone()) is None:
            return False
    return not (whole.is_meta or torch.allclose(whole, torch.cat(parts), rtol=1e-3))  # plans have meta tensors


def _step_shadow(
    optimizer: Any, fields: Mapping[str, Any], param: torch.Tensor, gradient: torch.Tensor
) -> Mapping[str, Any] | None:
    """Step a copy of the optimizer on ``param`` in place; return its state or None."""
    param.requires_grad_(True)
    param.grad = gradient
    shadow = _make_shadow(optimizer, [{**{key: copy.copy(value) for key, value in fields.items()}, "params": [param]}])
    try:
        type(optimizer).step(shadow)
    except Exception:  # noqa: BLE001 - any optimizer may fail in its own way
        return None
    finally:
        param.requires_grad_(False)
    return shadow.state.get(param, {})  # type: ignore[no-any-return]


def _make_shadow(optimizer: Any, groups: list[dict[str, Any]]) -> Any:
    """Copy an optimizer so that steps of the copy do not change the original."""
    # A subclass without __del__, in which DeepSpeed's CPU optimizers free their native state.
    kind: Any = type("Shadow", (type(optimizer),), {"__del__": lambda self: None, "__module__": __name__})
    shadow = kind.__new__(kind)
    for key, value in vars(optimizer).items():
        if isinstance(value, torch.optim.Optimizer):  # DeepSpeed's Muon has an Adam for the other parameters
            shadow.__dict__[key] = _make_shadow(value, [])
        elif key != "step":  # lr schedulers store a bound method of the original there
            shadow.__dict__[key] = copy.copy(value) if isinstance(value, (dict, list, set)) else value
    shadow.__dict__.update(state=defaultdict(dict), param_groups=groups)
    for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        if hooks in shadow.__dict__:
            shadow.__dict__[hooks] = {}
    return shadow


def _classify_states(state: Mapping[str, Any], shape: torch.Size) -> StateKinds:
    elementwise, scalars, other = {}, {}, {}
    for name, value in state.items():
        if value is None:
            continue
        if isinstance(value, torch.Tensor) and value.shape == shape and value.dim():
            elementwise[name] = value.dtype
        elif isinstance(value, (int, float, bool)) or (isinstance(value, torch.Tensor) and value.numel() == 1):
            scalars[name] = value
        else:
            other[name] = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
    return StateKinds(elementwise, scalars, other)


def find_other_kind(
    optimizer: Any,
    group: int,
    hyper: Mapping[str, Any],
    saved: Collection[str],
    like: torch.Tensor,
    scalars: Collection[str] = (),
) -> str:
    """Describe the difference between live and saved optimizer states, if any.

    An optimizer of the saved class may have fewer states at first: some appear later, others by saved switches.

    Args:
        scalars: names of saved one-element states, such as a factored optimizer's row states of one-row parameters.
    """
    live = optimizer.param_groups[group]
    kinds = probe_optimizer(optimizer, group, {}, like)
    if kinds is None:
        return ""
    names = {*kinds.elementwise, *kinds.other}
    saved_names = {*saved, *names.intersection(scalars)}
    if names == saved_names or (names < saved_names and _is_same_class(live, hyper)):
        return ""
    old, new = (", ".join(sorted(states)) or "none" for states in (saved, names))
    return f"optimizer states {old} → {new}"


def adopt_hyper(live: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the saved hyper-parameters that a live param group adopts.

    These are all if the saved group has every key of the live one (the same optimizer class), else the common ones:
    another implementation (CPU, fused) has other switches.

    Example:
        >>> adopt_hyper({"lr": 1e-3, "momentum": 0.9}, {"lr": 1e-4, "betas": (0.9, 0.99)})
        {'lr': 0.0001}
    """
    plain = {key: value for key, value in saved.items() if key != "params" and _is_plain(value)}
    same_class = _is_same_class(live, plain)
    return {key: value for key, value in plain.items() if same_class or key in live or key in _ALWAYS_KEPT}


def _is_same_class(live: Mapping[str, Any], saved: Mapping[str, Any]) -> bool:
    """Return True if a saved group has every key of the live one."""
    return set(drop_labels(live)) - {"params", *_ALWAYS_KEPT} <= set(saved)


def to_plain(value: Any) -> Any:
    """Convert a live hyper-parameter to plain data: other objects to a type name."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    return value if _is_plain(value) else type(value).__name__


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_is_plain(item) for item in value.values())
    if isinstance(value, (list, tuple)):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, (str, int, float, bool))


def restore_hyper(group: dict[str, Any], saved: Mapping[str, Any]) -> None:
    """Set a live param group's saved hyper-parameters; tensors are filled in place."""
    for key, value in adopt_hyper(group, saved).items():
        if isinstance(group.get(key), torch.Tensor) and isinstance(value, (int, float)):
            group[key].fill_(value)
        else:
            group[key] = value


def restore_scalar(name: str, value: Any, kinds: StateKinds | None) -> Any:
    """Convert a saved scalar to the optimizer's form, a tensor or a number.

    A fraction never becomes an integer. If the form is unknown (``kinds`` is None), integers stay, and floats become
    tensors that have the same value.
    """
    example, is_whole = kinds.scalars.get(name) if kinds else None, float(value).is_integer()
    if isinstance(example, torch.Tensor):
        dtype = example.dtype if is_whole or example.is_floating_point() else torch.float32
        return torch.full(example.shape, value, dtype=dtype, device=example.device)
    if isinstance(example, bool) or isinstance(value, bool):
        return bool(value)
    if isinstance(example, (int, float)):
        return type(example)(value) if is_whole else float(value)
    as_tensor = torch.tensor(float(value))
    return value if isinstance(value, int) or as_tensor.item() != value else as_tensor
