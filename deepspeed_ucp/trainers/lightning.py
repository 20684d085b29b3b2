"""Lightning's Trainer: counters of batches in whole steps of this run, and what of the data it would train on again.

Lightning counts the batches of an epoch, and steps after every ``accumulate_grad_batches`` of them; the engine counts
for itself, from the last whole step on. Data that was consumed Lightning counts as well, but does not pass over.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ..atoms import SavedJob, to_integer
from ..comm import connect
from ..config import UniversalConfig
from ..data import Order
from ..engine_state import find_state, get_config
from ..errors import CheckpointError, ConfigError
from ..load.client import read_objects
from ..saves.keeping import begin_save, finish_folders, finish_here, remove_when_safe
from ..saves.saving import finish_saves
from ..sources.foreign.names import META
from ..sources.latest import find_checkpoint, holds_foreign
from ..sources.open import look_at_job
from .batches import BatchSizes, refuse_loader_position, refuse_weights, warn_unfinished, warn_unknown_batch

logger = logging.getLogger("deepspeed_ucp")

_LOADERS = "combined_loader"
"""Where the state of its loop has the loaders' own."""

_ACCUMULATION = "_ucp_accumulation"
"""Key of checkpoints: the accumulation of the run that began, where this run's differs (``EngineState.accumulation``).
Lightning divides each loss by its accumulation, and so does DeepSpeed: the gradients that moments and clipping have
known are smaller by that once."""


def load_checkpoint(
    original: Callable[..., dict[str, Any]], strategy: Any, checkpoint_path: Any, *args: Any, **kwargs: Any
) -> dict[str, Any]:
    """``DeepSpeedStrategy.load_checkpoint``: a checkpoint of any world; collective.

    Raises:
        MismatchError: its total batch is another one.
        UnsupportedError: a stateful data loader's position in another world.
    """
    config = get_config(strategy.model)
    if config is not None:
        finish_folders(config, os.path.dirname(os.path.abspath(checkpoint_path)), connect())
    fitting = strategy.lightning_module is not None and strategy.lightning_module.trainer.state.fn == "fit"
    if config is None or not os.path.isdir(checkpoint_path):
        return original(strategy, checkpoint_path, *args, **kwargs)
    engine, folder = strategy.deepspeed_engine, os.fspath(checkpoint_path)
    is_foreign = connect().once(lambda: holds_foreign(folder))
    if not (fitting or is_foreign):
        return original(strategy, checkpoint_path, *args, **kwargs)
    if is_foreign:  # the original looks for a folder that is called `checkpoint` first
        original = partial(_load_foreign, fitting=fitting)
    job: SavedJob = connect().once(lambda: look_at_job(find_checkpoint(folder)))
    if fitting:
        refuse_weights(job, folder, "Start a new run with them: engine.load_checkpoint(folder) in on_fit_start")
        _check_total_batch(engine, folder, job, config)
        warn_unknown_batch(job, folder, BatchSizes.of(engine).total)
    state = original(strategy, checkpoint_path, *args, **kwargs)
    if not fitting:
        return state
    loop = state["loops"]["fit_loop"]
    if loop["state_dict"].get(_LOADERS):
        refuse_loader_position(folder, job)
    live = to_integer(engine.gradient_accumulation_steps())
    rest = count_anew(loop["epoch_loop.batch_progress"], job.accumulation, live)
    begun = state.pop(_ACCUMULATION, None) or job.accumulation or live
    find_state(engine).accumulation = None if begun == live else begun
    if connect().rank == 0:
        advice = "these batches have to be taken again. Save every so many batches as make whole steps."
        warn_unfinished(folder, rest, job.accumulation or live, advice)
        if state["global_step"] != job.steps:
            logger.warning(
                f"{folder}: Lightning had counted {state['global_step']} steps where the engine took {job.steps}: an "
                "epoch's batches were no multiple of accumulate_grad_batches, or steps were skipped. Its schedules and "
                "max_steps go on by its own count."
            )
    return state


def _load_foreign(strategy: Any, folder: str, *_: Any, fitting: bool, **__: Any) -> dict[str, Any]:
    """Load a folder that Lightning saved under FSDP; collective.

    Args:
        fitting: load the optimizer's states too.

    Returns:
        Lightning's own state.

    Raises:
        CheckpointError: the folder has none.
    """
    path, engine = os.path.join(folder, META), strategy.deepspeed_engine

    def read() -> dict[str, Any]:
        if os.path.isfile(path):
            return read_objects(path, trust_pickle=False)
        raise CheckpointError(
            f"{META} is missing, the state of Lightning's loops: Lightning cannot resume from this folder. Load it "
            "into a new run: engine.load_checkpoint(folder) in on_fit_start.",
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
    """``DeepSpeedStrategy.save_checkpoint``: by what the gradients were divided is saved where it is kept; collective.

    Training goes on while it is written: all that Lightning keeps is in it.
    """
    begun = find_state(strategy.model).accumulation
    kept = {} if begun is None else {_ACCUMULATION: begun}
    config, folder = get_config(strategy.model), args[0] if args else kwargs.get("filepath")
    if config is not None and folder is not None:
        begin_save(folder, config, connect())
    saved = original(strategy, {**checkpoint, **kept}, *args, **kwargs)
    if config is not None and config.save is not None and config.save.to:
        finish_saves(strategy.model, required=True)  # where the folder is not what is written
    return saved


def remove_checkpoint(original: Callable[..., Any], strategy: Any, filepath: Any) -> None:
    """``DeepSpeedStrategy.remove_checkpoint``: the last whole one stays as long as a newer one is written."""
    if strategy.is_global_zero:
        remove_when_safe(filepath, partial(original, strategy, filepath))


def teardown(original: Callable[..., Any], strategy: Any) -> None:
    """``DeepSpeedStrategy.teardown``, at the end of a run: what it has saved is there. A rank may come here alone."""
    finish_here()
    original(strategy)


def backward(original: Callable[..., Any], precision: Any, tensor: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """``DeepSpeedPrecision.backward``: gradients of the size that they had in the saved run."""
    engine = model.trainer.model
    begun = find_state(engine).accumulation
    if begun is not None:
        tensor = tensor * (engine.gradient_accumulation_steps() / begun)
    return original(precision, tensor, model, *args, **kwargs)


def _check_total_batch(engine: Any, folder: str, job: SavedJob, config: UniversalConfig) -> None:
    live = BatchSizes.of(engine)
    if live.is_kept(job, config):
        return
    fit, advice = live.fit(job), "Take a number of ranks that divides it"
    if fit is not None:
        loader = "" if fit[0] == live.micro else f" and its data loader batch_size={fit[0]}"
        advice = f"Give the Trainer accumulate_grad_batches={fit[1]}{loader}"
    live.refuse(folder, job, advice)


def count_anew(progress: Mapping[str, Any], was: int | None, now: int) -> int:
    """Count an epoch's batches in those of this run: as many whole steps as it had.

    Args:
        progress: of Lightning's loop, as it is saved; is changed.
        was, now: batches of a step, in the saved run and in this one.

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
    """``_TrainingEpochLoop.on_run_start``: says which data an epoch trains on again, or in other steps.

    Raises:
        ConfigError: Lightning has put a sampler of its own around an elastic one.
    """
    trainer = loop.trainer
    if get_config(trainer.strategy.model) is not None:
        loaders = trainer.fit_loop._combined_loader.flattened
        samplers = (getattr(loader, "sampler", None) for loader in loaders)
        # Lightning's own sampler deals out once more what the inner one gives.
        if any(isinstance(getattr(getattr(each, "dataset", None), "_sampler", None), Order) for each in samplers):
            raise ConfigError(
                "an ElasticSampler deals samples to ranks itself: Trainer(use_distributed_sampler=False)."
            )
        if trainer.global_rank == 0:
            _warn_data(loop, loaders)
    return original(loop, data_fetcher)


def _warn_data(loop: Any, loaders: list[Any]) -> None:
    done, trainer = loop.batch_progress.current.ready, loop.trainer
    if loop.restarting and done and not all(map(_goes_on, loaders)):
        logger.warning(
            f"Lightning goes on after batch {done} of the epoch, but its data begins anew: it trains on the epoch's "
            f"first batches again, and not on its last {done}. Take deepspeed_ucp.data.ElasticSampler, or checkpoints "
            "of an epoch's end."
        )
    batches, accumulation = trainer.num_training_batches, trainer.accumulate_grad_batches
    if batches != float("inf") and batches % accumulation:
        logger.warning(
            f"an epoch has {batches} batches, no multiple of accumulate_grad_batches={accumulation}: Lightning counts "
            "a step at its end that the engine does not take. Take "
            f"limit_train_batches={batches // accumulation * accumulation}."
        )


def _goes_on(loader: Any) -> bool:
    """Whether a loader begins where the run stands."""
    stateful = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
    orders = (getattr(loader, name, None) for name in ("sampler", "dataset"))
    return stateful or any(isinstance(each, Order) and each.follows for each in orders)
