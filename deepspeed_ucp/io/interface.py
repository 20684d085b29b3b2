"""The interface of stores, for local file systems and for URLs."""

from __future__ import annotations

import errno
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import BinaryIO

from .opened import Stored
from .paths import Entry


class Store(ABC):
    """Access to the files of one kind of storage."""

    @abstractmethod
    def list_folder(self, folder: str, /) -> dict[str, Entry]:
        """Return the entries of a folder by name. Links are followed; a link to nothing has no bytes.

        Raises:
            OSError: it cannot be listed.
        """

    @abstractmethod
    def list_tree(self, folder: str, /) -> dict[str, Entry]:
        """Return all files below a folder by relative path. Links are followed.

        Raises:
            OSError: a folder cannot be listed.
        """

    def note_listed(self, folder: str, entries: Mapping[str, Entry], /) -> None:  # noqa: B027 - local files need none
        """Record entries that another process has listed; reads expect these versions."""

    @abstractmethod
    def find_entry(self, path: str, /) -> Entry | None:
        """Return the entry of a path; None if there is none, or it is not accessible."""

    def find_change(self, path: str, /) -> int:
        """Return the time of a file's last change in nanoseconds.

        Raises:
            OSError: there is no such file.
        """
        entry = self.find_entry(path)
        if entry is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return round(entry.changed * 1e9)

    def is_folder(self, path: str, /) -> bool:
        """Return True if a path leads to a folder."""
        entry = self.find_entry(path)
        return entry is not None and entry.is_folder

    def is_file(self, path: str, /) -> bool:
        """Return True if a path leads to a regular file."""
        entry = self.find_entry(path)
        return entry is not None and not entry.is_folder

    def exists(self, path: str, /) -> bool:
        """Return True if a path exists, even as a link to nothing."""
        return self.find_entry(path) is not None

    @abstractmethod
    def read_small(self, path: str, /, most: int | None = None) -> bytes:
        """Return the bytes of a small file, or the first ``most`` of them.

        Raises:
            FileNotFoundError: it does not exist.
            OSError: it cannot be read, or is not a regular file.
        """

    @abstractmethod
    def write_small(self, path: str, data: bytes, /) -> None:
        """Replace a small file: after a crash there is the old one or the new one.

        Raises:
            OSError: it cannot be written.
            DiskFullError: the disk is full.
        """

    def exchange_small(self, path: str, data: bytes, before: bytes | None, /) -> bool:
        """Write a small file if its content is ``before`` (None: it does not exist); return True if it has ``data``.

        Without conditional writes, a write of another process between the comparison and this write is lost.

        Raises:
            OSError: it cannot be read or written.
            DiskFullError: the disk is full.
        """
        try:
            now = self.read_small(path)
        except FileNotFoundError:
            now = None
        if now == before:
            self.write_small(path, data)
        return now in (before, data)

    @abstractmethod
    def put_file(self, source: str, path: str, /) -> None:
        """Copy a local file to a path; an interrupted copy leaves the former file there.

        Raises:
            OSError: it cannot be written.
            DiskFullError: the disk is full.
        """

    @abstractmethod
    def remove(self, path: str, /) -> None:
        """Delete a file if it exists.

        Raises:
            OSError: it cannot be deleted.
        """

    @abstractmethod
    def open_regular(self, path: str, /) -> BinaryIO:
        """Open a file for reads of small parts; parts of a file behind a URL are kept in memory.

        The stream has a descriptor (``fileno``), or is an :class:`~.opened.Positioned` with a method ``read_ahead``.

        Raises:
            OSError: it cannot be opened, or is not a regular file.
        """

    @abstractmethod
    def open_stored(self, path: str, /, advice: int = os.POSIX_FADV_NORMAL, *, size: int | None = None) -> Stored:
        """Open a file for reads into memory.

        Args:
            advice: access pattern, as of ``os.posix_fadvise``.
            size: bytes of the file if known; it saves a store a request.

        Raises:
            CheckpointError: it cannot be opened.
        """
