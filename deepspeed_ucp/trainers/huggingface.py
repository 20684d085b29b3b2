"""Replacements of methods of Hugging Face's Trainer.

The trainer counts optimizer steps, whose samples, epochs and learning rates follow from the batch sizes. These are set
before the training loop makes the data loader, the number of steps and the engine from them.
"""

from __future__ import annotations

import inspect
import logging
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from .. import beacon
from ..comm import connect
from ..config import UniversalConfig
from ..engine_state import get_config
from ..errors import CheckpointError, MismatchError, UnsupportedError, describe_changes, pluralize
from ..formats.foreign.names import TRAINER_STATE
from ..hook import read_options, show_decisions
from ..model.index import BATCH_SIZES, INITIAL_SIZES, SCRIPT_BATCH, SavedJob, to_integer
from ..saves.keeping import begin_save, can_postpone, finish_folders, postpone_removals, remove_postponed, restore_times
from ..saves.saver import finish_saves
from ..torchsave.objects import PickledObject
from ..uncaught import shorten_uncaught
from .batches import LIVE, BatchSizes, complete_job, warn_order
from .hffolders import RANDOM_FILES, choose_folder, find_job, read_arguments, read_random, read_trainer_state
from .randomness import restore_ranks

logger = logging.getLogger("deepspeed_ucp")


@dataclass(slots=True)
class TrainerState:
    """State of one trainer, from one :func:`train` to the next.

    Attributes:
        requested: per-device batch and accumulation of the script; an attempt may have changed the arguments since.
        resumed: folder of the resume, if its total batch is to be kept.
        initial_sizes: ranks and micro batches per step in the run's first launch; None if they are the same here.
        uses_count: the model uses ``num_items_in_batch``; None before its first loss.
    """

    requested: tuple[int, int] | None = None
    resumed: str | None = None
    initial_sizes: tuple[int, int] | None = None
    uses_count: bool | None = None


def find_state(trainer: Any) -> TrainerState:
    """Return the state of a trainer, which is stored in its only attribute of ours."""
    state: TrainerState = vars(trainer).setdefault("_ucp_state", TrainerState())
    return state


def train(original: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """``Trainer.train``: resume from a complete folder or its weights (collective).

    Raises:
        CheckpointError: the folder is incomplete, and with ``fallback`` all before it are too.
    """
    call, config = inspect.signature(original).bind(trainer, *args, **kwargs), find_options(trainer)
    folder = call.arguments.get("resume_from_checkpoint")
    trainer._ucp_state = TrainerState()
    if any(type(callback).__name__ == "KubeflowCallback" for callback in trainer.callback_handler.callbacks):
        beacon.mute("kubeflow")  # that callback reports the progress
    if config is not None and folder:
        show_decisions()
        shorten_uncaught()
        parent = trainer.args.output_dir if folder is True else os.path.dirname(os.path.abspath(folder))
        finish_folders(config, parent, connect())
        folder = call.arguments["resume_from_checkpoint"] = choose_folder(trainer.args, folder, config)
    if config is not None and folder and config.arguments.get("load_module_only"):
        call.arguments["resume_from_checkpoint"] = None
        if connect().rank == 0:
            logger.warning("%s: a new run starts from its weights (load_module_only)", folder)
        with _load_weights(trainer, folder):
            return original(*call.args, **call.kwargs)
    return original(*call.args, **call.kwargs)


@contextmanager
def _load_weights(trainer: Any, folder: str) -> Iterator[None]:
    """Let a new run load a checkpoint's weights as soon as its engine exists."""
    from transformers import TrainerCallback

    class LoadWeights(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            strict = not hasattr(trainer.model, "peft_config")
            path, _ = trainer.model_wrapped.load_checkpoint(folder, load_module_strict=strict)
            if path is None:
                raise CheckpointError("has no weights that can be loaded.", path=folder)

    callback, callbacks = LoadWeights(), trainer.callback_handler.callbacks
    callbacks.insert(0, callback)  # before callbacks that use the weights
    try:
        yield
    finally:
        callbacks.remove(callback)


def inner_training_loop(original: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """``Trainer._inner_training_loop``: keep the saved total batch.

    With ``auto_find_batch_size`` the trainer calls it again, with a smaller batch, after an out-of-memory error.
    """
    call = inspect.signature(original).bind(trainer, *args, **kwargs)
    folder, config = call.arguments.get("resume_from_checkpoint"), find_options(trainer)
    chosen, state = trainer.args, find_state(trainer)
    state.resumed = None
    if config is None:
        return original(*call.args, **call.kwargs)
    state.requested = state.requested or (chosen.per_device_train_batch_size, chosen.gradient_accumulation_steps)
    chosen.per_device_train_batch_size, chosen.gradient_accumulation_steps = state.requested  # undo earlier attempts
    micro, accumulation = call.arguments.get("batch_size") or trainer._train_batch_size, state.requested[1]
    if folder:
        show_decisions()
        check_order(chosen, os.fspath(folder))
        state.resumed = os.fspath(folder) if config.total_batch == "saved" else None
        micro = call.arguments["batch_size"] = keep_total_batch(trainer, os.fspath(folder), micro, config)
    elif chosen.auto_find_batch_size:  # the trainer leaves the first attempt's size in the ds_config
        ranks = _count_replicas(trainer)
        _set_batch(trainer, micro, accumulation, micro * accumulation * ranks, script_batch=micro * accumulation)
    return original(*call.args, **call.kwargs)


def _count_replicas(trainer: Any) -> int:
    """Return the number of data-parallel ranks."""
    args = trainer.args
    step = trainer._train_batch_size * args.gradient_accumulation_steps
    return int(trainer.get_total_train_batch_size(args) // step)


def check_order(args: Any, folder: str) -> None:
    """Warn about an order of samples that does not continue the saved run's."""
    if connect().rank:
        return
    strategy, seed = _describe_order(vars(args))
    if strategy == "group_by_length":
        logger.warning(
            "group_by_length orders an epoch by batch sizes of this world and random numbers at its begin, which a "
            "resume does not have: a partial epoch continues with other samples, and repeats some. Resume from the end "
            "of an epoch, or use a reproducible order: random, sequential."
        )
    saved = read_arguments(folder)
    before = _describe_order(saved) if saved else (strategy, seed)
    changes = describe_changes(("train_sampling_strategy", before[0], strategy), ("seed", before[1], seed))
    if changes and not args.ignore_data_skip:
        warn_order(folder, changes, "Keep the saved values of seed, data_seed and train_sampling_strategy")


def _describe_order(args: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return a trainer's sampling strategy, and its seed if the order has one."""
    legacy = "group_by_length" if args.get("group_by_length") else "random"  # before transformers 5
    strategy, seed = args.get("train_sampling_strategy", legacy), args.get("data_seed")
    if strategy == "sequential":
        return strategy, None
    return strategy, args.get("seed") if seed is None else seed


def find_options(trainer: Any) -> UniversalConfig | None:
    """Return the plugin's options for a trainer, or None without an active plugin."""
    plugin = getattr(trainer.accelerator.state, "deepspeed_plugin", None)
    return read_options(plugin.deepspeed_config) if plugin is not None else None


def keep_total_batch(trainer: Any, folder: str, micro: int, config: UniversalConfig) -> int:
    """Set the batch sizes that make a checkpoint's total batch (collective).

    Args:
        micro: samples of a micro batch of this run, the upper limit.

    Returns:
        The micro batch to train with.

    Raises:
        CheckpointError: the folder has no engine state.
        MismatchError: the ds_config has another total batch, the script has changed its batch sizes in an unchanged
            world, or these ranks cannot make the saved total batch.
        UnsupportedError: ``auto_find_batch_size`` with transformers 4, whose gradients would have another size.
    """
    args, comm = trainer.args, connect()
    by_trial: bool = args.auto_find_batch_size
    job = find_job(folder, config, comm, by_trial=by_trial)
    ranks, saved = _count_replicas(trainer), comm.once(lambda: bool(splits_batches(read_arguments(folder))))
    width = ranks if splits_batches(vars(args)) else 1  # ranks that share a batch of the trainer
    if saved:  # counted each batch once per rank
        sizes = ("total_batch", "micro", "script_batch")
        job = replace(job, **{name: size // job.replicas for name in sizes if (size := getattr(job, name))})
    live = BatchSizes(micro // width, args.gradient_accumulation_steps, ranks)
    fit, total = (live.micro, live.accumulation), job.total_batch or live.total
    if not live.accepts_total(folder, job, config):
        written = None if by_trial else _read_explicit_total(args)
        if job.total_batch and written is not None and written // width != job.total_batch:
            live.refuse(folder, job, f'Write train_batch_size {job.total_batch * width} or "auto" into the ds_config')
        fit = live.fit(folder, job)
        if job.ranks == comm.size and job.script_batch != live.micro * live.accumulation and not by_trial:
            advice = f"Set per_device_train_batch_size={fit[0] * width} and gradient_accumulation_steps={fit[1]}"
            live.refuse(folder, job, advice)
    elif total != live.total:
        if comm.rank == 0:
            logger.warning(
                f"the saved run took {total} samples a step, this one takes {live.total}: step {job.steps} is sample "
                f"{job.steps * live.total} of its data, but the saved run had reached sample {job.steps * total}, and "
                "schedules that count steps change the rate per sample"
            )
        total = live.total
    is_changed = fit != (live.micro, live.accumulation)
    if is_changed and by_trial and not hasattr(trainer, "_prepare_for_training"):
        text = (
            f"{folder}: transformers 4 makes gradients of another size with auto_find_batch_size and accumulation. "
            f"Resume without it, with per_device_train_batch_size={fit[0] * width}, or with transformers 5."
        )
        raise comm.common(UnsupportedError(text))
    if is_changed or by_trial:
        _set_batch(trainer, fit[0] * width, fit[1], total * width, script_batch=micro * live.accumulation)
    _record_initial_sizes(trainer, job, (live.ranks, fit[1]))
    if is_changed and comm.rank == 0:
        old_new = ("per-device batch", micro, fit[0] * width), ("gradient accumulation", live.accumulation, fit[1])
        kept = f"{folder}: total batch {total} kept on {pluralize(live.ranks, 'rank')}"
        logger.warning(f"{kept}: {describe_changes(*old_new)}")
    return fit[0] * width


def splits_batches(args: Mapping[str, Any]) -> bool:
    """Return True if a trainer's arguments share each batch (``split_batches``).

    The trainer, the ds_config and DeepSpeed then still count each batch once per rank.
    """
    config = args.get("accelerator_config")
    state = config.state if isinstance(config, PickledObject) else config
    values = state if isinstance(state, Mapping) else getattr(state, "__dict__", {})
    return bool(values.get("split_batches"))


def _read_explicit_total(args: Any) -> int | None:
    """Read the user's ``train_batch_size``; None if it is ``auto`` or missing."""
    if not args.deepspeed:
        return None
    from accelerate.utils.deepspeed import HfDeepSpeedConfig

    # The trainer has replaced "auto" in its copy.
    value = to_integer(HfDeepSpeedConfig(args.deepspeed).config.get(BATCH_SIZES[0]))
    return value if isinstance(value, int) else None


def _set_batch(trainer: Any, micro: int, accumulation: int, total: int, *, script_batch: int) -> None:
    args, ds_config = trainer.args, trainer.accelerator.state.deepspeed_plugin.hf_ds_config
    args.per_device_train_batch_size = micro // max(1, args.n_gpu)
    args.gradient_accumulation_steps = accumulation
    trainer._train_batch_size = micro
    sizes = dict(zip(BATCH_SIZES, (total, micro, accumulation), strict=True))
    ds_config.config.update(sizes | {SCRIPT_BATCH: script_batch})
    faults = tuple(f"- ds {key}=" for key in BATCH_SIZES)  # begins of the trainer's messages about the old sizes
    ds_config.mismatches = [text for text in ds_config.mismatches if not text.startswith(faults)]


def _record_initial_sizes(trainer: Any, job: SavedJob, now: tuple[int, int]) -> None:
    """Record the ranks and micro batches per step of the first launch (``now``: this)."""
    initial = job.initial_sizes or (job.replicas, job.accumulation or now[1])
    was_divided = job.ranks != job.replicas * job.model_ranks
    if was_divided != _divides_sequences(trainer):
        initial = now
        if connect().rank == 0:
            logger.warning(
                "the trainer scales losses otherwise under sequence parallelism, which only "
                f"{'the saved run' if was_divided else 'this run'} uses. Compare the first losses with the saved ones."
            )
    state = find_state(trainer)
    state.initial_sizes, state.uses_count = initial if initial != now else None, None
    trainer.accelerator.state.deepspeed_plugin.hf_ds_config.config.update(zip(INITIAL_SIZES, initial, strict=True))


def _divides_sequences(trainer: Any) -> bool:
    """Return True if ranks divide sequences, whose losses the trainer averages."""
    return bool(hasattr(trainer, "get_sp_size") and trainer.get_sp_size() > 1)


def set_initial_training_values(
    original: Callable[..., Any], trainer: Any, args: Any, dataloader: Any, *more: Any
) -> Any:
    """``Trainer.set_initial_training_values``: keep the number of steps of an epoch.

    With ``dataloader_drop_last`` the trainer drops a partial micro batch of all ranks, but not a partial step. With
    accumulation, an epoch may therefore have an additional step.

    Raises:
        MismatchError: the epoch has another number of steps for another reason.
    """
    values = original(trainer, args, dataloader, *more)
    folder = find_state(trainer).resumed
    epochs, steps, examples, samples, total, batches, most = values
    saved = None if folder is None or not hasattr(dataloader, "__len__") else _read_steps_per_epoch(folder)
    if saved in (None, steps):
        return values
    whole = batches // args.gradient_accumulation_steps
    if not args.dataloader_drop_last or whole != saved:
        change = f"{folder}: an epoch of the saved run had {saved} steps, this one's has {steps}"
        if not args.ignore_data_skip:
            raise MismatchError(
                f"{change}: the trainer would continue at another sample. Use the same data and dataloader_drop_last "
                "(if that is on, also the saved accumulation), set ignore_data_skip=True to start an epoch of other "
                f"data, or {LIVE}."
            )
        if connect().rank == 0:
            logger.warning("%s: epochs are counted by the new number, and the current one starts again", change)
        return values
    if args.max_steps < 0:
        most = math.ceil(args.num_train_epochs * whole)
    else:
        epochs = math.ceil(most / whole)
    return epochs, whole, examples, samples, total, whole * args.gradient_accumulation_steps, most


def _read_steps_per_epoch(folder: str) -> int | None:
    """Return the optimizer steps per epoch of the saved run, or None if unknown."""
    state = read_trainer_state(folder)
    step, epoch = state.get("global_step"), state.get("epoch")
    return math.ceil(step / epoch - 1e-6) if step and epoch else None


def save_optimizer_and_scheduler(original: Callable[..., Any], trainer: Any, output_dir: Any) -> None:
    """``Trainer._save_optimizer_and_scheduler``: let training continue (collective).

    Training waits for the write if the trainer uploads the folder or removes folders in an unknown way, or if the
    folder has a save already: engine state and trainer files would come from different saves meanwhile.
    """
    config = find_options(trainer) if trainer.is_deepspeed_enabled else None
    if config is None or config.save is None:
        original(trainer, output_dir)
        return
    is_known = _can_rotate() and not trainer.args.push_to_hub
    goes_on = begin_save(output_dir, config, connect()) and is_known
    original(trainer, output_dir)
    if not goes_on:
        finish_saves(trainer.model_wrapped, required=True)


def _can_rotate() -> bool:
    """Return True if the trainer removes folders through :func:`rotate_checkpoints`."""
    modules = [sys.modules["transformers.trainer"], sys.modules["transformers.trainer_utils"]]
    names = "rotate_checkpoints" in vars(modules[0]) and hasattr(modules[0].Trainer, "_finalize_training")
    return names and all(map(can_postpone, modules))


def rotate_checkpoints(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """``rotate_checkpoints`` (one rank): keep the last complete checkpoint."""
    restore_times()
    with postpone_removals(sys.modules["transformers.trainer_utils"], TRAINER_STATE):
        original(*args, **kwargs)


def finalize_training(original: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """``Trainer._finalize_training``: finish saves before the best model is loaded."""
    if trainer.is_deepspeed_enabled:
        finish_saves(trainer.model_wrapped)
        remove_postponed()
    with postpone_removals(sys.modules["transformers.trainer"], TRAINER_STATE):
        return original(trainer, *args, **kwargs)


def load_engine(original: Callable[..., None], engine: Any, folder: str, load_module_strict: bool = True) -> None:
    """``deepspeed_load_checkpoint``: load folders not named ``global_step*`` too.

    Raises:
        CheckpointError: the folder has no checkpoint.
    """
    if get_config(engine) is None:
        original(engine, folder, load_module_strict=load_module_strict)
        return
    path, _ = engine.load_checkpoint(folder, load_module_strict=load_module_strict)
    if path is None:
        raise CheckpointError("has no checkpoint that can be loaded.", path=folder)


def load_scheduler(original: Callable[..., Any], trainer: Any, checkpoint: str | None) -> None:
    """``Trainer._load_optimizer_and_scheduler``: optionally keep this run's schedule.

    With ``load_lr_scheduler_states=False``, the schedule of this run is advanced to the saved step.

    Raises:
        MismatchError: the saved schedule has more param groups, such as that of a run without an adapter.
        UnsupportedError: the schedule depends on the results of the steps.
    """
    config = find_options(trainer)
    if config is None or checkpoint is None:
        original(trainer, checkpoint)
        return
    if config.arguments.get("load_lr_scheduler_states", True):
        try:
            original(trainer, checkpoint)
        except IndexError as error:  # of torch's list of functions
            raise MismatchError(
                f"{checkpoint}: its schedule has more param groups than this run's. Set "
                '"arguments": {"load_lr_scheduler_states": false} to continue with the schedule of this run, or '
                '{"load_module_only": true} to start anew from the weights.'
            ) from error
        return
    schedule = getattr(trainer.lr_scheduler, "scheduler", trainer.lr_scheduler)
    steps = int(read_trainer_state(checkpoint).get("global_step", 0))  # transformers 4 has not read it yet
    if isinstance(schedule, LambdaLR):
        schedule.last_epoch = steps - 1
        schedule.step()
    elif type(schedule).__module__.startswith("deepspeed"):
        schedule.step(steps - 1)
    else:
        raise UnsupportedError(
            f"load_lr_scheduler_states=False: {type(schedule).__name__} cannot be set to step {steps}, because it "
            "depends on the steps before. Use a schedule of get_scheduler, or load the saved one."
        )
    if connect().rank == 0:
        rates = ", ".join(f"{group['lr']:g}" for group in schedule.optimizer.param_groups)
        logger.warning("%s: the schedule of this run continues at step %d, learning rate %s", checkpoint, steps, rates)


class Watched(torch.Tensor):
    """A tensor that records whether it is used in a computation."""

    used = False

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") != "__get__":  # not an attribute such as its device
            for argument in (*args, *(kwargs or {}).values()):
                if isinstance(argument, Watched):
                    argument.used = True
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def compute_loss(original: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """``Trainer.compute_loss``: keep the scale of the loss of the run's first launch.

    The trainer passes the number of items of a step to a model that accepts any keyword, and then only multiplies the
    loss by the number of ranks. If the model ignores that number and returns a mean, the trainer adds up the means of
    all ranks and micro batches, whose number has changed.
    """
    call = inspect.signature(original).bind(trainer, *args, **kwargs)
    state, number = find_state(trainer), call.arguments.get("num_items_in_batch")
    if state.initial_sizes is None or not isinstance(number, torch.Tensor):
        return original(*call.args, **call.kwargs)
    if state.uses_count is None:
        watched = call.arguments["num_items_in_batch"] = number.as_subclass(Watched)
        # A compiled model does not accept a subclass of Tensor.
        eager = torch.compiler.set_stance("force_eager") if hasattr(torch.compiler, "set_stance") else nullcontext()
        with eager:
            loss = original(*call.args, **call.kwargs)
        state.uses_count = watched.used
        factor = find_loss_factor(trainer, state.initial_sizes, training=True)
        if not state.uses_count and factor != 1 and connect().rank == 0:
            logger.warning(
                f"{type(trainer.model).__name__} does not use num_items_in_batch, so the trainer adds up its losses "
                f"over ranks and micro batches, whose number has changed. They are multiplied by {factor:g}, which "
                "keeps the scale of losses and gradients of the saved run."
            )
    else:
        loss = original(*call.args, **call.kwargs)
    training = call.arguments["model"].training
    factor = 1.0 if state.uses_count else find_loss_factor(trainer, state.initial_sizes, training=training)
    return (loss[0] * factor, *loss[1:]) if isinstance(loss, tuple) else loss * factor


def find_loss_factor(trainer: Any, initial_sizes: tuple[int, int], *, training: bool) -> float:
    """Return the factor that keeps the scale of losses of a model without item counts."""
    ranks, accumulation = _count_replicas(trainer), trainer.args.gradient_accumulation_steps
    is_average = training and _divides_sequences(trainer)
    adds_ranks = not is_average and getattr(trainer.args, "average_tokens_across_devices", False)
    adds_micro = training and getattr(trainer, "loss_is_scaled_for_ga", None) is not False
    return (initial_sizes[0] / ranks if adds_ranks else 1.0) * (initial_sizes[1] / accumulation if adds_micro else 1.0)


def load_rng_state(original: Callable[..., Any], trainer: Any, checkpoint: str | None) -> None:
    """``Trainer._load_rng_state``: restore states that any number of ranks saved."""
    report = getattr(trainer.model_wrapped, "ucp_report", None)
    job: SavedJob | None = report.saved if report is not None and find_options(trainer) is not None else None
    if checkpoint is None or job is None:
        original(trainer, checkpoint)
        return
    job = complete_job(job, checkpoint, RANDOM_FILES)
    restore_ranks(trainer.model_wrapped, checkpoint, job, partial(read_random, checkpoint, job.ranks))
