"""Restore counters, schedulers, loss scaler and other state outside the buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from deepspeed.runtime.fp16 import loss_scaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils import fragment_address

from ..comm import Comm
from ..errors import MismatchError, pluralize, shorten
from ..model.index import HELPERS, AtomicIndex
from ..model.storage import strip_compiled
from .base import Target
from .coverage import find_data_sampler
from .optimizer import restore_hyper
from .references import keep_scheduler_references, replace_method
from .rule import compare_schedules, is_deepspeed_scheduler, read_scheduler, watch_schedule

NOT_CLIENT = (
    "module",
    "skipped_steps",
    "global_steps",
    "dp_world_size",
    "mp_world_size",
    "data_sampler",
    "random_ltd",
)
"""Keys of a model-states file that are not in the client state (engine.py ``_load_checkpoint``)."""

PICKLED = (loss_scaler.LossScaler, loss_scaler.DynamicLossScaler, ZeroStageEnum, fragment_address)
"""DeepSpeed's classes that its state files contain."""


def find_extra_states(module: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Return modules with an extra state (``set_extra_state``) by state-dict key."""
    base = torch.nn.Module.set_extra_state
    named = module.named_modules(remove_duplicate=False)  # a shared module has several keys
    modules = {strip_compiled(name): child for name, child in named if type(child).set_extra_state is not base}
    return {f"{name}._extra_state" if name else "_extra_state": child for name, child in modules.items()}


def restore_counters(engine: Any, saved: Mapping[str, Any]) -> None:
    """Set counters and the saved model-parallel degree as DeepSpeed's load does."""
    engine.global_steps = saved["global_steps"]
    engine.global_samples = saved.get("global_samples", engine.global_steps * engine.train_batch_size())
    engine.skipped_steps = saved.get("skipped_steps", 0)
    engine.loaded_checkpoint_mp_world_size = saved.get("mp_world_size", 1)


def find_helpers(engine: Any) -> dict[str, Any]:
    """Map each key in :data:`HELPERS` to the engine's live object, or None."""
    random_ltd = engine.random_ltd_scheduler if engine.random_ltd_enabled() else None
    return dict(zip(HELPERS, (engine.lr_scheduler, random_ltd, find_data_sampler(engine)), strict=True))


def check_scheduler(engine: Any, saved: Mapping[str, Any]) -> None:
    """Raise MismatchError if the scheduler has another kind or number of param groups."""
    state, scheduler = saved.get("lr_scheduler"), engine.lr_scheduler
    live = scheduler.state_dict() if hasattr(scheduler, "state_dict") else None
    if isinstance(state, Mapping) and isinstance(live, Mapping) and state and live and not state.keys() & live.keys():
        sides = (shorten([key for key in side if not str(key).startswith("_")], 3) for side in (state, live))
        saved_keys, live_keys = sides
        raise MismatchError(
            f"The saved lr_scheduler is of another kind: it keeps {saved_keys}, this run's {type(scheduler).__name__} "
            f"keeps {live_keys}. Use the saved run's scheduler, or continue with this run's schedule by "
            "load_lr_scheduler_states=False."
        )
    kind, name = read_scheduler(saved.get("ds_config")).get("type"), type(scheduler).__name__
    if state and is_deepspeed_scheduler(scheduler) and isinstance(kind, str) and kind != name:
        raise MismatchError(
            f"The saved lr_scheduler is {kind}, this run's is {name}. Use the saved run's scheduler, or continue with "
            "this run's schedule by load_lr_scheduler_states=False."
        )
    old = state.get("base_lrs") if isinstance(state, Mapping) else None
    new = getattr(engine.lr_scheduler, "base_lrs", None)
    if isinstance(old, list) and isinstance(new, list) and len(old) != len(new):  # torch would mix up groups' rates
        raise MismatchError(
            f"The saved lr_scheduler has {pluralize(len(old), 'param group')}, this run's has {len(new)}. Use "
            "the saved run's param groups, or continue with this run's schedule by load_lr_scheduler_states=False."
        )


def restore_helpers(engine: Any, saved: Mapping[str, Any], *, with_scheduler: bool) -> list[str]:
    """Restore lr scheduler, random-ltd scheduler and data sampler.

    Returns:
        Warnings: replaced settings of a scheduler; one of the three is only saved or only live. The latter is no error:
        a trainer may step a scheduler that the engine does not know, or the run may have another one on purpose.
    """
    helpers = find_helpers(engine)
    if not with_scheduler:
        del helpers["lr_scheduler"]
    live = {key for key, helper in helpers.items() if helper is not None}
    stored = {key for key in helpers if saved.get(key) is not None}
    warnings = list[str]()
    for key in (key for key in helpers if key in live & stored):
        if key == "data_sampler":
            _restore_sampler(helpers[key], saved[key])
        else:
            describe = watch_schedule(helpers[key])
            with keep_scheduler_references(engine):
                helpers[key].load_state_dict(saved[key])
            edits = [describe(), compare_schedules(engine, saved.get("ds_config")) * (key == "lr_scheduler")]
            warnings += filter(None, edits)
    new, unused = (", ".join(key for key in helpers if key in one) for one in (live - stored, stored - live))
    if new:
        warnings.append(
            f"only this engine has {new}: it restarts at step {saved['global_steps']} of the run. Use the saved run's "
            "configuration, or set it to that step yourself."
        )
    if unused:
        warnings.append(
            f"only the checkpoint has {unused}: its state is not used. Use the saved run's configuration, unless the "
            "change is intended or the trainer has its own."
        )
    if "lr_scheduler" in live ^ stored:
        warnings.append("load_lr_scheduler_states=False skips the lr_scheduler, and returns its saved state.")
    return warnings


def _restore_sampler(sampler: Any, saved: Mapping[str, Any]) -> None:
    """Restore a data sampler's state only.

    DeepSpeed's method adds the saved clusters to the sampler's clusters, and sets every rank's global numpy generator,
    which no sampler uses, to the first rank's (DeepSpeed issue 8405).
    """
    for name in ("data_clusters", "data_cluster_sizes"):
        if hasattr(sampler, name):
            setattr(sampler, name, [])
    state: Any = np.random.get_state(legacy=True)  # noqa: NPY002
    sampler.load_state_dict(saved)
    np.random.set_state(state)  # noqa: NPY002


def restore_rates(engine: Any) -> None:
    """Set a restored scheduler's current rates in the optimizer's param groups.

    Schedulers act after a step, and torch's continue from the current rates. Without a scheduler the live rates stay.
    """
    scheduler = engine.lr_scheduler
    if scheduler is None:
        return
    groups = engine.optimizer.param_groups
    rates = scheduler.get_lr() if is_deepspeed_scheduler(scheduler) else getattr(scheduler, "_last_lr", None) or []
    for group, rate in zip(groups, rates, strict=False):
        restore_hyper(group, {"lr": float(rate)})
    moments = scheduler.get_mom() if hasattr(scheduler, "get_mom") else None  # DeepSpeed's OneCycle
    for group, betas in zip(groups, moments or (), strict=False):
        group["betas"] = betas


def _find_scaler(wrapped: Any) -> Any:
    return getattr(wrapped, "loss_scale_config", None) or getattr(wrapped, "loss_scaler", None) or wrapped


def compare_scales(wrapped: Any, saved: Mapping[str, Any]) -> tuple[Any, Any] | None:
    """Return the (saved, live) loss scales, numbers or ``dynamic``, if they differ.

    Args:
        saved: fields of the loss scaler, or empty.
    """
    scaler = _find_scaler(wrapped)
    is_dynamic = getattr(scaler, "dynamic", getattr(scaler, "dynamic_loss_scale", False))
    live = "dynamic" if is_dynamic else getattr(scaler, "cur_scale", None)
    scales = "dynamic" if saved.get("dynamic") else saved.get("cur_scale"), live
    return scales if saved and None not in scales and scales[0] != scales[1] else None


def _restores_clipping(wrapped: Any) -> bool:
    return hasattr(wrapped, "clip_grad") and getattr(wrapped, "compute_grad_norm", True)


def restore_scaling(wrapped: Any, index: AtomicIndex) -> None:
    """Restore clipping (ZeRO 3 saves none), and a dynamic loss scaler that both have."""
    scaler, saved = _find_scaler(wrapped), index.scaler
    is_same = saved.get("dynamic") and not compare_scales(wrapped, saved)
    for key, value in saved.items() if is_same else ():
        if key != "dynamic" and hasattr(scaler, key):
            setattr(scaler, key, value)
    if index.clip_grad is not None and _restores_clipping(wrapped):
        wrapped.clip_grad = index.clip_grad


def list_scaling_changes(target: Target, index: AtomicIndex, *, with_states: bool) -> list[str]:
    """Describe changed gradient clipping and loss scaling, and which values are used.

    Args:
        with_states: the load restores them with the optimizer states, where it can.
    """
    wrapped, changes = target.wrapped, list[tuple[str, Any, Any, bool]]()
    if index.clip_grad is not None and target.optimizer is not None:
        live = wrapped.clip_grad if hasattr(wrapped, "clip_grad") else target.engine.gradient_clipping()
        changes.append(("gradient_clipping", index.clip_grad, live, _restores_clipping(wrapped)))
    if index.topology.precision == target.topology.precision == "float16":
        if scales := compare_scales(wrapped, index.scaler):
            changes.append(("loss_scale", *scales, False))
        elif "scale_window" in index.scaler:
            window = getattr(_find_scaler(wrapped), "scale_window", None)
            changes.append(("loss_scale_window", index.scaler["scale_window"], window, True))
    return [
        f"{name} {old} → {new} (the {'saved value' if with_states and is_taken else 'value of this run'} is used)"
        for name, old, new, is_taken in changes
        if old != new
    ]


_AFTER_READS = {
    "engine": ("load_module_state_dict",),
    "optimizer": ("load_state_dict", "_restore_from_bit16_weights", "refresh_fp32_params", "checkpoint_event_epilogue"),
}
"""Methods that DeepSpeed's load calls on all ranks after its reads; some are collective."""


@contextmanager
def wait_behind_reads(engine: Any, comm: Comm) -> Iterator[None]:
    """Make collectives of DeepSpeed's load wait for the slowest rank's reads."""

    def wait_first(work: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            comm.wait()
            return work(*args, **options)

        return call

    holders = {"engine": engine, "optimizer": getattr(engine, "optimizer", None)}
    wrapped = [(holders[kind], name) for kind, names in _AFTER_READS.items() for name in names]
    with ExitStack() as stack:
        for holder, name in wrapped:
            if hasattr(holder, name):
                stack.enter_context(replace_method(holder, name, wait_first(getattr(holder, name))))
        yield


def end_load_event(engine: Any) -> None:
    """Call DeepSpeed's ``checkpoint_event_epilogue``, if there is one (collective).

    After an error of one rank alone it would hang.
    """
    if engine._optimizer_has_ckpt_event_epilogue():
        engine.optimizer.checkpoint_event_epilogue()


def refresh_after_own_load(target: Target, comm: Comm, *, with_states: bool) -> None:
    """Update copies that DeepSpeed's load leaves stale (collective).

    In a pipeline, a tied layer with a ``forward_fn`` (an output layer that uses the embedding) has no layer file. Its
    masters are restored with the optimizer and its tied weight from the first stage, but the copies of its other
    parameters keep their initial values until the first step (``PipelineModule.load_state_dir``). Only the
    data-parallel ranks of such a stage gather them.
    """
    target.drop_secondary_copies()
    if not hasattr(target.engine, "is_pipe_parallel"):  # a pipeline with one stage can be stale too
        return
    is_stale = with_states and bool(target.unfiled())

    def refresh() -> None:
        if is_stale:
            target.prepare()
            target.refresh_copies()

    comm.run(refresh)
    if is_stale:
        target.gather_copies()


def pick_client_state(
    saved: Mapping[str, Any], *, module_only: bool, with_scheduler: bool, with_optimizer: bool
) -> dict[str, Any]:
    """Return the client state as DeepSpeed's load does: without states that it loads."""
    hidden = {"module"} if module_only else set(NOT_CLIENT)
    if with_scheduler:
        hidden.add("lr_scheduler")
    if with_optimizer:
        hidden.add("optimizer")
    return {key: value for key, value in saved.items() if key not in hidden}
