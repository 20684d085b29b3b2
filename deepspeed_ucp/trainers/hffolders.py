"""Folders of Hugging Face's Trainer, ``checkpoint-N``: whether one is whole, and which one a resume takes.

Beside the engine's tag and `latest` a folder has the trainer's state, which is written last, a torch scheduler's, and
random states of every rank.
"""

from __future__ import annotations

import logging
import os
import re
from dataclasses import replace
from typing import Any, NoReturn

from ..atoms import SavedJob
from ..comm import Comm, connect
from ..config import UniversalConfig
from ..errors import CheckpointError, OutOfReachError, shorten
from ..examine.tags import TRAINER_STATE
from ..examine.verify import verify_checkpoint
from ..io.jsonfile import read_json
from ..io.store import exists
from ..load.client import read_objects
from ..load.tags import find_folders, find_tag, suggest_fallback
from ..sources.foreign.names import NUMBERED
from ..sources.open import look_at_job
from .batches import complete_job
from .randomness import States, read_states

logger = logging.getLogger("deepspeed_ucp")

_NAME = re.compile(r"checkpoint-(\d+)")
_SCHEDULER = "scheduler.pt"

RANDOM_FILES = r"rng_state_(\d+)\.pth"
"""Names of the files with the random states of several ranks."""

_RANDOM = {"python": "python", "numpy": "numpy", "torch": "cpu", "accelerator": "{}"}
"""Keys of ``rng_state_N.pth``."""


def choose_folder(args: Any, wanted: Any, config: UniversalConfig) -> Any:
    """The folder that a resume takes: with ``fallback`` the newest whole one; collective.

    Args:
        args: the trainer's.
        wanted: a folder, or True, which is the newest in the output folder.

    Returns:
        The folder; True where there is none, which the trainer tells.

    Raises:
        CheckpointError: it is not whole, and with ``fallback`` none before it is either.
    """
    comm = connect()
    folders = comm.once(lambda: list_folders(args.output_dir) if wanted is True else list_before(os.fspath(wanted)))
    if not folders:
        return wanted
    if not config.fallback:
        with suggest_fallback(comm, lambda: len(folders) > 1):
            comm.once(lambda: read_trainer_state(folders[0]))
            if not config.arguments.get("load_module_only"):  # for which a folder of weights does as well
                find_job(folders[0], config, comm)
        return folders[0]
    passed: list[str] = []
    for latest in (True, False):  # where no other one is whole, one that has lost `latest` alone is better than none
        for folder in folders:
            if not (fault := find_fault(folder, args, config, comm, latest=latest)):
                if passed and comm.rank == 0:
                    logger.warning("%s: resuming from it; passed over: %s", folder, " ".join(dict.fromkeys(passed)))
                return folder
            passed.append(fault)
    raise CheckpointError(f"neither it nor one before it is whole: {' '.join(dict.fromkeys(passed))}", path=folders[0])


def list_folders(output: str) -> list[str]:
    """The trainer's folders in its output folder, the newest first."""
    found = [name for name in os.listdir(output) if _NAME.fullmatch(name)] if os.path.isdir(output) else []
    folders = [os.path.join(output, name) for name in sorted(found, key=_number, reverse=True)]
    return [folder for folder in folders if os.path.isdir(folder)]


def list_before(folder: str) -> list[str]:
    """A folder, and those beside it that the trainer saved before it."""
    parent, name = os.path.split(os.path.normpath(folder))
    if not os.path.isdir(folder):
        others = shorten(map(os.path.basename, list_folders(parent)))
        advice = f"{parent} holds {others}." if others else "Check the path."
        raise CheckpointError(f"does not exist. {advice}", path=folder)
    if not _NAME.fullmatch(name):
        return [folder]
    return [folder, *(each for each in list_folders(parent) if _number(os.path.basename(each)) < _number(name))]


def _number(name: str) -> int:
    return int(name.rpartition("-")[2])


def find_fault(folder: str, args: Any, config: UniversalConfig, comm: Comm, *, latest: bool) -> str:
    """What a folder lacks for a resume, in words; empty where it is whole; collective.

    Args:
        args: the trainer's.
        latest: the engine's tag has to be named by that file.

    Raises:
        UcpError: what is no fault of its files; an older one is not to be taken because of it.
    """
    try:
        comm.once(lambda: read_trainer_state(folder))
        tag = _find_tag(folder, config.model_copy(update={"fallback": not latest}), comm)
        job = find_job(folder, config, comm, tag=tag)
        comm.run(lambda: _read_beside(folder, args, job.ranks, comm))
        places = find_folders([folder, *config.also], tag, comm)
        found = verify_checkpoint(places[0], comm, headers_only=config.verify == "off", also=places[1:])
    except CheckpointError as error:
        if isinstance(error, OutOfReachError):
            raise
        return str(error)
    faults = [fault.text for fault in found.faults if not fault.warning]
    return f"{places[0]}: {shorten(faults, 3)}" if faults else ""


def _read_beside(folder: str, args: Any, ranks: int, comm: Comm) -> None:
    """This rank's part of what the trainer keeps beside the engine.

    Raises:
        CheckpointError: it cannot be read, or its schedule is missing.
    """
    if comm.rank == 0:
        schedule, own = os.path.join(folder, _SCHEDULER), args.hf_deepspeed_config.config
        if exists(schedule):
            read_objects(schedule, trust_pickle=False)
        elif not {"optimizer", "scheduler"} & own.keys():  # else the engine keeps it
            raise CheckpointError("missing", path=schedule)
    for rank in range(comm.rank, ranks, comm.size):
        read_random(folder, ranks, rank)


def find_job(
    folder: str, config: UniversalConfig, comm: Comm, *, tag: str | None = None, found: bool = False
) -> SavedJob:
    """What saved a trainer's folder; collective.

    Args:
        tag: the engine's, where it is known.
        found: the trainer had found its batch by itself (``auto_find_batch_size``).

    Raises:
        CheckpointError: there is no state of an engine.
    """
    tag = tag or _find_tag(folder, config, comm)
    places = find_folders([folder, *config.also], tag, comm)
    job = comm.once(lambda: look_at_job(places[0], places[1:]))
    if job.format:
        job = comm.once(lambda: _complete(job, folder))
    # Where the trainer had made its batch smaller, the ds_config has the first one, unless this package has set it.
    micro = comm.once(lambda: read_trainer_state(folder)).get("train_batch_size") if found and not job.asked else None
    if not micro:
        return job
    return replace(job, total_batch=micro * (job.accumulation or 1) * (job.ranks // job.model_ranks))


def _complete(job: SavedJob, folder: str) -> SavedJob:
    """Add to the job of a foreign checkpoint what the trainer's own files record.

    Raises:
        CheckpointError: the checkpoint has no optimizer states.
    """
    if job.weights_alone:
        _refuse_stateless(folder)
    return complete_job(job, folder, RANDOM_FILES)


def _find_tag(folder: str, config: UniversalConfig, comm: Comm) -> str:
    tag = find_tag(folder, None, comm, fallback=config.fallback, also=config.also, foreign=True)
    return tag if tag is not None else comm.once(lambda: _refuse_stateless(folder))


def _refuse_stateless(folder: str) -> NoReturn:
    """Refuse a folder without optimizer states that a load could take.

    Raises:
        CheckpointError: with the remedy.
    """
    numbered = sorted(filter(NUMBERED.fullmatch, os.listdir(folder)))
    if numbered:
        raise CheckpointError(
            f"{numbered[0]} numbers the optimizer states and does not name their parameters (a run without DeepSpeed "
            "and FSDP saves it so): no run can be resumed from them. Start a new one from the weights "
            '("arguments": {"load_module_only": true}).',
            path=folder,
        )
    beside = [name for name in sorted(os.listdir(folder)) if name == _SCHEDULER or name.startswith("rng_state")]
    if beside:
        raise CheckpointError(
            "the engine's state is missing (`latest` and the folder of a tag, global_step…), which was "
            f"saved with {beside[0]}. Copy it there, or take an older checkpoint.",
            path=folder,
        )
    raise CheckpointError(
        "holds weights without the engine's state (save_only_model leaves out optimizer, scheduler and "
        "random states), so that no run can be resumed from it: start a new one from its weights "
        '("arguments": {"load_module_only": true}).',
        path=folder,
    )


def read_trainer_state(folder: str) -> dict[str, Any]:
    """What the trainer notes of its run, at the end of a save.

    Raises:
        CheckpointError: it is missing or cannot be read.
    """
    path = os.path.join(folder, TRAINER_STATE)
    advice = "Take an older checkpoint."
    try:
        state: dict[str, Any] = read_json(path, advice=advice)
    except FileNotFoundError:
        raise CheckpointError(f"missing, which a save writes last: it was cut short. {advice}", path=path) from None
    return state


def read_random(folder: str, ranks: int, rank: int) -> States:
    """What the trainer saved of one of so many ranks."""
    name = "rng_state.pth" if ranks == 1 else f"rng_state_{rank}.pth"
    return read_states(os.path.join(folder, name), _RANDOM, rank)
