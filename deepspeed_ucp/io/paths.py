"""Paths as strings, of this machine's file systems and of stores, and what they lead to."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.:-]+://")
_LOCAL = re.compile(r"(file|local)://")

LONGEST_PATH = 4096
"""Bytes of a path, which a system ends with one more (``PATH_MAX``)."""

UPLOAD = ".ucp-save-"
"""What the name of a folder below a tag begins with that holds the files of one save in a store."""

FOLDER = -1
"""Size of a folder among a folder's entries."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Something in a folder.

    Attributes:
        size: bytes of a file, ``FOLDER`` for a folder.
        changed: time of its last change, in seconds since 1970; 0 where that is not known.
        version: what a store tells each content of a file by (ETag, generation); empty for local files.
    """

    size: int
    changed: float
    version: str = ""

    @property
    def is_folder(self) -> bool:
        """Whether it is no file."""
        return self.size == FOLDER


def is_below(path: str) -> bool:
    """Whether a path leads to something below a folder, by one name alone."""
    is_plain = path == os.path.normpath(path) and path not in (".", "..") and not path.startswith(("/", "../"))
    return is_plain and "\0" not in path and len(path) < LONGEST_PATH


def is_url(path: str) -> bool:
    """Whether a path leads to a store (``s3://bucket/run``), not into a local file system."""
    return _URL.match(path) is not None and _LOCAL.match(path) is None


def normalize(path: str) -> str:
    """The absolute form of a path, without ``/`` at its end; ``file://`` is taken off."""
    if not is_url(path):
        return os.path.abspath(_LOCAL.sub("", path, count=1))
    scheme, _, rest = path.partition("://")
    return f"{scheme}://{rest.rstrip('/')}"


def find_tag_folder(folder: str) -> str:
    """Return the tag's folder of a folder with a tag's files: the parent if it is a save's folder below the tag."""
    above, name = os.path.split(folder.rstrip("/"))
    return above if name.startswith(UPLOAD) else folder


def join_path(folder: str, name: str) -> str:
    """The path of a file by its name in a folder; a name that begins with ``../`` is of one beside the tag's folder.

    Beside a folder that is a link is where that leads.
    """
    if not name.startswith("../"):
        return os.path.join(folder, name)
    folder = find_tag_folder(folder)
    if is_url(folder):
        return os.path.join(os.path.dirname(folder), name[3:])
    return os.path.normpath(os.path.join(os.path.realpath(folder) if os.path.islink(folder) else folder, name))


def find_store(url: str) -> str:
    """The part of a URL that names the store, or the bucket: ``s3://bucket``."""
    return "/".join(url.split("/")[:3])
