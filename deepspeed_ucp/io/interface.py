"""Interfaces of stores (local or behind URLs) and of files open for reading."""

from __future__ import annotations

import errno
import io
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, Self

from ..errors import CheckpointError, OutOfReachError
from .memory import Scratch
from .paths import Entry

CHANGED = "has changed since its header was read"


class ChangedError(OSError):
    """A file has changed since its header was read."""


class Closing:
    """Base of objects that a ``with`` block closes at its end."""

    def close(self) -> None:
        """Close it; no thread may be reading."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ReadableFile(Closing, ABC):
    """A file in any store, open for reads; several threads may read it at once."""

    path: str

    def fetch(self, offset: int, nbytes: int, scratch: Scratch) -> memoryview | None:
        """Return bytes in memory of ``scratch`` if faster than :meth:`read`, else None."""
        return None

    @abstractmethod
    def read(self, views: list[memoryview], offset: int) -> None:
        """Fill a list of views with the bytes from ``offset`` on; the list is consumed.

        Raises:
            CheckpointError: the file cannot be read, or ends before.
        """

    @abstractmethod
    def read_some(self, views: list[memoryview], offset: int) -> int:
        """Read once; return the number of bytes read, 0 at the end of the file."""


class ReadStream(io.RawIOBase):
    """A seekable binary stream over :meth:`read_at`, for reads of a file's header."""

    is_remote = False
    """Each small read may cost a request to a store."""

    def __init__(self, size: int) -> None:
        self.size, self._at = size, 0

    @abstractmethod
    def read_at(self, nbytes: int, offset: int) -> bytes:
        """Return bytes from ``offset`` on; fewer at the end of the file."""

    def read_ahead(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Prefetch ranges (offset, bytes) by several reads at once."""

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


_AT_FAULT = (FileNotFoundError, NotADirectoryError, IsADirectoryError, ChangedError)
_LASTING = {errno.EINVAL, errno.ELOOP, errno.EIO, errno.EBADMSG, errno.EUCLEAN}
"""Errors of the file itself. Bad sectors and checksum errors (btrfs, ZFS) cause EIO: retries would never end."""


def explain_failure(path: str, action: str, error: OSError) -> CheckpointError:
    """Return the error of a failed ``action`` (opened, read, listed) on a path.

    It is a plain CheckpointError if the file is missing or damaged, else an OutOfReachError.
    """
    is_at_fault = isinstance(error, _AT_FAULT) or error.errno in _LASTING
    kind = CheckpointError if is_at_fault else OutOfReachError
    return kind(f"cannot be {action} ({error.strerror or error}).", path=path)


class Store(ABC):
    """Access to the files of one kind of storage.

    Methods raise FileNotFoundError for a missing path or bucket, OSError for another one that cannot be accessed,
    DiskFullError if there is no room to write, and UnsupportedError for a write to a read-only URL.
    """

    @abstractmethod
    def list_folder(self, folder: str, /) -> dict[str, Entry]:
        """Return a folder's entries by name; links are followed, broken ones have size 0."""

    @abstractmethod
    def list_tree(self, folder: str, /) -> dict[str, Entry]:
        """Return all files below a folder by relative path. Links are followed."""

    def note_listed(self, folder: str, entries: Mapping[str, Entry], /) -> None:  # noqa: B027 - local files need none
        """Record a folder's entries (listed by any process): reads expect these versions."""

    @abstractmethod
    def find_entry(self, path: str, /) -> Entry | None:
        """Return the entry of a path; None if there is none, or it is not accessible."""

    def find_change_time(self, path: str, /) -> int:
        """Return the time of a file's last change in nanoseconds."""
        entry = self.find_entry(path)
        if entry is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return round(entry.changed * 1e9)

    def is_folder(self, path: str, /) -> bool:
        entry = self.find_entry(path)
        return entry is not None and entry.is_folder

    def is_file(self, path: str, /) -> bool:
        entry = self.find_entry(path)
        return entry is not None and not entry.is_folder

    def exists(self, path: str, /) -> bool:
        """Return True if a path exists, even as a link to nothing."""
        return self.find_entry(path) is not None

    @abstractmethod
    def read_small(self, path: str, /, most: int | None = None) -> bytes:
        """Return the bytes of a small regular file, or the first ``most`` of them."""

    @abstractmethod
    def write_small(self, path: str, data: bytes, /) -> None:
        """Replace a small file: after a crash there is the old one or the new one."""

    def exchange_small(self, path: str, data: bytes, before: bytes | None, /) -> bool:
        """Write a small file if its content is ``before``; return True if it has ``data``.

        ``before`` is None for a missing file. Without conditional writes, a write of another process between the
        comparison and this write is lost.
        """
        try:
            now = self.read_small(path)
        except FileNotFoundError:
            now = None
        if now == before:
            self.write_small(path, data)
        return now in (before, data)

    @abstractmethod
    def put_file(self, path: str, source: str, /) -> None:
        """Copy a local file to a path; an interrupted copy leaves the former file there."""

    @abstractmethod
    def remove(self, path: str, /) -> None:
        """Delete a file if it exists."""

    @abstractmethod
    def open_stream(self, path: str, /) -> ReadStream:
        """Open a file as a stream for small reads; blocks of a remote file are cached."""

    @abstractmethod
    def open_stored(self, path: str, /, advice: int = os.POSIX_FADV_NORMAL, *, size: int | None = None) -> ReadableFile:
        """Open a file for reads into memory; CheckpointError if that fails.

        Args:
            advice: access pattern, as of ``os.posix_fadvise``.
            size: bytes of the file if known; it saves a store a request.
        """
