"""Loads that update objects in place, since schedulers and trainers refer to them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch

from ..model.wrappers import SCALER_STATE

logger = logging.getLogger("deepspeed_ucp")


@contextmanager
def replace_method(holder: Any, name: str, method: Callable[..., Any]) -> Iterator[None]:
    """Replace a method of one object until the context ends."""
    fields = vars(holder)
    before = {name: fields[name]} if name in fields else {}
    fields[name] = method
    try:
        yield
    finally:
        del fields[name]
        fields.update(before)


@contextmanager
def keep_references(engine: Any) -> Iterator[None]:
    """Make loads of the engine's optimizer, loss scaler and scheduler work in place.

    ``torch.optim.Optimizer.load_state_dict`` makes new param groups and states, and ZeRO takes the loss scaler from the
    file. An object that holds the old ones would change and read values that the optimizer no longer uses.
    """
    before = list(getattr(engine.optimizer, "param_groups", ()))
    with ExitStack() as stack:
        for optimizer in _list_optimizers(engine.optimizer):
            restore = partial(_set_state_in_place, optimizer, optimizer.__setstate__)
            stack.enter_context(replace_method(optimizer, "__setstate__", restore))
        stack.enter_context(keep_scheduler_references(engine))
        stack.enter_context(_keep_loss_scaler(engine.optimizer))
        yield
    groups = getattr(engine.optimizer, "param_groups", ())
    if list(map(id, before)) != list(map(id, groups)) and engine.global_rank == 0:
        logger.warning(
            "%s.load_state_dict has replaced the optimizer's param groups: an object that holds the old ones, as some "
            "schedulers do, no longer changes its learning rate. Create such objects after the load.",
            type(engine.basic_optimizer).__name__,
        )


@contextmanager
def keep_scheduler_references(engine: Any) -> Iterator[None]:
    """Keep the scheduler's references to the optimizer, param groups and parameters.

    A scheduler that does not exclude them from its state dict loads copies of them.
    """
    schedulers = list(_list_schedulers(engine.lr_scheduler))
    ids = _list_referenced(engine) if schedulers else ()
    references = [_find_references(scheduler, ids) for scheduler in schedulers]
    yield
    for scheduler, fields in zip(schedulers, references, strict=True):
        vars(scheduler).update(fields)


def _list_optimizers(optimizer: Any) -> list[torch.optim.Optimizer]:
    """List the torch optimizers that a wrapper contains, itself included."""
    candidates, pending = dict[int, Any](), [optimizer]
    while pending:
        candidate = pending.pop()
        if hasattr(candidate, "param_groups") and id(candidate) not in candidates:
            candidates[id(candidate)] = candidate
            fields = getattr(candidate, "__dict__", {}).values()
            pending += [part for field in fields for part in (field if isinstance(field, (list, tuple)) else [field])]
    return [optimizer for optimizer in candidates.values() if isinstance(optimizer, torch.optim.Optimizer)]


def _set_state_in_place(optimizer: Any, set_state: Callable[[Any], None], loaded: dict[str, Any]) -> None:
    """Replacement of ``__setstate__`` that writes into the optimizer's own objects."""
    groups, new, filled = optimizer.param_groups, loaded["param_groups"], set[int]()
    merged = [update_in_place(*pair, filled) for pair in zip(groups, new, strict=False)]
    groups[:] = [*merged, *new[len(merged) :]]
    set_state({**loaded, "state": update_in_place(optimizer.state, loaded["state"]), "param_groups": groups})


@torch.no_grad()
def update_in_place(old: Any, new: Any, filled: set[int] | None = None) -> Any:
    """Copy ``new`` into ``old`` and return ``old``; return ``new`` if it does not fit.

    Args:
        filled: ids of the tensors that are already written; two param groups can share one.

    Example:
        >>> step = torch.tensor(1.0)
        >>> update_in_place({"step": step}, {"step": torch.tensor(5.0)})["step"] is step
        True
    """
    filled = set() if filled is None else filled
    if old is new:
        return old
    if isinstance(old, dict) and isinstance(new, dict):
        merged = {key: update_in_place(old.get(key), value, filled) for key, value in new.items()}
        old.clear()
        old.update(merged)
        return old
    if not isinstance(old, torch.Tensor) or not _fits(old, new):
        return new
    if id(old) in filled:
        return old if bool((old == new).all()) else new
    filled.add(id(old))
    return old.copy_(new) if isinstance(new, torch.Tensor) else old.fill_(new)


def _fits(old: torch.Tensor, new: Any) -> bool:
    """Return True if a tensor can take a tensor or number without a change of form."""
    if isinstance(new, torch.Tensor):
        return (old.shape, old.dtype) == (new.shape, new.dtype)
    can_hold = isinstance(new, int) or old.is_floating_point()
    return isinstance(new, (int, float)) and can_hold and old.numel() == 1  # a number, such as a learning rate


@contextmanager
def _keep_loss_scaler(wrapper: Any) -> Iterator[None]:
    """Copy a loaded loss scaler's state into the live scaler if their types are equal."""
    scaler = getattr(wrapper, "loss_scaler", None)
    yield
    loaded = getattr(wrapper, "loss_scaler", None)
    if loaded is not scaler and type(loaded) is type(scaler):
        vars(scaler).update((key, value) for key, value in vars(loaded).items() if key in SCALER_STATE)
        wrapper.loss_scaler = scaler


def _list_schedulers(scheduler: Any) -> Iterator[Any]:
    """List a scheduler and the schedulers inside it (SequentialLR, ChainedScheduler)."""
    if hasattr(scheduler, "__dict__"):
        yield scheduler
        for inner in vars(scheduler).get("_schedulers") or ():
            yield from _list_schedulers(inner)


def _list_referenced(engine: Any) -> set[int]:
    """List the ids of the engine's objects that a scheduler can hold references to."""
    objects = [engine, engine.module, engine.optimizer, *engine.module.parameters()]
    for optimizer in _list_optimizers(engine.optimizer):
        groups = optimizer.param_groups
        params = [group["params"] for group in groups]
        objects += [optimizer, groups, optimizer.state, *groups, *params, *chain(*params)]
    return set(map(id, objects))


def _find_references(holder: Any, ids: Collection[int]) -> dict[str, Any]:
    """Find attributes that are objects with these ids, or lists of such objects."""

    def refers(value: Any) -> bool:
        return id(value) in ids or (
            isinstance(value, (list, tuple)) and bool(value) and all(id(part) in ids for part in value)
        )

    return {key: value for key, value in vars(holder).items() if refers(value)}
