"""Publishes and removes a save's tag at a destination.

In a folder a rename publishes the tag, in a store one conditional write. An interrupted removal leaves no tag that
looks complete.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from ..errors import CheckpointError, StorageError, TagTakenError
from ..formats.deepspeed.files import OFFLOADED, PUBLISHED, SEAL, ZERO, holds_counters, is_state_file, resolve_published
from ..io.deletion import delete_files, delete_tree, open_below
from ..io.disk import sync_folder
from ..io.jsonfile import parse_json, read_json
from ..io.paths import UPLOAD, is_url, load_libc
from ..io.staging import MANIFEST
from ..io.store import (
    exchange_small,
    exists,
    find_change_time,
    find_entry,
    list_folder,
    list_tree,
    read_small,
    remove,
    write_small,
)
from ..io.threads import map_threads
from .memory import Job, SavePart

WRITTEN = ".ucp-written-"
"""Prefix of the files that mark a node's part of a save as written, and of the record that its writing has begun."""

_REMOVERS = 4
"""Number of threads that delete objects of a store."""

_TURNS: tuple[Callable[[str], bool], ...] = (
    lambda name: name == SEAL,
    holds_counters,
    lambda name: not is_state_file(name),
    is_state_file,
)
"""Order of deletion: the seal, files with the step, other files, state files."""

_OLD, _GONE = "-old", "-gone"
"""Suffixes of a temporary folder that now holds the tag's former files, and of one that is being deleted."""

_ABANDONED = 86400.0
"""Another job's temporary folder is abandoned if its last change is this many seconds older than the published tag."""

_OTHER_FORMS = (PUBLISHED, MANIFEST, ZERO)
"""Names for which a load reads other files than the state files next to them."""

_TAKEN = "taken"
"""Key in the record of a save whose tag another job has published; the value is the message."""

_AT_FDCWD, _NOREPLACE, _EXCHANGE = -100, 1, 2
"""Arguments of ``renameat2``."""


class Tag:
    """The tag of one save in a folder; a rename of the temporary folder publishes it.

    Attributes:
        final: path of the tag.
        temporary: path of the folder that the save's files are written to; no other save uses it.
        published: path of the save's files after the tag is published.
        record: path of the file in which the first node records that the writing has begun.
        marker: name of the file in the tag that is written last.
    """

    marker = SEAL

    def __init__(self, save: SavePart, destination: str) -> None:
        self.save, self.destination, self.final = save, destination, os.path.join(destination, save.tag)
        above, name = os.path.split(self.final)
        self._set_paths(os.path.join(above, f".{name}"))
        self.published = self.final

    def _set_paths(self, prefix: str) -> None:
        self.temporary = f"{prefix}{UPLOAD}{self.save.job}-{self.save.number}"
        self.record = f"{prefix}{WRITTEN}{self.save.job}-{self.save.number}-begun"

    def identify(self) -> str:
        """Return a text that identifies the published save; empty if there is none."""
        return _identify(self.final)

    def check_published(self, before: str) -> bool:
        """Return True if this save is already published.

        Args:
            before: result of :meth:`identify` when the writing began.

        Raises:
            TagTakenError: in a store, for the first node: another job has published the tag. The temporary folder is
                deleted.
        """
        return os.path.exists(os.path.join(self.final, name_node_file(self.save, self.save.node)))

    def publish(self, before: str) -> None:
        """Publish the temporary folder as the tag.

        Raises:
            TagTakenError: another job has published the tag meanwhile.
            StorageError: the store refuses although the tag is as it was.
        """
        if not _publish_folder(self.temporary, self.final, before):
            raise self.give_up("another job")

    def delete_replaced(self, before: str) -> None:
        """Move the user's files from the replaced folder to the published one; delete it."""
        sync_folder(os.path.dirname(self.final))
        for old in (self.temporary, f"{self.temporary}{_OLD}"):
            _move_others_and_delete(old, self.final)

    def give_up(self, winner: str) -> TagTakenError:
        """Delete the temporary folder, record the winner, and return the error to raise."""
        text = (
            f"{self.final}: {winner} has published this tag since the writing of this save began, so this save is not "
            "written there. Load that one, or save again."
        )
        with suppress(OSError):
            remove_tree(*os.path.split(self.temporary))
        with suppress(OSError):
            write_small(self.record, json.dumps({_TAKEN: text}).encode())
        return TagTakenError(text)

    def delete_abandoned(self) -> None:
        """Delete temporary folders and records that no save needs any more."""
        above, published = os.path.dirname(self.record), find_change_time(os.path.join(self.final, self.marker)) / 1e9
        for name in list_folder(above):
            path = os.path.join(above, name)
            tag, mark, owner = name.rpartition(UPLOAD if UPLOAD in name else WRITTEN)
            with suppress(OSError):
                if mark and name.startswith(".") and self._is_abandoned(path, tag[1:], owner, published - _ABANDONED):
                    if not is_url(path):
                        os.rename(path, f"{path}{_GONE}")  # a writer that is still running fails then
                        name = f"{name}{_GONE}"
                    remove_tree(above, name)

    def _is_abandoned(self, path: str, tag: str, owner: str, before: float) -> bool:
        """Return True if no save needs a temporary folder or record any more.

        Args:
            tag: its tag; empty in a store.
            owner: its job and the number of its save (``job-number-…``). This job's is abandoned if that save is an
                earlier one and written.
            before: another job's leftover is abandoned if it was last changed before this time. A folder that is the
                only complete save is kept.
        """
        job = f"{self.save.job}-"
        if owner.startswith(job):
            number = owner.removeprefix(job).partition("-")[0]
            # Other nodes may have written their parts of pending saves, which they do only once.
            saves = Job(os.path.dirname(self.save.folder)).list_saves()
            pending = {save.number for save in saves if self.destination in save.list_pending()}
            return number.isdecimal() and int(number) < self.save.number and int(number) not in pending
        entry = find_entry(path)
        tree = list_tree(path) if entry is not None and entry.is_folder else {}
        changed = max((seen.changed for seen in (entry, *tree.values()) if seen is not None), default=0.0)
        is_only = SEAL in tree and bool(tag) and not exists(os.path.join(os.path.dirname(path), tag))
        return 0 < changed < before and not is_only


def make_tag(save: SavePart, destination: str) -> Tag:
    """Make the :class:`Tag` of a save for a folder or an object store."""
    return (_StoreTag if is_url(destination) else Tag)(save, destination)


def begin_writing(tag: Tag) -> str:
    """Return the tag's identity before this save, which the first node records once.

    Raises:
        StorageError: the first node has not recorded it yet.
        TagTakenError: another job has published the tag meanwhile.
    """
    try:
        record: dict[str, str] = read_json(tag.record)
    except FileNotFoundError:
        if tag.save.node:
            raise StorageError("the first node has not begun this save.", path=tag.record) from None
        record = {"before": tag.identify()}
        if not is_url(tag.record):
            os.makedirs(os.path.dirname(tag.record), exist_ok=True)
        write_small(tag.record, json.dumps(record).encode())
    if _TAKEN in record:
        raise TagTakenError(record[_TAKEN])
    return record["before"]


def name_node_file(save: SavePart, node: int) -> str:
    """Return the name of the file that marks a node's part of a save as written."""
    return f"{WRITTEN}{save.job}-{save.number}-{node}"


def _move_others_and_delete(old: str, final: str) -> None:
    """Move files that no checkpoint uses from ``old`` to ``final``; delete ``old``."""
    if os.path.isdir(old) and not os.path.islink(old):
        for name in os.listdir(old):
            is_stale = is_save_file(name) or name in _OTHER_FORMS or name.startswith(UPLOAD)
            if not is_stale and not os.path.lexists(os.path.join(final, name)):
                os.rename(os.path.join(old, name), os.path.join(final, name))
    with suppress(OSError):
        delete_tree(old)


def _identify(folder: str) -> str:
    """Return a folder's inode and its seal's hash as text; empty if it is missing."""
    try:
        inode = os.lstat(folder).st_ino
    except FileNotFoundError:
        return ""
    seal = b""
    with suppress(OSError):
        seal = read_small(os.path.join(folder, SEAL))
    return f"{inode} {hashlib.sha256(seal).hexdigest()}"


def _publish_folder(new: str, final: str, before: str) -> bool:
    """Rename ``new`` to ``final``, or exchange them; False if another job was faster.

    Afterwards the replaced folder is at the path ``new``, or at ``new`` with the suffix ``_OLD``.
    """
    with _lock_folder(os.path.dirname(final)):
        now = _identify(final)
        if now not in ("", before):  # a removed tag may be published again
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
    """Lock a folder for renames, if its file system supports that (NFS does not)."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _rename(old: str, new: str, flag: int) -> bool:
    """Rename ``old`` to a free ``new``, or exchange both; return False if impossible.

    A rename is not possible if ``new`` exists, an exchange if the file system does not support it. If the file system
    does not support renames without replacing, a plain rename is used, which replaces an empty folder.
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


class _StoreTag(Tag):
    """A tag in a store; ``ucp_published.json`` names the folder with its files."""

    marker = PUBLISHED

    def __init__(self, save: SavePart, destination: str) -> None:
        super().__init__(save, destination)
        self._set_paths(f"{self.final}/")
        self.published = self.temporary

    def identify(self) -> str:
        with suppress(FileNotFoundError):
            return read_small(f"{self.final}/{PUBLISHED}").decode(errors="replace")
        return ""

    def check_published(self, before: str) -> bool:
        pointer = self.identify()
        published = _parse_pointer(pointer, self.final)
        if published.get("folder") == os.path.basename(self.temporary):
            return True
        if pointer not in ("", before) and self.save.node == 0:  # a removed tag may be published again
            raise self.give_up(f"job {published.get('job', '(unknown)')}")
        return False

    def publish(self, before: str) -> None:
        """Let ``ucp_published.json`` name this save's folder, unless it has changed."""
        published = {"folder": os.path.basename(self.temporary), "job": self.save.job}
        expected = (before, "") if before else ("",)  # the tag may have been removed since
        is_written = any(
            exchange_small(f"{self.final}/{PUBLISHED}", json.dumps(published).encode(), content.encode() or None)
            for content in expected
        )
        if not (is_written or self.check_published(before)):
            raise StorageError(
                "the store refused a conditional write although no other job has published the tag.", path=self.final
            )

    def delete_replaced(self, before: str) -> None:
        """Delete the former published folder, and another save's files next to it.

        This is safe while the former writer still runs: its conditional write expects an older pointer and fails.
        """
        former, current = _parse_pointer(before, self.final).get("folder"), os.path.basename(self.temporary)
        for name in list_folder(self.final):
            if name != current and (name == former or (is_save_file(name) and not name.startswith(WRITTEN))):
                remove_tree(self.final, name)


def _parse_pointer(pointer: str, path: str) -> dict[str, Any]:
    with suppress(CheckpointError):
        return dict(parse_json(pointer.encode() or b"{}", path))
    return {}


def is_save_file(name: str) -> bool:
    """Return True if a path below a tag has a name that saves use."""
    return (
        name.startswith((f"{OFFLOADED}/", WRITTEN))
        or name in (SEAL, OFFLOADED)
        or (is_state_file(name) and "/" not in name)
    )


def remove_tag(destination: str, tag: str) -> None:
    """Delete a save's files, and its folder if it is empty afterwards.

    If ``ucp_published.json`` names a folder below the tag, that folder is deleted after the file. No link below the
    destination is followed; a link that has the name of a save's file is deleted, its target stays. The order
    (``_TURNS``) lets no load take the rest of a tag for complete after an interruption.

    Raises:
        OSError: a file cannot be deleted, or the tag's folder is reached through a link.
        CheckpointError: ``ucp_published.json`` is damaged.
    """
    folder = os.path.join(destination, tag)
    published = os.path.relpath(resolve_published(folder), folder)
    if is_url(destination):
        if published != ".":
            remove(f"{folder}/{PUBLISHED}")
            remove_tree(folder, published)
        remove(f"{folder}/{SEAL}")
        names = [name for name in list_tree(folder) if is_save_file(name)]
        for is_turn in _TURNS:
            map_threads(lambda name: remove(f"{folder}/{name}"), [*filter(is_turn, names)], _REMOVERS)
        return
    with open_below(destination, tag) as fd:
        if published != ".":
            os.unlink(PUBLISHED, dir_fd=fd)
            _sync(fd)
            remove_tree(destination, f"{tag}/{published}")
        for is_turn in _TURNS:
            delete_files(fd, partial(_is_deleted_in, is_turn), lambda name: name.split("/")[0] == OFFLOADED)
            _sync(fd)
    above, name = os.path.split(tag)
    with suppress(OSError), open_below(destination, above) as fd:
        os.rmdir(name, dir_fd=fd)  # if it is empty


def _is_deleted_in(is_turn: Callable[[str], bool], name: str) -> bool:
    return is_turn(name) and is_save_file(name)


def _sync(fd: int) -> None:
    with suppress(OSError):  # file systems without fsync of folders
        os.fsync(fd)


def remove_tree(destination: str, path: str) -> None:
    """Delete a file or a folder below a destination; no link below it is followed."""
    folder = os.path.join(destination, path)
    if is_url(destination):
        remove(folder)
        with suppress(FileNotFoundError):
            map_threads(lambda name: remove(f"{folder}/{name}"), list(list_tree(folder)), _REMOVERS)
    else:
        delete_tree(folder, destination)
