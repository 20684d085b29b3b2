"""Plain data as JSON that preserves tuples, bytes, keys of any type, NaN and infinities to the bit."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from typing import Any

from ...errors import UnsupportedError

_FLOAT, _TUPLE, _DICT, _BYTES = "$float", "$tuple", "$dict", "$bytes"

_DECODERS: dict[str, Callable[[Any], Any]] = {
    _FLOAT: lambda value: struct.unpack(">d", bytes.fromhex(value))[0],
    _TUPLE: tuple,
    _DICT: dict,
    _BYTES: bytes.fromhex,
}


def is_plain(value: Any) -> bool:
    """Return True if a hyper-parameter is plain data."""
    if isinstance(value, (list, tuple)):
        return all(map(is_plain, value))
    return value is None or isinstance(value, (str, int, float, bool))


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


def decode(value: Any) -> Any:
    """Return the value that :func:`encode` encoded.

    Raises:
        ValueError, TypeError: it was not encoded by :func:`encode`.
    """
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    decoded = {key: decode(item) for key, item in value.items()}
    (key, *more) = decoded or ("",)
    if more or key not in _DECODERS:
        return decoded
    return _DECODERS[key](decoded[key])
