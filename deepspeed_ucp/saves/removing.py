"""Deletes the files of saves; an interrupted removal leaves no tag that looks whole."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from ..formats.deepspeed.files import OFFLOADED, PUBLISHED, SEAL, holds_run, is_state_file, resolve_published
from ..io.deletion import delete_empty_folder, delete_files, delete_tree, open_below
from ..io.paths import is_url
from ..io.store import list_tree, remove
from ..io.threads import map_threads

WRITTEN = ".ucp-written-"
"""Prefix of the marker files of nodes that have written their part of a save."""

_REMOVERS = 4
"""Number of threads that delete objects of a store."""

_TURNS: tuple[Callable[[str], bool], ...] = (
    lambda name: name == SEAL,
    holds_run,
    lambda name: not is_state_file(name),
    is_state_file,
)
"""Order of deletion: the seal, files with the step, other files, state files."""


def is_saved(name: str) -> bool:
    """Return True if a path in a tag can be a save's file. Other files, and other tags, may be there too."""
    return (
        name.startswith((f"{OFFLOADED}/", WRITTEN))
        or name in (SEAL, OFFLOADED)
        or (is_state_file(name) and "/" not in name)
    )


def remove_tag(place: str, tag: str) -> None:
    """Delete a save's files, and its folder if that is empty afterwards; no link below the place is followed.

    If ``ucp_published.json`` names a folder below the tag, that folder is deleted after the file.

    A link in the place of a save's file is deleted, its target stays. The order: the seal, then files with the step,
    which every load needs, state files last. So an interrupted removal leaves a tag that is recognized, and removed
    later.

    Args:
        place: the folder or URL that holds the tag.

    Raises:
        OSError: a file cannot be deleted, or the tag's folder is reached through a link.
        CheckpointError: ``ucp_published.json`` is damaged.
    """
    folder = os.path.join(place, tag)
    published = os.path.relpath(resolve_published(folder), folder)
    if is_url(place):
        if published != ".":
            remove(f"{folder}/{PUBLISHED}")
            remove_tree(folder, published)
        remove(f"{folder}/{SEAL}")
        names = [name for name in list_tree(folder) if is_saved(name)]
        for is_turn in _TURNS:
            map_threads(lambda name: remove(f"{folder}/{name}"), [*filter(is_turn, names)], _REMOVERS)
        return
    with open_below(place, tag) as fd:
        if published != ".":
            os.unlink(PUBLISHED, dir_fd=fd)
            _sync(fd)
            remove_tree(place, f"{tag}/{published}")
        for is_turn in _TURNS:
            delete_files(fd, partial(_is_wanted, is_turn), lambda name: name.split("/")[0] == OFFLOADED)
            _sync(fd)
    delete_empty_folder(place, tag)


def _is_wanted(is_turn: Callable[[str], bool], name: str) -> bool:
    return is_turn(name) and is_saved(name)


def _sync(fd: int) -> None:
    with suppress(OSError):  # file systems without fsync of folders
        os.fsync(fd)


def remove_tree(place: str, path: str) -> None:
    """Delete a file, or a folder with everything in it, below a place; no link below the place is followed.

    Raises:
        OSError: something cannot be deleted.
    """
    folder = os.path.join(place, path)
    if is_url(place):
        remove(folder)
        with suppress(FileNotFoundError):
            map_threads(lambda name: remove(f"{folder}/{name}"), list(list_tree(folder)), _REMOVERS)
    else:
        delete_tree(folder, place)
