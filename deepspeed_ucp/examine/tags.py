"""Describe the tags of a folder by their headers: step, completeness and faults."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from ..comm import Comm
from ..errors import CheckpointError, UcpError
from ..formats.deepspeed.files import find_foreign_format, scan_if_there
from ..formats.deepspeed.naming import Naming
from ..formats.foreign.names import PARTS, TRAINER_STATE, is_foreign
from ..formats.latest import LOST, Age, find_checkpoint, find_tags, holds_foreign, is_checkpoint, try_find_age
from ..formats.open import survey_checkpoint
from ..io.store import list_tree
from ..model.wrappers import STATELESS

logger = logging.getLogger("deepspeed_ucp")


def find_saves(folder: str) -> list[str]:
    """Return relative paths of the checkpoints in a folder and its direct subfolders."""
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


def describe_tag(folder: str, path: str, also: Sequence[str] = ()) -> dict[str, Any]:
    """Describe a tag by its headers, as data for ``ds_ucp list --json``.

    Returns:
        The row, with ``age`` as sort key. ``weights_only``: it lacks only the optimizer states, and all of them.

    Raises:
        CheckpointError, OSError: the tag's folder cannot be listed.
    """
    where = folder if path == "." else os.path.join(folder, path)
    trees = [list_tree(path) for path in (*also, where)]  # before any file is read
    files = {name: entry for tree in trees for name, entry in tree.items() if not entry.is_folder}
    index, fault = None, None
    try:
        report = survey_checkpoint(where, Comm(), Naming(groups="module"), also=also)
        index, fault = report.index, report.fault
        if find_foreign_format(report.files.entries):  # DeepSpeed may load an unsupported save, but not this
            report.require()
    except UcpError as error:
        fault = error
    age = try_find_age([where])
    if index and index.format:
        files = {name: entry for name, entry in files.items() if is_foreign(name)}
        times = (entry.changed for entry in files.values())
        age = Age(index.counters.get("global_steps", -1), False, max(times, default=0.0))
    weights_only = index is not None and not fault and index.topology.wrapper == STATELESS
    text = index.stateless if index and weights_only else str(fault or _describe_unfinished(os.path.dirname(where)))
    return {
        "age": age,
        "tag": path,
        "folder": where,
        "step": None if age.step < 0 else age.step,
        "whole": not text,
        "weights_only": weights_only,
        "sealed": age.sealed,
        "bytes": sum(entry.size for entry in files.values()),
        "files": len(files),
        "written": datetime.fromtimestamp(age.time).astimezone().isoformat(timespec="seconds") if age.time else None,
        "topology": index.origin if index else None,
        "fault": text.removeprefix(where).lstrip("/: ") or None,
    }


def _describe_unfinished(folder: str) -> str:
    """Describe the fault of an unfinished save of a Trainer; empty if there is none."""
    names = scan_if_there(folder)
    is_cut = any(name == "scheduler.pt" or name.startswith("rng_state") for name in names)
    if is_cut and TRAINER_STATE not in names:
        return f"{folder}/{TRAINER_STATE}: missing, which a trainer's save writes last"
    return ""
