"""Files and folders of local file systems and behind URLs.

The functions at the end call the method of the :class:`Store` that serves the path. ``os.path.join``, ``split`` and
``basename`` work for both kinds of paths.
"""

from __future__ import annotations

import errno
import functools
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, BinaryIO, Concatenate, ParamSpec, TypeVar

from ..errors import CheckpointError
from .direct import ALIGNMENT, LEAST, REFUSED, align, is_cached, prefers_direct_reads, reopen_direct
from .disk import explain_full, replacing, sync_file, write_atomically
from .interface import ReadableFile, ReadStream, Store, explain_failure
from .memory import Scratch, drop_front
from .paths import FOLDER, Entry, is_url

P = ParamSpec("P")
T = TypeVar("T")


def open_local(path: str) -> BinaryIO:
    """Open a regular local file for reading; links are followed."""
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
    if not stat.S_ISREG(mode):  # a FIFO would block, a device would never end
        raise OSError(errno.EINVAL, "is a FIFO, a device or a socket, not a regular file", path)


class LocalStream(ReadStream):
    """A local file as :class:`ReadStream`."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(os.fstat(file.fileno()).st_size)
        self._file = file

    def read_at(self, nbytes: int, offset: int) -> bytes:
        return os.pread(self._file.fileno(), nbytes, offset)

    def read_ahead(self, ranges: Iterable[tuple[int, int]]) -> None:
        for offset, nbytes in ranges:
            os.posix_fadvise(self._file.fileno(), offset, nbytes, os.POSIX_FADV_WILLNEED)

    def close(self) -> None:
        self._file.close()
        super().close()


class LocalFile(ReadableFile):
    """A local file as :class:`ReadableFile`.

    Args:
        advice: access pattern, as of ``os.posix_fadvise``. If large reads bypass the page cache, the default becomes
            random access: small reads cause no read-ahead.
    """

    def __init__(self, path: str, advice: int = os.POSIX_FADV_NORMAL) -> None:
        self.path = path
        try:
            self._file = open_local(path)
        except OSError as error:
            raise explain_failure(path, "opened", error) from error
        self._reads_direct = prefers_direct_reads(self._file.fileno())
        if self._reads_direct and advice == os.POSIX_FADV_NORMAL:
            advice = os.POSIX_FADV_RANDOM  # reads through the cache are small then, and isolated
        if advice != os.POSIX_FADV_NORMAL:
            os.posix_fadvise(self._file.fileno(), 0, 0, advice)

    def fetch(self, offset: int, nbytes: int, scratch: Scratch) -> memoryview | None:
        """Read past the page cache if that is faster and possible, else return None."""
        file = self._file.fileno()
        if not self._reads_direct or nbytes < LEAST or is_cached(file, offset, nbytes):
            return None
        past = reopen_direct(file)  # for this read only: there may be too many files for two descriptors each
        if past is None:
            return None
        try:
            return self._read_direct(past, offset, nbytes, scratch)
        finally:
            os.close(past)

    def _read_direct(self, fd: int, offset: int, nbytes: int, scratch: Scratch) -> memoryview | None:
        low, size = align(offset, nbytes)
        memory, got, wanted = scratch.take(size), 0, offset + nbytes - low
        while got < wanted:
            try:
                count = os.preadv(fd, [memory[got:]], low + got)
            except OSError as error:
                if error.errno in REFUSED:
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

    def find_change_time(self, path: str) -> int:
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

    def put_file(self, path: str, source: str) -> None:
        """Copy bytes and access rights; create the folder if needed, without a sync."""
        with explain_full(path):
            os.makedirs(os.path.dirname(path), exist_ok=True)
        with replacing(path) as aside:
            shutil.copy(source, aside)
            sync_file(aside)

    def remove(self, path: str) -> None:
        with suppress(FileNotFoundError):
            os.unlink(path)

    def open_stream(self, path: str) -> ReadStream:
        return LocalStream(open_local(path))

    def open_stored(self, path: str, advice: int = os.POSIX_FADV_NORMAL, *, size: int | None = None) -> ReadableFile:
        return LocalFile(path, advice)


def _choose_store(path: str) -> Store:
    """Return the store of a path; obstore is imported with the first URL."""
    if not is_url(path):
        return LocalStore()
    if path.startswith(("http://", "https://")):
        from .web import WebStore

        return WebStore()
    from .objects import ObjectStore

    return ObjectStore()


def _dispatch_by_path(method: Callable[Concatenate[Store, str, P], T]) -> Callable[Concatenate[str, P], T]:
    """Return a function that calls a method of the store of its first argument."""

    @functools.wraps(method)
    def call(path: str, /, *args: P.args, **options: P.kwargs) -> T:
        result: T = getattr(_choose_store(path), method.__name__)(path, *args, **options)
        return result

    return call


list_folder = _dispatch_by_path(Store.list_folder)
list_tree = _dispatch_by_path(Store.list_tree)
note_listed = _dispatch_by_path(Store.note_listed)
find_entry = _dispatch_by_path(Store.find_entry)
find_change_time = _dispatch_by_path(Store.find_change_time)
is_folder = _dispatch_by_path(Store.is_folder)
is_file = _dispatch_by_path(Store.is_file)
exists = _dispatch_by_path(Store.exists)
read_small = _dispatch_by_path(Store.read_small)
write_small = _dispatch_by_path(Store.write_small)
exchange_small = _dispatch_by_path(Store.exchange_small)
put_file = _dispatch_by_path(Store.put_file)
remove = _dispatch_by_path(Store.remove)
open_stream = _dispatch_by_path(Store.open_stream)
open_stored = _dispatch_by_path(Store.open_stored)


def set_storage_options(options: Mapping[str, Any]) -> None:
    """Set the stores' options for this process; ConfigError if one is unknown."""
    from .clients import set_options

    set_options(options)


def read_bytes(path: str, offset: int, nbytes: int) -> bytes:
    """Return a few bytes of a file, without read-ahead."""
    data = bytearray(nbytes)
    with open_stored(path, os.POSIX_FADV_RANDOM) as file:
        file.read([memoryview(data)], offset)
    return bytes(data)
