"""Where the bytes of checkpoints lie: files of this machine's file systems, and behind URLs.

The one place that knows whether a path is local: whoever looks for files, lists, opens or reads them does so here.
Paths are strings; ``os.path.join``, ``split`` and ``basename`` serve for both, what asks the system does not.
"""

from __future__ import annotations

import errno
import io
import os
import re
import resource
import stat
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, BinaryIO, Protocol

from ..errors import CheckpointError
from .direct import ALIGNMENT, LEAST, align, is_cached, is_refusal, is_worth_passing, reopen
from .disk import write_atomically
from .memory import Scratch, drop_front

_SPARE_FILES = 256
"""What a process has open besides."""

_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_LOCAL = re.compile(r"(file|local)://")

FOLDER = -1
"""Size of a folder among a folder's entries."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Something in a folder.

    Attributes:
        size: bytes of a file, ``FOLDER`` for a folder.
        changed: time of its last change, in seconds since 1970; 0 where that is not known.
        version: what a store tells each content of a file by (ETag, generation); empty for local files.
    """

    size: int
    changed: float
    version: str = ""

    @property
    def is_folder(self) -> bool:
        """Whether it is no file."""
        return self.size == FOLDER


def is_url(path: str) -> bool:
    """Whether a path leads to a store (``s3://bucket/run``), not into a local file system."""
    return _URL.match(path) is not None and _LOCAL.match(path) is None


def normalize(path: str) -> str:
    """The absolute form of a path, without ``/`` at its end; ``file://`` is taken off."""
    if not is_url(path):
        return os.path.abspath(_LOCAL.sub("", path, count=1))
    scheme, _, rest = path.partition("://")
    return f"{scheme}://{rest.rstrip('/')}"


def set_storage_options(options: Mapping[str, Any]) -> None:
    """Options of the stores behind all URLs that this process reads from now on, as fsspec's file systems take them."""
    from . import remote

    remote.set_options(options)


def begin_reading(paths: Iterable[str]) -> None:
    """Have made in the background what reading takes of those paths that are URLs."""
    for path in filter(is_url, paths):
        from . import remote

        remote.begin(path)


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
    """The files in a folder and the folders below it, by their path from there.

    Raises:
        OSError: one cannot be listed.
    """
    if is_url(folder):
        from . import remote

        return remote.list_tree(folder)

    def refuse(error: OSError) -> None:
        raise error

    paths = (os.path.join(place, name) for place, _, names in os.walk(folder, onerror=refuse) for name in names)
    return {os.path.relpath(path, folder): find_entry(path) or Entry(0, 0.0) for path in paths}


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
    """Open a file for reading here and there in it; links are followed.

    A FIFO or a device in its place would block, or never end. Of a file behind a URL what was read is kept.

    Raises:
        OSError: it cannot be opened, or is no regular file.
    """
    if is_url(path):
        from .ranged import RemoteStream

        return RemoteStream(path)  # type: ignore[return-value]
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
    """Bytes of a file that :func:`open_regular` has opened."""
    size = getattr(stream, "size", None)
    return os.fstat(stream.fileno()).st_size if size is None else size


def is_remote(stream: BinaryIO) -> bool:
    """Whether each small read of what :func:`open_regular` has opened may cost a request to a store."""
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
    """Bytes of a file that :func:`open_regular` has opened; fewer where it ends before.

    Raises:
        OSError: it cannot be read.
    """
    read = getattr(stream, "read_at", None)
    return os.pread(stream.fileno(), nbytes, offset) if read is None else read(nbytes, offset)


def read_ahead(stream: BinaryIO, ranges: Iterable[tuple[int, int]]) -> None:
    """Say which (offset, bytes) of a file that :func:`open_regular` has opened will be read in small pieces.

    Raises:
        OSError: they cannot be read.
    """
    fetch = getattr(stream, "read_ahead", None)
    if fetch is not None:
        fetch(ranges)


def advise_random(stream: BinaryIO) -> None:
    """Say that small pieces far apart will be read of a file that :func:`open_regular` has opened."""
    if not is_remote(stream):
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_RANDOM)


def read_small(path: str, most: int | None = None) -> bytes:
    """A small file's bytes, or the first ``most`` of them.

    Raises:
        FileNotFoundError: there is none.
        OSError: it cannot be read, or is no regular file.
    """
    if is_url(path):
        from . import remote

        return remote.read_small(path)[:most]
    with open_regular(path) as stream:
        return stream.read() if most is None else stream.read(most)


class Stored(Protocol):
    """A file that is open for reading; several threads may read it at once."""

    path: str

    def fetch(self, offset: int, nbytes: int, scratch: Scratch) -> memoryview | None:
        """The bytes from ``offset`` on in memory of ``scratch``, where that is the faster way.

        None where it is not: they are to be :meth:`read`.

        Raises:
            CheckpointError: the file cannot be read, or ends before.
        """

    def read(self, views: list[memoryview], offset: int) -> None:
        """Fill memory, one view after the other, with the bytes from ``offset`` on; the list is used up.

        Raises:
            CheckpointError: the file cannot be read, or ends before.
        """

    def read_some(self, views: list[memoryview], offset: int) -> int:
        """One read; how many bytes came, 0 at the end of the file.

        Raises:
            CheckpointError: the file cannot be read.
        """

    def close(self) -> None:
        """Close it; no thread may be reading."""

    def __enter__(self) -> Stored: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


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


class StoredFile:
    """A local file as :class:`Stored`.

    Args:
        advice: how it will be read, as ``os.posix_fadvise`` takes it.

    Raises:
        CheckpointError: it cannot be opened.
    """

    def __init__(self, path: str, advice: int = os.POSIX_FADV_NORMAL) -> None:
        self.path = path
        try:
            self._file = open_regular(path)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be opened ({error.strerror or error}).") from error
        if advice != os.POSIX_FADV_NORMAL:
            os.posix_fadvise(self._file.fileno(), 0, 0, advice)
        self._passes = is_worth_passing(self._file.fileno())

    def fetch(self, offset: int, nbytes: int, scratch: Scratch) -> memoryview | None:
        """As :meth:`Stored.fetch`: past the page cache, unless it holds them, they are few, or it lets none pass."""
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
        """Fill memory, one view after the other, with the bytes from ``offset`` on; the list is used up.

        Raises:
            CheckpointError: the file cannot be read, or ends before.
        """
        while views:
            got = self.read_some(views, offset)
            if got == 0:
                raise self._explain_end()
            offset += got
            drop_front(views, got)

    def read_some(self, views: list[memoryview], offset: int) -> int:
        """One read; how many bytes came, 0 at the end of the file.

        Raises:
            CheckpointError: the file cannot be read.
        """
        try:
            return os.preadv(self._file.fileno(), views, offset)
        except OSError as error:
            raise self._explain(error, offset) from error

    def _explain(self, error: OSError, offset: int) -> CheckpointError:
        return CheckpointError(f"{self.path}: cannot be read at byte {offset} ({error.strerror or error}).")

    def _explain_end(self) -> CheckpointError:
        size = os.fstat(self._file.fileno()).st_size
        return CheckpointError(f"{self.path}: ends at byte {size}; it was truncated since its header was read.")

    def close(self) -> None:
        """Close it; no thread may be reading."""
        self._file.close()

    def __enter__(self) -> StoredFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_bytes(path: str, offset: int, nbytes: int) -> bytes:
    """A few bytes, without read-ahead.

    Raises:
        CheckpointError: they cannot be read.
    """
    data = bytearray(nbytes)
    with open_stored(path, os.POSIX_FADV_RANDOM) as file:
        file.read([memoryview(data)], offset)
    return bytes(data)


def allow_open_files(count: int) -> None:
    """Raise this process's limit of open files where ``count`` more may not fit; as far as the system lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + _SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        if most > soft:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
