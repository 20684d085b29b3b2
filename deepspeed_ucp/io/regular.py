"""Opens regular files only: a FIFO, a device or a socket in a file's place would block, or never end."""

from __future__ import annotations

import errno
import os
import stat
from typing import BinaryIO

_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def open_regular(path: str) -> BinaryIO:
    """Open a file for reading; links are followed.

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
