"""Reading and writing past the page cache, on this machine's own disks.

What goes through the cache costs a page of it for every page, a copy, and, when memory is full, somebody else's page:
on 2 cores of an AMD EPYC 0.3 to 1.4 s of processor time a GiB read, and 2 to 3 s a GiB written. With
``O_DIRECT`` the disk reads into memory that a thread uses again and again (0.02 s), where its checksum is formed, and
one copy brings it to its place. In large pages (``memory.allocate_large``) it is faster than through the cache at any
readahead, which has small pages to read into. Without large pages it is so only where the system reads ahead less far
than one of our reads: else that keeps the disk busy while threads work on what they have.

What the cache holds is taken from there: a save of a moment ago, what another rank reads as well, and what is read
twice on purpose. So are small reads, of which a disk is asked for pages only.
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

from .filesystems import DISK, find_kind, load_libc
from .memory import Scratch, find_address, has_large_pages

ALIGNMENT = 4096
"""Bytes of which addresses, offsets and sizes have to be multiples: no block of a disk is larger."""

LEAST = 64 << 10
"""Bytes from which on it is worth while."""

_FAR = 4 << 20
"""Bytes of readahead that keep a disk busy: those of a read."""

_WRITTEN = 8 << 20
"""Bytes of a write."""

_DEVICES = Path("/sys/class/bdi")
_REFUSED = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EFAULT}
"""``EFAULT`` tells memory of a device's driver, which no disk can be given."""


class _ThreadMemory(threading.local):
    """Memory of a thread's own."""

    def __init__(self) -> None:
        self.scratch = Scratch()


_own = _ThreadMemory()


def is_worth_passing(fd: int) -> bool:
    """Whether what is read of a file had better pass the cache by.

    File systems over a network read ahead and share what nodes have read; those in memory have nothing to read past.
    """
    return find_kind(fd) == DISK and (has_large_pages() or find_readahead(os.fstat(fd).st_dev) < _FAR)


def find_readahead(device: int) -> int:
    """Bytes that the system reads ahead on a device; 0 where it does not tell, as of several disks in one."""
    try:
        kib = (_DEVICES / f"{os.major(device)}:{os.minor(device)}" / "read_ahead_kb").read_text()
    except OSError:
        return 0
    return int(kib) << 10


def reopen(fd: int, mode: int = os.O_RDONLY) -> int | None:
    """A descriptor of the same file that passes the page cache by; None where the file system has none."""
    try:
        return os.open(f"/proc/self/fd/{fd}", mode | os.O_CLOEXEC | os.O_DIRECT)
    except OSError:
        return None


@contextmanager
def open_past(fd: int, nbytes: int) -> Iterator[int | None]:
    """A descriptor for writing so many bytes past the page cache; None where they had better go through it."""
    past = reopen(fd, os.O_WRONLY) if nbytes >= LEAST and find_kind(fd) == DISK else None
    try:
        yield past
    finally:
        if past is not None:
            os.close(past)


def cut_blocks(views: Sequence[memoryview], offset: int) -> Iterator[tuple[list[memoryview], int, bool]]:
    """Cut what is written one view behind the other from ``offset`` on: (views, their offset, is one of whole blocks).

    Blocks are those of the page cache as well: nothing that goes through it lies in a page that is written past it.
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


def write_past(fd: int, view: memoryview, offset: int) -> bool:
    """Write whole blocks; False where the system does not write them past its cache.

    Raises:
        OSError: as the system tells it.
    """
    done = 0
    is_aligned = not view.readonly and find_address(view) % ALIGNMENT == 0
    while done < view.nbytes:
        piece = view[done : done + _WRITTEN]
        if not is_aligned:
            aligned = _own.scratch.take(piece.nbytes)
            aligned[:] = piece
            piece = aligned
        try:
            done += os.pwrite(fd, piece, offset + done)
        except OSError as error:
            if is_refusal(error):
                return False
            raise
    return True


def is_refusal(error: OSError) -> bool:
    """Whether the system does not read or write past the cache here, rather than not at all."""
    return error.errno in _REFUSED


def align(offset: int, nbytes: int) -> tuple[int, int]:
    """The smallest aligned range (offset, bytes) around one."""
    low = offset // ALIGNMENT * ALIGNMENT
    return low, -(-(offset + nbytes) // ALIGNMENT) * ALIGNMENT - low


def is_cached(fd: int, offset: int, nbytes: int) -> bool:
    """Whether the page cache holds most of a range; also where the system does not tell."""
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
