"""Where the bytes of checkpoints lie: files of this machine's file systems.

All data that is read comes through :class:`StoredFile`; another kind of storage is another class with its methods.
"""

from __future__ import annotations

import os
import resource
from types import TracebackType

from ..errors import CheckpointError
from .regular import open_regular

_SPARE_FILES = 256
"""What a process has open besides."""


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
            while views and got >= views[0].nbytes:
                got -= views[0].nbytes
                views.pop(0)
            if got:
                views[0] = views[0][got:]

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
