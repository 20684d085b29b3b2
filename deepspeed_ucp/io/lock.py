"""A lock file for one process at a time on all nodes of a shared file system; a crash releases it."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ..errors import CheckpointError, StorageError
from .disk import explain_full
from .jsonfile import parse_json

_UNSUPPORTED = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}


@contextmanager
def hold_lock(path: str, purpose: str) -> Iterator[None]:
    """Context in which this process holds a lock file, which is deleted at the end.

    The kernel releases the lock when its holder dies. On a file system without ``flock`` the existence of the file is
    the lock; after a crash the user must remove it, as the error says.

    Args:
        purpose: work of the holder, for the error message of others.

    Raises:
        StorageError: another process holds it; the message has its host, pid and time.
    """
    fd = _acquire(path, purpose)
    try:
        with explain_full(path):
            holder = {"host": socket.gethostname(), "pid": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M:%S %z")}
            os.ftruncate(fd, 0)
            os.pwrite(fd, json.dumps(holder).encode(), 0)
        yield
    finally:
        with suppress(OSError):  # an error of this rank must not replace the error that all ranks raise
            if _is_still(fd, path):
                os.unlink(path)
        os.close(fd)


def _acquire(path: str, purpose: str) -> int:
    while True:
        fd, is_new = _open(path)
        try:
            _take(fd, is_new, path, purpose)
        except BaseException:
            os.close(fd)
            raise
        # The former holder may have removed the file between open and flock.
        if _is_still(fd, path):
            return fd
        os.close(fd)


def _open(path: str) -> tuple[int, bool]:
    """Open the lock file; return its descriptor, and True if this process created it."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    with explain_full(path):
        try:
            return os.open(path, flags | os.O_EXCL, 0o666), True
        except FileExistsError:
            return os.open(path, flags, 0o666), False


def _take(fd: int, is_new: bool, path: str, purpose: str) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise StorageError(
            f"{purpose} is under way already ({_read_holder(fd)}). Wait until it has ended.", path=path
        ) from error
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        if not is_new:
            raise StorageError(
                f"{purpose} is under way already ({_read_holder(fd)}), or was killed: this file system has no "
                "locks that end with their holder. If that process is no more, remove the file and run it again.",
                path=path,
            ) from error


def _is_still(fd: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def _read_holder(fd: int) -> str:
    try:
        holder = parse_json(os.pread(fd, 4096, 0), "lock")
        return f"pid {holder['pid']} on {holder['host']} since {holder['since']}"
    except (CheckpointError, KeyError, OSError):
        return "by a process that has not written its name"
