"""Tests of the synthesiser without DeepSpeed: cases that no real engine saves."""

from __future__ import annotations

import pytest
import torch
from deepspeed.runtime.utils import partition_uniform

from .compare import differences
from .description import Layer, Model, Param, Run, Topology, random_state
from .files import build_files
from .stages import bidirectional, contiguous, interleaved

PIPE = Model((Param("0.up", (8, 3)), Param("1.down", (3, 8))), {}, (Layer(), Layer()))


@pytest.mark.parametrize("layers", range(1, 14))
@pytest.mark.parametrize("pp", [1, 2, 3, 5, 8])
def test_synthesised_contiguous_stages_equal_deepspeeds_uniform_ones(layers: int, pp: int) -> None:
    bounds = partition_uniform(layers, pp)
    assert contiguous(layers, pp) == tuple(tuple(range(bounds[rank], bounds[rank + 1])) for rank in range(pp))


def test_placements_of_small_pipelines() -> None:
    assert interleaved(8, 2, 2) == ((0, 1, 4, 5), (2, 3, 6, 7))
    assert bidirectional(8, 4) == ((0, 1, 6, 7), (2, 3, 4, 5), (2, 3, 4, 5), (0, 1, 6, 7))


def test_saves_of_older_releases_lack_the_degrees() -> None:
    topology = Topology(1, 3, tp=2, pp=2)
    for written in (True, False):
        files = build_files(PIPE, random_state(PIPE, 0), topology, Run(parallel_dimensions=written))
        assert ("checkpoint_parallel_dimensions" in files["mp_rank_03_model_states.pt"]) is written


def test_compare_distinguishes_tensors_by_storage() -> None:
    padded = torch.zeros(4)
    assert list(differences({"x": padded[:3]}, {"x": torch.zeros(3)})) == [".x: storage size 16 is not 12"]
    assert list(differences({"x": padded[1:]}, {"x": padded[:3]})) == [".x: storage offset 1 is not 0"]
