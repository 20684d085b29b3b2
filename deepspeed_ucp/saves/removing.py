"""Which tags of a place go, and how one is removed: what is left by a stop is never taken for a whole save."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Container, Sequence
from contextlib import suppress

from ..io.disk import sync_folder
from ..io.paths import is_url
from ..io.store import list_folder, list_tree, remove
from ..io.threads import map_threads
from ..sources.files import FROZEN, OFFLOADED, SEAL, holds_run, is_state_file
from ..sources.seal import remove_seal

WRITTEN = ".ucp-written-"
"""Of the name of a file by which nodes tell each other that they have written."""

_REMOVERS = 4


def choose_spare(tags: Sequence[str], keep: int, stays: Container[str]) -> list[str]:
    """Those that go, of whole tags in their order: all but the last ``keep``, one at least, and what ``stays``."""
    return [tag for tag in tags[: -max(keep, 1)] if tag not in stays]


def is_saved(name: str) -> bool:
    """Whether a path in a tag is that of a save's file, not of what others have put there: another tag may be."""
    return (
        name.startswith((f"{OFFLOADED}/", WRITTEN))
        or name in (SEAL, FROZEN)
        or (is_state_file(name) and "/" not in name)
    )


def list_saved(folder: str) -> list[str]:
    """Paths of a save's files in its tag's folder.

    Raises:
        OSError: it cannot be listed.
    """
    held, swaps = list_folder(folder), os.path.join(folder, OFFLOADED)
    below = list_tree(swaps) if OFFLOADED in held and not os.path.islink(swaps) else {}
    return [*filter(is_saved, held), *(f"{OFFLOADED}/{name}" for name in below)]


def remove_tag(folder: str, choose: Callable[[str], bool] = is_saved) -> None:
    """Remove a save's files, and its folder where that holds nothing else.

    The seal goes first. Then what names the step, without which nothing is read; files of states go last, so that by
    what is left by a stop a tag is known, and removed.

    Args:
        choose: by their paths in the folder; the seal goes in any case.

    Raises:
        OSError: one cannot be removed.
    """
    remove_seal(folder)
    if not is_url(folder):
        sync_folder(folder)
    names = [name for name in list_saved(folder) if choose(name)]
    for is_turn in (holds_run, lambda name: not is_state_file(name), is_state_file):
        map_threads(lambda name: remove(os.path.join(folder, name)), [*filter(is_turn, names)], _REMOVERS)
    if not is_url(folder):
        for each, _, _ in os.walk(os.path.join(folder, OFFLOADED), topdown=False):
            _remove_empty(each)
        _remove_empty(folder)


def remove_tree(folder: str) -> None:
    """Remove a folder with all that lies in it; no link in it is followed.

    Raises:
        OSError: something cannot be removed.
    """
    if not is_url(folder):
        shutil.rmtree(folder)
        return
    map_threads(lambda name: remove(f"{folder}/{name}"), list(list_tree(folder)), _REMOVERS)


def _remove_empty(folder: str) -> None:
    with suppress(OSError):
        os.rmdir(folder)
