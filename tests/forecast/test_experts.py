"""The param groups of experts that DeepSpeed makes, foreseen."""

from __future__ import annotations

from collections import Counter

import pytest

from deepspeed_ucp.experts import place_experts
from deepspeed_ucp.forecast.experts import SpreadLayer, plan_groups

LAYER = "{}.deepspeed_moe.experts.deepspeed_experts."


def name_experts(layer: str, count: int) -> list[str]:
    return [f"{LAYER.format(layer)}{number}.{end}" for number in range(count) for end in ("a", "b")]


def spread(count: int, degree: int, dp: int) -> SpreadLayer:
    return SpreadLayer(count, tuple(place_experts(dp, degree, data_first=False)))


def test_degrees_are_in_the_order_of_their_names() -> None:
    """``ep_size_16`` stands before ``ep_size_2``; each rank's part of a group is one."""
    layers = {LAYER.format(layer): spread(16, degree, 16) for layer, degree in (("m", 2), ("n", 16))}
    names = [*name_experts("m", 16), *name_experts("n", 16)]
    planned = plan_groups([(["dense", *names], {})], layers, dict.fromkeys(names, (3,)), limit=1000)
    assert Counter(group.number for group in planned) == {0: 1, 1: 16, 2: 2}


@pytest.mark.parametrize(("limit", "sizes"), [(12, [2, 2]), (11, [1] * 4), (17, [2, 2]), (18, [3, 1]), (1, [1] * 4)])
def test_a_group_is_as_large_as_it_may_be(limit: int, sizes: list[int]) -> None:
    """Four tensors of 6 elements on a rank, cut at ``limit`` elements."""
    names, layers = name_experts("m", 4), {LAYER.format("m"): spread(4, 2, 2)}
    planned = plan_groups([(names, {})], layers, dict.fromkeys(names, (3, 2)), limit)
    assert [len(group.tensors) for group in planned if group.ranks == range(0, 2, 2)] == sizes
