"""Reading past the page cache, where a disk is not read ahead far enough and the cache does not hold the bytes.

A buffered read of what is cold costs a page of the cache for every page read, a copy out of it, and, when memory is
full, somebody else's page: on the machine of docs/benchmarks.md 0.3 to 1.4 s of processor time a GiB. With ``O_DIRECT``
the disk writes into memory that a thread uses again and again (0.05 s), where its checksum is formed, and one copy
brings it to its place. What the cache holds is taken from there: a save of a moment ago, what another rank reads as
well, and what is read twice on purpose. So is everything of a disk that the system reads ahead of as far as one of our
reads, as it does where an administrator or a cloud has set it so: then the disk is kept busy while threads work on what
they have, which is worth more than the copy.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
from pathlib import Path

from .disk import load_libc
from .filesystems import DISK, find_kind

ALIGNMENT = 4096
"""Bytes of which addresses, offsets and sizes have to be multiples: no block of a disk is larger."""

_FAR = 4 << 20
"""Bytes of readahead that keep a disk busy: those of a read."""

_DEVICES = Path("/sys/class/bdi")
_REFUSED = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP}


@functools.cache
def _load_libc() -> ctypes.CDLL:
    libc = load_libc()
    libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_longlong)
    libc.mmap.restype = ctypes.c_void_p
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    return libc


def is_worth_passing(fd: int) -> bool:
    """Whether buffered reads of a file would gain nothing from the cache but a second copy.

    File systems over a network read ahead and share what nodes have read; those in memory have nothing to read past.
    """
    return find_kind(fd) == DISK and find_readahead(os.fstat(fd).st_dev) < _FAR


def find_readahead(device: int) -> int:
    """Bytes that the system reads ahead on a device; 0 where it does not tell, as of several disks in one."""
    try:
        told = (_DEVICES / f"{os.major(device)}:{os.minor(device)}" / "read_ahead_kb").read_text()
    except OSError:
        return 0
    return int(told) << 10


def reopen(fd: int) -> int | None:
    """A descriptor of the same file that reads past the page cache; None where the file system has none."""
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
    except OSError:
        return None


def is_refusal(error: OSError) -> bool:
    """Whether the system does not read past the cache here, rather than not at all."""
    return error.errno in _REFUSED


def align(offset: int, nbytes: int) -> tuple[int, int]:
    """The smallest aligned range (offset, bytes) around one."""
    low = offset // ALIGNMENT * ALIGNMENT
    return low, -(-(offset + nbytes) // ALIGNMENT) * ALIGNMENT - low


def is_cached(fd: int, offset: int, nbytes: int) -> bool:
    """Whether the page cache holds most of a range; also where the system does not tell."""
    low, size = align(offset, nbytes)
    libc, pages = _load_libc(), (ctypes.c_ubyte * (size // mmap.PAGESIZE + 1))()
    address = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, fd, low)
    if address in (None, ctypes.c_void_p(-1).value):
        return True
    try:
        told = libc.mincore(address, size, pages) == 0
    finally:
        libc.munmap(address, size)
    found = bytes(pages)[: -(-size // mmap.PAGESIZE)]
    return not told or 2 * found.count(0) < len(found)
