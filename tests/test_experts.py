"""Experts: their names and distribution over ranks, AutoEP's placements, and other numbers of experts."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from deepspeed_ucp.errors import MismatchError
from deepspeed_ucp.extensions.experts.autoep import find_router_aliases, read_placements
from deepspeed_ucp.extensions.experts.names import (
    assign_experts,
    count_experts,
    cut_number,
    find_expert,
    find_layer,
    is_expert,
    name_experts,
)
from deepspeed_ucp.formats.deepspeed.headers import Piece
from deepspeed_ucp.model.records import Record
from deepspeed_ucp.model.view import EngineView
from deepspeed_ucp.plan.match import Match, match_parameters
from tests.plan.matching import make_index

LAYER = "body.3.deepspeed_moe.experts.deepspeed_experts."


def name_all(layers: int, experts: range, ends: tuple[str, ...] = ("w", "b")) -> list[str]:
    return [
        f"{layer}.deepspeed_moe.experts.deepspeed_experts.{expert}.{end}"
        for layer in range(layers)
        for expert in experts
        for end in ends
    ]


@pytest.mark.parametrize(
    ("name", "found"),
    [
        (f"{LAYER}12.fc.weight", (LAYER, 12)),
        ("deepspeed_moe.experts.deepspeed_experts.0.bias", ("deepspeed_moe.experts.deepspeed_experts.", 0)),
        (f"{LAYER}12fc.weight", None),
        (f"{LAYER}٣.fc.weight", None),
        (f"{LAYER}{'9' * 5000}.fc.weight", None),
        ("body.3.deepspeed_moe.gate.wg.weight", None),
        ("mydeepspeed_moe.experts.deepspeed_experts.1.w", None),
        (f"a.{LAYER}1.{LAYER}2.w", (f"a.{LAYER}1.{LAYER}", 2)),
    ],
)
def test_parameter_names_of_experts_are_recognized(name: str, found: tuple[str, int] | None) -> None:
    assert find_expert(name) == found


def test_expert_numbers_of_a_rank_become_numbers_in_the_layer() -> None:
    assert cut_number(f"{LAYER}3.fc.w") == cut_number(f"{LAYER}0.fc.w") == (LAYER, ".fc.w")
    assert cut_number("dense") == ("dense", "")
    assert count_experts([f"{LAYER}0.w", f"{LAYER}2.w", "dense"]) == {LAYER: 3}
    named = [{f"{LAYER}{number}.fc.w": (3, 2)} for number in (1, 7)]
    assert name_experts(f"{LAYER}1.fc.w", (3, 2), [range(3), range(6, 9)]) == named


def test_fused_experts_are_split_in_the_ranks_order() -> None:
    """These are AutoEP's experts."""
    parts = {"m.0.mlp.experts.w1.3": (5, 6), "m.0.mlp.experts.w1.1": (5, 6)}
    _, named = name_experts("m.0.mlp.experts.w1", (2, 5, 6), [(0, 2), (3, 1)])
    assert (named, list(named)) == (parts, list(parts))
    held = {"m.0.mlp.experts."}
    assert find_layer("m.0.mlp.experts.w1", held) == "m.0.mlp.experts."
    assert find_layer("m.0.mlp.router.gate.weight", held) is None
    assert find_layer("m.1.mlp.experts.w1", held) is None
    assert all(map(is_expert, [*parts, "experts.w3.0", f"{LAYER}1.fc.w"]))
    assert not any(map(is_expert, ["m.experts.w1", "m.experts.w4.0", "m.experts.w1.0.bias", "myexperts.w1.0"]))


@pytest.mark.parametrize("live", [1, 2, 4])
@pytest.mark.parametrize("saved", [1, 2, 4])
def test_experts_are_distributed_in_the_modules_order(live: int, saved: int) -> None:
    """For groups of experts only, and for groups of all parameters of the module."""

    def mix(experts: range) -> list[str]:
        size = 2 * len(experts)
        names = name_all(2, experts)
        return ["in", "0.gate", *names[:size], "0.norm", "1.gate", *names[size:], "out"]

    ranks = [[range(low, low + 4 // degree) for low in range(0, 4, 4 // degree)] for degree in (live, saved)]
    for make in (partial(name_all, 2), mix):
        names = list(dict.fromkeys(name for experts in ranks[0] for name in make(experts)))
        assert assign_experts(names, saved) == [make(experts) for experts in ranks[1]]
    backwards = list(dict.fromkeys(name for experts in ranks[0] for name in mix(experts)[::-1]))
    if live == saved:
        assert assign_experts(backwards, saved, live) == [mix(experts)[::-1] for experts in ranks[1]]
    elif live < 4:  # with a single expert per rank the order is unknown
        with pytest.raises(ValueError, match=f"another order than the module, and {live} .*, where .* had {saved}"):
            assign_experts(backwards, saved, live)


def test_expert_names_that_cannot_be_distributed_are_refused() -> None:
    by_expert = [name for expert in range(4) for layer in (0, 1) for name in name_all(2, range(expert, expert + 1))]
    with pytest.raises(ValueError, match="another order"):
        assign_experts([*reversed(name_all(2, range(4)))], 2)
    with pytest.raises(ValueError, match="another order"):
        assign_experts(sorted(set(by_expert), key=by_expert.index)[1:], 2)
    with pytest.raises(ValueError, match="3 expert-parallel ranks do not fit"):
        assign_experts(name_all(1, range(4)), 3)
    assert assign_experts(["dense", "other"], 3) == [["dense", "other"]] * 3


# -- AutoEP's placements in model states -------------------------------------------------------------------------------

SHAPES = {"m.0.mlp.experts.w1": (6, 5, 3), "m.0.mlp.experts.w2": (6, 3, 5)}


def describe(ranks: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Describe a layer like DeepSpeed (engine.py ``_save_moe_checkpoint``)."""
    affine = pytest.importorskip("deepspeed.checkpoint.autoep_affine", reason="DeepSpeed before 0.19 has no AutoEP")
    placement = affine.make_autoep_placement_descriptor(6, ranks)
    maps = {name: affine.autoep_placement_to_affine_map(placement, shape).to_dict() for name, shape in SHAPES.items()}
    return {
        "num_experts": 6,
        "ep_size": len(ranks),
        "expert_key_prefix": "m.0.mlp.experts",
        "expert_placement": placement,
        "affine_maps": {"version": 1, "params": maps},
    }


@pytest.mark.parametrize(
    "ranks", [[[0, 1, 2, 3, 4, 5]], [[0, 1, 2], [3, 4, 5]], [[5, 0], [2, 1], [3, 4]], [[1, 3, 5], [4, 2, 0]]]
)
def test_placements_of_any_order_agree_with_the_affine_maps(ranks: list[list[int]]) -> None:
    assert read_placements([describe(ranks)]) == {"m.0.mlp.experts.": tuple(map(tuple, ranks))}


def test_experts_of_releases_without_a_placement_are_contiguous() -> None:
    layer = {"num_experts": 6, "ep_size": 2, "expert_key_prefix": "experts"}
    assert read_placements([layer]) == {"experts.": ((0, 1, 2), (3, 4, 5))}
    assert read_placements(None) == {}


def _piece(layer: dict[str, Any]) -> Any:
    return layer["affine_maps"]["params"]["m.0.mlp.experts.w1"]["ranks"][1]["pieces"][0]


def _swap(layer: dict[str, Any]) -> None:
    ranks = layer["expert_placement"]["ranks"]
    ranks[0]["experts"], ranks[1]["experts"] = ranks[1]["experts"], ranks[0]["experts"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_swap, "affine map of m.0.mlp.experts.w1 is not its expert placement"),
        (lambda layer: _piece(layer).update(scale=0.5), "not of whole experts"),
        (lambda layer: _piece(layer).update(shape=[3, 5, 2]), "not of whole experts"),
        (lambda layer: _piece(layer).update(shape=[1 << 40, 5, 3]), "more experts than there are"),
        (lambda layer: _piece(layer)["source"].__setitem__(0, 7), "not of whole experts"),
        (lambda layer: layer["expert_placement"]["ranks"][1]["experts"].append(0), "not each is on one rank"),
        (lambda layer: layer["expert_placement"]["ranks"][1]["experts"].pop(), "not each is on one rank"),
        (lambda layer: layer["expert_placement"]["ranks"].pop(), "not each is on one rank"),
        (lambda layer: layer["expert_placement"]["ranks"][1].update(rank=2), "not numbered from 0"),
        (lambda layer: layer["expert_placement"].update(version=2), "of version 2"),
        (lambda layer: layer.update(num_experts=1 << 40), "experts in a layer"),
    ],
)
def test_invalid_placements_are_refused(change: Callable[[dict[str, Any]], object], words: str) -> None:
    layer = copy.deepcopy(describe([[0, 1, 2], [3, 4, 5]]))
    change(layer)
    with pytest.raises(ValueError, match=words):
        read_placements([layer])


def test_the_routers_second_name_is_an_alias_if_the_bytes_are_equal() -> None:
    def piece(crc: int, shape: tuple[int, ...] = (6, 3)) -> Piece:
        return Piece(Record(0, 72, crc), 0, shape, "float32")

    module = {
        "m.0.mlp.router.gate.weight": piece(1),
        "m.0.mlp.router.gate.bias": piece(2, (6,)),
        "m.0.mlp.gate.gate.weight": piece(1),
        "m.0.mlp.gate.gate.bias": piece(2, (6,)),
        "m.0.mlp.shared.gate.bias": piece(2, (6,)),
        "m.0.mlp.other.gate.weight": piece(1),
        "m.0.mlp.other.gate.bias": piece(3, (6,)),
        "m.0.mlp.turned.gate.weight": replace(piece(1), fault="its memory is not contiguous"),
        "m.0.mlp.turned.gate.bias": piece(2, (6,)),
        "m.1.mlp.router.gate.weight": piece(1),
        "m.1.mlp.gate.gate.weight": piece(1),
    }
    pairs = ((f"m.0.mlp.gate.gate.{end}", f"m.0.mlp.router.gate.{end}") for end in ("weight", "bias"))
    assert find_router_aliases(["m.0.mlp.experts."], module) == dict(pairs)


def test_a_second_name_of_a_router_is_no_alias_without_checksums() -> None:
    """It is one if both names have the same record."""
    same, other = (Piece(Record(offset, 72, None), 0, (6, 3), "float32") for offset in (0, 72))
    for piece in (same, other):
        aliases = find_router_aliases(["m.experts."], {"m.router.gate.weight": same, "m.gate.gate.weight": piece})
        assert bool(aliases) is (piece is same)


# -- another number of experts is one fault for each block ------------------------------------------------------------

OWN = "m.{layer}.mlp.deepspeed_moe.experts.deepspeed_experts.{e}.w1.weight"
AUTOEP = "m.{layer}.mlp.experts.w1.{e}"


def shape_all(form: str, experts: int) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {form.format(layer=n, e=e): (2, 3) for n in range(2) for e in range(experts)}
    return {**found, "m.0.mlp.gate.weight": (experts, 3), "m.0.dense": (5,)}


def compare(saved: dict[str, tuple[int, ...]], live: dict[str, tuple[int, ...]]) -> Match:
    shapes = {name: (shape,) for name, shape in live.items()}
    return match_parameters(make_index(saved), EngineView(shapes), strict=True, with_states=True).require()


@pytest.mark.parametrize("form", [OWN, AUTOEP], ids=["own", "autoep"])
@pytest.mark.parametrize(("have", "want"), [(4, 8), (8, 4)])
def test_another_number_of_experts_is_one_error_for_each_block(form: str, have: int, want: int) -> None:
    with pytest.raises(MismatchError) as error:
        compare(shape_all(form, have), shape_all(form, want))
    message = str(error.value)
    assert f"m.{{0-1}}.mlp: {have} experts in the checkpoint, {want} in the model" in message
    assert f"m.0.mlp.gate.weight: shape ({have}, 3) in the checkpoint, ({want}, 3) in the model" in message
    assert form.format(layer=0, e=7) not in message
    assert "Resume with the number of experts that was saved" in message


def test_an_error_about_dense_parameters_does_not_mention_experts() -> None:
    with pytest.raises(MismatchError) as error:
        compare({**shape_all(AUTOEP, 4), "more": (1,)}, shape_all(AUTOEP, 4))
    assert "expert" not in str(error.value)
