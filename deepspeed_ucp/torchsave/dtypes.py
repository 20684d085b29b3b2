"""Element types by the names in ``torch.save`` files, and conversion of single elements to and from bytes."""

from __future__ import annotations

import re
from typing import Any, Final

import numpy as np

from ..errors import CheckpointError
from ..model import ITEMSIZE

STORAGE_DTYPES: Final = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
}
"""Storage class → dtype; other dtypes are written as untyped bytes (torch/storage.py ``_new_dtypes``)."""

STORAGES: Final = {dtype: name for name, dtype in STORAGE_DTYPES.items()}

_NAME = re.compile(r"bool|b?float\d+\w*|complex\d+|q?u?int\d+(x\d+)?|bits\d+(x\d+)?")
"""Pickled names of torch's dtypes. A pattern, because importing torch takes seconds."""


def is_dtype(kind: str) -> bool:
    """Return True if a dotted name names a torch dtype."""
    module, _, name = kind.rpartition(".")
    return module == "torch" and _NAME.fullmatch(name) is not None


def is_storage(kind: str) -> bool:
    """Return True if a dotted name names a torch storage class."""
    module, _, name = kind.rpartition(".")
    return module in ("torch", "torch.storage") and (name in STORAGE_DTYPES or name == "UntypedStorage")


def unpack_scalar(dtype: str, data: bytes) -> Any:
    """Convert the little-endian bytes of one element to a Python number; ``dtype`` is a key of ``ITEMSIZE``."""
    return np.frombuffer(data, _find_dtype(dtype))[0].item()


def pack_scalar(dtype: str, value: Any) -> bytes:
    """Convert a number to the bytes of one element.

    Raises:
        CheckpointError: the dtype is unknown or cannot hold the value.
    """
    try:
        kind = _find_dtype(dtype)
        if kind.kind in "iu" and value != int(value):
            raise ValueError(f"{value} is not an integer")
        return np.asarray(value, kind).tobytes()
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise CheckpointError(
            f"a 0-dim tensor of dtype {dtype} cannot be written ({error}); known: {', '.join(ITEMSIZE)}"
        ) from None


def _find_dtype(name: str) -> np.dtype[Any]:
    if name not in ITEMSIZE:
        raise KeyError(name)
    if not name.startswith(("bfloat", "float8")):
        return np.dtype(name)
    import ml_dtypes

    return np.dtype(getattr(ml_dtypes, name, name))
