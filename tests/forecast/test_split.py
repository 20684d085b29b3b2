"""Pipeline stages of a model that is not there."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_ucp.errors import MismatchError
from deepspeed_ucp.forecast.split import balance, find_layer, split_stages


@pytest.mark.parametrize(
    ("name", "layer"),
    [("12.mlp.weight", 12), ("model.layers.3.w1", 3), ("h.0.1.x", 0), ("wte.weight", None), ("block7.w", None)],
)
def test_layers_are_told_by_the_first_number(name: str, layer: int | None) -> None:
    assert find_layer(name) == layer


@given(st.lists(st.integers(1, 50), min_size=1, max_size=12), st.data())
def test_stages_are_runs_of_which_the_largest_is_as_small_as_can_be(sizes: list[int], data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, len(sizes)))
    found = balance(sizes, parts)
    assert found == sorted(found)
    assert set(found) == set(range(parts))
    largest = max(sum(size for size, part in zip(sizes, found, strict=True) if part == each) for each in range(parts))
    assert largest == _best(tuple(sizes), parts)


def _best(sizes: tuple[int, ...], parts: int) -> int:
    if parts == 1:
        return sum(sizes)
    return min(max(sum(sizes[:at]), _best(sizes[at:], parts - 1)) for at in range(1, len(sizes) - parts + 2))


def test_tied_modules_are_at_both_ends_and_what_has_no_number_goes_to_the_nearer_one() -> None:
    names = ["tied_modules.embed.w", "first", "0.a", "1.a", "2.a", "last"]
    stages = split_stages(names, dict.fromkeys(names, 10), 3)
    assert stages == {names[0]: (0, 2), "first": (0,), "0.a": (0,), "1.a": (1,), "2.a": (2,), "last": (2,)}
    with pytest.raises(MismatchError, match="4 pipeline stages, but the parameters' names tell of 3 layers"):
        split_stages(names, dict.fromkeys(names, 10), 4)
