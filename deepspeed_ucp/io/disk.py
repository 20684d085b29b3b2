"""Durable writes: checks of free space, atomic replacement, syncs of folders.

They raise DiskFullError if the disk, a quota or the process's limit of file sizes has no room.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from ..errors import DiskFullError
from .direct import open_for_direct_writes, split_whole_blocks, write_direct
from .memory import drop_front, take_front
from .paths import load_libc
from .threads import map_threads

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_SYNC_THREADS = 16

_FEW = 64
"""Number of files up to which each is synced: ``syncfs`` also waits for writes of other processes."""

_LARGE = 1 << 20
"""Bytes of a write from which the kernel starts writeback at once, which shortens the final sync."""

_PIECE = 1 << 20
"""Bytes per call through the page cache. For longer writes the cache takes larger pages, which a virtual machine may
have to fetch from its host: 4 MiB have two thirds of the speed."""

_BEGIN_WRITING = 2  # SYNC_FILE_RANGE_WRITE


def check_space(folder: str, nbytes: int) -> None:
    """Raise DiskFullError if the disk lacks room for files; quotas are not checked.

    Args:
        folder: need not exist; its present files count as written.
        nbytes: final size of all its files.
    """
    needed = nbytes - count_allocated(folder)
    present = folder
    while not os.path.isdir(present):
        present = os.path.dirname(os.path.abspath(present))
    free = _count_free(present)
    if needed > free:
        raise DiskFullError(
            f"disk full: needs {needed:,} bytes, has {free:,} bytes free. Make room, or write elsewhere.", path=folder
        )


def count_allocated(folder: str) -> int:
    """Return the bytes allocated to the files of a folder, without holes."""
    nbytes = 0
    for path in (os.path.join(parent, name) for parent, _, names in os.walk(folder) for name in names):
        with suppress(FileNotFoundError):  # deleted meanwhile
            nbytes += os.lstat(path).st_blocks * 512
    return nbytes


def _count_free(path: str) -> int:
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize


@contextmanager
def explain_full(path: str) -> Iterator[None]:
    """Context that raises ENOSPC, EDQUOT and EFBIG as DiskFullError.

    Any other OSError gets ``path`` if the system names no file.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            error.filename = error.filename or path
            raise
        raise DiskFullError(
            f"disk full ({error.strerror}); {_describe_space(path)}. Make room, then run it again.", path=path
        ) from error


def _describe_space(path: str) -> str:
    folder = path if os.path.isdir(path) else os.path.dirname(os.path.abspath(path))
    try:
        return f"the file system has {_count_free(folder):,} bytes free"
    except OSError:
        return "its free space is unknown"


@contextmanager
def open_to_write(path: str) -> Iterator[int]:
    """Yield the descriptor of a file, created if missing, never truncated."""
    with explain_full(path):
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        yield fd
    finally:
        os.close(fd)


def create_file(path: str, data: bytes) -> None:
    """Write a new small file, without a sync."""
    with explain_full(path), open(path, "xb") as stream:
        stream.write(data)


def write_at(fd: int, data: memoryview | bytes | bytearray, offset: int) -> None:
    """Write all of ``data`` at byte ``offset``; several threads may write one file."""
    write_parts(fd, [data], offset)


def write_parts(fd: int, parts: Sequence[memoryview | bytes | bytearray], offset: int) -> None:
    """Write consecutive parts at byte ``offset``: blocks past the cache if faster.

    Several threads may write different blocks of one file.
    """
    views = [memoryview(part).cast("B") for part in parts]
    with explain_full(_find_path(fd)), open_for_direct_writes(fd, max(view.nbytes for view in views)) as past:
        for piece, at, is_whole in split_whole_blocks(views, offset):
            if past is None or not is_whole or not write_direct(past, piece[0], at):
                _write_through(fd, piece, at)


def _write_through(fd: int, views: list[memoryview], offset: int) -> None:
    """Write through the page cache; the list is consumed."""
    start = offset
    while views:
        done = os.pwritev(fd, take_front(views, _PIECE), offset)
        offset += done
        drop_front(views, done)
    call = getattr(load_libc(), "sync_file_range", None)
    if offset - start >= _LARGE and call is not None:  # errors are left to the final sync
        call(fd, ctypes.c_int64(start), ctypes.c_int64(offset - start), _BEGIN_WRITING)


def _find_path(fd: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return f"file descriptor {fd}"


@contextmanager
def replacing(path: str) -> Iterator[str]:
    """Context that yields a temporary path, renamed to ``path`` at the end.

    Both are in one folder. A temporary file that a killed process has left is used again. If another process uses it,
    the file gets another name. After an error it is deleted.
    """
    folder, name = os.path.split(os.path.abspath(path))
    usual = os.path.join(folder, f".{name}.ucp-tmp")
    with explain_full(path), open_to_write(usual) as fd:
        aside = usual if _lock(fd, usual) else os.path.join(folder, f".{name}.{secrets.token_hex(4)}.ucp-tmp")
        try:
            yield aside
            os.replace(aside, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(aside)
            raise


def _lock(fd: int, path: str) -> bool:
    """Lock an open file; return False if another process has locked or renamed it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # a file system without locks
    return is_still_at(fd, path)


def is_still_at(fd: int, path: str) -> bool:
    """Return True if an open file has not been renamed, replaced or deleted since."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def write_atomically(path: str, data: bytes) -> None:
    """Replace a file atomically and durably; several processes may do so at once."""
    with replacing(path) as aside, open_to_write(aside) as fd:
        write_at(fd, data, 0)
        os.ftruncate(fd, len(data))
        os.fsync(fd)
    sync_folder(os.path.dirname(aside))


def map_new_file(path: str, nbytes: int) -> memoryview:
    """Create and map a file of ``nbytes`` > 0 zeros; writes to this memory never fail.

    The kernel writes the bytes back when it needs memory.
    """
    with explain_full(path):
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            os.posix_fallocate(fd, 0, nbytes)
            return memoryview(mmap.mmap(fd, nbytes))
        finally:
            os.close(fd)


def sync_folder(folder: str) -> None:
    """Sync a folder's directory entries, if its file system supports that."""
    try:
        sync_file(folder)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EBADF):  # file systems without fsync of folders
            raise


def sync_tree(folder: str) -> None:
    """Sync all files and folders below a folder that this node has written."""
    with explain_full(folder):
        tree = list(os.walk(folder))
        files = [os.path.join(parent, name) for parent, _, names in tree for name in names]
        if len(files) > _FEW and _sync_filesystem(folder):
            return
        map_threads(sync_file, files, _SYNC_THREADS)
        map_threads(sync_folder, (parent for parent, _, _ in tree), _SYNC_THREADS)


def _sync_filesystem(folder: str) -> bool:
    """Call ``syncfs``; return False if it reports no errors (Linux before 5.8)."""
    release = tuple(int(part) for part in os.uname().release.split("-")[0].split(".")[:2] if part.isdigit())
    call = getattr(load_libc(), "syncfs", None)
    if call is None or release < (5, 8):
        return False
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if call(fd) == 0:
            return True
        code = ctypes.get_errno()
    finally:
        os.close(fd)
    if code in (errno.ENOSYS, errno.EINVAL):
        return False
    raise OSError(code, os.strerror(code), folder)


def sync_file(path: str) -> None:
    """Sync a file, also bytes that other processes wrote."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
