"""A cold page cache, with the proof that it is cold, and memory that was in use a moment ago."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil

_DROP_CACHES = Path("/proc/sys/vm/drop_caches")
_PAGE = mmap.PAGESIZE
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.mmap.restype = ctypes.c_void_p
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_MAP_FAILED = ctypes.c_void_p(-1).value


class StillWarm(RuntimeError):
    """The page cache keeps the checkpoint although everything permitted was done to drop it."""


def make_cold(*roots: Path) -> int:
    """Use memory, and drop every file below `roots` from the page cache; the bytes that stay cached (normally 0).

    Raises StillWarm when more than 1 % of the bytes stay: a load measured then would not come from the storage.
    """
    files = list_files(*roots)
    touch_memory(files)
    for file in files:
        _drop(file)
    resident = sum(resident_bytes(file) for file in files)
    if resident:
        _drop_all_caches()
        resident = sum(resident_bytes(file) for file in files)
    total = sum(file.stat().st_size for file in files)
    if resident > total // 100:
        raise StillWarm(
            f"{resident} of {total} bytes below {', '.join(map(str, roots))} are still cached; as root "
            "/proc/sys/vm/drop_caches would empty the cache"
        )
    return resident


def list_files(*roots: Path) -> list[Path]:
    """All files below folders."""
    return [file for root in roots for file in sorted(root.rglob("*")) if file.is_file()]


def touch_memory(files: Sequence[Path]) -> None:
    """Use as much memory as four times the files' bytes once, but leave a quarter of what is free, and free it.

    A virtual machine's host takes back what has been free for some seconds. Whoever uses it next would wait for it:
    a case that follows smaller ones would take up to twice as long. Every processor waits for a share of it.
    """
    wanted = min(4 * sum(file.stat().st_size for file in files), psutil.virtual_memory().available * 3 // 4)
    with map_memory(wanted) as memory, ThreadPoolExecutor() as pool:
        parts = np.array_split(np.frombuffer(memory, np.uint8)[::_PAGE], os.cpu_count() or 1)
        list(pool.map(lambda part: np.copyto(part, 1), parts))
        del parts  # memory that something looks at cannot be freed


def map_memory(nbytes: int) -> mmap.mmap:
    """Memory that nobody has touched, page by page; a byte at least."""
    return mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def resident_bytes(file: Path) -> int:
    """How many bytes of `file` the page cache holds, by mincore(2)."""
    size = file.stat().st_size
    if not size:
        return 0
    with file.open("rb") as handle:
        address = _libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, handle.fileno(), 0)
    if address == _MAP_FAILED:
        raise OSError(ctypes.get_errno(), "mmap", str(file))
    pages = (ctypes.c_ubyte * -(-size // _PAGE))()
    failed = _libc.mincore(address, size, pages)
    error = ctypes.get_errno()
    _libc.munmap(address, size)
    if failed:
        raise OSError(error, "mincore", str(file))
    return sum(page & 1 for page in bytes(pages)) * _PAGE


def _drop(file: Path) -> None:
    """Dirty pages cannot be dropped, so they are written out first."""
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def _drop_all_caches() -> None:
    try:
        _DROP_CACHES.write_text("3\n")
    except OSError:
        return  # not root: make_cold tells whether it mattered
