"""Comparing elements: equal to the bit, or how many differ, where first and by how much."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ..atoms import ITEMSIZE

Buffer = bytes | bytearray | memoryview
Array = npt.NDArray[Any]

_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@dataclass(frozen=True, slots=True)
class Tally:
    """What comparing elements has found.

    Attributes:
        numel: elements compared.
        differing: how many differ.
        first: position of the first that differs; -1 where none does.
        largest: largest absolute difference; inf where one side is no finite number.
        relative: largest of |a - b| / max(|a|, |b|).
    """

    numel: int = 0
    differing: int = 0
    first: int = -1
    largest: float = 0.0
    relative: float = 0.0

    def join(self, other: Tally) -> Tally:
        """Both together."""
        places = [each.first for each in (self, other) if each.differing]
        return Tally(
            self.numel + other.numel,
            self.differing + other.differing,
            min(places, default=-1),
            max(self.largest, other.largest),
            max(self.relative, other.relative),
        )

    def shift(self, start: int) -> Tally:
        """The same elements, counted from ``start``."""
        return replace(self, first=self.first + start) if self.differing else self


def compare(left: Buffer, right: Buffer, dtype: str, other: str) -> Tally:
    """Compare as many elements of dtype ``dtype`` as there are with those of dtype ``other``.

    Elements of one dtype are equal if their bits are; of two dtypes if their values are, or both are NaN.
    """
    numel = len(left) // ITEMSIZE[dtype]
    if dtype == other:
        unequal = _differ_in_bits(left, right, ITEMSIZE[dtype])
        if unequal is None:
            return Tally(numel)
        places = np.flatnonzero(unequal)
        if dtype in ("int64", "uint64") and len(places):
            first, second = _pick(left, places, 8), _pick(right, places, 8)
            return Tally(numel, len(places), int(places[0]), *_measure_wide(first, second, dtype))
        first, second = (_widen(_pick(data, places, ITEMSIZE[dtype]), dtype) for data in (left, right))
    else:
        first, second = _widen(np.frombuffer(left, np.uint8), dtype), _widen(np.frombuffer(right, np.uint8), other)
        places = np.flatnonzero((first != second) & ~(np.isnan(first) & np.isnan(second)))
        first, second = first[places], second[places]
    if not len(places):
        return Tally(numel)
    largest, relative = _measure(first, second)
    return Tally(numel, len(places), int(places[0]), largest, relative)


def _differ_in_bits(left: Buffer, right: Buffer, itemsize: int) -> Array | None:
    """Which elements differ; None where none does, which is told eight bytes at a time."""
    even = len(left) // 8 * 8
    same = np.array_equal(np.frombuffer(left, np.uint64, even // 8), np.frombuffer(right, np.uint64, even // 8))
    if same and bytes(memoryview(left)[even:]) == bytes(memoryview(right)[even:]):
        return None
    if itemsize in _BITS:
        kind = _BITS[itemsize]
        return np.asarray(np.frombuffer(left, kind) != np.frombuffer(right, kind))
    rows = [np.frombuffer(data, np.uint64).reshape(-1, itemsize // 8) for data in (left, right)]
    return np.asarray((rows[0] != rows[1]).any(1))


def _pick(data: Buffer, places: Array, itemsize: int) -> Array:
    """The bytes of elements."""
    return np.frombuffer(data, np.uint8).reshape(-1, itemsize)[places].reshape(-1)


def _widen(data: Array, dtype: str) -> Array:
    """Bytes → float64 (complex128 of complex numbers); integers beyond 2^53 are rounded."""
    if dtype == "bfloat16":
        return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if dtype.startswith("float8"):
        return _list_float8(dtype)[data]
    kind = np.dtype(dtype)
    return data.view(kind).astype(np.complex128 if kind.kind == "c" else np.float64)


def _list_float8(dtype: str) -> Array:
    """Values of all 256 bytes; both formats are e-bit exponents with a bias, without or with infinities."""
    mantissa_bits, bias = (3, 7) if dtype == "float8_e4m3fn" else (2, 15)
    codes = np.arange(256)
    exponent, mantissa = (codes & 0x7F) >> mantissa_bits, codes & ((1 << mantissa_bits) - 1)
    scale = 2.0 ** np.where(exponent == 0, 1 - bias, exponent - bias)
    values = scale * ((exponent > 0) + mantissa / (1 << mantissa_bits))
    if dtype == "float8_e4m3fn":
        values[(codes & 0x7F) == 0x7F] = math.nan
    else:
        values[exponent == 31] = np.where(mantissa[exponent == 31] == 0, math.inf, math.nan)
    return np.asarray(np.where(codes & 0x80, -values, values))


def _measure_wide(first: Array, second: Array, dtype: str) -> tuple[float, float]:
    """Largest absolute and relative difference of integers of 8 bytes, which float64 would round."""
    left, right = first.view(dtype), second.view(dtype)
    bits = first.view(np.uint64), second.view(np.uint64)
    apart = np.where(left > right, bits[0] - bits[1], bits[1] - bits[0]).astype(np.float64)
    size = np.maximum(np.abs(left.astype(np.float64)), np.abs(right.astype(np.float64)))
    return float(apart.max()), float((apart / size).max())


def _measure(first: Array, second: Array) -> tuple[float, float]:
    """Largest absolute and relative difference. Two NaNs are 0 apart; a NaN and a number for ever."""
    with np.errstate(all="ignore"):
        apart = np.abs(first - second)
        size = np.maximum(np.abs(first), np.abs(second))
        relative = np.where(size > 0, apart / size, 0.0)
    alike = (np.isnan(first) & np.isnan(second)) | (first == second)
    apart = np.where(alike, 0.0, np.nan_to_num(apart, nan=math.inf, posinf=math.inf))
    relative = np.where(alike, 0.0, np.nan_to_num(relative, nan=math.inf, posinf=math.inf))
    return float(apart.max()), float(relative.max())
