"""Takes a save from memory to a place, a folder or a URL, where nothing names it before it is whole."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from ..comm import Comm
from ..errors import CheckpointError, OutOfReachError, StorageError, UcpError, UnsupportedError
from ..io.deletion import delete_tree
from ..io.disk import explain_full, sync_file, sync_folder
from ..io.filesystems import load_libc
from ..io.jsonfile import read_json
from ..io.pace import Pace, keep_pace
from ..io.paths import is_url
from ..io.store import exchange_small, exists, list_folder, list_tree, read_small, remove, write_small
from ..io.threads import map_threads
from ..io.urls import put_file
from ..sources.files import SEAL, is_state_file
from ..sources.latest import LATEST, read_tag
from ..sources.older import find_age
from ..sources.open import seal_folder
from ..sources.reading import read_file
from ..sources.seal import has_seal, read_seal, remove_seal
from .bases import bring_base, find_base, list_brought, remove_bases
from .memory import Destination, Snapshot, list_later
from .removing import WRITTEN, choose_spare, is_saved, remove_tag

logger = logging.getLogger("deepspeed_ucp")

T = TypeVar("T")

_ASIDE = ".ucp-save-"
"""Of the name of a folder in which a save grows."""

_OLD, _GONE = "-old", "-gone"
"""Of the names of folders that one which grew aside has taken the place of, and that nobody goes on with."""

_ABANDONED = 86400.0
"""Seconds without any change after which a folder in which another job's save grows is nobody's."""

_DONE = "on the first node"
"""What is noted of a part of a save in the place of its mark."""

_COPIERS = 4
_SENT = 64 << 20
"""Bytes that are asked of the system at once."""

_LOOKED_AGAIN, _SELDOM = 0.05, 1.0
"""Seconds between the first looks for what other nodes have done, and between later ones."""


_QUIET, _SLOWER = 30.0, 3.0
"""Seconds in which other nodes write nothing until a save of theirs gives way to a newer one, and how much longer than
the first node they may take for a file."""


def write_save(
    save: Snapshot, place: Destination, wait: float, pace: Pace, is_late: Callable[[], bool] = lambda: False
) -> str:
    """Write a node's files of a save to a place; when all are there the first node seals it, and ``latest`` names it.

    Args:
        wait: seconds that other nodes may take longer.
        pace: of the place.
        is_late: whether a newer save waits for this one, which is given up where a node does not seem to have it.

    Returns:
        Its mark there (:func:`find_mark`), on the first node; elsewhere a word.

    Raises:
        UcpError: another node has not written in time, or the files do not belong together.
        OSError: as the system or the store tells it.
    """
    if save.node and not has_begun(save, place) and is_sealed(save, place):
        return _DONE  # it was stopped right before it could note that
    (_write_to_store if is_url(place.folder) else _write_to_folder)(save, place, _Others(save, wait, is_late), pace)
    return find_mark(place.folder, save.tag) if save.node == 0 else _DONE


def find_mark(place: str, tag: str) -> str:
    """What a sealed tag is in a place: whoever writes a file of it anew changes this, whatever the clocks tell.

    Who saves there without the plugin leaves the seal as it is. Empty where there is none that can be read.
    """
    folder = os.path.join(place, tag)
    try:
        digest, held = read_seal(os.path.join(folder, SEAL)).digest, list_folder(folder)
    except (OSError, UcpError):
        return ""
    told = [(name, str(entry)) for name, entry in sorted(held.items()) if is_state_file(name)]
    return hashlib.sha256(json.dumps([digest, told]).encode()).hexdigest()


def has_begun(save: Snapshot, place: Destination) -> bool:
    """Whether the first node writes a save to a place, or this one has done its part."""
    final = os.path.join(place.folder, save.tag)
    mark = os.path.join(final, _name_begun(save)) if is_url(final) else _name_aside(save, place)
    return exists(mark) or exists(os.path.join(final, _name_node(save, save.node)))


def is_sealed(save: Snapshot, place: Destination) -> bool:
    """Whether the seal of a save's tag names this node's files as they are in memory."""
    final = os.path.join(place.folder, save.tag)
    try:
        sealed = read_seal(os.path.join(final, SEAL)).files
        own = [name for name in os.listdir(os.path.join(save.folder, save.tag)) if is_state_file(name)]
        return all(name in sealed and (sealed[name].size, sealed[name].crc) == _sum_up(save, name) for name in own)
    except (OSError, UcpError):
        return False


def _name_aside(save: Snapshot, place: Destination) -> str:
    """The folder in which a save grows."""
    above, name = os.path.split(os.path.join(place.folder, save.tag))
    return os.path.join(above, f".{name}{_ASIDE}{save.job}-{save.number}")


def _write_to_folder(save: Snapshot, place: Destination, others: _Others, pace: Pace) -> None:
    """In a folder aside, which takes the tag's place at once; what others had in the tag moves into it."""
    final, aside, named = os.path.join(place.folder, save.tag), _name_aside(save, place), _read_latest(place)
    above = os.path.dirname(final)
    inside = [each for each in save.list_files() if each.startswith(f"{save.tag}{os.sep}")]

    def copy(each: str) -> None:
        _copy(os.path.join(save.folder, each), os.path.join(aside, os.path.relpath(each, save.tag)), pace)

    with explain_full(aside):
        bring_base(save, place, partial(_copy, pace=pace))
        if not os.path.exists(os.path.join(final, _name_node(save, save.node))):  # else it has taken its place
            os.makedirs(aside, exist_ok=True)
            map_threads(copy, inside, _COPIERS)
            sync_folder(aside)
            write_small(
                os.path.join(aside, _name_node(save, save.node)),
                _sign(save, _list_sizes(os.path.join(save.folder, save.tag))),
            )
            if save.node:
                return
            others.wait(lambda: os.listdir(aside), aside)
            seal_folder(aside, Comm(), hosts=_list_hosts(_read_signs(save, aside)))
            if is_replaced(save):
                raise StorageError("a later job has saved this tag while it was written.", path=final)
            _exchange(aside, final)
        if save.node:
            return
        sync_folder(above)
        for old in (aside, f"{aside}{_OLD}"):
            _keep_others(old, final)
        _remove_left(above, save, os.stat(os.path.join(final, SEAL)).st_mtime)
        for each in set(save.list_files()).difference(inside, save.list_base()):
            _copy(os.path.join(save.folder, each), os.path.join(place.folder, each), pace)
        _name_latest(save, place, named)


def _write_to_store(save: Snapshot, place: Destination, others: _Others, pace: Pace) -> None:
    """Stores do not rename: a tag that is written over has no seal meanwhile.

    Of what is left of it nothing is there before the first file, and no file is written over: two jobs that write one
    tag, as one that hung and the one that followed it, cannot have their files mixed below a seal.
    """
    final, named = f"{place.folder}/{save.tag}", _read_latest(place)
    if save.node == 0 and not exists(f"{final}/{_name_begun(save)}"):
        remove_seal(final)
        map_threads(lambda left: remove(f"{final}/{left}"), filter(is_saved, _list_sizes(final)), _COPIERS)
        write_small(f"{final}/{_name_begun(save)}", b"")
    own = _upload(save, place, pace)
    if save.node:
        return
    others.wait(lambda: list_folder(final), final)
    if is_replaced(save):
        raise StorageError("a later job has saved this tag while it was written.", path=final)
    try:
        _seal_uploaded(save, final)
    except CheckpointError:
        for name in own if not has_seal(final) else ():  # the next attempt puts them there anew
            remove(f"{final}/{name}")
        raise
    _name_latest(save, place, named)


def _upload(save: Snapshot, place: Destination, pace: Pace) -> list[str]:
    """Put a node's files where they are to be, but those that are there from before a stop; the tag's own ones."""
    final = f"{place.folder}/{save.tag}"
    files = sorted(set(save.list_files()).difference(list_brought(save, place)))
    own, held = [os.path.relpath(each, save.tag) for each in files], _list_sizes(final)
    own = [name for name in own if not name.startswith("..")]

    def put(each: str) -> None:
        path, name = os.path.join(save.folder, each), os.path.relpath(each, save.tag)
        if name not in own or held.get(name) != os.path.getsize(path):
            with keep_pace(pace):
                put_file(path, f"{place.folder}/{each}", new=name in own)

    map_threads(put, files, _COPIERS)
    write_small(f"{final}/{_name_node(save, save.node)}", _sign(save, {name: _sum_up(save, name) for name in own}))
    return own


def _seal_uploaded(save: Snapshot, final: str) -> None:
    """Seal what all nodes have put into a store; what is there of another save goes.

    Raises:
        CheckpointError: files are others' by now, or do not belong together.
        StorageError: it has another save's seal.
    """
    signs, written = _read_signs(save, final), dict[str, tuple[int, int | None]]()
    for told in signs.values():
        written.update({name: (size, crc) for name, (size, crc) in told["files"].items()})
    held = set(list_tree(final))
    for left in filter(is_saved, held.difference(written, signs, [_name_begun(save)])):
        if not has_seal(final):  # else it is sealed already, by this writer before a stop or by another
            remove(f"{final}/{left}")
    seal_folder(final, Comm(), own=written, hosts=_list_hosts(signs))


def _list_sizes(folder: str) -> dict[str, int]:
    """Bytes of the files of a tag, which need not be there."""
    try:
        return {name: entry.size for name, entry in list_tree(folder).items()}
    except FileNotFoundError:
        return {}


def find_fault(save: Snapshot, error: Exception) -> UcpError | None:
    """Return the fault of a save's own files that no retry of its writing can mend, or None.

    Args:
        error: raised by :func:`write_save`.
    """
    if isinstance(error, UnsupportedError):
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


def _sum_up(save: Snapshot, name: str) -> tuple[int, int | None]:
    """A file's bytes, and the CRC32 that a header tells of it."""
    folder = os.path.join(save.folder, save.tag)
    if is_state_file(name):
        header = read_file(folder, name)
        return header.size, header.crc
    return os.path.getsize(os.path.join(folder, name)), None


def _read_latest(place: Destination) -> bytes | None:
    try:
        return read_small(os.path.join(place.folder, LATEST))
    except (FileNotFoundError, NotADirectoryError):
        return None


def _name_latest(save: Snapshot, place: Destination, named: bytes | None) -> None:
    """Let ``latest`` name a save, where it is to, and nobody has let it name a later one meanwhile.

    Args:
        named: what it held before the save was written.
    """
    if not save.latest or list_later(save):
        return
    while not exchange_small(os.path.join(place.folder, LATEST), save.tag.encode(), named):
        named = _read_latest(place)
        tag = (named or b"").decode(errors="replace").strip()
        if tag and find_age([os.path.join(place.folder, tag)]).step > save.step:
            logger.warning("%s: another job has let `latest` name %s, which stays", place.folder, tag)
            return


def is_replaced(save: Snapshot) -> bool:
    """Whether a later job has saved under the same tag."""
    return any(later.tag == save.tag for later in list_later(save))


def end_save(save: Snapshot, place: Destination) -> None:
    """Take away what nodes told each other by, once it is noted that the place has the save."""
    names = [_name_begun(save), *(_name_node(save, node) for node in range(save.nodes))]
    for name in names if save.node == 0 else ():
        remove(os.path.join(place.folder, save.tag, name))


def prune_place(place: Destination, held: Mapping[str, str]) -> dict[str, str]:
    """Remove the first ones of those tags that this job has written to a place, down to as many as stay.

    Args:
        held: their marks by tag, in the order in which they were written. What has another one by now is another's.

    Returns:
        Those that are left. One that ``latest`` names, and the last one that is sealed, are always among them.
    """
    if place.keep is None:
        return dict(held)
    try:
        named = read_tag(os.path.join(place.folder, LATEST))
    except (OSError, StorageError):
        named = ""
    spare, bases = choose_spare(list(held), place.keep, {named}), set[str]()
    for tag in spare:
        if find_mark(place.folder, tag) == held[tag]:
            bases |= find_base(place.folder, tag)
            try:
                remove_tag(place.folder, tag)
            except OSError as error:
                logger.warning("%s/%s: cannot be removed: %s", place.folder, tag, error)
    if bases := bases.difference(*(find_base(place.folder, tag) for tag in held if tag not in spare)):
        remove_bases(place, bases)
    return {tag: mark for tag, mark in held.items() if tag not in spare}


def _keep_others(old: str, final: str) -> None:
    """Remove a save that another has taken the place of; what others had put there moves to that one."""
    if os.path.isdir(old) and not os.path.islink(old):
        for name in os.listdir(old):
            if not is_saved(name) and not os.path.lexists(os.path.join(final, name)):
                os.rename(os.path.join(old, name), os.path.join(final, name))
    with suppress(OSError):
        delete_tree(old)


def _remove_left(folder: str, save: Snapshot, now: float) -> None:
    """What earlier saves of this job have left that were not finished, and other jobs' that nobody goes on with.

    Args:
        now: by the clock of the file system, about.
    """
    for name in os.listdir(folder):
        tag, mark, owner = name.rpartition(_ASIDE)
        job, _, number = owner.rpartition("-")
        path = os.path.join(folder, name)
        if mark and job == save.job and number.isdecimal():
            if int(number) < save.number:
                with suppress(OSError):
                    delete_tree(path)
        elif mark:
            with suppress(OSError):
                if _is_abandoned(path, os.path.join(folder, tag[1:]), now):
                    os.rename(path, f"{path}{_GONE}")  # its writer, if it lives after all, misses it and begins anew
                    delete_tree(f"{path}{_GONE}")


def _is_abandoned(aside: str, final: str, now: float) -> bool:
    """Whether nothing in a folder aside has changed for long, and it is not the only whole save of its tag."""
    files = [os.path.join(above, name) for above, _, names in os.walk(aside) for name in (*names, ".")]
    is_old = max(os.stat(path).st_mtime for path in files) < now - _ABANDONED
    return is_old and (os.path.isdir(final) or not os.path.exists(os.path.join(aside, SEAL)))


def _copy(source: str, destination: str, pace: Pace) -> None:
    """A file's bytes and access rights, made durable under a name aside, then named."""
    os.makedirs(os.path.dirname(destination), exist_ok=True)
    aside = f"{destination}.ucp-tmp"
    with open(source, "rb") as read, open(aside, "wb") as written:
        size = os.fstat(read.fileno()).st_size
        most = pace.cut(_SENT)
        while size:
            pace.wait(min(size, most))
            sent = os.sendfile(written.fileno(), read.fileno(), None, most)
            if not sent:
                break
            size -= sent
        os.fchmod(written.fileno(), os.fstat(read.fileno()).st_mode & 0o777)
    sync_file(aside)
    os.replace(aside, destination)


def _name_node(save: Snapshot, node: int) -> str:
    """Of the file that says that a node has written its part of a save."""
    return f"{WRITTEN}{save.job}-{save.number}-{node}"


def _name_begun(save: Snapshot) -> str:
    """Of the object that says that the first node writes a save to a store."""
    return f"{WRITTEN}{save.job}-{save.number}-begun"


def _sign(save: Snapshot, files: Mapping[str, object]) -> bytes:
    """What that file says: which of the tag's files the node has written, and which machines have them in memory."""
    return json.dumps({"files": files, "hosts": save.list_hosts()}).encode()


def _read_signs(save: Snapshot, folder: str) -> dict[str, dict[str, Any]]:
    """By its name what each node's file says."""
    names = [_name_node(save, node) for node in range(save.nodes)]
    return {name: read_json(f"{folder}/{name}") for name in names}


def _list_hosts(signs: Mapping[str, Mapping[str, Any]]) -> dict[str, list[str]]:
    """By machine the files that lie in its memory; nothing where none has another's."""
    held = defaultdict[str, set[str]](set)
    for sign in signs.values():
        for host in sign["hosts"]:
            held[host].update(sign["files"])
    return {host: sorted(files) for host, files in held.items()}


class _Others:
    """Other nodes' parts of a save that the first node begins to write now.

    Args:
        most: seconds to wait for them.
        is_late: as :func:`write_save` takes it.
    """

    def __init__(self, save: Snapshot, most: float, is_late: Callable[[], bool]) -> None:
        self.save, self.most, self.is_late = save, most, is_late
        self._begin = time.monotonic()

    def wait(self, look: Callable[[], Iterable[str]], folder: str) -> None:
        """Wait until all are there.

        Args:
            look: names of what is there.

        Raises:
            StorageError: they have not come in time.
        """
        wanted = {_name_node(self.save, node) for node in range(self.save.nodes)}
        held, changed = set[str](), time.monotonic()
        quiet = max(_QUIET, _SLOWER * (changed - self._begin))

        def describe() -> str:
            return f"{len(wanted - held)} of {self.save.nodes} nodes have not written their files"

        def find() -> bool | None:
            nonlocal held, changed
            before, held = held, set(look())
            changed = time.monotonic() if held != before else changed
            if wanted - held and time.monotonic() - changed > quiet and self.is_late():
                raise StorageError(f"{describe()}, and a newer save waits.", path=folder)
            return wanted <= held or None

        wait_until(find, self.most, describe, folder)


def wait_until(look: Callable[[], T | None], wait: float, explain: Callable[[], str], folder: str) -> T:
    """Look again and again for what other nodes do, and ever more seldom.

    Raises:
        StorageError: it has not come within ``wait`` seconds.
    """
    end, pause = time.monotonic() + wait, _LOOKED_AGAIN
    while (found := look()) is None:
        if time.monotonic() > end:
            raise StorageError(f"{explain()} within {wait:.0f} s.", path=folder)
        time.sleep(pause)
        pause = min(2 * pause, _SELDOM)
    return found


_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def _exchange(new: str, final: str) -> None:
    """Put a folder in another one's place, at once where the file system can: that one is where it was, or aside."""
    try:
        os.rename(new, final)
    except OSError:  # something is there
        paths = _AT_FDCWD, os.fsencode(new), _AT_FDCWD, os.fsencode(final), _RENAME_EXCHANGE
        if load_libc().renameat2(*paths):  # not on every file system
            os.rename(final, f"{new}{_OLD}")
            os.rename(new, final)
