"""How far a path leads: to this machine's own disks, to a file system over the network, to a store."""

from __future__ import annotations

import os
from pathlib import Path

from .store import is_url

_MOUNTS = Path("/proc/self/mountinfo")
_NETWORK = (
    *("nfs", "lustre", "gpfs", "beegfs", "cifs", "smb", "ceph", "fuse", "9p", "wekafs", "panfs", "afs", "virtiofs"),
    *("gfs2", "ocfs2", "orangefs", "pvfs2"),
)
"""How the names of those kinds of file systems begin."""


def measure_distance(path: str) -> int:
    """0 for a local file system, 1 for one over the network, 2 for a store; a path that is not there is local."""
    if is_url(path):
        return 2
    return int(_find_kind(path).startswith(_NETWORK))


def _find_kind(path: str) -> str:
    """The kind of file system that a path lies in; empty where the system does not tell."""
    try:
        device = os.stat(path).st_dev
        lines = _MOUNTS.read_text().splitlines()
    except OSError:
        return ""
    wanted = f"{os.major(device)}:{os.minor(device)}"
    return next((line.split(" - ", 1)[1].split()[0] for line in lines if line.split()[2] == wanted), "")
