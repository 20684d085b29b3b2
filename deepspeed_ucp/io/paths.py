"""Local paths and URLs, the entries of folders, and the kinds of storage."""

from __future__ import annotations

import ctypes
import functools
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from .threads import count_threads, map_threads

T = TypeVar("T")
R = TypeVar("R")

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.:-]+://")
_LOCAL = re.compile(r"(file|local)://")

LONGEST_PATH = 4096
"""Limit of the bytes of a path (``PATH_MAX``)."""

UPLOAD = ".ucp-save-"
"""In a store: prefix of a folder below a tag with the files of one save. In a folder of tags: part of the name of the
hidden folder that a save is written to before it is renamed to its tag."""

FOLDER = -1
"""Size of a folder among a folder's entries."""

DISK, MEMORY, NETWORK = "disk", "memory", "network"

_KINDS = {
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


@dataclass(frozen=True, slots=True)
class Entry:
    """A file or a folder.

    Attributes:
        size: bytes of a file, ``FOLDER`` for a folder.
        changed: time of its last change, in seconds since 1970; 0 if unknown.
        version: identifies the content in a store (ETag, generation); empty for local files.
    """

    size: int
    changed: float
    version: str = ""

    @property
    def is_folder(self) -> bool:
        return self.size == FOLDER


def is_below(path: str) -> bool:
    """Return True if a relative path is normalized and stays below its folder."""
    is_plain = path == os.path.normpath(path) and path not in (".", "..") and not path.startswith(("/", "../"))
    return is_plain and "\0" not in path and len(path) < LONGEST_PATH


def is_url(path: str) -> bool:
    """Return True for a store's URL (``s3://bucket/run``), False for a local path."""
    return _URL.match(path) is not None and _LOCAL.match(path) is None


def normalize(path: str) -> str:
    """Return an absolute path or a URL without a final ``/`` and without ``file://``."""
    if not is_url(path):
        return os.path.abspath(_LOCAL.sub("", path, count=1))
    scheme, _, rest = path.partition("://")
    return f"{scheme}://{rest.rstrip('/')}"


def find_tag_folder(folder: str) -> str:
    """Return the tag's folder, given it or the folder of one save (``UPLOAD``) in it."""
    above, name = os.path.split(folder.rstrip("/"))
    return above if name.startswith(UPLOAD) else folder


def join_path(folder: str, name: str) -> str:
    """Return a file's path in a folder; ``../name`` starts at the tag's real folder."""
    if not name.startswith("../"):
        return os.path.join(folder, name)
    folder = find_tag_folder(folder)
    if is_url(folder):
        return os.path.join(os.path.dirname(folder), name[3:])
    return os.path.normpath(os.path.join(os.path.realpath(folder) if os.path.islink(folder) else folder, name))


def find_root_url(url: str) -> str:
    """Return scheme and host or bucket of a URL: ``s3://bucket``."""
    return "/".join(url.split("/")[:3])


class _Statfs(ctypes.Structure):
    _fields_ = (("f_type", ctypes.c_long), ("rest", ctypes.c_char * 512))


@functools.cache
def load_libc() -> ctypes.CDLL:
    """Return the C library with the types of functions that take addresses or sizes."""
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


def find_storage_kind(file: int | str) -> str:
    """Return DISK, MEMORY or NETWORK for a path or descriptor; empty if unknown."""
    libc, status = load_libc(), _Statfs()
    address = ctypes.byref(status)
    failed = libc.fstatfs(file, address) if isinstance(file, int) else libc.statfs(os.fsencode(file), address)
    return "" if failed else _KINDS.get(status.f_type & 0xFFFFFFFF, NETWORK)


def measure_distance(path: str) -> int:
    """Return 0 for local storage or a missing path, 1 for a network, 2 for a store."""
    return 2 if is_url(path) else int(find_storage_kind(path) == NETWORK)


def count_readers(path: str) -> int:
    """Return the number of threads with which a rank reads the files of a folder."""
    return max(count_threads(), _FAR_READERS) if measure_distance(path) else count_threads()


def choose_map(path: str) -> Callable[[Callable[[T], R], Sequence[T]], Iterable[R]]:
    """Return ``map``, or a threaded one if ``path`` is on a network or in a store."""
    return partial(map_threads, threads=_FAR_READERS) if measure_distance(path) else map
