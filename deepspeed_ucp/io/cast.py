"""Element-type casts with the results of torch's ``.to``.

numpy casts where it can, without an import of torch. torch casts eight-bit types: ml_dtypes returns nan for values too
large for float8_e4m3fn, and is 14 times slower.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

FLOATING = frozenset({"float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"})
"""Element types that an export casts; others are not changed."""

_NUMPY = frozenset({"float64", "float32", "float16", "bfloat16"})
_STEP = 1 << 15
"""Elements per step; the intermediate results of a step fit into the processor cache."""


def cast(data: memoryview, source: str, into: memoryview, target: str) -> None:
    """Cast elements: round to nearest even, overflow becomes infinite, nan stays nan.

    Args:
        data: C-contiguous bytes of ``source`` elements.
        into: memory for as many ``target`` elements.
    """
    if source == target:
        into[:] = data
    elif source in _NUMPY and target in _NUMPY:
        _cast_numpy(np.frombuffer(data, find_dtype(source)), np.frombuffer(into, find_dtype(target)))
    elif data.nbytes:
        import torch

        elements = torch.frombuffer(data, dtype=getattr(torch, source))
        torch.frombuffer(into, dtype=getattr(torch, target)).copy_(elements)


def find_dtype(name: str) -> np.dtype[Any]:
    """Return the numpy dtype of an element type's name, from ``ml_dtypes`` if needed."""
    if not name.startswith(("bfloat", "float8")):
        return np.dtype(name)
    import ml_dtypes

    return np.dtype(getattr(ml_dtypes, name, name))


def _cast_numpy(data: npt.NDArray[Any], into: npt.NDArray[Any]) -> None:
    narrow = into.dtype.itemsize == 2  # by float32, as torch does
    with np.errstate(over="ignore", invalid="ignore"):
        for low in range(0, len(data), _STEP):
            part = data[low : low + _STEP]
            into[low : low + _STEP] = part.astype(np.float32, copy=False) if narrow else part


def average(copies: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the double-precision mean of tensors, which is exact for equal tensors.

    Raises:
        ValueError: the iterable is empty.
    """
    total, number = None, 0
    for copy in copies:
        total = copy.double() if total is None else total.add_(copy.double())
        number += 1
    if total is None:
        raise ValueError("the mean of no tensors")
    return total / number
