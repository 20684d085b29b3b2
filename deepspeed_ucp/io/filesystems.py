"""Kinds of file systems: of a disk of this machine, of its memory, over a network."""

from __future__ import annotations

import ctypes
import functools
import os

DISK, MEMORY, NETWORK = "disk", "memory", "network"

_LOCAL = {
    0xEF53: DISK,  # ext
    0x58465342: DISK,  # xfs
    0x9123683E: DISK,  # btrfs
    0xCA451A4E: DISK,  # bcachefs
    0xF2F52010: DISK,  # f2fs
    0x2FC12FC1: DISK,  # zfs
    0x794C7630: DISK,  # overlay, of whatever lies below
    0x01021994: MEMORY,  # tmpfs
    0x858458F6: MEMORY,  # ramfs
    0x958458F6: MEMORY,  # hugetlbfs
}
"""Kinds by what statfs tells (``f_type``; linux/magic.h). All others lie over a network, or behind a process (fuse)."""


class _Statfs(ctypes.Structure):
    _fields_ = (("f_type", ctypes.c_long), ("rest", ctypes.c_char * 512))


@functools.cache
def load_libc() -> ctypes.CDLL:
    """The C library, whose calls tell ``errno``; those that take addresses or sizes know their types."""
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
    """The kind of file system that a file lies in, open or by its path; empty where the system does not tell."""
    libc, found = load_libc(), _Statfs()
    address = ctypes.byref(found)
    failed = libc.fstatfs(file, address) if isinstance(file, int) else libc.statfs(os.fsencode(file), address)
    return "" if failed else _LOCAL.get(found.f_type & 0xFFFFFFFF, NETWORK)
