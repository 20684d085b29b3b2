"""Finds and checks folders ``checkpoint-N`` of Hugging Face's Trainer.

Besides the engine's tag and `latest`, a folder has the trainer's state (written last), the state of a torch scheduler,
and the random states of every rank.
"""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NoReturn

from ..comm import Comm, connect
from ..config import UniversalConfig
from ..errors import CheckpointError, OutOfReachError, UcpError, shorten
from ..examine.verify import verify_checkpoint
from ..formats.foreign.names import NUMBERED, TRAINER_STATE
from ..formats.open import read_saved_job
from ..io.jsonfile import read_json
from ..io.store import exists
from ..load.client import read_objects
from ..load.tags import find_folders, find_tag, suggest_fallback
from ..model.index import SavedJob
from ..torchsave.objects import PickledObject
from ..torchsave.torchfile import read_header
from .batches import complete_job
from .randomness import States, read_states

logger = logging.getLogger("deepspeed_ucp")

_NAME = re.compile(r"checkpoint-(\d+)")
_SCHEDULER = "scheduler.pt"

RANDOM_FILES = "rng_state_{}.pth"
"""Name of a rank's file with random states, if several ranks saved."""

_RANDOM = {"python": "python", "numpy": "numpy", "torch": "cpu", "accelerator": "{}"}
"""Keys of ``rng_state_N.pth``."""


def choose_folder(args: Any, wanted: Any, config: UniversalConfig) -> Any:
    """Choose the folder of a resume (collective).

    Args:
        wanted: a folder, or True for the newest one in the output folder.

    Returns:
        The folder, with ``fallback`` the newest complete one; True if there is none, which the trainer reports.

    Raises:
        CheckpointError: the folder is incomplete, and with ``fallback`` all before it are too.
    """
    comm = connect()
    folders = comm.once(lambda: _list_folders(args.output_dir) if wanted is True else _list_before(os.fspath(wanted)))
    if not folders:
        return wanted
    if not config.fallback:
        with suggest_fallback(comm, lambda: len(folders) > 1):
            comm.once(lambda: read_trainer_state(folders[0]))
            if not config.arguments.get("load_module_only"):  # a folder of weights is enough for that
                find_job(folders[0], config, comm)
        return folders[0]
    skipped: list[str] = []
    for folder in folders:
        if not (fault := _find_fault(folder, args, config, comm)):
            if skipped and comm.rank == 0:
                logger.warning("%s: resuming from it; skipped: %s", folder, " ".join(skipped))
            return folder
        skipped.append(fault)
    text = f"neither it nor one before it is complete: {' '.join(skipped)}"
    raise comm.common(CheckpointError(text, path=folders[0]))


def _list_folders(output: str, most: float = math.inf) -> list[str]:
    """List folders numbered at most ``most`` in an output folder, newest first."""
    names = os.listdir(output) if os.path.isdir(output) else ()
    numbers = {int(match[1]): name for name in names if (match := _NAME.fullmatch(name))}
    folders = [os.path.join(output, numbers[number]) for number in sorted(numbers, reverse=True) if number <= most]
    return [folder for folder in folders if os.path.isdir(folder)]


def _list_before(folder: str) -> list[str]:
    """List a folder and its siblings that the trainer saved before it."""
    parent, name = os.path.split(os.path.abspath(folder))
    if not os.path.isdir(folder):
        others = shorten(map(os.path.basename, _list_folders(parent)))
        advice = f"{parent} has {others}." if others else "Check the path."
        raise CheckpointError(f"does not exist. {advice}", path=folder)
    match = _NAME.fullmatch(name)
    return [folder, *_list_folders(parent, int(match[1]) - 1)] if match else [folder]


def _find_fault(folder: str, args: Any, config: UniversalConfig, comm: Comm) -> str:
    """Describe the fault that prevents a resume from a folder, if any (collective).

    Raises:
        UcpError: an error that an older folder would not avoid.
    """
    try:
        comm.once(lambda: read_trainer_state(folder))
        tag = _find_tag(folder, config.model_copy(update={"fallback": False}), comm)
        job = find_job(folder, config, comm, tag=tag)
        comm.run(lambda: _read_trainer_files(folder, args, job.ranks, comm))
        places = find_folders([folder, *config.also], tag, comm)
        verification = verify_checkpoint(places[0], comm, headers_only=config.verify == "off", also=places[1:])
    except CheckpointError as error:
        if isinstance(error, OutOfReachError):
            raise
        return str(error)
    faults = [fault.text for fault in verification.faults if fault.is_fault]
    return f"{places[0]}: {shorten(faults, 3)}" if faults else ""


def _read_trainer_files(folder: str, args: Any, ranks: int, comm: Comm) -> None:
    """Read this rank's share of the schedule and the random states, as a check.

    Raises:
        CheckpointError: a file cannot be read, or the schedule is missing.
    """
    if comm.rank == 0:
        schedule, ds_config = os.path.join(folder, _SCHEDULER), args.hf_deepspeed_config.config
        if exists(schedule):
            read_objects(schedule, trust_pickle=False)
        elif not {"optimizer", "scheduler"} & ds_config.keys():  # else the engine saves it
            raise CheckpointError("missing", path=schedule)
    for rank in range(comm.rank, ranks, comm.size):
        read_random(folder, ranks, rank)


def find_job(
    folder: str, config: UniversalConfig, comm: Comm, *, tag: str | None = None, by_trial: bool = False
) -> SavedJob:
    """Describe the job that saved a trainer's folder (collective).

    Args:
        by_trial: the trainer had found its batch by trial (``auto_find_batch_size``).

    Raises:
        CheckpointError: the folder has no engine state.
    """
    tag = tag or _find_tag(folder, config, comm)
    places = find_folders([folder, *config.also], tag, comm)
    job = comm.once(lambda: read_saved_job(places[0], places[1:]))
    if job.format:
        job = comm.once(
            lambda: _refuse_stateless(folder) if job.weights_alone else complete_job(job, folder, RANDOM_FILES)
        )
    # After a reduction, the ds_config has the first micro batch that was tried, unless this package has set it.
    has_size = by_trial and not job.script_batch
    micro = comm.once(lambda: read_trainer_state(folder)).get("train_batch_size") if has_size else None
    if not micro:
        return job
    return replace(job, total_batch=micro * (job.accumulation or 1) * job.replicas)


def _find_tag(folder: str, config: UniversalConfig, comm: Comm) -> str:
    tag = find_tag(folder, None, comm, fallback=config.fallback, also=config.also)
    return tag if tag is not None else comm.once(lambda: _refuse_stateless(folder))


def _refuse_stateless(folder: str) -> NoReturn:
    """Raise a :class:`CheckpointError` about a folder without usable optimizer states."""
    names, restart = sorted(os.listdir(folder)), '"arguments": {"load_module_only": true}'
    if numbered := next(filter(NUMBERED.fullmatch, names), ""):
        text = (
            f"{numbered} numbers the optimizer states without the names of their parameters (saved without DeepSpeed "
            f"and FSDP), so that no run can be resumed. Start a new one from the weights ({restart})."
        )
    elif saved_with := next((name for name in names if name == _SCHEDULER or name.startswith("rng_state")), ""):
        text = (
            "the engine's state is missing (`latest` and the folder of a tag, global_step…), which was saved with "
            f"{saved_with}. Copy it back, or use an older checkpoint."
        )
    else:
        text = (
            "has weights without the engine's state (save_only_model leaves out optimizer, scheduler and random "
            f"states), so that no run can be resumed. Start a new one from the weights ({restart})."
        )
    raise CheckpointError(text, path=folder)


def read_trainer_state(folder: str) -> dict[str, Any]:
    """Read the trainer's state, which is written at the end of a save.

    Raises:
        CheckpointError: it is missing or cannot be read.
    """
    path, advice = os.path.join(folder, TRAINER_STATE), "Use an older checkpoint."
    try:
        state: dict[str, Any] = read_json(path, advice=advice)
    except FileNotFoundError:
        raise CheckpointError(f"missing: the save was interrupted before it wrote this. {advice}", path=path) from None
    return state


def read_arguments(folder: str) -> Mapping[str, Any]:
    """Read the saved run's arguments as inert data; empty if they are unknown."""
    try:
        tree: Any = read_header(os.path.join(folder, "training_args.bin")).tree
    except (OSError, UcpError):  # the trainer does not need the file
        return {}
    state = tree.state if isinstance(tree, PickledObject) else None
    return state if isinstance(state, dict) else {}


def read_random(folder: str, ranks: int, rank: int) -> States:
    """Read the random states of one of ``ranks`` ranks."""
    name = "rng_state.pth" if ranks == 1 else RANDOM_FILES.format(rank)
    return read_states(os.path.join(folder, name), _RANDOM, rank)
