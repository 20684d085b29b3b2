"""JSON that preserves tuples, bytes, keys of any type, NaN and infinities to the bit."""

from __future__ import annotations

import json
import math
import struct
from typing import Any

from ...errors import UnsupportedError

_FLOAT, _TUPLE, _DICT, _BYTES = "$float", "$tuple", "$dict", "$bytes"


def is_plain(value: Any) -> bool:
    """Return True if a hyper-parameter is plain data."""
    if isinstance(value, (list, tuple)):
        return all(map(is_plain, value))
    return value is None or isinstance(value, (str, int, float, bool))


def dump_json(value: Any) -> str:
    """Dump plain data as one line of ASCII with sorted keys, equal for equal data.

    Raises:
        UnsupportedError: a value is not plain data.
    """
    return json.dumps(encode(value, ""), sort_keys=True, separators=(",", ":"), allow_nan=False)


def encode(value: Any, where: str) -> Any:
    """Encode plain data as JSON; errors name ``where``.

    Raises:
        UnsupportedError: the value is not plain data.
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {_FLOAT: struct.pack(">d", value).hex()}
    if isinstance(value, bytes):
        return {_BYTES: value.hex()}
    if isinstance(value, (list, tuple)):
        items = [encode(item, f"{where}[{at}]") for at, item in enumerate(value)]
        return {_TUPLE: items} if isinstance(value, tuple) else items
    if isinstance(value, dict):
        return _encode_dict(value, where)
    raise UnsupportedError(f"{where.lstrip('.') or 'value'}: {type(value).__name__} {value!r} is not plain data.")


def _encode_dict(value: dict[Any, Any], where: str) -> Any:
    if all(isinstance(key, str) and not key.startswith("$") for key in value):
        return {key: encode(item, f"{where}.{key}") for key, item in value.items()}
    pairs = [[encode(key, where), encode(item, f"{where}[{key!r}]")] for key, item in value.items()]
    return {_DICT: sorted(pairs, key=lambda pair: json.dumps(pair[0], sort_keys=True))}


def decode(found: dict[str, Any]) -> Any:
    """Return the value that :func:`encode` wrote as this object: an ``object_hook``."""
    if len(found) != 1:
        return found
    ((key, value),) = found.items()
    if key == _FLOAT:
        return struct.unpack(">d", bytes.fromhex(value))[0]
    if key == _TUPLE:
        return tuple(value)
    if key == _DICT:
        return {name: item for name, item in value}  # noqa: C416 - pairs of any types
    return bytes.fromhex(value) if key == _BYTES else found
