"""Kinds of file systems, and the number of requests in flight that suits a path's storage."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TypeVar

from .paths import is_url
from .threads import count_threads, map_threads

T = TypeVar("T")
R = TypeVar("R")

DISK, MEMORY, NETWORK = "disk", "memory", "network"

_LOCAL = {
    0xEF53: DISK,  # ext
    0x58465342: DISK,  # xfs
    0x9123683E: DISK,  # btrfs
    0xCA451A4E: DISK,  # bcachefs
    0xF2F52010: DISK,  # f2fs
    0x2FC12FC1: DISK,  # zfs
    0x794C7630: DISK,  # overlay; its layers are unknown
    0x01021994: MEMORY,  # tmpfs
    0x858458F6: MEMORY,  # ramfs
    0x958458F6: MEMORY,  # hugetlbfs
}
"""Kinds by statfs's ``f_type`` (linux/magic.h). All others are network file systems, or processes (fuse)."""

_FAR_READERS = 16
"""Reads in flight from network storage: its latency is high, but it serves many requests at once."""


class _Statfs(ctypes.Structure):
    _fields_ = (("f_type", ctypes.c_long), ("rest", ctypes.c_char * 512))


@functools.cache
def load_libc() -> ctypes.CDLL:
    """Return the C library, with ``errno`` and the argument types of functions that take addresses or sizes."""
    libc = ctypes.CDLL(None, use_errno=True)
    number, address, size = ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t
    libc.statfs.argtypes = ctypes.c_char_p, address
    libc.fstatfs.argtypes = number, address
    libc.madvise.argtypes = address, size, number
    libc.mincore.argtypes = address, size, address
    libc.mmap.argtypes = address, size, number, number, number, ctypes.c_longlong
    libc.mmap.restype = address
    libc.munmap.argtypes = address, size
    return libc


def find_kind(file: int | str) -> str:
    """Return the kind of file system of a path or a file descriptor; empty if unknown."""
    libc, status = load_libc(), _Statfs()
    address = ctypes.byref(status)
    failed = libc.fstatfs(file, address) if isinstance(file, int) else libc.statfs(os.fsencode(file), address)
    return "" if failed else _LOCAL.get(status.f_type & 0xFFFFFFFF, NETWORK)


def measure_distance(path: str) -> int:
    """Return 0 for a local file system, 1 for a network file system, 2 for a store; a missing path is local."""
    return 2 if is_url(path) else int(find_kind(path) == NETWORK)


def count_readers(path: str) -> int:
    """Return the number of threads with which a rank reads the files of a folder."""
    return max(count_threads(), _FAR_READERS) if measure_distance(path) else count_threads()


def choose_map(path: str) -> Callable[[Callable[[T], R], Sequence[T]], Iterable[R]]:
    """Return a ``map`` for work on a folder's files: by several threads for network storage."""
    return partial(map_threads, threads=_FAR_READERS) if measure_distance(path) else map
