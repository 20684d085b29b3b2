"""Read JSON documents from files and stores; errors name the file.

A missing file is a FileNotFoundError or NotADirectoryError, an unreadable one an OutOfReachError, another fault a plain
CheckpointError.
"""

from __future__ import annotations

import json
from typing import Any

from ..errors import CheckpointError
from .interface import explain_failure
from .store import read_small

MOST_BYTES = 1 << 26
"""Default size limit of a document."""

_NAMES = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
_DAMAGED = "It is damaged: restore the file."


def read_json(path: str, *, most: int = MOST_BYTES, advice: str = _DAMAGED, strict: bool = False) -> Any:
    """Read a JSON object from a file or a store.

    Args:
        most: size limit in bytes.
        advice: the remedy that errors end with.
        strict: also refuse repeated keys, NaN and infinities.
    """
    return parse_json(read_bounded(path, most, advice), path, advice=advice, strict=strict)


def read_bounded(path: str, most: int, advice: str = _DAMAGED) -> bytes:
    """Read a small file whole; CheckpointError if it exceeds ``most`` bytes."""
    try:
        data = read_small(path, most + 1)
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as error:
        raise explain_failure(path, "read", error) from error
    if len(data) > most:
        raise CheckpointError(f"has more than {most} bytes, which no file of its kind needs. {advice}", path=path)
    return data


def parse_json(data: bytes, path: str, *, advice: str = _DAMAGED, strict: bool = False) -> Any:
    """Parse a JSON object that has been read from ``path``."""

    def make_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(pairs)
        if len(fields) < len(pairs):
            raise ValueError("a key occurs twice")
        return fields

    hooks: dict[str, Any] = {"object_pairs_hook": make_dict, "parse_constant": _refuse_constant} if strict else {}
    try:
        value = json.loads(data.decode("utf-8"), **hooks)
    except RecursionError:
        raise CheckpointError(f"is nested too deeply. {advice}", path=path) from None
    except ValueError as error:
        raise CheckpointError(f"is no valid JSON ({error}). {advice}", path=path) from None
    if not isinstance(value, dict):
        kind_name = _NAMES.get(type(value), "a number")
        raise CheckpointError(f"holds {kind_name} where an object is expected. {advice}", path=path)
    return value


def _refuse_constant(constant: str) -> Any:
    raise ValueError(f"{constant} is not allowed")
