"""Headers and other small things of foreign files: read by one rank, from the first place where that succeeds."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ...comm import Comm
from ...io.memory import pause_collection
from ...io.paths import join_path
from ..reading import explain_form
from ..table import FileTable

T = TypeVar("T")


def read_with(parse: Callable[[str], T], where: FileTable, name: str) -> T:
    """Read a file from the first place where that succeeds.

    Args:
        parse: reads the file at a path.

    Raises:
        CheckpointError: it is damaged or missing.
        UnsupportedError: ``parse`` does not know the form of its contents.
    """

    def read(folder: str) -> T:
        path = join_path(folder, name)
        with explain_form(path), pause_collection():
            return parse(path)

    return where.read(name, read)


def read_once(parse: Callable[[str], T], where: FileTable, name: str, comm: Comm) -> T:
    """The same, read by one rank for all; collective."""
    return where.once(name, lambda: read_with(parse, where, name), comm)
