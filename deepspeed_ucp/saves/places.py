"""Writes a save from memory to a folder or a store and publishes it by one operation when it is complete."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import json
import logging
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from secrets import token_hex
from typing import Any, TypeVar

from ..comm import Comm
from ..errors import CheckpointError, OutOfReachError, StorageError, TagTakenError, UcpError, UnsupportedError
from ..io.deletion import delete_tree
from ..io.disk import explain_full, sync_file, sync_folder
from ..io.filesystems import load_libc
from ..io.jsonfile import parse_json, read_json
from ..io.paths import UPLOAD, is_url
from ..io.store import (
    exchange_small,
    exists,
    find_entry,
    list_folder,
    list_tree,
    put_file,
    read_small,
    remove,
    write_small,
)
from ..io.threads import map_threads
from ..sources.files import PUBLISHED, SEAL, is_state_file, list_published, resolve_published
from ..sources.latest import LATEST, read_tag
from ..sources.older import find_age
from ..sources.open import seal_folder
from ..sources.reading import read_file
from ..sources.seal import read_seal
from .memory import Destination, Snapshot, list_later
from .removing import WRITTEN, choose_spare, is_saved, remove_tag, remove_tree

logger = logging.getLogger("deepspeed_ucp")

T = TypeVar("T")

_OLD, _GONE = "-old", "-gone"
"""Of the names of folders that one which grew aside has taken the place of, and that nobody goes on with."""

_ABANDONED = 86400.0
"""Seconds without any change after which a folder in which another job's save grows is nobody's."""

_TAKEN = "taken"
"""Key of a record whose tag another job has published; its value is the message."""

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


def write_save(save: Snapshot, place: Destination, wait: float, is_late: Callable[[], bool] = lambda: False) -> str:
    """Write a node's files of a save to a place; when all are there the first node seals it, and ``latest`` names it.

    Args:
        wait: seconds that other nodes may take longer.
        is_late: whether a newer save waits for this one, which is given up where a node does not seem to have it.

    Returns:
        Its mark there (:func:`find_mark`), on the first node; elsewhere a word.

    Raises:
        UcpError: another node has not written in time, or the files do not belong together.
        OSError: as the system or the store tells it.
    """
    if save.node and not has_begun(save, place) and is_sealed(save, place):
        return _DONE  # it was stopped right before it could note that
    (_write_to_store if is_url(place.folder) else _write_to_folder)(save, place, _Others(save, wait, is_late))
    return find_mark(place.folder, save.tag) if save.node == 0 else _DONE


def find_mark(place: str, tag: str) -> str:
    """Return a digest of a sealed tag's seal and files in a place; any writer that replaces them changes it.

    A save without the plugin leaves the seal as it is. Empty if there is no seal that can be read.
    """
    try:
        folder, held = list_published(os.path.join(place, tag))
        digest = read_seal(os.path.join(folder, SEAL)).digest
    except (OSError, UcpError):
        return ""
    told = [(name, str(entry)) for name, entry in sorted(held.items()) if is_state_file(name)]
    return hashlib.sha256(json.dumps([digest, told]).encode()).hexdigest()


def has_begun(save: Snapshot, place: Destination) -> bool:
    """Return True if the first node has begun to write a save to a place."""
    return exists(_name_record(save, place))


def is_sealed(save: Snapshot, place: Destination) -> bool:
    """Return True if the seal of a save's tag names this node's files as they are in memory."""
    try:
        sealed = read_seal(os.path.join(resolve_published(os.path.join(place.folder, save.tag)), SEAL)).files
        own = [name for name in os.listdir(os.path.join(save.folder, save.tag)) if is_state_file(name)]
        return all(name in sealed and (sealed[name].size, sealed[name].crc) == _sum_up(save, name) for name in own)
    except (OSError, UcpError):
        return False


def _name_aside(save: Snapshot, place: Destination) -> str:
    """The folder in which a save grows."""
    above, name = os.path.split(os.path.join(place.folder, save.tag))
    return os.path.join(above, f".{name}{UPLOAD}{save.job}-{save.number}")


def _write_to_folder(save: Snapshot, place: Destination, others: _Others) -> None:
    """Write to a temporary folder and rename it; files of others in the tag's folder move into the new one."""
    final, aside, named = os.path.join(place.folder, save.tag), _name_aside(save, place), _read_latest(place)
    above = os.path.dirname(final)
    inside = [each for each in save.list_files() if each.startswith(f"{save.tag}{os.sep}")]

    def copy(each: str) -> None:
        _copy(os.path.join(save.folder, each), os.path.join(aside, os.path.relpath(each, save.tag)))

    with explain_full(aside):
        if not os.path.exists(os.path.join(final, _name_node(save, save.node))):  # else it was renamed before a stop
            begun = _begin(save, place, os.path.basename(aside), lambda: _identify(final))
            os.makedirs(aside, exist_ok=True)
            map_threads(copy, inside, _COPIERS)
            sync_folder(aside)
            write_small(os.path.join(aside, _name_node(save, save.node)), _sign(save))
            if save.node:
                return
            others.wait(lambda: os.listdir(aside), aside)
            seal_folder(aside, Comm(), hosts=_list_hosts(_read_signs(save, aside)))
            if is_replaced(save):
                raise StorageError("a later job has saved this tag while it was written.", path=final)
            if not _publish_folder(aside, final, begun["before"]):
                raise _give_up(save, place, aside, "another job")
        if save.node:
            return
        sync_folder(above)
        for old in (aside, f"{aside}{_OLD}"):
            _keep_others(old, final)
        _remove_left(above, save, os.stat(os.path.join(final, SEAL)).st_mtime)
        for each in set(save.list_files()).difference(inside):
            _copy(os.path.join(save.folder, each), os.path.join(place.folder, each))
        _name_latest(save, place, named)


def _write_to_store(save: Snapshot, place: Destination, others: _Others) -> None:
    """Upload to a folder below the tag that no other writer uses, then let ``ucp_published.json`` name it.

    That is one conditional write, which fails if another job has published the tag since this save's writing began.
    """
    final, named = f"{place.folder}/{save.tag}", _read_latest(place)
    name = f"{UPLOAD}{save.job}-{save.number}-{token_hex(4)}"
    begun = _begin(save, place, name, lambda: _read_pointer(final))
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
            seal_folder(folder, Comm(), hosts=_list_hosts(_read_signs(save, folder)))
        except CheckpointError:
            for each in own:  # the next attempt uploads them again
                remove(f"{folder}/{each}")
            raise
        _publish(save, place, begun)
    _name_latest(save, place, named)
    _remove_replaced(save, final, begun)


def _begin(save: Snapshot, place: Destination, folder: str, look: Callable[[], str]) -> dict[str, str]:
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
    path = _name_record(save, place)
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


def _give_up(save: Snapshot, place: Destination, folder: str, winner: str) -> TagTakenError:
    """Delete the folder that a save was written to and record that another job has published the tag."""
    final = os.path.join(place.folder, save.tag)
    text = (
        f"{final}: {winner} has published this tag since the writing of this save began, so this save is not written "
        "there. Load that one, or save again."
    )
    with suppress(OSError):
        remove_tree(os.path.dirname(folder), os.path.basename(folder))
    with suppress(OSError):
        write_small(_name_record(save, place), json.dumps({_TAKEN: text}).encode())
    return TagTakenError(text)


def _read_pointer(final: str) -> str:
    """Return the content of a tag's ``ucp_published.json``; empty if there is none."""
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
    told = dict[str, Any]()
    with suppress(CheckpointError):
        told = parse_json(pointer.encode(), final)
    if told.get("folder") != begun["folder"]:
        raise _give_up(save, place, f"{final}/{begun['folder']}", f"job {told.get('job', '(unknown)')}")
    return True


def _publish(save: Snapshot, place: Destination, begun: Mapping[str, str]) -> None:
    """Let ``ucp_published.json`` name a save's folder unless another job has published the tag meanwhile.

    Raises:
        TagTakenError: it has.
        StorageError: the store refuses although the tag is as it was.
    """
    final, before = f"{place.folder}/{save.tag}", begun["before"]
    told = {"folder": begun["folder"], "job": save.job, "step": save.step, "time": round(time.time())}
    expected = (before, "") if before else ("",)  # it may have been removed meanwhile
    is_written = any(
        exchange_small(f"{final}/{PUBLISHED}", json.dumps(told).encode(), each.encode() or None) for each in expected
    )
    if not (is_written or _is_published(save, place, begun)):
        raise StorageError("the store refused a conditional write, for no reason that can be seen.", path=final)


def _remove_replaced(save: Snapshot, final: str, begun: Mapping[str, str]) -> None:
    """Delete files of other saves in a tag of a store after this one was published.

    A writer whose folder was there before cannot publish it any more, as it expects an older ``ucp_published.json``.
    Other jobs' folders stay for a day after their last change all the same: their writers find out by themselves.
    """
    replaced, own = None, (begun["folder"], _name_begun(save), PUBLISHED)
    with suppress(CheckpointError):
        replaced = parse_json(begun["before"].encode() or b"{}", final).get("folder")
    published = find_entry(f"{final}/{PUBLISHED}")
    last = published.changed - _ABANDONED if published else 0.0
    for name, entry in list_folder(final).items():
        if name in own:
            continue
        if name.startswith(UPLOAD):
            changed = max((each.changed for each in list_tree(f"{final}/{name}").values()), default=0.0)
            if name == replaced or _is_left(name.removeprefix(UPLOAD), save, changed, last):
                remove_tree(final, name)
        elif name.startswith(WRITTEN):
            if _is_left(name.removeprefix(WRITTEN), save, entry.changed, last):
                remove(f"{final}/{name}")
        elif is_saved(name) and entry.is_folder:
            remove_tree(final, name)
        elif is_saved(name):
            remove(f"{final}/{name}")


def _is_left(owner: str, save: Snapshot, changed: float, last: float) -> bool:
    """Return True if the owner of files (``job-number-…``) is an earlier save of this job, or has not changed them."""
    job, number, _ = (*owner.rsplit("-", 2), "", "")[:3]
    if job == save.job and number.isdecimal():
        return int(number) < save.number
    return 0 < changed < last


def _upload(save: Snapshot, place: Destination, folder: str) -> list[str]:
    """Upload a node's files; return the names of the tag's own ones.

    Args:
        folder: URL for the tag's own files; others go to their paths in the place.
    """
    files, inside = sorted(save.list_files()), f"{save.tag}{os.sep}"

    def put(each: str) -> None:
        target = f"{folder}/{each.removeprefix(inside)}" if each.startswith(inside) else f"{place.folder}/{each}"
        put_file(os.path.join(save.folder, each), target)

    map_threads(put, files, _COPIERS)
    write_small(f"{folder}/{_name_node(save, save.node)}", _sign(save))
    return [each.removeprefix(inside) for each in files if each.startswith(inside)]


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
    """Delete the coordination files of a save after it is recorded as complete."""
    if save.node:
        return
    folder, record = os.path.join(place.folder, save.tag), _name_record(save, place)
    with suppress(FileNotFoundError, CheckpointError):
        if is_url(folder):
            folder = f"{folder}/{read_json(record)['folder']}"
    remove(record)
    for node in range(save.nodes):
        remove(os.path.join(folder, _name_node(save, node)))


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
    spare = choose_spare(list(held), place.keep, {named})
    for tag in spare:
        if find_mark(place.folder, tag) == held[tag]:
            try:
                remove_tag(place.folder, tag)
            except OSError as error:
                logger.warning("%s/%s: cannot be removed: %s", place.folder, tag, error)
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
    """Delete what earlier saves of this job left unfinished, and folders and records that other jobs abandoned.

    Args:
        now: by the clock of the file system, about.
    """
    for name in os.listdir(folder):
        tag, mark, owner = name.rpartition(UPLOAD)
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
        elif name.startswith(".") and WRITTEN in name:
            with suppress(OSError):
                if _is_left(name.rpartition(WRITTEN)[2], save, os.stat(path).st_mtime, now - _ABANDONED):
                    os.unlink(path)


def _is_abandoned(aside: str, final: str, now: float) -> bool:
    """Whether nothing in a folder aside has changed for long, and it is not the only whole save of its tag."""
    files = [os.path.join(above, name) for above, _, names in os.walk(aside) for name in (*names, ".")]
    is_old = max(os.stat(path).st_mtime for path in files) < now - _ABANDONED
    return is_old and (os.path.isdir(final) or not os.path.exists(os.path.join(aside, SEAL)))


def _copy(source: str, destination: str) -> None:
    """A file's bytes and access rights, made durable under a name aside, then named."""
    os.makedirs(os.path.dirname(destination), exist_ok=True)
    aside = f"{destination}.ucp-tmp"
    with open(source, "rb") as read, open(aside, "wb") as written:
        size = os.fstat(read.fileno()).st_size
        while size:
            sent = os.sendfile(written.fileno(), read.fileno(), None, _SENT)
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
    """Return the name of the record that the first node writes a save to a place (:func:`_begin`)."""
    return f"{WRITTEN}{save.job}-{save.number}-begun"


def _name_record(save: Snapshot, place: Destination) -> str:
    """Return the path of that record: in the tag in a store, beside it in a folder, where the tag is renamed."""
    final = os.path.join(place.folder, save.tag)
    above, name = os.path.split(final)
    return f"{final}/{_name_begun(save)}" if is_url(final) else os.path.join(above, f".{name}{_name_begun(save)}")


def _sign(save: Snapshot) -> bytes:
    """Return the content of that file: the tag's files of the node, and the machines that have them in memory."""
    inside = f"{save.tag}{os.sep}"
    files = [each.removeprefix(inside) for each in save.list_files() if each.startswith(inside)]
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


_AT_FDCWD, _NOREPLACE, _EXCHANGE = -100, 1, 2
"""Arguments of ``renameat2``."""


def _identify(folder: str) -> str:
    """Return a text that no folder which replaces a tag's folder shares with it; empty if there is no folder."""
    try:
        inode = os.lstat(folder).st_ino
    except FileNotFoundError:
        return ""
    seal = b""
    with suppress(OSError):
        seal = read_small(os.path.join(folder, SEAL))
    return f"{inode} {hashlib.sha256(seal).hexdigest()}"


def _publish_folder(new: str, final: str, before: str) -> bool:
    """Rename a folder to a tag's path if the tag is as it was; return False if another job has published it meanwhile.

    The folder that was there is afterwards at the new one's path, or at that path with the suffix ``_OLD``.

    Args:
        before: what :func:`_identify` returned when the writing began.
    """
    with _lock_folder(os.path.dirname(final)):
        now = _identify(final)
        if now not in ("", before):  # a tag that was removed has no winner
            return False
        if not now:
            return _rename(new, final, _NOREPLACE)
        if _rename(new, final, _EXCHANGE):
            if _identify(new) == before:
                return True
            _rename(new, final, _EXCHANGE)
            return False
        old = f"{new}{_OLD}"  # the file system cannot exchange
        os.rename(final, old)
        if _identify(old) == before and _rename(new, final, _NOREPLACE):
            return True
        _rename(old, final, _NOREPLACE)
        return False


@contextmanager
def _lock_folder(folder: str) -> Iterator[None]:
    """Let one writer at a time rename in a folder, where the file system can lock folders (NFS cannot)."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _rename(old: str, new: str, flag: int) -> bool:
    """Rename without replacing, or exchange two paths; return False if the first finds something there.

    Return False as well if the file system has no exchange. Without the other operation a plain rename replaces an
    empty folder.
    """
    if not load_libc().renameat2(_AT_FDCWD, os.fsencode(old), _AT_FDCWD, os.fsencode(new), flag):
        return True
    code = ctypes.get_errno()
    try:
        if code not in (errno.EINVAL, errno.ENOSYS):
            raise OSError(code, os.strerror(code), new)
        if flag == _NOREPLACE:
            os.rename(old, new)
        return flag == _NOREPLACE
    except OSError as error:
        if flag == _NOREPLACE and error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
            return False
        raise
