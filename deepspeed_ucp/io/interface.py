"""What a store and a file in it are asked for: what local files and those behind URLs have in common."""

from __future__ import annotations

import errno
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import BinaryIO, TypeVar

from .memory import Scratch
from .paths import Entry

C = TypeVar("C", bound="Closing")


class Closing:
    """Something open, which a ``with`` block closes at its end."""

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
        """The bytes from ``offset`` on in memory of ``scratch``, where that is the faster way.

        None where it is not: they are to be :meth:`read`.

        Raises:
            CheckpointError: the file cannot be read, or ends before.
        """
        return None

    @abstractmethod
    def read(self, views: list[memoryview], offset: int) -> None:
        """Fill memory, one view after the other, with the bytes from ``offset`` on; the list is used up.

        Raises:
            CheckpointError: the file cannot be read, or ends before.
        """

    @abstractmethod
    def read_some(self, views: list[memoryview], offset: int) -> int:
        """One read; how many bytes came, 0 at the end of the file.

        Raises:
            CheckpointError: the file cannot be read.
        """


class Store(ABC):
    """What is asked of paths that lead to one kind of place."""

    @abstractmethod
    def list_folder(self, folder: str, /) -> dict[str, Entry]:
        """What lies in a folder, by name. Links are followed; what is nothing in the end has no bytes.

        Raises:
            OSError: it cannot be listed.
        """

    @abstractmethod
    def list_tree(self, folder: str, /) -> dict[str, Entry]:
        """The files in a folder and the folders below it, by their path from there. Links are followed.

        Raises:
            OSError: one cannot be listed.
        """

    def note_listed(self, folder: str, entries: Mapping[str, Entry], /) -> None:  # noqa: B027 - a system knows its files
        """Keep what another process was told of a store's files, as if this one had listed them: reads go by it."""

    @abstractmethod
    def find_entry(self, path: str, /) -> Entry | None:
        """What a path leads to; None where that is nothing, or cannot be told."""

    def find_change(self, path: str, /) -> int:
        """Time of a file's last change in nanoseconds.

        Raises:
            OSError: there is none.
        """
        found = self.find_entry(path)
        if found is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return round(found.changed * 1e9)

    def is_folder(self, path: str, /) -> bool:
        """Whether a path leads to a folder."""
        found = self.find_entry(path)
        return found is not None and found.is_folder

    def is_file(self, path: str, /) -> bool:
        """Whether a path leads to a regular file."""
        found = self.find_entry(path)
        return found is not None and not found.is_folder

    def exists(self, path: str, /) -> bool:
        """Whether there is something of that name, be it a link to nothing."""
        return self.find_entry(path) is not None

    @abstractmethod
    def read_small(self, path: str, /, most: int | None = None) -> bytes:
        """A small file's bytes, or the first ``most`` of them.

        Raises:
            FileNotFoundError: there is none.
            OSError: it cannot be read, or is no regular file.
        """

    @abstractmethod
    def write_small(self, path: str, data: bytes, /) -> None:
        """Write a small file: after a crash there is the old one or the new one.

        Raises:
            OSError: it cannot be written.
            DiskFullError: the disk is full.
        """

    def exchange_small(self, path: str, data: bytes, before: bytes | None, /) -> bool:
        """Write a small file unless it is another one by now; whether it has ``data``.

        Where a store knows no conditions, what another writes between the look and the write is written over.

        Args:
            before: its bytes until now; None where there was none.

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
    def remove(self, path: str, /) -> None:
        """Remove a file, if there is one.

        Raises:
            OSError: it cannot be removed.
        """

    @abstractmethod
    def open_regular(self, path: str, /) -> BinaryIO:
        """Open a file to be read here and there in it; of one behind a URL what was read is kept.

        It has a descriptor (``fileno``), or else is an :class:`~.opened.Positioned` with a ``read_ahead`` of its own.

        Raises:
            OSError: it cannot be opened, or is no regular file.
        """

    @abstractmethod
    def open_stored(self, path: str, /, advice: int = os.POSIX_FADV_NORMAL, *, size: int | None = None) -> Stored:
        """Open a file for reading.

        Args:
            advice: how it will be read, as ``os.posix_fadvise`` takes it.
            size: in bytes, where it is known: that of a file in a store has to be asked for otherwise.

        Raises:
            CheckpointError: it cannot be opened.
        """
