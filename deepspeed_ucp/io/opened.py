"""Files that are open for reading: their interface, and files of local file systems."""

from __future__ import annotations

import errno
import io
import os
import resource
import stat
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, BinaryIO, TypeVar

from ..errors import CheckpointError, OutOfReachError
from .direct import ALIGNMENT, LEAST, align, is_cached, is_refusal, is_worth_passing, reopen
from .memory import Scratch, drop_front

C = TypeVar("C", bound="Closing")

CHANGED = "has changed since its header was read"

_SPARE_FILES = 256
"""Number of other files that a process has open."""

_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


class ChangedError(OSError):
    """A file has changed since its header was read."""


class Closing:
    """Closes itself at the end of a ``with`` block."""

    def close(self) -> None:
        """Close it; no thread may be reading."""

    def __enter__(self: C) -> C:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Stored(Closing, ABC):
    """A file that is open for reading; several threads may read it at once."""

    path: str

    def fetch(self, offset: int, nbytes: int, scratch: Scratch) -> memoryview | None:
        """Return bytes in memory of ``scratch`` if that is faster than :meth:`read`, else None.

        Raises:
            CheckpointError: the file cannot be read, or ends before.
        """
        return None

    @abstractmethod
    def read(self, views: list[memoryview], offset: int) -> None:
        """Fill a list of views with the bytes from ``offset`` on; the list is consumed.

        Raises:
            CheckpointError: the file cannot be read, or ends before.
        """

    @abstractmethod
    def read_some(self, views: list[memoryview], offset: int) -> int:
        """Read once; return the number of bytes read, 0 at the end of the file.

        Raises:
            CheckpointError: the file cannot be read.
        """


_AT_FAULT = (FileNotFoundError, NotADirectoryError, IsADirectoryError, ChangedError)
_LASTING = {errno.EINVAL, errno.ELOOP, errno.EIO, errno.EBADMSG, errno.EUCLEAN}
"""Errors of the file itself: it is not a file, or the medium or the file system has lost its bytes.

EIO is one of them: bad sectors and checksum errors (btrfs, ZFS) cause it permanently, so retries would never end.
"""


def explain_failure(path: str, what: str, error: OSError) -> CheckpointError:
    """Return the error for a file or folder that cannot be ``what`` (opened, read, listed).

    Returns:
        A plain CheckpointError if it is missing or damaged, else an OutOfReachError.
    """
    is_at_fault = isinstance(error, _AT_FAULT) or error.errno in _LASTING
    kind = CheckpointError if is_at_fault else OutOfReachError
    return kind(f"cannot be {what} ({error.strerror or error}).", path=path)


def open_local(path: str) -> BinaryIO:
    """Open a local regular file for reading; links are followed.

    Raises:
        OSError: it cannot be opened, or is not a regular file: a FIFO would block, a device might never end.
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
    """Return the size in bytes of a stream of ``store.open_regular``."""
    size = getattr(stream, "size", None)
    return os.fstat(stream.fileno()).st_size if size is None else size


def is_remote(stream: BinaryIO) -> bool:
    """Return True if each small read of a stream of ``store.open_regular`` may cost a request to a store."""
    return hasattr(stream, "read_ahead")


class Positioned(io.RawIOBase):
    """A stream over :meth:`read_at`.

    Attributes:
        size: in bytes.
    """

    def __init__(self, size: int) -> None:
        self.size, self._at = size, 0

    @abstractmethod
    def read_at(self, nbytes: int, offset: int) -> bytes:
        """Return bytes from ``offset`` on; fewer at the end of the file."""

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
    """Return bytes of a stream of ``store.open_regular``; fewer at the end of the file.

    Raises:
        OSError: it cannot be read.
    """
    read = getattr(stream, "read_at", None)
    return os.pread(stream.fileno(), nbytes, offset) if read is None else read(nbytes, offset)


def read_ahead(stream: BinaryIO, ranges: Iterable[tuple[int, int]]) -> None:
    """Prefetch ranges (offset, bytes) of a stream of ``store.open_regular`` from a store.

    Raises:
        OSError: they cannot be read.
    """
    fetch = getattr(stream, "read_ahead", None)
    if fetch is not None:
        fetch(ranges)


def advise_needed(stream: BinaryIO, ranges: Iterable[tuple[int, int]]) -> None:
    """Prefetch ranges as :func:`read_ahead` does; local ones through the kernel, by many disk reads at once.

    Raises:
        OSError: they cannot be read.
    """
    if is_remote(stream):
        read_ahead(stream, ranges)
        return
    for offset, nbytes in ranges:
        os.posix_fadvise(stream.fileno(), offset, nbytes, os.POSIX_FADV_WILLNEED)


def advise_random(stream: BinaryIO) -> None:
    """Announce small reads far apart of a stream of ``store.open_regular``."""
    if not is_remote(stream):
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_RANDOM)


class StoredFile(Stored):
    """A local file as :class:`Stored`.

    Args:
        advice: access pattern, as of ``os.posix_fadvise``. If large reads bypass the page cache, the default becomes
            random access: small reads cause no read-ahead.

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
            advice = os.POSIX_FADV_RANDOM  # reads through the cache are small then, and isolated
        if advice != os.POSIX_FADV_NORMAL:
            os.posix_fadvise(self._file.fileno(), 0, 0, advice)

    def fetch(self, offset: int, nbytes: int, scratch: Scratch) -> memoryview | None:
        """Read past the page cache, unless it holds the bytes, they are few, or the file system refuses."""
        file = self._file.fileno()
        if not self._passes or nbytes < LEAST or is_cached(file, offset, nbytes):
            return None
        past = reopen(file)  # for this read only: there may be too many files for two descriptors each
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
    """Raise this process's limit of open files for ``count`` more, as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + _SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        if most > soft:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
