"""How far a path leads: to this machine's own disks, to a file system over the network, to a store."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TypeVar

from .filesystems import NETWORK, find_kind
from .paths import is_url
from .threads import count_threads, map_threads

T = TypeVar("T")
R = TypeVar("R")


def measure_distance(path: str) -> int:
    """0 for a local file system, 1 for one over the network, 2 for a store; a path that is not there is local."""
    if is_url(path):
        return 2
    return int(find_kind(path) == NETWORK)


_FAR_READERS = 16
"""Reads that are under way at once of what lies over a network: it answers late, but many at a time."""


def count_readers(path: str) -> int:
    """How many reads of a folder's files a rank has under way at once, by as many threads."""
    local = count_threads()
    return max(local, _FAR_READERS) if measure_distance(path) else local


def choose_map(path: str) -> Callable[[Callable[[T], R], Sequence[T]], Iterable[R]]:
    """``map`` for work that waits for a folder's files: over a network several at once."""
    return partial(map_threads, threads=_FAR_READERS) if measure_distance(path) else map
