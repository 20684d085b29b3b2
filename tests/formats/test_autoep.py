"""AutoEP's placement of experts, and its router's alias, in model states."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from deepspeed_ucp.formats.deepspeed.autoep import find_router_aliases, read_placements
from deepspeed_ucp.formats.deepspeed.headers import ModelHeader, Piece
from deepspeed_ucp.torchsave.records import FileRecord

affine = pytest.importorskip("deepspeed.checkpoint.autoep_affine", reason="DeepSpeed before 0.19 has no AutoEP")
autoep_placement_to_affine_map = affine.autoep_placement_to_affine_map
make_autoep_placement_descriptor = affine.make_autoep_placement_descriptor

SHAPES = {"m.0.mlp.experts.w1": (6, 5, 3), "m.0.mlp.experts.w2": (6, 3, 5)}


def describe(ranks: Sequence[Sequence[int]]) -> dict[str, Any]:
    """A layer as DeepSpeed describes it (engine.py ``_save_moe_checkpoint``)."""
    placement = make_autoep_placement_descriptor(6, ranks)
    maps = {name: autoep_placement_to_affine_map(placement, shape).to_dict() for name, shape in SHAPES.items()}
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


def test_releases_without_a_placement_are_contiguous() -> None:
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
def test_invalid_descriptions_are_refused(change: Callable[[dict[str, Any]], object], words: str) -> None:
    layer = copy.deepcopy(describe([[0, 1, 2], [3, 4, 5]]))
    change(layer)
    with pytest.raises(ValueError, match=words):
        read_placements([layer])


def test_the_routers_second_name_is_an_alias_if_the_bytes_are_equal() -> None:
    def piece(crc: int, shape: tuple[int, ...] = (6, 3)) -> Piece:
        return Piece(FileRecord(str(crc), 0, 72, crc), 0, shape, "float32")

    module = {
        "m.0.mlp.router.gate.weight": piece(1),
        "m.0.mlp.router.gate.bias": piece(2, (6,)),
        "m.0.mlp.gate.gate.weight": piece(1),
        "m.0.mlp.gate.gate.bias": piece(2, (6,)),
        "m.0.mlp.shared.gate.bias": piece(2, (6,)),
        "m.0.mlp.other.gate.weight": piece(1),
        "m.0.mlp.other.gate.bias": piece(3, (6,)),
        "m.1.mlp.router.gate.weight": piece(1),
        "m.1.mlp.gate.gate.weight": piece(1),
    }
    header = ModelHeader(module, False, (), None, {}, {}, {}, {}, None, placements={"m.0.mlp.experts.": ((0,),)})
    pairs = ((f"m.0.mlp.gate.gate.{end}", f"m.0.mlp.router.gate.{end}") for end in ("weight", "bias"))
    assert find_router_aliases(header) == dict(pairs)
