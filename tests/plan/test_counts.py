"""Other numbers of experts on the two sides: what is told, and that the rule which is shown does what it says."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import numpy as np
import pytest

from deepspeed_ucp.errors import MismatchError
from deepspeed_ucp.patterns import from_config
from deepspeed_ucp.plan.match import Match, TargetInventory, match_parameters
from deepspeed_ucp.plan.renames import apply_renames
from tests.plan.test_match import make_index
from tests.plan.test_recast import make_index as make_bytes
from tests.plan.test_recast import read

OWN = "m.{layer}.mlp.deepspeed_moe.experts.deepspeed_experts.{e}.w1.weight"
AUTOEP = "m.{layer}.mlp.experts.w1.{e}"


def name_all(form: str, experts: int) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {form.format(layer=n, e=e): (2, 3) for n in range(2) for e in range(experts)}
    return {**found, "m.0.mlp.gate.weight": (experts, 3), "m.0.dense": (5,)}


def match(saved: dict[str, tuple[int, ...]], live: TargetInventory, strict: bool = True) -> Match:
    return match_parameters(make_index(saved), live, strict=strict, with_states=True).require()


@pytest.mark.parametrize("form", [OWN, AUTOEP], ids=["own", "autoep"])
@pytest.mark.parametrize(("have", "want", "choose"), [(4, 8, lambda e: e % 4), (8, 4, lambda e: 2 * e)])
def test_the_rule_that_is_shown_brings_them_together(
    form: str, have: int, want: int, choose: Callable[[int], int]
) -> None:
    saved = name_all(form, have)
    shapes = {name: (shape,) for name, shape in name_all(form, want).items()}
    with pytest.raises(MismatchError) as error:
        match(saved, TargetInventory(shapes))
    told = str(error.value)
    assert f"m.{{0-1}}.mlp: {have} experts in the checkpoint, {want} in the model" in told
    assert f"m.0.mlp.gate.weight: shape ({have}, 3) in the checkpoint, ({want}, 3) in the model, a row for" in told
    assert form.format(layer=0, e=7) not in told
    assert told.count("m.0.mlp.gate.weight: shape") == 1  # not as a vocabulary of other rows as well
    rules = [json.loads(text) for text in re.findall(r"\{\"from\".*?(?:\"|null)\}(?=[ );])", told)]
    made = apply_renames(make_index(saved), shapes, from_config({"rename": rules}))
    found = match_parameters(made.index, TargetInventory(shapes, unfed=made.unfed), strict=True, with_states=True)
    assert found.saved.keys() == shapes.keys() - {"m.0.mlp.gate.weight"}
    index, data = make_bytes(saved)
    made = apply_renames(index, shapes, from_config({"rename": rules}))
    for name, number in ((form.format(layer=1, e=e), e) for e in range(want)):
        source = form.format(layer=1, e=choose(number))
        assert np.array_equal(read(made.index, data, name), read(index, data, source)), name


def test_what_has_experts_on_one_side_alone() -> None:
    shapes = {name: (shape,) for name, shape in name_all(AUTOEP, 4).items()}
    with pytest.raises(MismatchError, match=r"Rename rules tell which saved parameter feeds which expert"):
        match({"m.0.dense": (5,), "m.0.mlp.gate.weight": (4, 3)}, TargetInventory(shapes))
    with pytest.raises(MismatchError) as error:
        match({**name_all(AUTOEP, 4), "more": (1,)}, TargetInventory(shapes))
    assert "expert" not in str(error.value)


def test_a_router_is_refused_by_a_lenient_load_too() -> None:
    shapes = {name: (shape,) for name, shape in name_all(AUTOEP, 8).items()}
    with pytest.raises(MismatchError, match="a row for each expert") as error:
        match(name_all(AUTOEP, 4), TargetInventory(shapes), strict=False)
    assert "4 experts" not in str(error.value)  # missing ones are passed over by the user's word


@pytest.mark.parametrize(("have", "want"), [(4, 8), (8, 4)])
def test_the_rule_for_experts_in_one_parameter_brings_them_together(have: int, want: int) -> None:
    saved, live = {"m.up": (have, 2, 3)}, {"m.up": ((want, 2, 3),)}
    with pytest.raises(MismatchError) as error:
        match(saved, TargetInventory(live))
    (rule,) = re.findall(r"rename rule (\{.*?\"\})", str(error.value))
    index, data = make_bytes(saved)
    made = apply_renames(index, live, from_config({"rename": [json.loads(rule)]}))
    rows = [e % have if want > have else e * 2 for e in range(want)]
    assert np.array_equal(read(made.index, data, "m.up"), read(index, data, "m.up")[rows])
    assert match_parameters(made.index, TargetInventory(live), strict=True, with_states=True).saved == {"m.up": "m.up"}


@pytest.mark.parametrize(("have", "want"), [(2, 4), (4, 2), (2, 3), (12, 9)])
def test_the_rule_that_is_shown_for_layers_brings_them_together(have: int, want: int) -> None:
    saved, live = ({f"m.h.{n}.{x}": (2,) for n in range(n_) for x in ("w.weight", "b")} for n_ in (have, want))
    shapes = {name: (shape,) for name, shape in live.items()}
    with pytest.raises(MismatchError) as error:
        match(saved, TargetInventory(shapes))
    (rule,) = [json.loads(text) for text in re.findall(r"\{\"from\".*?\}\"\}|\{\"from\".*?\"\}", str(error.value))]
    index, data = make_bytes(saved)
    made = apply_renames(index, shapes, from_config({"rename": [rule]}))
    for n in range(want):
        source = f"m.h.{n * have // want}.b"
        assert np.array_equal(read(made.index, data, f"m.h.{n}.b"), read(index, data, source))
