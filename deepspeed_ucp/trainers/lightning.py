"""Replacements of Lightning's methods, which convert its counters and check data.

Lightning counts batches and takes a step after every ``accumulate_grad_batches``; the engine counts its steps.
Lightning also counts consumed data, but does not skip it on a resume.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ..comm import connect
from ..config import UniversalConfig
from ..data import Order
from ..engine_state import find_state, get_config
from ..errors import CheckpointError, ConfigError
from ..formats.foreign.names import META
from ..formats.latest import find_checkpoint, holds_foreign
from ..formats.open import read_saved_job
from ..load.client import read_objects
from ..model.index import SavedJob, to_integer
from ..saves.keeping import begin_save, finish_folders, finish_local_saves, remove_when_safe
from ..saves.saver import finish_saves
from .batches import BatchSizes, refuse_loader_position, refuse_weights, warn_unfinished

logger = logging.getLogger("deepspeed_ucp")

_LOADERS = "combined_loader"
"""Key of the loaders' states in the state of its loop."""

_ACCUMULATION = "_ucp_accumulation"
"""Key of checkpoints: the accumulation of the run's first launch, if it has changed since (``EngineState``).

Both Lightning and DeepSpeed divide each loss by the accumulation, so gradients depend on it."""


def load_checkpoint(
    original: Callable[..., dict[str, Any]], strategy: Any, checkpoint_path: Any, *args: Any, **kwargs: Any
) -> dict[str, Any]:
    """``DeepSpeedStrategy.load_checkpoint``: load from any world (collective).

    Raises:
        MismatchError: it has another total batch.
        UnsupportedError: it has the position of a stateful data loader in another world.
    """
    config = get_config(strategy.model)
    if config is not None:
        finish_folders(config, os.path.dirname(os.path.abspath(checkpoint_path)), connect())
    fitting = strategy.lightning_module is not None and strategy.lightning_module.trainer.state.fn == "fit"
    if config is None or not os.path.isdir(checkpoint_path):
        return _record_loaders(strategy, original(strategy, checkpoint_path, *args, **kwargs))
    engine, folder = strategy.deepspeed_engine, os.fspath(checkpoint_path)
    is_foreign = connect().once(lambda: holds_foreign(folder))
    if not (fitting or is_foreign):
        return original(strategy, checkpoint_path, *args, **kwargs)
    if is_foreign:  # the original requires a folder `checkpoint`
        original = partial(_load_foreign, fitting=fitting)
    job: SavedJob = connect().once(lambda: read_saved_job(find_checkpoint(folder)))
    if fitting:
        refuse_weights(job, folder, "Start a new run with them: engine.load_checkpoint(folder) in on_fit_start")
        _check_total_batch(engine, folder, job, config)
    state = _record_loaders(strategy, original(strategy, checkpoint_path, *args, **kwargs))
    if not fitting:
        return state
    loop = state["loops"]["fit_loop"]
    if find_state(strategy.model).loaders_restored:
        refuse_loader_position(folder, job)
    live = to_integer(engine.gradient_accumulation_steps())
    rest = convert_counts(loop["epoch_loop.batch_progress"], job.accumulation, live)
    initial = state.pop(_ACCUMULATION, None) or job.accumulation or live
    find_state(engine).accumulation = None if initial == live else initial
    if connect().rank == 0:
        advice = "these batches must be repeated. Save after whole steps."
        warn_unfinished(folder, rest, job.accumulation or live, advice)
        if state["global_step"] != job.steps:
            logger.warning(
                f"{folder}: Lightning counted {state['global_step']} steps, but the engine took {job.steps}: an epoch "
                "was no multiple of accumulate_grad_batches, or steps were skipped. Schedules and max_steps follow "
                "Lightning's count."
            )
    return state


def _record_loaders(strategy: Any, state: dict[str, Any]) -> dict[str, Any]:
    """Record whether ``state`` has positions of stateful loaders; return ``state``."""
    loop = (state.get("loops") or {}).get("fit_loop") or {}
    if get_config(strategy.model) is not None:
        find_state(strategy.model).loaders_restored = bool((loop.get("state_dict") or {}).get(_LOADERS))
    return state


def _load_foreign(strategy: Any, folder: str, *_: Any, fitting: bool, **__: Any) -> dict[str, Any]:
    """Load a folder saved under FSDP; return Lightning's state (collective).

    Raises:
        CheckpointError: the folder has no state of Lightning.
    """
    path, engine = os.path.join(folder, META), strategy.deepspeed_engine

    def read() -> dict[str, Any]:
        if os.path.isfile(path):
            return read_objects(path, trust_pickle=False)
        raise CheckpointError(
            f"{META} is missing, which has the state of Lightning's loops: Lightning cannot resume from this folder. "
            "Load it into a new run: engine.load_checkpoint(folder) in on_fit_start.",
            path=folder,
        )

    state = connect().once(read)
    strict = strategy.lightning_module is None or strategy.lightning_module.strict_loading
    with_states = {"load_optimizer_states": fitting, "load_lr_scheduler_states": False}
    engine.load_checkpoint(folder, load_module_strict=strict, **with_states)
    return state


def save_checkpoint(
    original: Callable[..., Any], strategy: Any, checkpoint: Mapping[str, Any], *args: Any, **kwargs: Any
) -> Any:
    """``DeepSpeedStrategy.save_checkpoint``: add the accumulation (collective).

    The accumulation is that of the run's first launch. Training continues during the write: the checkpoint has all of
    Lightning's state.
    """
    initial = find_state(strategy.model).accumulation
    kept = {} if initial is None else {_ACCUMULATION: initial}
    config, folder = get_config(strategy.model), args[0] if args else kwargs.get("filepath")
    if config is not None and folder is not None:
        begin_save(folder, config, connect())
    saved = original(strategy, {**checkpoint, **kept}, *args, **kwargs)
    if config is not None and config.save is not None and config.save.to:
        finish_saves(strategy.model, required=True)  # the save goes to other destinations than the folder
    return saved


def remove_checkpoint(original: Callable[..., Any], strategy: Any, filepath: Any) -> None:
    """``DeepSpeedStrategy.remove_checkpoint``: keep the last complete checkpoint."""
    if strategy.is_global_zero:
        remove_when_safe(filepath, partial(original, strategy, filepath))


def teardown(original: Callable[..., Any], strategy: Any) -> None:
    """``DeepSpeedStrategy.teardown``: finish this rank's saves."""
    finish_local_saves()  # not collective: single ranks may tear down
    original(strategy)


def backward(original: Callable[..., Any], precision: Any, tensor: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """``DeepSpeedPrecision.backward``: keep the saved run's scale of gradients."""
    engine = model.trainer.model
    initial = find_state(engine).accumulation
    if initial is not None:
        tensor = tensor * (engine.gradient_accumulation_steps() / initial)
    return original(precision, tensor, model, *args, **kwargs)


def _check_total_batch(engine: Any, folder: str, job: SavedJob, config: UniversalConfig) -> None:
    live = BatchSizes.of(engine)
    if live.accepts_total(folder, job, config):
        return
    fit = live.fit(folder, job)
    loader = "" if fit[0] == live.micro else f" and a data loader with batch_size={fit[0]}"
    live.refuse(folder, job, f"Use Trainer(accumulate_grad_batches={fit[1]}){loader}")


def convert_counts(progress: Mapping[str, Any], was: int | None, now: int) -> int:
    """Convert the counts of an epoch's batches to this run's, in whole steps.

    Args:
        progress: saved progress of Lightning's loop, which is converted in place.
        was, now: batches per step, in the saved run and in this one.

    Returns:
        The saved run's batches since its last whole step.
    """
    was = was or now
    for part in ("total", "current"):
        counts = progress[part]
        done = counts["processed"]
        new = done // was * now
        counts.update({name: new + count - done for name, count in counts.items()})
    return int(done % was)


def on_run_start(original: Callable[..., Any], loop: Any, data_fetcher: Any) -> Any:
    """``_TrainingEpochLoop.on_run_start``: warn about repeated and skipped data.

    Raises:
        ConfigError: Lightning has wrapped an elastic sampler in its distributed one.
    """
    trainer = loop.trainer
    if get_config(trainer.strategy.model) is not None:
        loaders = trainer.fit_loop._combined_loader.flattened
        _refuse_split(loaders, "Set Trainer(use_distributed_sampler=False)")
        if trainer.global_rank == 0:
            _warn_data(loop, loaders)
    return original(loop, data_fetcher)


def setup_dataloader(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``Fabric._setup_dataloader``: refuse to split samples a second time."""
    loader = original(*args, **kwargs)
    _refuse_split([loader], "Pass setup_dataloaders use_distributed_sampler=False")
    return loader


def _refuse_split(loaders: list[Any], advice: str) -> None:
    samplers = (getattr(loader, "sampler", None) for loader in loaders)
    if any(isinstance(getattr(getattr(sampler, "dataset", None), "_sampler", None), Order) for sampler in samplers):
        raise ConfigError(f"Lightning splits the samples of an ElasticSampler over the ranks a second time. {advice}.")


def _warn_data(loop: Any, loaders: list[Any]) -> None:
    done, trainer = loop.batch_progress.current.ready, loop.trainer
    restored = find_state(trainer.strategy.model).loaders_restored
    if loop.restarting and done and not all(_is_positioned(loader, restored=restored) for loader in loaders):
        logger.warning(
            f"Lightning continues after batch {done} of the epoch, but its data starts again: it repeats the epoch's "
            f"first batches, and skips its last {done}. Use deepspeed_ucp.data.ElasticSampler, or checkpoints from the "
            "end of an epoch."
        )
    batches, accumulation = trainer.num_training_batches, trainer.accumulate_grad_batches
    if batches != float("inf") and batches % accumulation:
        logger.warning(
            f"an epoch has {batches} batches, no multiple of accumulate_grad_batches={accumulation}: Lightning counts "
            "a step at its end that the engine does not take. Set "
            f"limit_train_batches={batches // accumulation * accumulation}."
        )


def _is_positioned(loader: Any, *, restored: bool) -> bool:
    """Return True if a loader, with ``restored`` states, starts at the run's position."""
    stateful = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
    orders = (getattr(loader, name, None) for name in ("sampler", "dataset"))
    return (stateful and restored) or any(isinstance(order, Order) and order.follows for order in orders)
