"""Comparison of elements by value and by bit."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from deepspeed_ucp.examine.diff import AtomDifference, Tally, compare

DTYPES = ["float64", "float32", "bfloat16", "float16", "int64", "int32", "int16", "int8", "uint8", "bool", "complex64"]


@pytest.mark.parametrize("dtype", [*DTYPES, "complex128", "float8_e4m3fn", "float8_e5m2"])
def test_elements_of_any_dtype_are_compared(dtype: str) -> None:
    values = (torch.arange(101) % 7 - 2).abs().to(getattr(torch, dtype))
    other = values.clone()
    other[13], other[50] = other[13] == 0, other[50]
    left, right = (each.view(torch.uint8).numpy().tobytes() for each in (values, other))
    assert compare(left, left, dtype, dtype) == Tally(101)
    found = compare(left, right, dtype, dtype)
    distance = abs(complex(values[13].item()) - complex(other[13].item()))
    assert (found.differing, found.first, found.largest) == (1, 13, distance)
    assert found.relative == 1.0


NEGATIVE_NAN = np.array([0xFFC00000], np.uint32).view(np.float32)


@pytest.mark.parametrize(
    ("left", "right", "differing", "largest"),
    [
        (np.float32([math.nan]), np.float32([math.nan]), 0, 0.0),
        (np.float32([math.nan, 1.5]), np.float64([math.nan, 1.5]), 0, 0.0),
        (np.float32([math.nan]), np.float32([1]), 1, math.inf),
        (np.float32([math.nan]), NEGATIVE_NAN, 1, 0.0),
        (np.float32([math.inf]), np.float32([-math.inf]), 1, math.inf),
        (np.array([2**60, 2**60 + 1]), np.array([2**60, 2**60 + 2]), 1, 1.0),
        (np.array([-(2**63)]), np.array([2**63 - 1]), 1, float(2**64 - 1)),
        (np.array([0.0]), np.array([-0.0]), 1, 0.0),
    ],
)
def test_special_values_are_compared_by_bits(left: Any, right: Any, differing: int, largest: float) -> None:
    """This holds for elements of one dtype, even without a tolerance."""
    found = compare(left.tobytes(), right.tobytes(), str(left.dtype), str(right.dtype))
    assert (found.differing, found.first, found.largest) == (differing, len(left) - 1 if differing else -1, largest)
    assert not AtomDifference("x", "fp32", "values", ("float64", "float64"), tally=found).is_within(0.0)
