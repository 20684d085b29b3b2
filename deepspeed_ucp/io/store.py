"""Where the bytes of checkpoints lie: files of this machine's file systems.

All data that is read comes through :class:`StoredFile`; another kind of storage is another class with its methods.
"""

from __future__ import annotations

import errno
import os
import resource
import stat
from types import TracebackType
from typing import BinaryIO

from ..errors import CheckpointError
from .memory import drop_front

_SPARE_FILES = 256
"""What a process has open besides."""

_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def open_regular(path: str) -> BinaryIO:
    """Open a file for reading; links are followed. A FIFO or a device in its place would block, or never end.

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


class StoredFile:
    """A file that is open for reading; several threads may read it at once.

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

    def read(self, views: list[memoryview], offset: int) -> None:
        """Fill memory, one view after the other, with the bytes from ``offset`` on; the list is used up.

        Raises:
            CheckpointError: the file cannot be read, or ends before.
        """
        while views:
            got = self.read_some(views, offset)
            if got == 0:
                size = os.fstat(self._file.fileno()).st_size
                raise CheckpointError(f"{self.path}: ends at byte {size}; it was truncated since its header was read.")
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
            raise CheckpointError(
                f"{self.path}: cannot be read at byte {offset} ({error.strerror or error})."
            ) from error

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
    with StoredFile(path, os.POSIX_FADV_RANDOM) as file:
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
