"""Replacements of methods of Accelerate: batches, schedulers, random states."""

from __future__ import annotations

import logging
import math
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

from torch.optim.lr_scheduler import LambdaLR

from ..comm import connect
from ..config import UniversalConfig
from ..data import Order
from ..engine.references import replace_method
from ..engine_state import get_config
from ..errors import CheckpointError, ConfigError, pluralize
from ..formats.latest import check_tag, holds_foreign
from ..formats.open import read_saved_job
from ..load.client import read_objects
from ..model.index import BATCH_SIZES, SCRIPT_BATCH, SHUFFLED, SavedJob, to_integer
from ..saves.keeping import begin_save, can_postpone, finish_folders, postpone_removals
from ..saves.saver import finish_saves
from .batches import (
    BatchSizes,
    complete_job,
    refuse_loader_position,
    refuse_weights,
    warn_order,
    warn_unfinished,
)
from .randomness import States, read_states, restore_ranks

logger = logging.getLogger("deepspeed_ucp")

_RANDOM_FILES = "random_states_{}.pkl"
"""Name of a rank's file with random states."""

OWN = _RANDOM_FILES.format(0)
"""A file that Accelerate writes after the engine's state."""

_TAG = "pytorch_model"
"""The tag of the first engine in Accelerate's saves."""

_RANDOM = {
    "python": "random_state",
    "numpy": "numpy_random_seed",
    "torch": "torch_manual_seed",
    "accelerator": "torch_{}_manual_seed",
}
"""Keys of ``random_states_N.pkl``."""

_RATE = "_ucp_rate"
"""Attribute of a torch scheduler, and key of its state: steps per optimizer step."""


def find_engine(accelerator: Any) -> tuple[Any, UniversalConfig | None]:
    """Return the first prepared engine that has the plugin on, with its options."""
    engines = ((model, get_config(model)) for model in accelerator._models)
    return next(((model, config) for model, config in engines if config is not None), (None, None))


def prepare_deepspeed(original: Callable[..., Any], accelerator: Any, *args: Any) -> Any:
    """``Accelerator._prepare_deepspeed``: adopt the engine's gradient accumulation.

    Raises:
        ConfigError: the micro batch has changed, which the data loader makes.
    """
    prepared = original(accelerator, *args)
    engine, config = find_engine(accelerator)
    if config is None:
        return prepared
    micro = to_integer(engine.train_micro_batch_size_per_gpu())
    given = accelerator.deepspeed_config.get(BATCH_SIZES[1], micro)
    if micro != given:
        raise ConfigError(
            f"preserve_batch_size: on {pluralize(connect().size, 'rank')}, train_batch_size "
            f"{engine.train_batch_size()} needs micro batches of {micro} samples, but the data loader makes {given}. "
            f"Set its batch_size={micro}."
        )
    if engine.gradient_accumulation_steps() != accelerator.gradient_accumulation_steps:
        accelerator.gradient_accumulation_steps = to_integer(engine.gradient_accumulation_steps())
    return prepared


def prepare_data_loader(original: Callable[..., Any], accelerator: Any, loader: Any, *args: Any, **kwargs: Any) -> Any:
    """``Accelerator.prepare_data_loader``: refuse to split samples a second time.

    The Trainer's data loaders are prepared by it, too.

    Raises:
        ConfigError: the samples would be split over the ranks twice.
    """
    owners = loader, getattr(loader, "batch_sampler", None)
    orders = [getattr(owner, name, None) for owner in owners for name in ("sampler", "dataset")]
    wrong = next((order for order in orders if isinstance(order, Order) and order.world > 1), None)
    if wrong is not None and accelerator.num_processes > 1:
        raise ConfigError(
            f"Accelerate splits the samples of an {type(wrong).__name__} over the ranks a second time. Make it with "
            "rank=0, world=1, or leave its data loader out of accelerator.prepare."
        )
    return original(accelerator, loader, *args, **kwargs)


def save_state(original: Callable[..., Any], accelerator: Any, *args: Any, **kwargs: Any) -> Any:
    """``Accelerator.save_state``: record schedules and seed too (collective).

    Training continues while a new folder is written. In a folder with an older save, the state and Accelerate's files
    would come from different saves meanwhile.
    """
    engine, config = find_engine(accelerator)
    if config is not None:
        _record_order(accelerator, engine)
    rest = accelerator.step % accelerator.gradient_accumulation_steps
    if rest and config is not None and accelerator.is_main_process:
        logger.warning(
            f"saving after {rest} of the {accelerator.gradient_accumulation_steps} micro batches of a step: their "
            "gradients are not saved, so a resume must repeat these micro batches. Save when "
            "accelerator.sync_gradients is true."
        )
    if config is None or config.save is None:
        return original(accelerator, *args, **kwargs)
    module = sys.modules["accelerate.accelerator"]
    folder = str(args[0] if args else kwargs.get("output_dir"))
    if accelerator.project_configuration.automatic_checkpoint_naming:
        folder = os.path.join(_find_parent(accelerator), f"checkpoint_{accelerator.save_iteration}")
    engines = [model for model in accelerator._models if get_config(model) is not None]
    goes_on = begin_save(folder, config, connect()) and can_postpone(module) and len(engines) == 1
    with postpone_removals(module, OWN, coming=True) if goes_on else nullcontext():
        saved = original(accelerator, *args, **kwargs)
    if not goes_on:
        for engine in engines:
            finish_saves(engine, required=True)  # the script may remove older ones next
    return saved


def _record_order(accelerator: Any, engine: Any) -> None:
    """Record steps of schedulers in their states, and the seed in the ds_config."""
    for scheduler in _list_torch_schedulers(accelerator):
        if scheduler.step_with_optimizer:
            vars(scheduler.scheduler).setdefault(_RATE, _count_steps(scheduler, accelerator.num_processes))
    seed = _find_seed(accelerator)
    if seed is not None and isinstance(engine.config, dict):
        engine.config[SHUFFLED] = seed + 1


def _find_seed(accelerator: Any) -> int | None:
    """Return the seed of the first data loader that Accelerate shuffles, or None."""
    samplers = (loader.get_sampler() for loader in accelerator._dataloaders if hasattr(loader, "get_sampler"))
    return next((sampler.initial_seed for sampler in samplers if hasattr(sampler, "initial_seed")), None)


def _find_parent(accelerator: Any) -> str:
    """Return the folder of checkpoints with automatic names."""
    return os.path.join(str(accelerator.project_dir), "checkpoints")


def load_state(
    original: Callable[..., Any], accelerator: Any, input_dir: Any = None, *args: Any, **kwargs: Any
) -> None:
    """``Accelerator.load_state``: load a checkpoint of any world (collective).

    Raises:
        MismatchError: its total batch cannot be kept.
        UnsupportedError: it has the position of a stateful data loader in another world.
    """
    engine, config = find_engine(accelerator)
    if config is None:
        original(accelerator, input_dir, *args, **kwargs)
        return
    comm = connect()
    absolute = input_dir and os.path.abspath(os.path.expanduser(str(input_dir)))
    finish_folders(config, os.path.dirname(absolute) if absolute else _find_parent(accelerator), comm)
    folder = comm.run(lambda: _find_folder(accelerator, input_dir))
    is_foreign = comm.once(lambda: holds_foreign(folder))
    job = comm.once(lambda: _find_job(folder, is_foreign=is_foreign))
    if any(getattr(loader, "use_stateful_dataloader", False) for loader in accelerator._dataloaders):
        refuse_loader_position(folder, job, ", or skip_first_batches")
    seed, saved = _find_seed(accelerator), job.shuffled and job.shuffled - 1
    if saved not in (None, seed) and accelerator.is_main_process:
        warn_order(folder, f"seed {saved} → {seed}", "Keep the saved seed (set_seed, or data_seed)")
    schedules = comm.run(
        lambda: [_adapt_steps(*schedule, job, comm.size) for schedule in _read_schedulers(accelerator, folder)]
    )
    _keep_total_batch(accelerator, engine, folder, job, config)
    load = engine.load_checkpoint
    without_tag = replace_method(engine, "load_checkpoint", lambda folder, _, **kwargs: load(folder, **kwargs))
    with without_tag if is_foreign else nullcontext():  # Accelerate passes the tag of a DeepSpeed save
        original(accelerator, folder, *args, **kwargs)
    for scheduler, values in schedules:
        vars(scheduler).update(values)
    if engine.ucp_report.saved is not None:  # else the numbering of the ranks is unknown
        restore_ranks(engine, folder, job, partial(read_random, folder))
    _restore_step(accelerator, folder, job)
    if accelerator.is_main_process and config.param_groups == "saved" and not (config.arguments or kwargs):
        warn_rate(engine.lr_scheduler, folder)


def _find_job(folder: str, *, is_foreign: bool) -> SavedJob:
    """Describe the job that saved a folder.

    Raises:
        CheckpointError: the save was interrupted, or the folder has only weights.
    """
    job = read_saved_job(folder) if is_foreign else None
    if job is not None:
        refuse_weights(job, folder, "Start a new run with them: engine.load_checkpoint(folder, load_module_only=True)")
    if os.path.isdir(folder) and not os.path.exists(os.path.join(folder, OWN)):
        raise CheckpointError(
            f"{OWN} is missing: the save was interrupted before it wrote this. Use an older checkpoint.", path=folder
        )
    return complete_job(job or read_saved_job(check_tag(folder, _TAG)), folder, _RANDOM_FILES)


def _find_folder(accelerator: Any, input_dir: Any) -> str:
    """Return the given folder of a load, or the one with the highest automatic number."""
    if input_dir is not None:
        return os.path.expanduser(str(input_dir))
    if not accelerator.project_configuration.automatic_checkpoint_naming:
        raise ConfigError("load_state: pass a folder, or set automatic_checkpoint_naming.")
    parent = _find_parent(accelerator)
    numbers = {int(match[1]): name for name in os.listdir(parent) if (match := re.search(r"(\d+)$", name))}
    if not numbers:
        raise ConfigError(f"{parent}: has no checkpoint. Pass load_state a folder that save_state has made.")
    return os.path.join(parent, numbers[max(numbers)])


def _keep_total_batch(accelerator: Any, engine: Any, folder: str, job: SavedJob, config: UniversalConfig) -> None:
    """Set the accumulation that makes the saved total batch.

    Raises:
        MismatchError: the script has changed its batch in an unchanged world, or no accumulation makes the total batch.
    """
    live, was = BatchSizes.of(engine), accelerator.gradient_accumulation_steps
    if live.accepts_total(folder, job, config) or job.total_batch is None:
        return
    fit = live.fit(folder, job)
    changed = job.ranks == connect().size and job.script_batch != live.micro * was
    if changed or fit[0] != live.micro:
        advice = f"Use a data loader with batch_size={fit[0]} and gradient_accumulation_steps={fit[1]}"
        live.refuse(folder, job, advice)
    engine.set_train_batch_size(job.total_batch)
    if hasattr(engine.optimizer, BATCH_SIZES[2]):
        engine.optimizer.gradient_accumulation_steps = fit[1]
    if isinstance(engine.config, dict):  # its saves record it
        script_batch = live.micro * live.accumulation
        engine.config.update({BATCH_SIZES[0]: job.total_batch, BATCH_SIZES[2]: fit[1], SCRIPT_BATCH: script_batch})
    accelerator.gradient_accumulation_steps = fit[1]
    if accelerator.is_main_process:
        kept = f"{folder}: total batch {job.total_batch} kept on {pluralize(live.ranks, 'rank')}"
        logger.warning(f"{kept}: gradient accumulation {was} → {fit[1]}")


def _list_torch_schedulers(accelerator: Any) -> list[Any]:
    """List the schedulers that Accelerate saves; the engine saves DeepSpeed's."""
    from accelerate.utils import DeepSpeedSchedulerWrapper

    return [scheduler for scheduler in accelerator._schedulers if not isinstance(scheduler, DeepSpeedSchedulerWrapper)]


def _read_schedulers(accelerator: Any, folder: str) -> list[tuple[Any, dict[str, Any]]]:
    plain = _list_torch_schedulers(accelerator)
    names = (f"scheduler_{number}.bin" if number else "scheduler.bin" for number in range(len(plain)))
    paths = [os.path.join(folder, name) for name in names]
    return [(scheduler, read_objects(path, trust_pickle=False)) for scheduler, path in zip(plain, paths, strict=True)]


def _count_steps(scheduler: Any, ranks: int) -> int:
    """Return the steps of a scheduler per optimizer step, on a number of ranks."""
    return 1 if scheduler.split_batches or not scheduler.step_with_optimizer else ranks


def _adapt_steps(scheduler: Any, saved: Mapping[str, Any], job: SavedJob, ranks: int) -> tuple[Any, dict[str, Any]]:
    """Return a torch scheduler, and attributes to set after its saved state is loaded.

    Accelerate steps a scheduler once per rank at every optimizer step, or once with ``split_batches``. A saved schedule
    keeps its number of steps per optimizer step. The functions of a LambdaLR come from this script: if the saved
    learning rate shows that they are made for this number of steps, the steps are converted.
    """
    inner, assumed, now = scheduler.scheduler, _count_steps(scheduler, job.ranks), _count_steps(scheduler, ranks)
    was = int(saved.get(_RATE, assumed)) if scheduler.step_with_optimizer else 1
    other = job.ranks if scheduler.split_batches else 1
    if _RATE not in saved and was != other and saved.get("last_epoch") == job.steps * other and connect().rank == 0:
        logger.warning(
            f"{type(inner).__name__} has taken {other} steps per optimizer step in the saved run, as with another "
            f"split_batches, and continues with {now}. Use the split_batches of the saved run."
        )
    if was == now:
        return inner, {}
    if _expects_live_steps(inner, saved, was, now):
        steps = saved["last_epoch"] // was
        return inner, {"last_epoch": steps * now, "_step_count": steps * now + 1, _RATE: now}
    if not isinstance(inner, LambdaLR) and _holds_functions(inner) and connect().rank == 0:
        logger.warning(
            f"{type(inner).__name__} has functions of this script. It continues with {was} steps per optimizer step as "
            f"in the saved run, so they must not be made for the {now} of this run."
        )
    return inner, {_RATE: was}


def warn_rate(schedule: Any, folder: str) -> None:
    """Warn if DeepSpeed's schedule gives another learning rate than the saved one."""
    if not type(schedule).__module__.startswith("deepspeed") or schedule.last_batch_iteration < 0:
        return
    saved, live = [float(group["lr"]) for group in schedule.optimizer.param_groups], schedule.get_lr()
    if any(not math.isclose(*pair, rel_tol=1e-6, abs_tol=1e-12) for pair in zip(saved, live, strict=False)):
        logger.warning(
            f"{folder}: {type(schedule).__name__} of this run gives the learning rate {live[0]:g} at the saved step, "
            f"but the saved run had {saved[0]:g}. Accelerate divides total_num_steps of a DummyScheduler by the number "
            "of ranks: pass optimizer steps × num_processes, or write total_num_steps into the ds_config."
        )


def _holds_functions(scheduler: Any) -> bool:
    """Return True if a scheduler, or one inside it, takes rates from functions."""
    return hasattr(scheduler, "lr_lambdas") or any(map(_holds_functions, getattr(scheduler, "_schedulers", ())))


def _expects_live_steps(inner: Any, saved: Mapping[str, Any], was: int, now: int) -> bool:
    """Return True if functions expect ``now`` steps per optimizer step, or neither."""
    if not isinstance(inner, LambdaLR):
        return False
    functions: Sequence[Callable[[int], float]] = inner.lr_lambdas
    count, rate = saved["last_epoch"], saved["_last_lr"]

    def matches(step: int) -> bool:
        rates = (base * function(step) for base, function in zip(saved["base_lrs"], functions, strict=True))
        return all(math.isclose(*pair, rel_tol=1e-9, abs_tol=1e-12) for pair in zip(rates, rate, strict=True))

    unchanged, scaled = matches(count), matches(count // was * now)
    if unchanged and scaled and _differ_later(functions, count // was, was, now):
        logger.warning(
            f"the saved learning rate {rate} fits this script's schedule at step {count // was} both with {was} and "
            f"{now} steps per optimizer step, which differ later; it continues with {now}, as in scripts that use "
            "num_processes"
        )
    if not unchanged and not scaled:
        logger.warning(
            f"the saved learning rate {rate} does not fit this script's schedule at step {count // was}, with {was} or "
            f"with {now} steps per optimizer step; it continues with {now}"
        )
    return scaled or not unchanged


def _differ_later(functions: Sequence[Callable[[int], float]], step: int, was: int, now: int) -> bool:
    """Return True if functions differ for ``was`` and ``now`` steps after ``step``."""
    later = dict.fromkeys(step + int(1.05**power) for power in range(340))
    try:
        return any(function(at * was) != function(at * now) for function in functions for at in later)
    except Exception:  # noqa: BLE001 - the script's function, beyond its last step
        return True


def step_scheduler(original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """``AcceleratedScheduler.step``: step as often as in the saved run."""
    inner, is_split = scheduler.scheduler, scheduler.split_batches
    is_step = scheduler.step_with_optimizer and scheduler.gradient_state.sync_gradients
    rate = getattr(inner, _RATE, None) if is_step else None
    if rate is None or (rate == 1 and is_split):
        original(scheduler, *args, **kwargs)
        return
    scheduler.split_batches = True  # one step
    try:
        for _ in range(rate):
            if not hasattr(inner, "total_steps") or inner._step_count <= inner.total_steps:
                original(scheduler, *args, **kwargs)
    finally:
        scheduler.split_batches = is_split


def read_random(folder: str, rank: int) -> States:
    """Read the random states that Accelerate saved for a rank."""
    return read_states(os.path.join(folder, _RANDOM_FILES.format(rank)), _RANDOM, rank)


def _restore_step(accelerator: Any, folder: str, job: SavedJob) -> None:
    """Restore the number of micro batches in the epoch, rounded down to whole steps."""
    path = os.path.join(folder, OWN)
    saved = connect().once(lambda: read_objects(path, trust_pickle=False).get("step", 0) if os.path.isfile(path) else 0)
    accumulation = job.accumulation or accelerator.gradient_accumulation_steps
    steps, rest = divmod(saved, accumulation)
    accelerator.step = steps * accelerator.gradient_accumulation_steps
    if accelerator.is_main_process:
        advice = f"repeat the last {rest} micro batches of the saved run, or their samples are skipped"
        warn_unfinished(folder, rest, accumulation, advice)
