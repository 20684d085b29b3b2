"""Headers and other small things of foreign files: read by one rank, from the first place where that succeeds."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

from ...comm import Comm
from ...errors import CheckpointError, UnsupportedError
from ...io.memory import pause_collection
from ...io.paths import join_path
from ...io.store import read_small
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


def read_all(path: str, most: int) -> bytes:
    """A small file's bytes.

    Raises:
        CheckpointError: it cannot be read.
        UnsupportedError: it has more than ``most``.
    """
    try:
        data = read_small(path, most + 1)
    except OSError as error:
        raise CheckpointError(f"cannot be read ({error.strerror or error}).", path=path) from error
    if len(data) > most:
        raise UnsupportedError(f"has more than {most} bytes, which no file of its kind needs.", path=path)
    return data


def load_json(data: bytes, path: str, *, strict: bool = True) -> Any:
    """Parse a file's JSON.

    Args:
        strict: refuse duplicate keys and NaN, which readers interpret in different ways.

    Raises:
        CheckpointError: it cannot be parsed, or is nested too deeply.
    """
    options: dict[str, Any] = {"object_pairs_hook": _take_once, "parse_constant": _refuse} if strict else {}
    try:
        return json.loads(data.decode(), **options)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"cannot be parsed as JSON ({error}); the file is damaged.", path=path) from error


def _take_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key is there twice")
    return found


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")
