"""Writes a save to an object store: below the tag, and one conditional write publishes it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from secrets import token_hex
from typing import Any

from ..comm import Comm
from ..errors import CheckpointError, StorageError
from ..formats.deepspeed.files import PUBLISHED
from ..formats.open import seal_folder
from ..io.jsonfile import parse_json
from ..io.paths import UPLOAD
from ..io.store import exchange_small, find_entry, list_folder, list_tree, put_file, read_small, remove, write_small
from ..io.threads import map_threads
from .coordination import (
    ABANDONED,
    COPIERS,
    OtherNodes,
    begin_writing,
    give_up,
    is_left_behind,
    is_replaced,
    list_hosts,
    name_begun,
    name_latest,
    name_node,
    read_latest_name,
    read_signs,
    sign_part,
)
from .memory import Destination, Snapshot
from .removing import WRITTEN, is_saved, remove_tree


def write_to_store(save: Snapshot, place: Destination, others: OtherNodes) -> None:
    """Upload to a folder below the tag that no other writer uses, then let ``ucp_published.json`` name it.

    That is one conditional write, which fails if another job has published the tag since this save's writing began.
    """
    final, named = f"{place.folder}/{save.tag}", read_latest_name(place)
    name = f"{UPLOAD}{save.job}-{save.number}-{token_hex(4)}"
    begun = begin_writing(save, place, name, lambda: _read_pointer(final))
    folder = f"{final}/{begun['folder']}"
    if save.node:
        _upload(save, place, folder)
        return
    if not _is_published(save, place, begun):
        own = _upload(save, place, folder)
        others.wait(lambda: list_folder(folder), folder)
        if is_replaced(save):
            raise StorageError("a later job has saved this tag while it was written.", path=final)
        try:
            seal_folder(folder, Comm(), hosts=list_hosts(read_signs(save, folder)))
        except CheckpointError:
            for each in own:  # the next attempt uploads them again
                remove(f"{folder}/{each}")
            raise
        _publish(save, place, begun)
    name_latest(save, place, named)
    _remove_replaced(save, final, begun)


def _read_pointer(final: str) -> str:
    """Return the content of a tag's ``ucp_published.json``, or an empty string."""
    with suppress(FileNotFoundError):
        return read_small(f"{final}/{PUBLISHED}").decode(errors="replace")
    return ""


def _is_published(save: Snapshot, place: Destination, begun: Mapping[str, str]) -> bool:
    """Return True if ``ucp_published.json`` names a save's folder, as after a write whose answer was lost.

    Raises:
        TagTakenError: another job has published the tag since the save's writing began.
    """
    final = f"{place.folder}/{save.tag}"
    pointer = _read_pointer(final)
    if pointer in ("", begun["before"]):  # a tag that was removed has no winner
        return False
    published = dict[str, Any]()
    with suppress(CheckpointError):
        published = parse_json(pointer.encode(), final)
    if published.get("folder") != begun["folder"]:
        raise give_up(save, place, f"{final}/{begun['folder']}", f"job {published.get('job', '(unknown)')}")
    return True


def _publish(save: Snapshot, place: Destination, begun: Mapping[str, str]) -> None:
    """Let ``ucp_published.json`` name a save's folder unless another job has published the tag meanwhile.

    Raises:
        TagTakenError: it has.
        StorageError: the store refuses although the tag is as it was.
    """
    final, before = f"{place.folder}/{save.tag}", begun["before"]
    published = {"folder": begun["folder"], "job": save.job, "step": save.step, "time": round(time.time())}
    expected = (before, "") if before else ("",)  # it may have been removed meanwhile
    is_written = any(
        exchange_small(f"{final}/{PUBLISHED}", json.dumps(published).encode(), each.encode() or None)
        for each in expected
    )
    if not (is_written or _is_published(save, place, begun)):
        raise StorageError("the store refused a conditional write, for no reason that can be seen.", path=final)


def _remove_replaced(save: Snapshot, final: str, begun: Mapping[str, str]) -> None:
    """Delete files of other saves in a tag of a store after this one was published.

    A writer whose folder was there before cannot publish it any more, as it expects an older ``ucp_published.json``.
    Other jobs' folders stay for a day after their last change all the same: their writers find out by themselves.
    """
    replaced, own = None, (begun["folder"], name_begun(save), PUBLISHED)
    with suppress(CheckpointError):
        replaced = parse_json(begun["before"].encode() or b"{}", final).get("folder")
    published = find_entry(f"{final}/{PUBLISHED}")
    last = published.changed - ABANDONED if published else 0.0
    for name, entry in list_folder(final).items():
        if name in own:
            continue
        if name.startswith(UPLOAD):
            changed = max((each.changed for each in list_tree(f"{final}/{name}").values()), default=0.0)
            if name == replaced or is_left_behind(name.removeprefix(UPLOAD), save, changed, last):
                remove_tree(final, name)
        elif name.startswith(WRITTEN):
            if is_left_behind(name.removeprefix(WRITTEN), save, entry.changed, last):
                remove(f"{final}/{name}")
        elif is_saved(name) and entry.is_folder:
            remove_tree(final, name)
        elif is_saved(name):
            remove(f"{final}/{name}")


def _upload(save: Snapshot, place: Destination, folder: str) -> list[str]:
    """Upload a node's files, except those that an earlier attempt has uploaded; return the names of the tag's files.

    Args:
        folder: URL for the tag's files, which this save alone uses; other files go to their paths in the place.
    """
    files, inside, present = sorted(save.list_files()), f"{save.tag}{os.sep}", dict[str, int]()
    with suppress(FileNotFoundError):
        present = {name: entry.size for name, entry in list_tree(folder).items()}

    def put(each: str) -> None:
        path, name = os.path.join(save.folder, each), each.removeprefix(inside)
        if name == each:
            put_file(path, f"{place.folder}/{each}")
        elif present.get(name) != os.path.getsize(path):
            put_file(path, f"{folder}/{name}")

    map_threads(put, files, COPIERS)
    write_small(f"{folder}/{name_node(save, save.node)}", sign_part(save))
    return [each.removeprefix(inside) for each in files if each.startswith(inside)]
