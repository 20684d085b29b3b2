"""Files that are open for reading: those of this machine's file systems, and what all of them have in common."""

from __future__ import annotations

import errno
import io
import os
import resource
import stat
from abc import abstractmethod
from collections.abc import Iterable
from typing import Any, BinaryIO

from ..errors import CheckpointError, OutOfReachError
from .direct import ALIGNMENT, LEAST, align, is_cached, is_refusal, is_worth_passing, reopen
from .interface import Stored
from .memory import Scratch, drop_front

CHANGED = "has changed since its header was read"

_SPARE_FILES = 256
"""What a process has open besides."""
_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


class ChangedError(OSError):
    """A file has changed since its header was read."""


_AT_FAULT = (FileNotFoundError, NotADirectoryError, IsADirectoryError, ChangedError)
_LASTING = {errno.EINVAL, errno.ELOOP, errno.EIO, errno.EBADMSG, errno.EUCLEAN}
"""Errors that are a file's own: what lies there is no file, or the medium or the file system has lost its bytes.

EIO is one: bad sectors and failing checksums (btrfs, ZFS) answer it for as long as the file is there, so that a job
which waits for it to pass would never go on.
"""


def explain_failure(path: str, what: str, error: OSError) -> CheckpointError:
    """The error to raise where a file or folder of a checkpoint cannot be ``what`` (opened, read, listed).

    Returns:
        A plain CheckpointError where it is missing or damaged, else an OutOfReachError.
    """
    is_at_fault = isinstance(error, _AT_FAULT) or error.errno in _LASTING
    kind = CheckpointError if is_at_fault else OutOfReachError
    return kind(f"cannot be {what} ({error.strerror or error}).", path=path)


def open_local(path: str) -> BinaryIO:
    """Open a file of this machine's file systems for reading here and there in it; links are followed.

    A FIFO or a device in its place would block, or never end.

    Raises:
        OSError: it cannot be opened, or is no regular file.
    """
    _check_mode(path, os.stat(path).st_mode)
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _check_mode(path, os.fstat(file).st_mode)  # it may have been replaced since
        return os.fdopen(file, "rb")
    except BaseException:
        os.close(file)
        raise


def _check_mode(path: str, mode: int) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, f"is {_KINDS.get(stat.S_IFMT(mode), 'something else')}, not a regular file", path)


def measure(stream: BinaryIO) -> int:
    """Bytes of a file that ``store.open_regular`` has opened."""
    size = getattr(stream, "size", None)
    return os.fstat(stream.fileno()).st_size if size is None else size


def is_remote(stream: BinaryIO) -> bool:
    """Whether each small read of what ``store.open_regular`` has opened may cost a request to a store."""
    return hasattr(stream, "read_ahead")


class Positioned(io.RawIOBase):
    """A file over :meth:`read_at`, which needs no place of its own.

    Attributes:
        size: in bytes.
    """

    def __init__(self, size: int) -> None:
        self.size, self._at = size, 0

    @abstractmethod
    def read_at(self, nbytes: int, offset: int) -> bytes:
        """Bytes from ``offset`` on; fewer where the file ends before."""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self.size}[whence]
        if at < 0:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        self._at = at
        return at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        data = self.read_at(len(buffer), self._at)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def read_at(stream: BinaryIO, nbytes: int, offset: int) -> bytes:
    """Bytes of a file that ``store.open_regular`` has opened; fewer where it ends before.

    Raises:
        OSError: it cannot be read.
    """
    read = getattr(stream, "read_at", None)
    return os.pread(stream.fileno(), nbytes, offset) if read is None else read(nbytes, offset)


def read_ahead(stream: BinaryIO, ranges: Iterable[tuple[int, int]]) -> None:
    """Say which (offset, bytes) of a file that ``store.open_regular`` has opened will be read in small pieces.

    Raises:
        OSError: they cannot be read.
    """
    fetch = getattr(stream, "read_ahead", None)
    if fetch is not None:
        fetch(ranges)


def advise_needed(stream: BinaryIO, ranges: Iterable[tuple[int, int]]) -> None:
    """As :func:`read_ahead`; of a local file the system is told, which waits for many disk reads at once.

    Raises:
        OSError: they cannot be read.
    """
    if is_remote(stream):
        read_ahead(stream, ranges)
        return
    for offset, nbytes in ranges:
        os.posix_fadvise(stream.fileno(), offset, nbytes, os.POSIX_FADV_WILLNEED)


def advise_random(stream: BinaryIO) -> None:
    """Say that small pieces far apart will be read of a file that ``store.open_regular`` has opened."""
    if not is_remote(stream):
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_RANDOM)


class StoredFile(Stored):
    """A local file as :class:`Stored`.

    Args:
        advice: how it will be read, as ``os.posix_fadvise`` takes it. Where large reads pass the cache, nothing is
            read ahead of small ones, unless they are said to follow each other.

    Raises:
        CheckpointError: it cannot be opened.
    """

    def __init__(self, path: str, advice: int = os.POSIX_FADV_NORMAL) -> None:
        self.path = path
        try:
            self._file = open_local(path)
        except OSError as error:
            raise explain_failure(path, "opened", error) from error
        self._passes = is_worth_passing(self._file.fileno())
        if self._passes and advice == os.POSIX_FADV_NORMAL:
            advice = os.POSIX_FADV_RANDOM  # what goes through the cache then is small, and its neighbours are not
        if advice != os.POSIX_FADV_NORMAL:
            os.posix_fadvise(self._file.fileno(), 0, 0, advice)

    def fetch(self, offset: int, nbytes: int, scratch: Scratch) -> memoryview | None:
        """Past the page cache, unless it holds them, they are few, or it lets none pass."""
        file = self._file.fileno()
        if not self._passes or nbytes < LEAST or is_cached(file, offset, nbytes):
            return None
        past = reopen(file)  # for this read alone: many files leave no room for a second descriptor of each
        if past is None:
            return None
        try:
            return self._read_past(past, offset, nbytes, scratch)
        finally:
            os.close(past)

    def _read_past(self, fd: int, offset: int, nbytes: int, scratch: Scratch) -> memoryview | None:
        low, size = align(offset, nbytes)
        memory, got, wanted = scratch.take(size), 0, offset + nbytes - low
        while got < wanted:
            try:
                count = os.preadv(fd, [memory[got:]], low + got)
            except OSError as error:
                if is_refusal(error):
                    return None
                raise self._explain(error, low + got) from error
            got += count
            if got < wanted and (count == 0 or got % ALIGNMENT):
                raise self._explain_end()
        return memory[offset - low : wanted]

    def read(self, views: list[memoryview], offset: int) -> None:
        while views:
            got = self.read_some(views, offset)
            if got == 0:
                raise self._explain_end()
            offset += got
            drop_front(views, got)

    def read_some(self, views: list[memoryview], offset: int) -> int:
        try:
            return os.preadv(self._file.fileno(), views, offset)
        except OSError as error:
            raise self._explain(error, offset) from error

    def _explain(self, error: OSError, offset: int) -> CheckpointError:
        return explain_failure(self.path, f"read at byte {offset}", error)

    def _explain_end(self) -> CheckpointError:
        size = os.fstat(self._file.fileno()).st_size
        return CheckpointError(f"ends at byte {size}; it was truncated since its header was read.", path=self.path)

    def close(self) -> None:
        self._file.close()


def allow_open_files(count: int) -> None:
    """Raise this process's limit of open files where ``count`` more may not fit; as far as the system lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + _SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        if most > soft:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
