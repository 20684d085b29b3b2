"""Read headers and small files of foreign checkpoints from the first place that has them intact."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ...comm import Comm
from ...io.memory import pause_collection
from ...io.paths import join_path
from ..deepspeed.reading import explain_form
from ..places import FileTable

T = TypeVar("T")


def read_with(parse: Callable[[str], T], where: FileTable, name: str) -> T:
    """Read a file from the first place where ``parse`` succeeds.

    Args:
        parse: reads the file at a path.

    Raises:
        CheckpointError: the file is damaged or missing.
        UnsupportedError: the contents have an unknown form.
    """

    def read(folder: str) -> T:
        path = join_path(folder, name)
        with explain_form(path), pause_collection():
            return parse(path)

    return where.read(name, read)


def read_once(parse: Callable[[str], T], where: FileTable, name: str, comm: Comm) -> T:
    """Read a file on one rank for all; collective. Arguments as for :func:`read_with`."""
    return where.once(name, lambda: read_with(parse, where, name), comm)
