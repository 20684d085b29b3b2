"""Writes a save to a folder: to a temporary folder, which one rename publishes as the tag."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ..comm import Comm
from ..errors import StorageError
from ..formats.deepspeed.files import SEAL
from ..formats.open import seal_folder
from ..io.deletion import delete_tree
from ..io.disk import explain_full, sync_file, sync_folder
from ..io.filesystems import load_libc
from ..io.paths import UPLOAD
from ..io.store import read_small, write_small
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
    name_latest,
    name_node,
    read_latest_name,
    read_signs,
    sign_part,
)
from .memory import Destination, Snapshot
from .removing import WRITTEN, is_saved

_OLD, _GONE = "-old", "-gone"
"""Suffixes of a temporary folder that now holds the tag's former files, and of one that is being deleted."""

_AT_FDCWD, _NOREPLACE, _EXCHANGE = -100, 1, 2
"""Arguments of ``renameat2``."""


def write_to_folder(save: Snapshot, place: Destination, others: OtherNodes) -> None:
    """Write to a temporary folder and rename it; other files in the tag's former folder are moved to the new one."""
    final, aside, named = os.path.join(place.folder, save.tag), _name_aside(save, place), read_latest_name(place)
    above = os.path.dirname(final)
    inside = [each for each in save.list_files() if each.startswith(f"{save.tag}{os.sep}")]

    def copy(each: str) -> None:
        _copy(os.path.join(save.folder, each), os.path.join(aside, os.path.relpath(each, save.tag)))

    with explain_full(aside):
        if not os.path.exists(os.path.join(final, name_node(save, save.node))):  # else it was renamed before a stop
            begun = begin_writing(save, place, os.path.basename(aside), lambda: _identify(final))
            os.makedirs(aside, exist_ok=True)
            map_threads(copy, inside, COPIERS)
            sync_folder(aside)
            write_small(os.path.join(aside, name_node(save, save.node)), sign_part(save))
            if save.node:
                return
            others.wait(lambda: os.listdir(aside), aside)
            seal_folder(aside, Comm(), hosts=list_hosts(read_signs(save, aside)))
            if is_replaced(save):
                raise StorageError("a later job has saved this tag while it was written.", path=final)
            if not _publish_folder(aside, final, begun["before"]):
                raise give_up(save, place, aside, "another job")
        if save.node:
            return
        sync_folder(above)
        for old in (aside, f"{aside}{_OLD}"):
            _keep_others(old, final)
        _remove_left(above, save, os.stat(os.path.join(final, SEAL)).st_mtime)
        for each in set(save.list_files()).difference(inside):
            _copy(os.path.join(save.folder, each), os.path.join(place.folder, each))
        name_latest(save, place, named)


def _name_aside(save: Snapshot, place: Destination) -> str:
    """Return the path of the temporary folder that a save is written to."""
    above, name = os.path.split(os.path.join(place.folder, save.tag))
    return os.path.join(above, f".{name}{UPLOAD}{save.job}-{save.number}")


def _keep_others(old: str, final: str) -> None:
    """Delete a folder that was replaced, after moving files that belong to no save to the folder that replaced it."""
    if os.path.isdir(old) and not os.path.islink(old):
        for name in os.listdir(old):
            if not is_saved(name) and not os.path.lexists(os.path.join(final, name)):
                os.rename(os.path.join(old, name), os.path.join(final, name))
    with suppress(OSError):
        delete_tree(old)


def _remove_left(folder: str, save: Snapshot, now: float) -> None:
    """Delete unfinished folders of earlier saves of this job, and folders and records that other jobs abandoned.

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
                if is_left_behind(name.rpartition(WRITTEN)[2], save, os.stat(path).st_mtime, now - ABANDONED):
                    os.unlink(path)


def _is_abandoned(aside: str, final: str, now: float) -> bool:
    """Return True if a temporary folder has not changed for a day and is not the only complete save of its tag."""
    files = [os.path.join(above, name) for above, _, names in os.walk(aside) for name in (*names, ".")]
    is_old = max(os.stat(path).st_mtime for path in files) < now - ABANDONED
    return is_old and (os.path.isdir(final) or not os.path.exists(os.path.join(aside, SEAL)))


def _copy(source: str, destination: str) -> None:
    """Copy a file's bytes and access rights to a temporary file, sync it and rename it."""
    os.makedirs(os.path.dirname(destination), exist_ok=True)
    aside = f"{destination}.ucp-tmp"
    shutil.copy(source, aside)
    sync_file(aside)
    os.replace(aside, destination)


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
        before: result of :func:`_identify` when the writing began.
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
    """Let one writer at a time rename in a folder, if the file system can lock folders (NFS cannot)."""
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
