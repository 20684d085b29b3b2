"""Where the bytes of checkpoints lie: files of this machine's file systems, and behind URLs.

The one place that knows whether a path is local: whoever looks for files, lists, opens or reads them does so here.
Paths are strings; ``os.path.join``, ``split`` and ``basename`` serve for both, what asks the system does not.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, BinaryIO

from .disk import write_atomically
from .opened import Stored, StoredFile, open_local
from .paths import FOLDER, Entry, is_url, normalize


def set_storage_options(options: Mapping[str, Any]) -> None:
    """Options of the stores behind all URLs that this process reads from now on, as fsspec's file systems take them."""
    from . import remote

    remote.set_options(options)


def begin_reading(paths: Iterable[str]) -> None:
    """Have made in the background what reading takes of those paths that are URLs."""
    for path in filter(is_url, paths):
        from . import remote

        remote.begin(path)


def end_reading() -> None:
    """Close what is kept open between requests to stores; the next request opens it anew."""
    http = sys.modules.get(f"{__package__}.http")  # where no store was read it is not imported for this
    if http is not None:
        http.close_idle()


def list_folder(folder: str) -> dict[str, Entry]:
    """What lies in a folder, by name. Links are followed; what is nothing in the end has no bytes.

    Raises:
        OSError: it cannot be listed.
    """
    if is_url(folder):
        from . import remote

        return remote.list_folder(folder)
    with os.scandir(folder) as entries:
        return {entry.name: find_entry(entry.path) or Entry(0, 0.0) for entry in entries}


def list_tree(folder: str) -> dict[str, Entry]:
    """The files in a folder and the folders below it, by their path from there. Links are followed.

    Raises:
        OSError: one cannot be listed.
    """
    if is_url(folder):
        from . import remote

        return remote.list_tree(folder)

    return {os.path.relpath(path, folder): entry for path, entry in _list_below(folder, frozenset())}


def _list_below(folder: str, above: frozenset[tuple[int, int]]) -> Iterator[tuple[str, Entry]]:
    """Files below a folder by their paths; nothing in one that a link leads back up to (``above``: devices, inodes)."""
    found = os.stat(folder)
    here = found.st_dev, found.st_ino
    if here in above:
        return
    for name, entry in list_folder(folder).items():
        path = os.path.join(folder, name)
        if entry.is_folder:
            yield from _list_below(path, above | {here})
        else:
            yield path, entry


def note_listed(folder: str, entries: Mapping[str, Entry]) -> None:
    """Keep what another process was told of a store's files, as if this one had listed them: reads go by it."""
    if is_url(folder):
        from . import remote

        remote.note(normalize(folder), entries)


def find_entry(path: str) -> Entry | None:
    """What a path leads to; None where that is nothing, or cannot be told."""
    if is_url(path):
        from . import remote

        return remote.find_entry(path)
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return None
    return Entry(FOLDER if stat.S_ISDIR(found.st_mode) else found.st_size, found.st_mtime)


def write_small(path: str, data: bytes) -> None:
    """Write a small file: after a crash there is the old one or the new one.

    Raises:
        OSError: it cannot be written.
        DiskFullError: the disk is full.
    """
    if is_url(path):
        from . import remote

        remote.put_bytes(path, data)
    else:
        write_atomically(path, data)


def remove(path: str) -> None:
    """Remove a file, if there is one.

    Raises:
        OSError: it cannot be removed.
    """
    if is_url(path):
        from . import remote

        remote.remove([path])
    else:
        with suppress(FileNotFoundError):
            os.unlink(path)


def find_change(path: str) -> int:
    """Time of a file's last change in nanoseconds.

    Raises:
        OSError: there is none.
    """
    if not is_url(path):
        return os.stat(path).st_mtime_ns
    found = find_entry(path)
    if found is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
    return round(found.changed * 1e9)


def is_folder(path: str) -> bool:
    """Whether a path leads to a folder."""
    if not is_url(path):
        return os.path.isdir(path)
    from . import remote

    return remote.is_folder(path)


def is_file(path: str) -> bool:
    """Whether a path leads to a regular file."""
    if not is_url(path):
        return os.path.isfile(path)
    found = find_entry(path)
    return found is not None and not found.is_folder


def exists(path: str) -> bool:
    """Whether there is something of that name, be it a link to nothing."""
    return find_entry(path) is not None if is_url(path) else os.path.lexists(path)


def is_same(first: str, second: str) -> bool:
    """Whether two paths lead to one file."""
    if is_url(first) or is_url(second):
        return normalize(first) == normalize(second)
    return os.path.samefile(first, second)


def open_regular(path: str) -> BinaryIO:
    """Open a file to be read here and there in it, as ``opened.open_local``; of one behind a URL what was read is kept.

    Raises:
        OSError: it cannot be opened, or is no regular file.
    """
    if not is_url(path):
        return open_local(path)
    from .ranged import RemoteStream

    return RemoteStream(path)  # type: ignore[return-value]


def read_small(path: str, most: int | None = None) -> bytes:
    """A small file's bytes, or the first ``most`` of them.

    Raises:
        FileNotFoundError: there is none.
        OSError: it cannot be read, or is no regular file.
    """
    if is_url(path):
        from . import remote

        return remote.read_small(path, most)
    with open_regular(path) as stream:
        return stream.read() if most is None else stream.read(most)


def open_stored(path: str, advice: int = os.POSIX_FADV_NORMAL, *, size: int | None = None) -> Stored:
    """Open a file for reading.

    Args:
        advice: how it will be read, as ``os.posix_fadvise`` takes it.
        size: in bytes, where it is known: that of a file in a store has to be asked for otherwise.

    Raises:
        CheckpointError: it cannot be opened.
    """
    if is_url(path):
        from .ranged import RemoteFile

        return RemoteFile(path, size)
    return StoredFile(path, advice)


def read_bytes(path: str, offset: int, nbytes: int) -> bytes:
    """A few bytes, without read-ahead.

    Raises:
        CheckpointError: they cannot be read.
    """
    data = bytearray(nbytes)
    with open_stored(path, os.POSIX_FADV_RANDOM) as file:
        file.read([memoryview(data)], offset)
    return bytes(data)
