"""Forecast targets: how ZeRO 3 would cut a param group into sub-groups."""

from __future__ import annotations

import pytest

from deepspeed_ucp.wrappers import cut_sub_groups


@pytest.mark.parametrize(
    ("size", "expected"), [(100, [(0, 4)]), (6, [(0, 2), (2, 4)]), (1, [(0, 1), (1, 2), (2, 3), (3, 4)])]
)
def test_sub_groups_end_with_the_parameter_that_reaches_their_size(size: int, expected: list[tuple[int, int]]) -> None:
    assert [(some.start, some.stop) for some in cut_sub_groups((7, 5, 8, 2), 2, size)] == expected
