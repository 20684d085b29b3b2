"""Writes a save from memory to a folder or a store, and checks which saves a place has."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping
from contextlib import suppress

from ..errors import CheckpointError, OutOfReachError, StorageError, TagTakenError, UcpError, UnsupportedError
from ..formats.deepspeed.files import SEAL, is_state_file, list_published, resolve_published
from ..formats.deepspeed.reading import read_file
from ..formats.deepspeed.seal import read_seal
from ..formats.latest import LATEST, read_tag
from ..io.jsonfile import read_json
from ..io.paths import is_url
from ..io.store import exists, remove
from .coordination import OtherNodes, name_node, name_record
from .memory import Destination, Snapshot
from .removing import choose_spare, remove_tag
from .to_folder import write_to_folder
from .to_store import write_to_store

logger = logging.getLogger("deepspeed_ucp")

_DONE = "on the first node"
"""Mark of a save on nodes other than the first."""


def write_save(save: Snapshot, place: Destination, wait: float, is_late: Callable[[], bool] = lambda: False) -> str:
    """Write a node's files of a save to a place; when all are there the first node seals it, and ``latest`` names it.

    Args:
        wait: seconds that other nodes may take longer.
        is_late: returns True if a newer save waits for this one; then an inactive node is not waited for.

    Returns:
        On the first node the save's mark (:func:`find_mark`); on others a constant.

    Raises:
        UcpError: another node has not written in time, or the files do not belong together.
        OSError: the system or the store reports an error.
    """
    if save.node and not has_begun(save, place) and is_sealed(save, place):
        return _DONE  # it was stopped right before it could note that
    (write_to_store if is_url(place.folder) else write_to_folder)(save, place, OtherNodes(save, wait, is_late))
    return find_mark(place.folder, save.tag) if save.node == 0 else _DONE


def find_mark(place: str, tag: str) -> str:
    """Return a digest of a sealed tag's seal and files in a place; any writer that replaces them changes it.

    A save without the plugin leaves the seal as it is. Empty if there is no seal that can be read.
    """
    try:
        folder, entries = list_published(os.path.join(place, tag))
        digest = read_seal(os.path.join(folder, SEAL)).digest
    except (OSError, UcpError):
        return ""
    files = [(name, str(entry)) for name, entry in sorted(entries.items()) if is_state_file(name)]
    return hashlib.sha256(json.dumps([digest, files]).encode()).hexdigest()


def has_begun(save: Snapshot, place: Destination) -> bool:
    """Return True if the first node has begun to write a save to a place."""
    return exists(name_record(save, place))


def is_sealed(save: Snapshot, place: Destination) -> bool:
    """Return True if the seal of a save's tag names this node's files as they are in memory."""
    memory = os.path.join(save.folder, save.tag)
    try:
        sealed = read_seal(os.path.join(resolve_published(os.path.join(place.folder, save.tag)), SEAL)).files
        headers = {name: read_file(memory, name) for name in os.listdir(memory) if is_state_file(name)}
    except (OSError, UcpError):
        return False
    return all(
        name in sealed and (sealed[name].size, sealed[name].crc) == (header.size, header.crc)
        for name, header in headers.items()
    )


def find_fault(save: Snapshot, error: Exception) -> UcpError | None:
    """Return the fault of a save's own files that no retry of its writing can mend, or None.

    Args:
        error: raised by :func:`write_save`.
    """
    if isinstance(error, (UnsupportedError, TagTakenError)):
        return error
    folder = os.path.join(save.folder, save.tag)
    try:
        for name in filter(is_state_file, os.listdir(folder) if isinstance(error, CheckpointError) else ()):
            read_file(folder, name)
    except (OutOfReachError, OSError):
        return None
    except UcpError as fault:
        return fault
    return None


def end_save(save: Snapshot, place: Destination) -> None:
    """Delete the coordination files of a save after it is recorded as complete."""
    if save.node:
        return
    folder, record = os.path.join(place.folder, save.tag), name_record(save, place)
    with suppress(FileNotFoundError, CheckpointError):
        if is_url(folder):
            folder = f"{folder}/{read_json(record)['folder']}"
    remove(record)
    for node in range(save.nodes):
        remove(os.path.join(folder, name_node(save, node)))


def prune_place(place: Destination, marks: Mapping[str, str]) -> dict[str, str]:
    """Delete the oldest tags that this job has written to a place until ``place.keep`` are left.

    Args:
        marks: marks by tag, in the order of writing. A tag that has another mark now is another job's and stays.

    Returns:
        The marks of the remaining tags, which include the tag in ``latest`` and the last sealed one.
    """
    if place.keep is None:
        return dict(marks)
    try:
        named = read_tag(os.path.join(place.folder, LATEST))
    except (OSError, StorageError):
        named = ""
    spare = choose_spare(list(marks), place.keep, {named})
    for tag in spare:
        if find_mark(place.folder, tag) == marks[tag]:
            try:
                remove_tag(place.folder, tag)
            except OSError as error:
                logger.warning("%s/%s: cannot be removed: %s", place.folder, tag, error)
    return {tag: mark for tag, mark in marks.items() if tag not in spare}
