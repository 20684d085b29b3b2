"""Differences between topologies."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from deepspeed_ucp.model.flat import FlatBuffer, join_parameters
from deepspeed_ucp.model.topology import Topology, drop_labels, find_differences
from deepspeed_ucp.model.wrappers import BARE

FLAT = join_parameters(0, ("a", "b"), ((3,), (1, 5)), parts=2, partition=6, gaps=(1, 0))
BASE = Topology(1, "zero12", "bfloat16", dp=2, flats=(FLAT, join_parameters(1, ("c",), ((2,),), parts=2, partition=1)))

CHANGES: dict[str, Any] = {
    "undeclared": True, "elastic": True, "offload": "cpu/none",
    "wrapper": "bf16", "precision": "float32", "master": "bfloat16",
    "zero_stage": 2, "dp": 4, "tp": 2, "pp": 2, "sp": 2, "ep": 2, "flats": (FLAT,),
}  # fmt: skip

FLAT_CHANGES: dict[str, tuple[Any, str]] = {
    "names": (("b", "a"), "parameter order"),
    "shapes": (((3,), (5,)), "b (1, 5) → (5,)"),
    "offsets": ((0, 3), "parameter alignment"),
    "group": (1, "param group 0 → 1"),
    "partition": (8, "partition 6 → 8 elements"),
    "parts": (3, "partitions 2 → 3"),
    "by_parameter": (True, "cut by parameter on one side only"),
    "tensors": (((0, 6), (3, 6)), "tensors that are cut as one"),
    "ranks": (range(0, 4, 2), "on other ranks"),
}


@pytest.mark.parametrize("field", [field.name for field in fields(Topology)])
def test_a_difference_in_any_field_is_listed(field: str) -> None:
    value = CHANGES[field]
    text = "parameter layout: 2 → 1 parts" if field == "flats" else f"{field} {getattr(BASE, field)} → {value}"
    assert find_differences(BASE, replace(BASE)) == []
    assert find_differences(BASE, replace(BASE, **{field: value})) == [text]


@pytest.mark.parametrize("field", [field.name for field in fields(FlatBuffer)])
def test_a_difference_in_any_property_of_a_flat_buffer_is_listed(field: str) -> None:
    value, text = FLAT_CHANGES[field]
    changed = replace(FLAT, **{field: value})
    assert find_differences(BASE, replace(BASE, flats=(changed, BASE.flats[1]))) == [f"parameter layout: {text}"]


NEW_NAMES, NAMES_DIFFER = replace(FLAT, names=("a", "x")), "parameters (2 → 2 or other names)"
BARE_TOPOLOGY = replace(BASE, wrapper=BARE, dp=1, tp=2, flats=())


@pytest.mark.parametrize(
    ("source", "target", "listed"),
    [
        (BASE, replace(BASE, flats=(NEW_NAMES, BASE.flats[1])), [f"parameter layout: {NAMES_DIFFER}"]),
        # flat buffers are listed only if all other fields are equal
        (BASE, replace(BASE, dp=4, flats=(replace(FLAT, parts=4), BASE.flats[1])), ["dp 2 → 4"]),
        (BASE, replace(BASE, dp=4, flats=(FLAT,)), ["dp 2 → 4"]),
        (BASE, replace(BASE, zero_stage=3, wrapper="zero3"), ["zero_stage 1 → 3", "wrapper zero12 → zero3"]),
        # an engine without masters has no partitioning degree
        (replace(BASE, tp=2), BARE_TOPOLOGY, ["wrapper zero12 → none"]),
    ],
)
def test_differences_between_topologies_are_listed(source: Topology, target: Topology, listed: list[str]) -> None:
    assert find_differences(source, target) == listed


def test_a_topology_is_described_in_one_phrase() -> None:
    assert BASE.describe() == "ZeRO-1 dp=2 bfloat16 (zero12)"
    assert replace(BASE, tp=2, pp=4).describe() == "ZeRO-1 dp=2 tp=2 pp=4 bfloat16 (zero12)"
    assert BARE_TOPOLOGY.describe() == "ZeRO-1 tp=2 bfloat16 (none)"


def test_drop_labels_removes_names_of_process_groups() -> None:
    assert drop_labels({"lr": 1, "name": "ep_size_2", "moe": True}) == {"lr": 1}
    assert drop_labels({"lr": 1, "name": "mine"}) == {"lr": 1, "name": "mine"}
