"""Coordination files in a destination: for the nodes of one save, and against other jobs that write the same tag."""

from __future__ import annotations

import json
import logging
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from ..errors import StorageError, TagTakenError
from ..formats.latest import LATEST
from ..formats.older import find_age
from ..io.jsonfile import read_json
from ..io.paths import is_url
from ..io.store import exchange_small, read_small, write_small
from .memory import Destination, Snapshot, list_later
from .removing import WRITTEN, remove_tree

logger = logging.getLogger("deepspeed_ucp")

T = TypeVar("T")

ABANDONED = 86400.0
"""Seconds without any change after which another job's temporary folder counts as abandoned."""

COPIERS = 4
"""Number of files that a writer copies at once."""

_TAKEN = "taken"
"""Key in the record of a save whose tag another job has published; the value is the message."""

_LOOKED_AGAIN, _SELDOM = 0.05, 1.0
"""Seconds between the first polls for other nodes' files, and between later ones."""

_QUIET, _SLOWER = 30.0, 3.0
"""Seconds without a file from another node after which a save gives way to a newer one, and the factor by which other
nodes may be slower than the first node."""


def begin_writing(save: Snapshot, place: Destination, folder: str, look: Callable[[], str]) -> dict[str, str]:
    """Return the record of a save's writing to a place. The first node writes it when it begins, before any stop.

    Args:
        folder: name of the folder that the files are written to, if it is not recorded yet.
        look: returns a text that identifies the published tag; empty if there is no tag.

    Returns:
        The name as ``folder``, and as ``before`` the identity of the tag when the writing began.

    Raises:
        StorageError: the first node has not begun.
        TagTakenError: another job has published the tag meanwhile.
    """
    path = name_record(save, place)
    try:
        begun: dict[str, str] = read_json(path)
    except FileNotFoundError:
        if save.node:
            raise StorageError("the first node has not begun this save.", path=path) from None
        begun = {"folder": folder, "before": look()}
        if not is_url(path):
            os.makedirs(os.path.dirname(path), exist_ok=True)
        write_small(path, json.dumps(begun).encode())
    if _TAKEN in begun:
        raise TagTakenError(begun[_TAKEN])
    return begun


def give_up(save: Snapshot, place: Destination, folder: str, winner: str) -> TagTakenError:
    """Delete the folder that a save was written to and record that another job has published the tag."""
    final = os.path.join(place.folder, save.tag)
    text = (
        f"{final}: {winner} has published this tag since the writing of this save began, so this save is not written "
        "there. Load that one, or save again."
    )
    with suppress(OSError):
        remove_tree(os.path.dirname(folder), os.path.basename(folder))
    with suppress(OSError):
        write_small(name_record(save, place), json.dumps({_TAKEN: text}).encode())
    return TagTakenError(text)


def is_replaced(save: Snapshot) -> bool:
    """Return True if a later job has saved under the same tag."""
    return any(later.tag == save.tag for later in list_later(save))


def is_left_behind(owner: str, save: Snapshot, changed: float, last: float) -> bool:
    """Return True if the owner of files (``job-number-…``) is an earlier save of this job, or has not changed them."""
    job, number, _ = (*owner.rsplit("-", 2), "", "")[:3]
    if job == save.job and number.isdecimal():
        return int(number) < save.number
    return 0 < changed < last


def read_latest_name(place: Destination) -> bytes | None:
    """Return the content of a place's ``latest``, or None."""
    try:
        return read_small(os.path.join(place.folder, LATEST))
    except (FileNotFoundError, NotADirectoryError):
        return None


def name_latest(save: Snapshot, place: Destination, named: bytes | None) -> None:
    """Let ``latest`` name a save, unless the save is not to be named or ``latest`` has come to name a later one.

    Args:
        named: its content before the save was written.
    """
    if not save.latest or list_later(save):
        return
    while not exchange_small(os.path.join(place.folder, LATEST), save.tag.encode(), named):
        named = read_latest_name(place)
        tag = (named or b"").decode(errors="replace").strip()
        if tag and find_age([os.path.join(place.folder, tag)]).step > save.step:
            logger.warning("%s: another job has let `latest` name %s, which stays", place.folder, tag)
            return


def name_node(save: Snapshot, node: int) -> str:
    """Return the name of a node's file that records that it has written its part of a save."""
    return f"{WRITTEN}{save.job}-{save.number}-{node}"


def name_begun(save: Snapshot) -> str:
    """Return the name of the record of :func:`begin_writing`."""
    return f"{WRITTEN}{save.job}-{save.number}-begun"


def name_record(save: Snapshot, place: Destination) -> str:
    """Return the path of that record: below the tag in a store, next to it in a folder, whose tag is renamed."""
    final = os.path.join(place.folder, save.tag)
    above, name = os.path.split(final)
    return f"{final}/{name_begun(save)}" if is_url(final) else os.path.join(above, f".{name}{name_begun(save)}")


def sign_part(save: Snapshot) -> bytes:
    """Return the content of a node's file: the node's files of the tag, and the machines that have them in memory."""
    inside = f"{save.tag}{os.sep}"
    files = [each.removeprefix(inside) for each in save.list_files() if each.startswith(inside)]
    return json.dumps({"files": files, "hosts": save.list_hosts()}).encode()


def read_signs(save: Snapshot, folder: str) -> dict[str, dict[str, Any]]:
    """Return the contents of the nodes' files (:func:`sign_part`) by name."""
    names = [name_node(save, node) for node in range(save.nodes)]
    return {name: read_json(f"{folder}/{name}") for name in names}


def list_hosts(signs: Mapping[str, Mapping[str, Any]]) -> dict[str, list[str]]:
    """Return the files in each machine's memory; empty if no machine has another's files."""
    found = defaultdict[str, set[str]](set)
    for sign in signs.values():
        for host in sign["hosts"]:
            found[host].update(sign["files"])
    return {host: sorted(files) for host, files in found.items()}


class OtherNodes:
    """Waits, on the first node, for the other nodes' parts of a save.

    Args:
        most: seconds to wait.
        is_late: returns True if a newer save waits for this one.
    """

    def __init__(self, save: Snapshot, most: float, is_late: Callable[[], bool]) -> None:
        self.save, self.most, self.is_late = save, most, is_late
        self._begin = time.monotonic()

    def wait(self, look: Callable[[], Iterable[str]], folder: str) -> None:
        """Wait until all nodes have written their parts.

        Args:
            look: returns the names of the files that are there.

        Raises:
            StorageError: some parts were not written in time.
        """
        wanted = {name_node(self.save, node) for node in range(self.save.nodes)}
        present, changed = set[str](), time.monotonic()
        quiet = max(_QUIET, _SLOWER * (changed - self._begin))

        def describe() -> str:
            return f"{len(wanted - present)} of {self.save.nodes} nodes have not written their files"

        def find() -> bool | None:
            nonlocal present, changed
            before, present = present, set(look())
            changed = time.monotonic() if present != before else changed
            if wanted - present and time.monotonic() - changed > quiet and self.is_late():
                raise StorageError(f"{describe()}, and a newer save waits.", path=folder)
            return wanted <= present or None

        wait_until(find, self.most, describe, folder)


def wait_until(look: Callable[[], T | None], wait: float, explain: Callable[[], str], folder: str) -> T:
    """Call ``look`` with growing pauses until it returns something other than None, and return that.

    Raises:
        StorageError: it returned None for ``wait`` seconds.
    """
    end, pause = time.monotonic() + wait, _LOOKED_AGAIN
    while (found := look()) is None:
        if time.monotonic() > end:
            raise StorageError(f"{explain()} within {wait:.0f} s.", path=folder)
        time.sleep(pause)
        pause = min(2 * pause, _SELDOM)
    return found
