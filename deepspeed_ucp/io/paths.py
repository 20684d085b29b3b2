"""Local paths and URLs as strings, and the entries of folders."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.:-]+://")
_LOCAL = re.compile(r"(file|local)://")

LONGEST_PATH = 4096
"""Limit of the bytes of a path (``PATH_MAX``)."""

UPLOAD = ".ucp-save-"
"""Prefix of a folder below a tag that holds the files of one save in a store."""

FOLDER = -1
"""Size of a folder among a folder's entries."""


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
        """True for a folder."""
        return self.size == FOLDER


def is_below(path: str) -> bool:
    """Return True if a relative path is normalized and stays below its folder."""
    is_plain = path == os.path.normpath(path) and path not in (".", "..") and not path.startswith(("/", "../"))
    return is_plain and "\0" not in path and len(path) < LONGEST_PATH


def is_url(path: str) -> bool:
    """Return True for the URL of a store (``s3://bucket/run``), False for a local path."""
    return _URL.match(path) is not None and _LOCAL.match(path) is None


def normalize(path: str) -> str:
    """Return the absolute path or the URL, without ``/`` at its end and without ``file://``."""
    if not is_url(path):
        return os.path.abspath(_LOCAL.sub("", path, count=1))
    scheme, _, rest = path.partition("://")
    return f"{scheme}://{rest.rstrip('/')}"


def find_tag_folder(folder: str) -> str:
    """Return the tag's folder of a folder with a tag's files: the parent if it is a save's folder below the tag."""
    above, name = os.path.split(folder.rstrip("/"))
    return above if name.startswith(UPLOAD) else folder


def join_path(folder: str, name: str) -> str:
    """Return the path of a file in a folder. ``../name`` is relative to the tag's folder, with links resolved."""
    if not name.startswith("../"):
        return os.path.join(folder, name)
    folder = find_tag_folder(folder)
    if is_url(folder):
        return os.path.join(os.path.dirname(folder), name[3:])
    return os.path.normpath(os.path.join(os.path.realpath(folder) if os.path.islink(folder) else folder, name))


def find_store(url: str) -> str:
    """Return the store or the bucket of a URL: ``s3://bucket``."""
    return "/".join(url.split("/")[:3])
