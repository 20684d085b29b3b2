"""Compare elements bitwise: number, first place and size of differences."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ..io.cast import find_dtype

Buffer = bytes | bytearray | memoryview
Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Tally:
    """The result of comparing elements.

    Attributes:
        numel: elements compared.
        differing: how many differ.
        first: position of the first that differs; -1 if none does.
        largest: largest absolute difference; inf if one side is not finite.
        relative: largest of |a - b| / max(|a|, |b|).
    """

    numel: int = 0
    differing: int = 0
    first: int = -1
    largest: float = 0.0
    relative: float = 0.0

    def join(self, other: Tally) -> Tally:
        """Add two results."""
        places = [each.first for each in (self, other) if each.differing]
        return Tally(
            self.numel + other.numel,
            self.differing + other.differing,
            min(places, default=-1),
            max(self.largest, other.largest),
            max(self.relative, other.relative),
        )

    def shift(self, start: int) -> Tally:
        """Count positions from ``start``."""
        return replace(self, first=self.first + start) if self.differing else self


def compare(left: Buffer, right: Buffer, dtype: str, other: str) -> Tally:
    """Compare elements of ``dtype`` with elements of dtype ``other``.

    Elements of one dtype are equal if their bits are; of two dtypes if their values are, or both are NaN.
    """
    first, second = np.frombuffer(left, find_dtype(dtype)), np.frombuffer(right, find_dtype(other))
    if dtype == other:
        bits = f"u{first.itemsize}" if first.itemsize <= 8 else f"V{first.itemsize}"
        places = np.flatnonzero(first.view(bits) != second.view(bits))
    else:
        places = np.flatnonzero(_differ_in_value(_widen(first), _widen(second)))
    if not len(places):
        return Tally(len(first))
    return Tally(len(first), len(places), int(places[0]), *_measure(_widen(first[places]), _widen(second[places])))


def _differ_in_value(first: Array, second: Array) -> Array:
    return np.asarray((first != second) & ~(np.isnan(first) & np.isnan(second)))


def _widen(data: Array) -> Array:
    """Convert to the widest type of the kind; 64-bit integers fit the mantissa of a long double."""
    kind = np.longdouble if data.dtype.kind in "iu" and data.itemsize == 8 else np.float64
    return data.astype(np.complex128 if data.dtype.kind == "c" else kind)


def _measure(first: Array, second: Array) -> tuple[float, float]:
    """Return the largest absolute and relative difference: 0 for two NaNs, inf for a NaN and a number."""
    with np.errstate(all="ignore"):
        apart = np.abs(first - second)
        size = np.maximum(np.abs(first), np.abs(second))
        relative = np.where(size > 0, apart / size, 0.0)
    alike = ~_differ_in_value(first, second)
    largest = (np.where(alike, 0.0, np.nan_to_num(each, nan=math.inf, posinf=math.inf)) for each in (apart, relative))
    return tuple(float(each.max()) for each in largest)  # type: ignore[return-value]
