"""Writes saves to destinations (folders or stores), and checks saves there.

All nodes write to one temporary folder; a file of each node records that its part is there. The first node seals the
folder and publishes it (:mod:`.publishing`); then ``latest`` names the tag.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import NamedTuple, TypeVar

from ..comm import Comm
from ..errors import CheckpointError, OutOfReachError, StorageError, TagTakenError, UcpError, UnsupportedError
from ..formats.deepspeed.files import SEAL, is_state_file, list_published, resolve_published
from ..formats.deepspeed.reading import read_file
from ..formats.deepspeed.seal import read_seal
from ..formats.latest import LATEST, read_tag, try_find_age
from ..formats.open import seal_folder
from ..io.paths import Entry, is_url
from ..io.store import exchange_small, exists, list_folder, list_tree, put_file, read_small, remove, write_small
from ..io.threads import map_threads
from .memory import SavePart, list_later
from .publishing import begin_writing, make_tag, name_node_file, remove_tag, remove_tree

logger = logging.getLogger("deepspeed_ucp")

T = TypeVar("T")

_COPIERS = 4
"""Number of files that a writer copies at once."""

_NO_MARK = "on the first node"
"""Result of :func:`write_save` on other nodes; the first node has the mark."""

_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0
"""Seconds between the first polls for other nodes' files, and between later ones."""


def write_save(save: SavePart, destination: str, wait: float) -> str:
    """Write this node's part of a save to a destination; return its mark.

    The first node then waits up to ``wait`` seconds for the others, seals the folder and publishes it. It deletes
    replaced and abandoned folders, and updates ``latest``. Other nodes return :data:`_NO_MARK`.

    Raises:
        UcpError: another node has not written in time, or the files do not belong together.
        OSError: the system or the store reports an error.
    """
    if save.node and not has_begun(save, destination) and has_sealed_part(save, destination):
        return _NO_MARK  # it was stopped right before it could note that
    tag, named = make_tag(save, destination), _read_latest(destination)
    before, missing = begin_writing(tag), {name_node_file(save, node) for node in range(save.nodes)}

    def look() -> bool | None:
        missing.difference_update(list_folder(tag.temporary))
        return not missing or None

    def explain() -> str:
        return f"{len(missing)} of {save.nodes} nodes have not written their files"

    if not tag.check_published(before):
        parts = _put_part(save, tag.temporary)
        if save.node:
            return _NO_MARK
        wait_until(look, wait, explain, tag.temporary)
        if is_replaced(save):
            raise StorageError("a later job has saved this tag while it was written.", path=tag.final)
        _seal(tag.temporary, parts)
        tag.publish(before)
    if save.node:
        return _NO_MARK
    tag.delete_replaced(before)
    tag.delete_abandoned()
    for path in save.list_files():
        if not path.startswith(f"{save.tag}/"):
            put_file(os.path.join(destination, path), os.path.join(save.folder, path))
    _update_latest(save, destination, named)
    return find_mark(destination, save.tag)


def is_replaced(save: SavePart) -> bool:
    """Return True if a later job has saved under the same tag."""
    return any(later.tag == save.tag for later in list_later(save))


def _put_part(save: SavePart, folder: str) -> list[str]:
    """Write this node's part of a tag to a folder; return the names of its files.

    Files that are there with the same size are not written again. The node's marker file is written last.
    """
    inside, present = f"{save.tag}/", dict[str, int]()
    names = [path.removeprefix(inside) for path in save.list_files() if path.startswith(inside)]
    with suppress(FileNotFoundError):
        present = {name: entry.size for name, entry in list_tree(folder).items()}

    def put(name: str) -> None:
        path = os.path.join(save.folder, save.tag, name)
        if present.get(name) != os.path.getsize(path):
            put_file(f"{folder}/{name}", path)

    map_threads(put, names, _COPIERS)
    if not is_url(folder):  # a node without files may be the first one here
        os.makedirs(folder, exist_ok=True)
    write_small(f"{folder}/{name_node_file(save, save.node)}", b"")
    return names


def _seal(folder: str, names_here: Iterable[str]) -> None:
    """Seal the temporary folder of a save.

    If its files do not belong together, delete this node's files (``names_here``) and raise, so that the next attempt
    writes them again.
    """
    try:
        seal_folder(folder, Comm())
    except CheckpointError:
        for name in names_here:
            remove(f"{folder}/{name}")
        raise


def wait_until(look: Callable[[], T | None], wait: float, explain: Callable[[], str], folder: str) -> T:
    """Return the first result of ``look`` that is not None, with pauses between calls.

    Raises:
        StorageError: it returned None for ``wait`` seconds.
    """
    end, pause = time.monotonic() + wait, _FIRST_PAUSE
    while (result := look()) is None:
        if time.monotonic() > end:
            raise StorageError(f"{explain()} within {wait:.0f} s.", path=folder)
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)
    return result


def _read_latest(destination: str) -> bytes | None:
    try:
        return read_small(os.path.join(destination, LATEST))
    except (FileNotFoundError, NotADirectoryError):
        return None


def _update_latest(save: SavePart, destination: str, named: bytes | None) -> None:
    """Write a save's tag to ``latest``, if the save requests it.

    ``latest`` stays if it meanwhile names a save of a later step, or if a later job has saved.

    Args:
        named: its content before the save was written.
    """
    if not save.latest or list_later(save):
        return
    while not exchange_small(os.path.join(destination, LATEST), save.tag.encode(), named):
        before, named = named, _read_latest(destination)
        if named == before:
            raise StorageError(
                "the store refused a conditional write of `latest`, which has not changed.", path=destination
            )
        tag = (named or b"").decode(errors="replace").strip()
        if tag and try_find_age([os.path.join(destination, tag)]).step > save.step:
            logger.warning("%s: another job has let `latest` name %s, which stays", destination, tag)
            return


def find_mark(destination: str, tag: str) -> str:
    """Return a digest of the seal and of the state files' sizes, times and versions.

    Contents are not read. Any writer that replaces the files changes the digest; a save without the plugin leaves the
    seal as it is. Empty if there is no seal that can be read.
    """
    with suppress(OSError, UcpError):
        return _make_mark(*list_published(os.path.join(destination, tag)))
    return ""


def _make_mark(folder: str, entries: Mapping[str, Entry]) -> str:
    """Return the mark of a sealed folder with these files."""
    described = [read_seal(os.path.join(folder, SEAL)).digest, sorted(_fingerprint_files(entries).items())]
    return hashlib.sha256(json.dumps(described).encode()).hexdigest()


def _fingerprint_files(entries: Mapping[str, Entry]) -> dict[str, str]:
    """Return state file → fingerprint: size, time, and in a store the version."""
    return {name: str(entry) for name, entry in entries.items() if is_state_file(name)}


def has_begun(save: SavePart, destination: str) -> bool:
    """Return True if the first node has begun to write a save to a destination."""
    return exists(make_tag(save, destination).record)


def has_sealed_part(save: SavePart, destination: str) -> bool:
    """Return True if the seal of a save's tag lists this node's state files.

    It must list them with the sizes and header CRCs that they have in memory. False without state files.
    """
    memory = os.path.join(save.folder, save.tag)
    try:
        sealed = read_seal(os.path.join(resolve_published(os.path.join(destination, save.tag)), SEAL)).files
        headers = {name: read_file(memory, name) for name in os.listdir(memory) if is_state_file(name)}
    except (OSError, UcpError):
        return False
    return bool(headers) and all(
        name in sealed and (sealed[name].size, sealed[name].crc) == (header.size, header.crc)
        for name, header in headers.items()
    )


def find_permanent_error(save: SavePart, error: Exception, *, is_repeated: bool = False) -> UcpError | None:
    """Return the error to give up a save with, or None if a retry may succeed.

    Args:
        is_repeated: the previous attempt raised the same error, and this node has rewritten its files since.
    """
    if isinstance(error, (UnsupportedError, TagTakenError)):
        return error
    if not isinstance(error, CheckpointError) or isinstance(error, OutOfReachError):
        return None
    folder = os.path.join(save.folder, save.tag)
    try:
        names = list(filter(is_state_file, os.listdir(folder)))
        for name in names:
            read_file(folder, name)
    except (OutOfReachError, OSError):
        return None
    except UcpError as fault:
        return fault
    others = {finding.file for finding in error.findings if is_state_file(finding.file)}.difference(names)
    return error if is_repeated and others else None  # another node writes its part only once


def delete_coordination_files(save: SavePart, destination: str) -> None:
    """Delete a recorded save's coordination files on the first node."""
    if save.node:
        return
    tag = make_tag(save, destination)
    remove(tag.record)
    for node in range(save.nodes):
        remove(f"{tag.published}/{name_node_file(save, node)}")


class WrittenTag(NamedTuple):
    """A tag that a job has written to a destination.

    Attributes:
        mark: its mark after it was written (:func:`find_mark`).
        number: number of its save if ``latest`` was to name it, else the former number of the tag, or 0.
        states: state file → fingerprint, when its removal began; None if it has not begun.
        folder: folder of these files, relative to the tag.
    """

    mark: str
    number: int
    states: Mapping[str, str] | None = None
    folder: str = "."


def delete_old_tags(
    destination: str,
    keep: int | None,
    written: Mapping[str, WrittenTag],
    record: Callable[[dict[str, WrittenTag]], None],
) -> None:
    """Delete all but the newest ``keep`` tags of this job from a destination.

    The tag in ``latest`` is never deleted. If a removal fails or is interrupted, the next call completes it.

    Args:
        written: by tag, in the order of writing. A tag that has another mark now is another job's and stays.
        record: stores the remaining tags, before a tag is removed and at the end.
    """
    if keep is None:
        return
    remaining, named = dict(written), ""
    try:
        named = read_tag(os.path.join(destination, LATEST))
    except FileNotFoundError:
        pass
    except CheckpointError as error:
        logger.warning("%s: no older save is removed, as `latest` may name it: %s", destination, error)
        return
    for tag in [tag for tag in list(written)[:-keep] if tag != named]:
        known, path = written[tag], os.path.join(destination, tag)
        try:
            folder, entries = list_published(path)
            now = _make_mark(folder, entries) if SEAL in entries else ""
            states = _fingerprint_files(entries)
            if now and now == known.mark:
                remaining[tag] = WrittenTag(now, known.number, states, os.path.relpath(folder, path))
                record(remaining)
                remove_tag(destination, tag)
            elif not now and known.states is not None and states.items() <= known.states.items():
                if known.folder != ".":
                    remove_tree(path, known.folder)
                remove_tag(destination, tag)
        except FileNotFoundError:
            pass
        except (OSError, UcpError) as error:
            logger.warning("%s: cannot be removed now: %s", path, error)
            continue
        del remaining[tag]
    record(remaining)
