"""How far a path leads: to this machine's own disks, to a file system over the network, to a store."""

from __future__ import annotations

import os

from .filesystems import NETWORK, find_kind
from .memory import identify_host
from .store import is_url

Identity = tuple[int | str, ...]


def measure_distance(path: str) -> int:
    """0 for a local file system, 1 for one over the network, 2 for a store; a path that is not there is local."""
    if is_url(path):
        return 2
    return int(find_kind(path) == NETWORK)


def identify_file(path: str) -> Identity:
    """What tells a file from its copies elsewhere, on whichever machine: a local one its machine, device and inode."""
    if measure_distance(path):
        return (path,)
    try:
        found = os.stat(path)
    except OSError:
        return (identify_host(), path)
    return (identify_host(), found.st_dev, found.st_ino)
