"""Reads and writes past the page cache, on local disks.

The page cache costs an allocation and a copy per page: on 2 cores of an AMD EPYC 0.3 to 1.4 s of processor time per GiB
read, and 2 to 3 s per GiB written. With ``O_DIRECT`` a disk reads into memory that a thread reuses (0.02 s), where the
checksum is computed; one copy brings the bytes to their destination. In large pages (``memory.allocate_large``) this is
faster than the cache at any readahead. In small pages it is faster only if the system reads ahead less than one of our
reads; a longer readahead keeps the disk busy while threads process their bytes.

Bytes that the cache holds are read from there: a recent save, files that other ranks read, and repeated reads. So are
small reads.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from .memory import Scratch, find_address, has_large_pages
from .paths import DISK, find_storage_kind, load_libc

ALIGNMENT = 4096
"""Bytes: addresses, offsets and sizes must be multiples of it. No disk has larger blocks."""

LEAST = 64 << 10
"""Minimum bytes of a read or write past the cache."""

_FAR = 4 << 20
"""Bytes of readahead that keep a disk busy: as many as one of our reads."""

_WRITTEN = 8 << 20
"""Bytes of a write."""

_DEVICES = Path("/sys/class/bdi")
REFUSED = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EFAULT}
"""Errors of file systems without such reads and writes. ``EFAULT``: a disk cannot access memory of a device driver."""


_thread = threading.local()
"""Has each thread's scratch memory."""


def prefers_direct_reads(fd: int) -> bool:
    """Return True if direct reads (past the page cache) of an open file are faster.

    Never on network file systems, which read ahead and share bytes between nodes, nor on file systems in memory.
    """
    return find_storage_kind(fd) == DISK and (has_large_pages() or find_readahead(os.fstat(fd).st_dev) < _FAR)


def find_readahead(device: int) -> int:
    """Return a device's readahead in bytes; 0 if unknown, as for several disks in one."""
    try:
        kib = (_DEVICES / f"{os.major(device)}:{os.minor(device)}" / "read_ahead_kb").read_text()
    except OSError:
        return 0
    return int(kib) << 10


def reopen_direct(fd: int, mode: int = os.O_RDONLY) -> int | None:
    """Reopen a descriptor with ``O_DIRECT``; return None if the file system refuses."""
    try:
        return os.open(f"/proc/self/fd/{fd}", mode | os.O_CLOEXEC | os.O_DIRECT)
    except OSError:
        return None


@contextmanager
def open_for_direct_writes(fd: int, nbytes: int) -> Iterator[int | None]:
    """Yield an ``O_DIRECT`` descriptor of a file, or None if the cache is faster."""
    past = reopen_direct(fd, os.O_WRONLY) if nbytes >= LEAST and find_storage_kind(fd) == DISK else None
    try:
        yield past
    finally:
        if past is not None:
            os.close(past)


def split_whole_blocks(views: Sequence[memoryview], offset: int) -> Iterator[tuple[list[memoryview], int, bool]]:
    """Divide consecutive views at byte ``offset`` into whole blocks and the rest.

    Yields (views, their offset, is_whole); ``is_whole`` marks one view of whole blocks. A block is at least a page: no
    page is written both through the cache and past it.
    """
    block = max(ALIGNMENT, mmap.PAGESIZE)
    through, begin = list[memoryview](), offset
    for view in views:
        low = -offset % block
        high = low + (view.nbytes - low) // block * block
        if high - low >= LEAST:
            yield [*through, view[:low]], begin, False
            yield [view[low:high]], offset + low, True
            through, begin = [view[high:]], offset + high
        else:
            through.append(view)
        offset += view.nbytes
    yield through, begin, False


def write_direct(fd: int, view: memoryview, offset: int) -> bool:
    """Write whole blocks past the page cache; return False if the system refuses."""
    done = 0
    is_aligned = not view.readonly and find_address(view) % ALIGNMENT == 0
    while done < view.nbytes:
        piece = view[done : done + _WRITTEN]
        if not is_aligned:
            aligned = vars(_thread).setdefault("scratch", Scratch()).take(piece.nbytes)
            aligned[:] = piece
            piece = aligned
        try:
            done += os.pwrite(fd, piece, offset + done)
        except OSError as error:
            if error.errno in REFUSED:
                return False
            raise
    return True


def align(offset: int, nbytes: int) -> tuple[int, int]:
    """Return the smallest aligned range (offset, bytes) that contains a range."""
    low = offset // ALIGNMENT * ALIGNMENT
    return low, -(-(offset + nbytes) // ALIGNMENT) * ALIGNMENT - low


def is_cached(fd: int, offset: int, nbytes: int) -> bool:
    """Return True if the page cache holds most of a range, or if that is unknown."""
    low = offset // mmap.PAGESIZE * mmap.PAGESIZE
    size = offset + nbytes - low
    libc, pages = load_libc(), (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    address = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, fd, low)
    if address in (None, ctypes.c_void_p(-1).value):
        return True
    try:
        is_known = libc.mincore(address, size, pages) == 0
    finally:
        libc.munmap(address, size)
    return not is_known or 2 * bytes(pages).count(0) < len(pages)
