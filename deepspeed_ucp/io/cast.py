"""Casts between element types as torch's ``.to`` makes them, without importing torch where numpy can do it.

Eight-bit types are torch's: ml_dtypes makes nan of what is too large for float8_e4m3fn, and is 14 times slower.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

FLOATING = frozenset({"float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"})
"""Element types that an export casts; all others stay as they are."""

_NUMPY = frozenset({"float64", "float32", "float16", "bfloat16"})
_STEP = 1 << 15
"""Elements per step: what the intermediate results of a step take fits the cache."""


def cast(data: memoryview, source: str, into: memoryview, target: str) -> None:
    """Cast elements; round to nearest even, what is too large becomes infinite, nan stays nan.

    Args:
        data: C-contiguous bytes of ``source`` elements.
        into: bytes of as many ``target`` elements.
    """
    if source == target:
        into[:] = data
    elif source in _NUMPY and target in _NUMPY:
        _cast_numpy(np.frombuffer(data, find_dtype(source)), np.frombuffer(into, find_dtype(target)))
    else:
        _cast_torch(data, source, into, target)


def find_dtype(name: str) -> np.dtype[Any]:
    """Numpy's type of an element type's name; that of ``ml_dtypes`` where numpy has none of its own."""
    import ml_dtypes

    return np.dtype(getattr(ml_dtypes, name, name))


def _cast_numpy(data: npt.NDArray[Any], into: npt.NDArray[Any]) -> None:
    narrow = into.dtype.itemsize == 2  # by float32, as torch does
    with np.errstate(over="ignore", invalid="ignore"):
        for low in range(0, len(data), _STEP):
            part = data[low : low + _STEP]
            into[low : low + _STEP] = part.astype(np.float32, copy=False) if narrow else part


def _cast_torch(data: memoryview, source: str, into: memoryview, target: str) -> None:
    import torch

    if data.nbytes:
        elements = torch.frombuffer(data, dtype=getattr(torch, source))
        torch.frombuffer(into, dtype=getattr(torch, target)).copy_(elements)


def average(copies: Iterable[torch.Tensor]) -> torch.Tensor:
    """The mean of tensors in double precision, added in their order, so that equal copies give themselves.

    Raises:
        ValueError: there are none.
    """
    total, number = None, 0
    for copy in copies:
        total = copy.double() if total is None else total.add_(copy.double())
        number += 1
    if total is None:
        raise ValueError("the mean of no tensors")
    return total / number
