"""Prepare a measurement: an empty page cache, which is checked, and memory that the host has already provided."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil

_PAGE = mmap.PAGESIZE
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)


class StillCached(RuntimeError):
    """The page cache keeps the files although everything permitted was done to drop them."""


def make_cold(*roots: Path) -> None:
    """Touch memory, and drop all files below `roots` from the page cache.

    Raises:
        StillCached: more than 1 % of the bytes stay cached, so a load would not read from the storage.
    """
    files = list_files(*roots)
    touch_memory(files)
    for file in files:
        _drop(file)
    if any(map(count_cached, files)):
        with suppress(OSError):  # only root may empty the whole cache
            Path("/proc/sys/vm/drop_caches").write_text("3\n")
    cached, total = sum(map(count_cached, files)), sum(file.stat().st_size for file in files)
    if cached > total // 100:
        names = ", ".join(map(str, roots))
        raise StillCached(
            f"{cached} of {total} bytes below {names} are still cached. Run as root, which can drop them."
        )


def list_files(*roots: Path) -> list[Path]:
    return [file for root in roots for file in sorted(root.rglob("*")) if file.is_file()]


def touch_memory(files: Sequence[Path]) -> None:
    """Use four times as much memory as the files have bytes, but at most three quarters of the free memory; free it.

    The host of a virtual machine reclaims memory that has been free for some seconds. The next process to use it would
    wait for it, up to the duration of a load.
    """
    wanted = min(4 * sum(file.stat().st_size for file in files), psutil.virtual_memory().available * 3 // 4)
    with map_memory(wanted) as memory, ThreadPoolExecutor() as pool:
        parts = np.array_split(np.frombuffer(memory, np.uint8)[::_PAGE], os.cpu_count() or 1)
        list(pool.map(lambda part: np.copyto(part, 1), parts))
        del parts  # a memory map with views cannot be closed


def map_memory(nbytes: int) -> mmap.mmap:
    """Return new, untouched memory; at least one byte."""
    return mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def count_cached(file: Path) -> int:
    """Return the number of the file's bytes in the page cache (mincore(2))."""
    size = file.stat().st_size
    if not size:
        return 0
    pages = (ctypes.c_ubyte * -(-size // _PAGE))()
    with file.open("rb") as stream, mmap.mmap(stream.fileno(), size, prot=mmap.PROT_READ) as mapped:
        address = np.frombuffer(mapped, np.uint8).ctypes.data
        if _libc.mincore(address, size, pages):
            raise OSError(ctypes.get_errno(), "mincore", str(file))
    return sum(page & 1 for page in bytes(pages)) * _PAGE


def _drop(file: Path) -> None:
    """Drop a file's pages from the cache; dirty ones are written first."""
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
