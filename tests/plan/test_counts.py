"""A different number of experts is one fault for each block instead of one for each expert."""

from __future__ import annotations

import pytest

from deepspeed_ucp.errors import MismatchError
from deepspeed_ucp.model.view import EngineView
from deepspeed_ucp.plan.match import Match, match_parameters
from tests.plan.test_match import make_index

OWN = "m.{layer}.mlp.deepspeed_moe.experts.deepspeed_experts.{e}.w1.weight"
AUTOEP = "m.{layer}.mlp.experts.w1.{e}"


def name_all(form: str, experts: int) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {form.format(layer=n, e=e): (2, 3) for n in range(2) for e in range(experts)}
    return {**found, "m.0.mlp.gate.weight": (experts, 3), "m.0.dense": (5,)}


def match(saved: dict[str, tuple[int, ...]], live: dict[str, tuple[int, ...]], strict: bool = True) -> Match:
    shapes = {name: (shape,) for name, shape in live.items()}
    return match_parameters(make_index(saved), EngineView(shapes), strict=strict, with_states=True).require()


@pytest.mark.parametrize("form", [OWN, AUTOEP], ids=["own", "autoep"])
@pytest.mark.parametrize(("have", "want"), [(4, 8), (8, 4)])
def test_another_number_is_refused_by_block(form: str, have: int, want: int) -> None:
    with pytest.raises(MismatchError) as error:
        match(name_all(form, have), name_all(form, want))
    told = str(error.value)
    assert f"m.{{0-1}}.mlp: {have} experts in the checkpoint, {want} in the model" in told
    assert f"m.0.mlp.gate.weight: shape ({have}, 3) in the checkpoint, ({want}, 3) in the model" in told
    assert form.format(layer=0, e=7) not in told
    assert "Resume with the number of experts that was saved" in told


def test_a_router_of_another_size_is_left_to_the_patterns_by_a_lenient_load() -> None:
    """The patterns refuse it, because no rule declares its rows a vocabulary."""
    assert "m.0.mlp.gate.weight" in match(name_all(AUTOEP, 4), name_all(AUTOEP, 8), strict=False).resized


def test_experts_in_one_parameter() -> None:
    with pytest.raises(MismatchError, match=r"m\.up: shape \(4, 2, 3\) in the checkpoint, \(8, 2, 3\)"):
        match({"m.up": (4, 2, 3)}, {"m.up": (8, 2, 3)})


def test_a_dense_difference_does_not_mention_experts() -> None:
    with pytest.raises(MismatchError) as error:
        match({**name_all(AUTOEP, 4), "more": (1,)}, name_all(AUTOEP, 4))
    assert "expert" not in str(error.value)
