"""Tests of the synthesiser without DeepSpeed: cases that no real engine saves."""

from __future__ import annotations

import pytest
import torch
from deepspeed.runtime.utils import partition_uniform

from .compare import differences
from .stages import bidirectional, contiguous, interleaved


@pytest.mark.parametrize("layers", range(1, 14))
@pytest.mark.parametrize("pp", [1, 2, 3, 5, 8])
def test_synthesised_contiguous_stages_equal_deepspeeds_uniform_ones(layers: int, pp: int) -> None:
    bounds = partition_uniform(layers, pp)
    assert contiguous(layers, pp) == tuple(tuple(range(bounds[rank], bounds[rank + 1])) for rank in range(pp))


def test_placements_of_small_pipelines() -> None:
    assert interleaved(8, 2, 2) == ((0, 1, 4, 5), (2, 3, 6, 7))
    assert bidirectional(8, 4) == ((0, 1, 6, 7), (2, 3, 4, 5), (2, 3, 4, 5), (0, 1, 6, 7))


def test_compare_distinguishes_tensors_by_storage() -> None:
    padded = torch.zeros(4)
    assert list(differences({"x": padded[:3]}, {"x": torch.zeros(3)})) == [".x: storage size 16 is not 12"]
    assert list(differences({"x": padded[1:]}, {"x": padded[:3]})) == [".x: storage offset 1 is not 0"]
