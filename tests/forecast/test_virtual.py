"""Virtual targets: flat buffers, and who holds which elements."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_ucp.forecast.virtual import VirtualFlat, cut_sub_groups
from deepspeed_ucp.plan.geometry import accumulate_offsets, part_numel

FLATS = st.tuples(st.lists(st.integers(1, 30), min_size=1, max_size=6), st.integers(1, 7), st.booleans())


@given(FLATS)
def test_holders_of_elements_are_the_ranks_whose_cuts_have_them(drawn: tuple[list[int], int, bool]) -> None:
    numels, dp, by_parameter = drawn
    names = tuple(f"p{number}" for number in range(len(numels)))
    if by_parameter:
        parts = [part_numel(numel, dp) for numel in numels]
        flat = VirtualFlat(0, names, tuple(numels), tuple(accumulate_offsets(parts)), sum(parts), dp, True)
    else:
        partition = -(-sum(numels) // dp)
        flat = VirtualFlat(0, names, tuple(numels), tuple(accumulate_offsets(numels)), partition, dp)
    held = {
        (cut.name, cut.start + at): rank for rank in range(dp) for cut in flat.cuts(rank) for at in range(cut.numel)
    }
    assert len(held) == sum(numels)
    for place, numel in enumerate(numels):
        for rank, low, high in flat.find_holders(place, numel // 3, numel):
            assert all(held[names[place], element] == rank for element in range(low, high))
        covered = sum(high - low for _, low, high in flat.find_holders(place, numel // 3, numel))
        assert covered == numel - numel // 3


@pytest.mark.parametrize(
    ("size", "expected"), [(100, [(0, 4)]), (6, [(0, 2), (2, 4)]), (1, [(0, 1), (1, 2), (2, 3), (3, 4)])]
)
def test_sub_groups_end_with_the_parameter_that_reaches_their_size(size: int, expected: list[tuple[int, int]]) -> None:
    assert [(some.start, some.stop) for some in cut_sub_groups((7, 5, 8, 2), 2, size)] == expected
