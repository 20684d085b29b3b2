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
    """The C library, whose calls tell ``errno``."""
    return ctypes.CDLL(None, use_errno=True)


@functools.cache
def _load_calls() -> ctypes.CDLL:
    libc = load_libc()
    libc.statfs.argtypes = (ctypes.c_char_p, ctypes.c_void_p)
    libc.fstatfs.argtypes = (ctypes.c_int, ctypes.c_void_p)
    return libc


def find_kind(file: int | str) -> str:
    """The kind of file system that a file lies in, open or by its path; empty where the system does not tell."""
    libc, found = _load_calls(), _Statfs()
    told = ctypes.byref(found)
    failed = libc.fstatfs(file, told) if isinstance(file, int) else libc.statfs(os.fsencode(file), told)
    return "" if failed else _LOCAL.get(found.f_type & 0xFFFFFFFF, NETWORK)
