"""Which checkpoint a user means by a folder."""

from __future__ import annotations

import os

from ..errors import CheckpointError
from .files import MANIFEST, UNIVERSAL, ZERO, check_tag, find_tags, is_state_file, read_latest


def find_checkpoint(path: str) -> str:
    """The folder of the checkpoint that ``path`` means.

    A folder with state files (one tag, or an atomic checkpoint) is itself; else ``latest`` in it is followed, or
    ``latest_universal`` where there is no ``latest``.

    Raises:
        CheckpointError: there is nothing of that kind; what lies there is named.
    """
    folder = path.rstrip("/") or path
    if not os.path.isdir(folder):
        what = "is a file, not a checkpoint's folder" if os.path.exists(folder) else "does not exist"
        raise CheckpointError(f"{folder} {what}.")
    if _holds_checkpoint(folder):
        return folder
    universal = os.path.join(folder, UNIVERSAL)
    if os.path.isfile(universal) and not os.path.isfile(os.path.join(folder, "latest")):
        return check_tag(folder, _read_line(universal))
    tag = read_latest(folder)
    if tag is None:
        tags = find_tags(folder)
        raise CheckpointError(
            f"{folder}: neither a checkpoint's folder nor one with `latest` ({len(os.listdir(folder))} entries, none "
            f"of them a checkpoint{': ' if tags else ''}{', '.join(tags)})."
        )
    return check_tag(folder, tag)


def _holds_checkpoint(folder: str) -> bool:
    return any(is_state_file(name) or name in (MANIFEST, ZERO) for name in os.listdir(folder))


def _read_line(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as stream:
            return stream.read().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error}).") from error
