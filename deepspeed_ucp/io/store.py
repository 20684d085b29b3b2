"""Files and folders of local file systems and behind URLs.

The functions at the end call the method of the :class:`Store` that serves the path. ``os.path.join``, ``split`` and
``basename`` work for both kinds of paths.
"""

from __future__ import annotations

import functools
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, BinaryIO, Concatenate, ParamSpec, TypeVar

from .disk import explain_full, sync_file, write_atomically
from .interface import Store
from .opened import Stored, StoredFile, open_local
from .paths import FOLDER, Entry, is_url

P = ParamSpec("P")
T = TypeVar("T")


class LocalStore(Store):
    """Local file systems."""

    def list_folder(self, folder: str) -> dict[str, Entry]:
        with os.scandir(folder) as entries:
            return {entry.name: self.find_entry(entry.path) or Entry(0, 0.0) for entry in entries}

    def list_tree(self, folder: str) -> dict[str, Entry]:
        return {os.path.relpath(path, folder): entry for path, entry in self._list_below(folder, frozenset())}

    def _list_below(self, folder: str, above: frozenset[tuple[int, int]]) -> Iterator[tuple[str, Entry]]:
        """Yield the files below a folder, unless a link leads back up to it.

        Args:
            above: (device, inode) of the folders above.
        """
        status = os.stat(folder)
        here = status.st_dev, status.st_ino
        if here in above:
            return
        for name, entry in self.list_folder(folder).items():
            path = os.path.join(folder, name)
            if entry.is_folder:
                yield from self._list_below(path, above | {here})
            else:
                yield path, entry

    def find_entry(self, path: str) -> Entry | None:
        try:
            status = os.stat(path)
        except (OSError, ValueError):
            return None
        return Entry(FOLDER if stat.S_ISDIR(status.st_mode) else status.st_size, status.st_mtime)

    def find_change(self, path: str) -> int:
        return os.stat(path).st_mtime_ns

    def is_file(self, path: str) -> bool:
        return os.path.isfile(path)

    def exists(self, path: str) -> bool:
        return os.path.lexists(path)

    def read_small(self, path: str, most: int | None = None) -> bytes:
        with open_local(path) as stream:
            return stream.read() if most is None else stream.read(most)

    def write_small(self, path: str, data: bytes) -> None:
        write_atomically(path, data)

    def put_file(self, source: str, path: str) -> None:
        """Copy its bytes and access rights; the folder is made if needed, and not synced."""
        aside = f"{path}.ucp-tmp"
        with explain_full(path):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            shutil.copy(source, aside)
            sync_file(aside)
            os.replace(aside, path)

    def remove(self, path: str) -> None:
        with suppress(FileNotFoundError):
            os.unlink(path)

    def open_regular(self, path: str) -> BinaryIO:
        return open_local(path)

    def open_stored(self, path: str, advice: int = os.POSIX_FADV_NORMAL, *, size: int | None = None) -> Stored:
        return StoredFile(path, advice)


def _choose(path: str) -> Store:
    """Return the store of a path; obstore is imported with the first URL."""
    if not is_url(path):
        return LocalStore()
    if path.startswith(("http://", "https://")):
        from .web import WebStore

        return WebStore()
    from .objects import ObjectStore

    return ObjectStore()


def _by_path(method: Callable[Concatenate[Store, str, P], T]) -> Callable[Concatenate[str, P], T]:
    """Return a function that calls a method of the store of its first argument, a path."""

    @functools.wraps(method)
    def call(path: str, /, *args: P.args, **options: P.kwargs) -> T:
        result: T = getattr(_choose(path), method.__name__)(path, *args, **options)
        return result

    return call


list_folder = _by_path(Store.list_folder)
list_tree = _by_path(Store.list_tree)
note_listed = _by_path(Store.note_listed)
find_entry = _by_path(Store.find_entry)
find_change = _by_path(Store.find_change)
is_folder = _by_path(Store.is_folder)
is_file = _by_path(Store.is_file)
exists = _by_path(Store.exists)
read_small = _by_path(Store.read_small)
write_small = _by_path(Store.write_small)
exchange_small = _by_path(Store.exchange_small)
remove = _by_path(Store.remove)
open_regular = _by_path(Store.open_regular)
open_stored = _by_path(Store.open_stored)


def set_storage_options(options: Mapping[str, Any]) -> None:
    """Set options of the stores behind all URLs for this process.

    Raises:
        ConfigError: an option is unknown.
    """
    from .clients import set_options

    set_options(options)


def put_file(source: str, path: str) -> None:
    """Copy a local file to a path; an interrupted copy leaves the former file there.

    Raises:
        FileNotFoundError: there is no such bucket.
        OSError: it cannot be written.
        DiskFullError: the disk is full.
        UnsupportedError: the URL is read only.
    """
    _choose(path).put_file(source, path)


def read_bytes(path: str, offset: int, nbytes: int) -> bytes:
    """Return a few bytes of a file, without read-ahead.

    Raises:
        CheckpointError: they cannot be read.
    """
    data = bytearray(nbytes)
    with open_stored(path, os.POSIX_FADV_RANDOM) as file:
        file.read([memoryview(data)], offset)
    return bytes(data)
