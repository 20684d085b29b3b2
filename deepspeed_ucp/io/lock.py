"""A lock file: one process at a time, over the nodes of a shared file system, and nothing stale after a crash."""

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
    """Hold ``path`` while the block runs; the file goes at the end.

    The kernel lets go of it when the holder dies. Where a file system knows no ``flock``, the file's existence is the
    lock, and one that a crash left behind has to be removed by hand: the error says so.

    Args:
        purpose: what the holder does, for the message of whoever comes second.

    Raises:
        StorageError: another process holds it; names host, pid and time.
    """
    fd = _acquire(path, purpose)
    try:
        with explain_full(path):
            _sign(fd)
        yield
    finally:
        with suppress(OSError):  # one of this rank alone may not replace what all ranks raise
            if _is_still(fd, path):
                os.unlink(path)
        os.close(fd)


def _acquire(path: str, purpose: str) -> int:
    while True:
        fd, made = _open(path)
        try:
            _take(fd, made, path, purpose)
        except BaseException:
            os.close(fd)
            raise
        # Its holder may have removed the file between our opening and locking it.
        if _is_still(fd, path):
            return fd
        os.close(fd)


def _open(path: str) -> tuple[int, bool]:
    """The lock file, and whether this process made it."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    with explain_full(path):
        try:
            return os.open(path, flags | os.O_EXCL, 0o666), True
        except FileExistsError:
            return os.open(path, flags, 0o666), False


def _take(fd: int, made: bool, path: str, purpose: str) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise StorageError(
            f"{purpose} is under way already ({_read_holder(fd)}). Wait until it has ended.", path=path
        ) from error
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        if not made:
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


def _sign(fd: int) -> None:
    holder = {"host": socket.gethostname(), "pid": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M:%S %z")}
    os.ftruncate(fd, 0)
    os.pwrite(fd, json.dumps(holder).encode(), 0)


def _read_holder(fd: int) -> str:
    try:
        holder = parse_json(os.pread(fd, 4096, 0), "lock")
        return f"pid {holder['pid']} on {holder['host']} since {holder['since']}"
    except (CheckpointError, KeyError, OSError):
        return "by a process that has not told its name"
