"""The geometry of flat buffers: what each rank's cuts are, and what is padding."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_ucp.atoms import strip_compiled
from deepspeed_ucp.plan.geometry import Cut, accumulate_offsets, cut_flat
from deepspeed_ucp.targets import Flat
from deepspeed_ucp.targets.base import dtype_name, flatten
from tests.reshard import examples, models
from tests.synth import Model, Topology, group_layouts, partition_layout


@examples(150)
@given(model=models(), dp=st.integers(1, 9), aligned=st.booleans(), robin=st.booleans())
def test_cuts_are_deepspeeds(model: Model, dp: int, aligned: bool, robin: bool) -> None:
    """``cut_flat`` against the synthesiser's layout, which is held against real saves."""
    topology = Topology(2, dp, round_robin=robin, parameter_alignment=aligned)
    for group, whole in enumerate(group_layouts(model, topology)):
        names, numels = [p.name for p in whole.params], [p.numel for p in whole.params]
        size = whole.numel // dp
        for rank in range(dp):
            expected = partition_layout(model, topology)[rank][group].slices
            cuts = cut_flat(names, numels, whole.offsets, rank * size, (rank + 1) * size)
            assert cuts == [Cut(part.name, part.start, part.numel, part.offset) for part in expected]


def test_offsets_of_parameters_that_follow_each_other() -> None:
    assert accumulate_offsets([3, 0, 5]) == [0, 3, 3]
    assert accumulate_offsets([]) == []


@pytest.mark.parametrize(
    ("spans", "gaps"),
    [
        ([(0, 10)], []),
        ([], [(0, 10)]),
        ([(2, 3), (7, 2)], [(0, 2), (5, 7), (9, 10)]),
        ([(7, 3), (0, 2)], [(2, 7)]),
    ],
)
def test_padding_is_what_no_cut_covers(spans: list[tuple[int, int]], gaps: list[tuple[int, int]]) -> None:
    cuts = [Cut(f"p{offset}", 0, numel, offset) for offset, numel in spans]
    assert Flat(0, ("p",), cuts, torch.zeros(10), None).gaps() == gaps


def test_names_dtypes_and_memory() -> None:
    assert strip_compiled("_orig_mod.layer._orig_mod.weight") == "layer.weight"
    assert dtype_name(torch.bfloat16) == "bfloat16"
    tensor = torch.zeros(2, 3, requires_grad=True)
    flat = flatten(tensor)
    flat[4] = 1
    assert tensor[1, 1] == 1
    assert flatten(torch.zeros(3, 2).t()).shape == (2, 3)
