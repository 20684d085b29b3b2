"""Hugging Face's Trainer: the saved total batch on any world, before it computes where it stands in its data; losses
and random states of any world.

The trainer counts optimizer steps. Which samples, epoch and learning rate a step means follows from its batch sizes, so
that these are what has to be right, and before anything is made of them: the loop's first lines make the data loader
and the number of steps, then the engine, then load.
"""

from __future__ import annotations

import inspect
import logging
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from .. import beacon
from ..atoms import ASKED, BATCH_SIZES, BEGUN, SavedJob, to_integer
from ..comm import connect
from ..config import UniversalConfig
from ..engine_state import get_config
from ..errors import CheckpointError, MismatchError, UnsupportedError, count_of, describe_changes
from ..examine.tags import TRAINER_STATE
from ..hook import read_options, show_decisions
from ..saves.keeping import begin_save, can_guard, finish_folders, guard, remove_postponed, restore_times
from ..saves.saving import finish_saves
from ..uncaught import shorten_uncaught
from .batches import LIVE, BatchSizes, complete_job, warn_unknown_batch
from .hffolders import RANDOM_FILES, choose_folder, find_job, read_random, read_trainer_state
from .randomness import restore_ranks

logger = logging.getLogger("deepspeed_ucp")


@dataclass(slots=True)
class TrainerState:
    """What this package keeps of one trainer, from one :func:`train` to the next.

    Attributes:
        own: per-device batch and accumulation that the script asks for; an attempt may have taken others since.
        resumed: the folder that it resumes from, where the saved total batch is to be kept.
        begun: ranks and micro batches of a step where the run began; None where this run has the same.
        looks: whether the model looks at ``num_items_in_batch``; None before its first loss.
    """

    own: tuple[int, int] | None = None
    resumed: str | None = None
    begun: tuple[int, int] | None = None
    looks: bool | None = None


def find_state(trainer: Any) -> TrainerState:
    """What is kept of a trainer: the one thing that is set on it."""
    state: TrainerState = vars(trainer).setdefault("_ucp_state", TrainerState())
    return state


def train(original: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """``Trainer.train``: resumes from a folder that is whole, or takes its weights alone into a new run; collective.

    Raises:
        CheckpointError: the folder is not whole, and with ``fallback`` none before it is.
    """
    call, config = inspect.signature(original).bind(trainer, *args, **kwargs), find_options(trainer)
    folder = call.arguments.get("resume_from_checkpoint")
    trainer._ucp_state = TrainerState()
    if any(type(each).__name__ == "KubeflowCallback" for each in trainer.callback_handler.callbacks):
        beacon.mute("kubeflow")  # it tells the progress itself
    if config is not None and folder:
        show_decisions()
        shorten_uncaught()
        beside = trainer.args.output_dir if folder is True else os.path.dirname(os.path.abspath(folder))
        finish_folders(config, beside, connect())
        folder = call.arguments["resume_from_checkpoint"] = choose_folder(trainer.args, folder, config)
    if config is not None and folder and config.arguments.get("load_module_only"):
        call.arguments["resume_from_checkpoint"] = None
        if connect().rank == 0:
            logger.warning("%s: a new run begins with its weights alone, as load_module_only says", folder)
        with _take_weights(trainer, folder):
            return original(*call.args, **call.kwargs)
    return original(*call.args, **call.kwargs)


@contextmanager
def _take_weights(trainer: Any, folder: str) -> Iterator[None]:
    """Inside, a new run takes a checkpoint's weights when its engine is there, before other callbacks look at them."""
    from transformers import TrainerCallback

    class TakeWeights(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            strict = not hasattr(trainer.model, "peft_config")
            path, _ = trainer.model_wrapped.load_checkpoint(folder, load_module_strict=strict)
            if path is None:
                raise CheckpointError("holds no weights that can be loaded.", path=folder)

    callback, callbacks = TakeWeights(), trainer.callback_handler.callbacks
    callbacks.insert(0, callback)
    try:
        yield
    finally:
        callbacks.remove(callback)


def inner_training_loop(original: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """``Trainer._inner_training_loop``: a resume keeps the saved total batch.

    With ``auto_find_batch_size`` the trainer calls it again, with a smaller batch, when memory has run out.
    """
    call = inspect.signature(original).bind(trainer, *args, **kwargs)
    folder, config = call.arguments.get("resume_from_checkpoint"), find_options(trainer)
    state = find_state(trainer)
    state.resumed = None
    if config is None:
        return original(*call.args, **call.kwargs)
    micro, accumulation = call.arguments.get("batch_size") or trainer._train_batch_size, _restore_own(trainer)
    if folder:
        show_decisions()
        warn_order(trainer.args)
        state.resumed = os.fspath(folder) if config.total_batch == "saved" else None
        micro = call.arguments["batch_size"] = keep_total_batch(trainer, os.fspath(folder), micro, config)
    elif trainer.args.auto_find_batch_size:  # the trainer leaves the size that it tried first in the ds_config
        ranks = _count_replicas(trainer)
        _set_batch(trainer, micro, accumulation, micro * accumulation * ranks, asked=micro * accumulation)
    return original(*call.args, **call.kwargs)


def _restore_own(trainer: Any) -> int:
    """The accumulation that the script asks for; an earlier attempt may have taken another."""
    args, state = trainer.args, find_state(trainer)
    state.own = state.own or (args.per_device_train_batch_size, args.gradient_accumulation_steps)
    args.per_device_train_batch_size, args.gradient_accumulation_steps = state.own
    return int(args.gradient_accumulation_steps)


def _count_replicas(trainer: Any) -> int:
    """Ranks that take samples of their own."""
    args = trainer.args
    step = trainer._train_batch_size * args.gradient_accumulation_steps
    return int(trainer.get_total_train_batch_size(args) // step)


def warn_order(args: Any) -> None:
    """Say so where the trainer's own order of an epoch is that of one world and one begin alone."""
    legacy = "group_by_length" if getattr(args, "group_by_length", False) else None  # before transformers 5
    strategy = getattr(args, "train_sampling_strategy", legacy)
    if strategy == "group_by_length" and connect().rank == 0:
        logger.warning(
            "group_by_length orders an epoch by this world's batch sizes and the random numbers at its begin, which a "
            "resume does not have: an epoch that had begun goes on with other samples, some of them again. Resume from "
            "an epoch's end, or take an order that is kept: random, sequential."
        )


def find_options(trainer: Any) -> UniversalConfig | None:
    """The plugin's options for a trainer's engine; None where it has none, or the plugin is off."""
    plugin = getattr(trainer.accelerator.state, "deepspeed_plugin", None)
    return read_options(plugin.deepspeed_config) if plugin is not None else None


def keep_total_batch(trainer: Any, folder: str, micro: int, config: UniversalConfig) -> int:
    """Give a trainer the accumulation and per-device batch that make a checkpoint's total batch; collective.

    Args:
        folder: the trainer's own, ``checkpoint-N``.
        micro: samples of a micro batch of this run; never more are taken.

    Returns:
        The micro batch to train with.

    Raises:
        CheckpointError: the folder holds no state of an engine.
        MismatchError: the total batch is another one on purpose, or these ranks cannot make it.
        UnsupportedError: the trainer finds its batch by itself, and is not known to make the same gradients then.
    """
    args, comm = trainer.args, connect()
    found: bool = args.auto_find_batch_size
    job = find_job(folder, config, comm, found=found)
    live = BatchSizes(micro, args.gradient_accumulation_steps, _count_replicas(trainer))
    fit, total = (micro, live.accumulation), job.total_batch or live.total
    warn_unknown_batch(job, folder, total)
    if not live.is_kept(job, config):
        fit = choose_batch(job, folder, live, None if found else _read_own_total(args), found=found)
    elif total != live.total:
        if comm.rank == 0:
            logger.warning(
                f"the saved run took {total} samples a step, this one takes {live.total}: step {job.steps} means "
                f"sample {job.steps * live.total} of its data, where the saved run had come to {job.steps * total}, "
                "and a schedule by steps another rate per sample"
            )
        total = live.total
    is_changed = fit != (micro, live.accumulation)
    if is_changed and found and not hasattr(trainer, "_prepare_for_training"):
        raise UnsupportedError(
            f"{folder}: transformers 4 makes gradients of another size with auto_find_batch_size and accumulation. "
            f"Resume without it, with per_device_train_batch_size={fit[0]}, or with transformers 5."
        )
    if is_changed or found:
        _set_batch(trainer, *fit, total, asked=micro * live.accumulation)
    _note_begun(trainer, job, (live.ranks, fit[1]))
    if is_changed and comm.rank == 0:
        old_new = ("per-device batch", micro, fit[0]), ("gradient accumulation", live.accumulation, fit[1])
        kept = f"{folder}: total batch {total} kept on {count_of(live.ranks, 'rank')}"
        logger.warning(f"{kept}: {describe_changes(*old_new)}")
    return fit[0]


def choose_batch(
    job: SavedJob, folder: str, live: BatchSizes, written: int | None, *, found: bool = False
) -> tuple[int, int]:
    """(per-device batch, accumulation) of a saved total batch.

    Args:
        written: the total batch of the user's ds_config.
        found: the micro batch is one that the trainer has found to fit into memory, nobody's wish.

    Raises:
        MismatchError: a ds_config has another one written out, the world is the saved one and what the script asks for
            is not what it asked for there, or the ranks cannot make it.
    """
    fit = live.fit(job)
    if written not in (None, job.total_batch):
        live.refuse(folder, job, f'Write train_batch_size {job.total_batch} or "auto" into the ds_config')
    if fit is None:
        live.refuse(folder, job, "Take a number of ranks that divides it")
    if job.ranks == connect().size and job.asked != live.micro * live.accumulation and not found:
        advice = f"Set per_device_train_batch_size={fit[0]} and gradient_accumulation_steps={fit[1]}"
        live.refuse(folder, job, advice)
    return fit


def _read_own_total(args: Any) -> int | None:
    """The ``train_batch_size`` that the user's ds_config has written out; the trainer has replaced ``auto`` by then."""
    if not args.deepspeed:
        return None
    from accelerate.utils.deepspeed import HfDeepSpeedConfig

    value = to_integer(HfDeepSpeedConfig(args.deepspeed).config.get(BATCH_SIZES[0]))
    return value if isinstance(value, int) else None


def _set_batch(trainer: Any, micro: int, accumulation: int, total: int, *, asked: int) -> None:
    """Before the engine is made: in the trainer, its arguments, and the ds_config that it has made of them."""
    args, held = trainer.args, trainer.accelerator.state.deepspeed_plugin.hf_ds_config
    args.per_device_train_batch_size = micro // max(1, args.n_gpu)
    args.gradient_accumulation_steps = accumulation
    trainer._train_batch_size = micro
    held.config.update({**dict(zip(BATCH_SIZES, (total, micro, accumulation), strict=True)), ASKED: asked})
    held.mismatches = [text for text in held.mismatches if not text.startswith(_OF_SIZES)]


def _note_begun(trainer: Any, job: SavedJob, now: tuple[int, int]) -> None:
    """Keep in the trainer and its saves how many ranks and micro batches made a step when the run began.

    Args:
        now: ranks and micro batches of this run.
    """
    begun = job.begun or (job.ranks // job.model_ranks, job.accumulation or now[1])
    state = find_state(trainer)
    state.begun, state.looks = begun if begun != now else None, None
    trainer.accelerator.state.deepspeed_plugin.hf_ds_config.config.update(zip(BEGUN, begun, strict=True))


_OF_SIZES = tuple(f"- ds {key}=" for key in BATCH_SIZES)
"""How the trainer's complaints about these begin."""


def set_initial_training_values(
    original: Callable[..., Any], trainer: Any, args: Any, dataloader: Any, *more: Any
) -> Any:
    """``Trainer.set_initial_training_values``: a resumed epoch has as many steps as it had.

    With ``dataloader_drop_last`` the trainer drops what is less than a micro batch of all ranks, and not what is less
    than a step: with accumulation an epoch may end in a step that was none without.

    Raises:
        MismatchError: it cannot have as many.
    """
    values = original(trainer, args, dataloader, *more)
    folder = find_state(trainer).resumed
    epochs, steps, examples, samples, total, batches, most = values
    saved = None if folder is None or not hasattr(dataloader, "__len__") else _read_steps(folder)
    if saved in (None, steps):
        return values
    whole = batches // args.gradient_accumulation_steps
    if not args.dataloader_drop_last or whole != saved:
        told = f"{folder}: an epoch of the saved run had {saved} steps, this one's has {steps}"
        if not args.ignore_data_skip:
            raise MismatchError(
                f"{told}: the trainer would go on at another sample. Train on the same data, with dataloader_drop_last "
                "as it was (where that is on, with the saved accumulation), let ignore_data_skip=True begin an epoch "
                f"of other data, or {LIVE}."
            )
        if connect().rank == 0:
            logger.warning("%s: epochs are counted in these, and the begun one begins with its first sample", told)
        return values
    if args.max_steps < 0:
        most = math.ceil(args.num_train_epochs * whole)
    else:
        epochs = math.ceil(most / whole)
    return epochs, whole, examples, samples, total, whole * args.gradient_accumulation_steps, most


def _read_steps(folder: str) -> int | None:
    """Optimizer steps of an epoch of the saved run: the trainer notes its epochs as a fraction."""
    state = read_trainer_state(folder)
    step, epoch = state.get("global_step"), state.get("epoch")
    return math.ceil(step / epoch - 1e-6) if step and epoch else None


def save_optimizer_and_scheduler(original: Callable[..., Any], trainer: Any, output_dir: Any) -> None:
    """``Trainer._save_optimizer_and_scheduler``: training goes on while it is written, where that is safe; collective.

    Not where the folder is read or removed in a way that is not known, or holds a save already, whose state and whose
    trainer's files would not be of one save meanwhile.
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
    """Whether the trainer removes its folders where :func:`rotate_checkpoints` sees it."""
    modules = [sys.modules["transformers.trainer"], sys.modules["transformers.trainer_utils"]]
    names = "rotate_checkpoints" in vars(modules[0]) and hasattr(modules[0].Trainer, "_finalize_training")
    return names and all(map(can_guard, modules))


def rotate_checkpoints(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """``rotate_checkpoints``, after a save, on the rank that removes: the last whole one stays."""
    restore_times()
    with guard(sys.modules["transformers.trainer_utils"], TRAINER_STATE):
        original(*args, **kwargs)


def finalize_training(original: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """``Trainer._finalize_training``: the best model is loaded from files that are there, and what was kept longer than
    its limit goes; collective."""
    if trainer.is_deepspeed_enabled:
        finish_saves(trainer.model_wrapped)
        remove_postponed()
    with guard(sys.modules["transformers.trainer"], TRAINER_STATE):
        return original(trainer, *args, **kwargs)


def load_engine(original: Callable[..., None], engine: Any, folder: str, load_module_strict: bool = True) -> None:
    """``deepspeed_load_checkpoint``: loads any format; the original looks for folders named ``global_step*`` first.

    Raises:
        CheckpointError: the folder holds no checkpoint.
    """
    if get_config(engine) is None:
        original(engine, folder, load_module_strict=load_module_strict)
        return
    path, _ = engine.load_checkpoint(folder, load_module_strict=load_module_strict)
    if path is None:
        raise CheckpointError("holds no checkpoint that can be loaded.", path=folder)


def load_scheduler(original: Callable[..., Any], trainer: Any, checkpoint: str | None) -> None:
    """``Trainer._load_optimizer_and_scheduler``: this run's own schedule, at the saved step, where it is to stay.

    Raises:
        MismatchError: the saved one is of more param groups, as that of a run without an adapter.
        UnsupportedError: it cannot be set to a step.
    """
    config = find_options(trainer)
    if config is None or checkpoint is None:
        original(trainer, checkpoint)
        return
    if config.arguments.get("load_lr_scheduler_states", True):
        try:
            original(trainer, checkpoint)
        except IndexError as error:  # torch's, of a list of functions
            raise MismatchError(
                f"{checkpoint}: its schedule is of more param groups than this run's. "
                '"arguments": {"load_lr_scheduler_states": false} goes on with the schedule of this run, '
                '{"load_module_only": true} begins anew with the weights.'
            ) from error
        return
    schedule = getattr(trainer.lr_scheduler, "scheduler", trainer.lr_scheduler)
    steps = int(read_trainer_state(checkpoint).get("global_step", 0))  # transformers 4 has not read it yet
    advance(schedule, steps)
    if connect().rank == 0:
        told = ", ".join(f"{group['lr']:g}" for group in schedule.optimizer.param_groups)
        logger.warning("%s: this run's own schedule at step %d, learning rate %s", checkpoint, steps, told)


def advance(schedule: Any, steps: int) -> None:
    """Set a fresh schedule to where it is after so many steps.

    Raises:
        UnsupportedError: it goes by what the steps have brought.
    """
    if isinstance(schedule, LambdaLR):
        schedule.last_epoch = steps - 1
        schedule.step()
    elif type(schedule).__module__.startswith("deepspeed"):
        schedule.step(steps - 1)
    else:
        raise UnsupportedError(
            f"load_lr_scheduler_states=False: {type(schedule).__name__} cannot be set to step {steps}, as it goes by "
            "the steps before. Take a schedule of get_scheduler's, or the saved one."
        )


class Watched(torch.Tensor):
    """A number that notes whether anything is computed with it."""

    used = False

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") != "__get__":  # its device, its dtype
            for each in (*args, *(kwargs or {}).values()):
                if isinstance(each, Watched):
                    each.used = True
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def compute_loss(original: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """``Trainer.compute_loss``: of the size that it had where the run began.

    The trainer hands the number of items in a step to a model that takes any keyword, multiplies the loss by the ranks,
    and divides it by nothing. A model that does not look at that number gives a mean: of a step there are as many as
    ranks and micro batches, which are added up.
    """
    call = inspect.signature(original).bind(trainer, *args, **kwargs)
    state, number = find_state(trainer), call.arguments.get("num_items_in_batch")
    if state.begun is None or not isinstance(number, torch.Tensor):
        return original(*call.args, **call.kwargs)
    if state.looks is None:
        watched = call.arguments["num_items_in_batch"] = number.as_subclass(Watched)
        # A compiled model takes no tensor of another class.
        eager = torch.compiler.set_stance("force_eager") if hasattr(torch.compiler, "set_stance") else nullcontext()
        with eager:
            made = original(*call.args, **call.kwargs)
        state.looks = watched.used
        if not state.looks:
            _warn_size(trainer, state.begun)
    else:
        made = original(*call.args, **call.kwargs)
    factor = 1.0 if state.looks else find_factor(trainer, state.begun, training=call.arguments["model"].training)
    return (made[0] * factor, *made[1:]) if isinstance(made, tuple) else made * factor


def _warn_size(trainer: Any, begun: tuple[int, int]) -> None:
    factor = find_factor(trainer, begun, training=True)
    if factor != 1 and connect().rank == 0:
        logger.warning(
            f"{type(trainer.model).__name__} does not look at num_items_in_batch: the trainer adds up its losses over "
            f"ranks and micro batches, of which there are others now. They are multiplied by {factor:g}, as losses and "
            "gradients were in the saved run."
        )


def find_factor(trainer: Any, begun: tuple[int, int], *, training: bool) -> float:
    """What such a loss is to be multiplied with.

    Args:
        begun: ranks and micro batches of a step where the run began.
    """
    ranks, accumulation = _count_replicas(trainer), trainer.args.gradient_accumulation_steps
    adds_ranks = getattr(trainer.args, "average_tokens_across_devices", False)
    adds_micro = training and getattr(trainer, "loss_is_scaled_for_ga", None) is not False
    return (begun[0] / ranks if adds_ranks else 1.0) * (begun[1] / accumulation if adds_micro else 1.0)


def load_rng_state(original: Callable[..., Any], trainer: Any, checkpoint: str | None) -> None:
    """``Trainer._load_rng_state``: whatever ranks had saved them."""
    report = getattr(trainer.model_wrapped, "ucp_report", None)
    job: SavedJob | None = report.saved if report is not None and find_options(trainer) is not None else None
    if checkpoint is None or job is None:
        original(trainer, checkpoint)
        return
    job = complete_job(job, checkpoint, RANDOM_FILES)
    restore_ranks(trainer.model_wrapped, checkpoint, job, partial(read_random, checkpoint, job.ranks))
