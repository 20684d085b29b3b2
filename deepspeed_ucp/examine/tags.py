"""Describe the tags of a folder by their headers: step, completeness and faults."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..comm import Comm
from ..errors import CheckpointError, UcpError
from ..formats.deepspeed.files import scan_if_there
from ..formats.deepspeed.naming import Naming
from ..formats.foreign.names import PARTS, TRAINER_STATE, is_foreign
from ..formats.latest import LOST, Age, find_age, find_checkpoint, find_tags, holds_foreign, is_checkpoint
from ..formats.open import survey_checkpoint
from ..io.paths import Entry
from ..io.store import list_tree
from ..model.wrappers import STATELESS

logger = logging.getLogger("deepspeed_ucp")

_TRAINERS = re.compile(r"checkpoint-\d+")


@dataclass(frozen=True, slots=True)
class TagReport:
    """Description of a tag by its headers.

    Attributes:
        path: path relative to the searched folder; ``.`` for this folder.
        folder: full path.
        fault: fault that makes it incomplete; None if it is whole, or only of an unsupported kind.
        topology: description of the saving topology; None if unknown.
        weights_only: whether it lacks only the optimizer states, and all of them.
        files: all files of its tree.
    """

    path: str
    folder: str
    age: Age
    fault: UcpError | str | None
    topology: str | None
    weights_only: bool
    files: Mapping[str, Entry]

    def describe_fault(self) -> str | None:
        """Return the fault without the folder's path."""
        return str(self.fault).removeprefix(self.folder).lstrip("/: ") if self.fault else None


def find_saves(folder: str) -> list[str]:
    """Return the folders of checkpoints in a folder and its subfolders, relative to it; ``.`` if it is one itself.

    Raises:
        CheckpointError: there is none, or the folder cannot be listed.
    """
    if is_checkpoint(folder):
        return ["."]
    saves = find_tags(folder) or ["."] * holds_foreign(folder)
    for name, entry in sorted(scan_if_there(folder).items()):
        if entry.is_folder and name not in (LOST, *saves) and not name.startswith(PARTS):
            try:
                tags = [os.path.join(name, tag) for tag in find_tags(os.path.join(folder, name))]
                saves += tags or [name] * holds_foreign(os.path.join(folder, name))
            except CheckpointError as error:
                logger.warning("%s", error)
    return saves or [os.path.relpath(find_checkpoint(folder), folder)]  # raises, and describes the folder


def look_at_tag(folder: str, path: str, also: Sequence[str] = ()) -> TagReport:
    """Read the headers of a tag.

    Args:
        folder, path: as :func:`find_saves` returns it.
        also: folders that hold further files of the tag.

    Raises:
        CheckpointError, OSError: it cannot be listed.
    """
    where = folder if path == "." else os.path.join(folder, path)
    trees = [list_tree(path) for path in (*also, where)]  # before any file is read
    files = {name: entry for tree in trees for name, entry in tree.items() if not entry.is_folder}
    index, fault = None, None
    try:
        report = survey_checkpoint(where, Comm(), Naming(groups="module"), also=also)
        index, fault = report.index, report.fault
    except UcpError as error:
        fault = error
    age = find_age([where])
    if index and index.format:
        files = {name: entry for name, entry in files.items() if is_foreign(name)}
        times = (entry.changed for entry in files.values())
        age = Age(index.counters.get("global_steps", -1), False, max(times, default=0.0))
    weights_only = index is not None and not fault and index.topology.wrapper == STATELESS
    if index and weights_only:
        fault = CheckpointError(index.stateless)
    return TagReport(
        path,
        where,
        age,
        fault or _find_cut_short(os.path.dirname(where)),
        index.written if index else None,
        weights_only=weights_only,
        files=files,
    )


def is_trainers(folder: str) -> bool:
    """Return whether a folder is a checkpoint of Hugging Face's Trainer, with the Trainer's own files."""
    return _TRAINERS.fullmatch(os.path.basename(folder)) is not None and any(map(_is_beside, scan_if_there(folder)))


def _is_beside(name: str) -> bool:
    return name in (TRAINER_STATE, "scheduler.pt") or name.startswith("rng_state")


def _find_cut_short(folder: str) -> str:
    """Return a fault if Hugging Face's Trainer has not finished a save, else an empty text."""
    names = scan_if_there(folder)
    is_cut = any(map(_is_beside, names)) and TRAINER_STATE not in names
    return f"{folder}/{TRAINER_STATE}: missing, which a trainer's save writes last" if is_cut else ""
