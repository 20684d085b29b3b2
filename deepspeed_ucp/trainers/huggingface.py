"""Hugging Face's Trainer: the saved total batch on any world, before it computes where it stands in its data; random
states of any world.

The trainer counts optimizer steps. Which samples, epoch and learning rate a step means follows from its batch sizes, so
that these are what has to be right, and before anything is made of them: the loop's first lines make the data loader
and the number of steps, then the engine, then load.
"""

from __future__ import annotations

import inspect
import json
import logging
import math
import os
from collections.abc import Callable
from functools import partial
from typing import Any

from ..atoms import ASKED, BATCH_SIZES, SavedJob
from ..comm import connect
from ..config import SECTION, UniversalConfig, adapt_batch
from ..errors import CheckpointError, MismatchError
from ..hook import read_options, show_decisions
from ..sources.latest import find_checkpoint, find_tags
from ..sources.open import look_at_job
from .randomness import States, read_states, restore_ranks

logger = logging.getLogger("deepspeed_ucp")

_RANDOM = {"python": "python", "numpy": "numpy", "torch": "cpu", "accelerator": "{}"}
"""Keys of ``rng_state_N.pth``."""

_LIVE = f'to go on with this run\'s all the same set "{SECTION}": {{"total_batch": "live"}}'


def inner_training_loop(original: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """``Trainer._inner_training_loop``: a resume keeps the saved total batch."""
    call = inspect.signature(original).bind(trainer, *args, **kwargs)
    folder, config = call.arguments.get("resume_from_checkpoint"), find_options(trainer)
    trainer._ucp_resumed = None
    if config is not None and folder:
        show_decisions()
        tell_order(trainer.args)
        trainer._ucp_resumed = os.fspath(folder) if config.total_batch == "saved" else None
        micro = call.arguments.get("batch_size") or trainer._train_batch_size
        call.arguments["batch_size"] = keep_total_batch(trainer, os.fspath(folder), micro, config)
    return original(*call.args, **call.kwargs)


def tell_order(args: Any) -> None:
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
    """
    args, comm = trainer.args, connect()
    job = comm.once(lambda: _look(folder))
    accumulation: int = args.gradient_accumulation_steps
    ranks = trainer.get_total_train_batch_size(args) // (trainer._train_batch_size * accumulation)
    live = micro * accumulation * ranks
    if job.total_batch in (None, live):
        return micro
    if config.total_batch == "live":
        _tell_live(job, live, comm.rank)
        return micro
    fit = choose_batch(job, folder, micro, ranks, live, _read_own_total(args))
    _set_batch(trainer, *fit, job.total_batch or live, asked=micro * accumulation)
    if comm.rank == 0:
        logger.warning(
            "%s: total batch %d kept on %d ranks: per-device batch %d → %d, gradient accumulation %d → %d",
            *(folder, job.total_batch, ranks, micro, fit[0], accumulation, fit[1]),
        )
    return fit[0]


def _look(folder: str) -> SavedJob:
    if not find_tags(folder):
        raise CheckpointError(
            f"{folder}: holds weights without the engine's state (save_only_model leaves out optimizer, scheduler and "
            "random states), so that no run can be resumed from it: start a new one from its weights."
        )
    return look_at_job(find_checkpoint(folder))


def _tell_live(job: SavedJob, live: int, rank: int) -> None:
    if rank == 0:
        logger.warning(
            "the saved run took %d samples a step, this one takes %d: step %d means sample %d of its data, where the "
            "saved run had come to %d, and a schedule by steps another rate per sample",
            *(job.total_batch, live, job.steps, job.steps * live, job.steps * (job.total_batch or live)),
        )


def choose_batch(job: SavedJob, folder: str, micro: int, ranks: int, live: int, written: int | None) -> tuple[int, int]:
    """(per-device batch, accumulation) of a saved total batch.

    Raises:
        MismatchError: a ds_config has another one written out, the world is the saved one and what the script asks for
            is not what it asked for there, or the ranks cannot make it.
    """
    total = job.total_batch or live
    told = (
        f"{folder}: saved with a total batch of {total} samples, this run has {live} (per-device batch {micro}, "
        f"{ranks} ranks): the trainer would go on at another sample and learning rate."
    )
    fit = adapt_batch(total, micro, ranks)
    if written not in (None, total):
        raise MismatchError(f'{told} Write train_batch_size {total} or "auto" into the ds_config, or {_LIVE}.')
    if fit is None:
        raise MismatchError(f"{told} Take a number of ranks that divides it, or {_LIVE}.")
    if job.ranks == connect().size and job.asked != live // ranks:
        raise MismatchError(
            f"{told} Set per_device_train_batch_size={fit[0]} and gradient_accumulation_steps={fit[1]}, or {_LIVE}."
        )
    return fit


def _read_own_total(args: Any) -> int | None:
    """The ``train_batch_size`` that the user's ds_config has written out; the trainer has replaced ``auto`` by then."""
    if not args.deepspeed:
        return None
    from accelerate.utils.deepspeed import HfDeepSpeedConfig

    value = HfDeepSpeedConfig(args.deepspeed).config.get(BATCH_SIZES[0])
    return value if isinstance(value, int) else None


def _set_batch(trainer: Any, micro: int, accumulation: int, total: int, *, asked: int) -> None:
    """Before the engine is made: in the trainer, its arguments, and the ds_config that it has made of them."""
    args, held = trainer.args, trainer.accelerator.state.deepspeed_plugin.hf_ds_config
    args.per_device_train_batch_size = micro // max(1, args.n_gpu)
    args.gradient_accumulation_steps = accumulation
    trainer._train_batch_size = micro
    held.config.update({**dict(zip(BATCH_SIZES, (total, micro, accumulation), strict=True)), ASKED: asked})
    held.mismatches = [text for text in held.mismatches if not text.startswith(_OF_SIZES)]


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
    folder: str | None = getattr(trainer, "_ucp_resumed", None)
    epochs, steps, examples, samples, total, batches, most = values
    saved = None if folder is None or not hasattr(dataloader, "__len__") else _read_steps(folder)
    if saved in (None, steps):
        return values
    whole = batches // args.gradient_accumulation_steps
    if not args.dataloader_drop_last or whole != saved:
        raise MismatchError(
            f"{folder}: an epoch of the saved run had {saved} steps, this one's has {steps}: the trainer would go on "
            "at another sample. Train on the same data, with dataloader_drop_last as it was (where that is on, with "
            f"the saved accumulation), or {_LIVE}."
        )
    if args.max_steps < 0:
        most = math.ceil(args.num_train_epochs * whole)
    else:
        epochs = math.ceil(most / whole)
    return epochs, whole, examples, samples, total, whole * args.gradient_accumulation_steps, most


def _read_steps(folder: str) -> int | None:
    """Optimizer steps of an epoch of the saved run: the trainer notes its epochs as a fraction."""
    with open(os.path.join(folder, "trainer_state.json"), encoding="utf-8") as stream:
        state = json.load(stream)
    step, epoch = state.get("global_step"), state.get("epoch")
    return math.ceil(step / epoch - 1e-6) if step and epoch else None


def load_rng_state(original: Callable[..., Any], trainer: Any, checkpoint: str | None) -> None:
    """``Trainer._load_rng_state``: whatever ranks had saved them."""
    report = getattr(trainer.model_wrapped, "ucp_report", None)
    job: SavedJob | None = report.saved if report is not None and find_options(trainer) is not None else None
    if checkpoint is None or job is None:
        original(trainer, checkpoint)
        return
    restore_ranks(trainer.model_wrapped, checkpoint, job, partial(read_random, checkpoint, job.ranks))


def read_random(folder: str, ranks: int, rank: int) -> States:
    """What the trainer saved of one of so many ranks."""
    name = "rng_state.pth" if ranks == 1 else f"rng_state_{rank}.pth"
    return read_states(os.path.join(folder, name), _RANDOM, rank)
