"""Which loads of an unchanged topology are left to DeepSpeed: those that are known to be right, and no others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel

from deepspeed_ucp.targets.known import KNOWN, list_unknown


class Zero(BaseModel):
    """Fields of ``zero_optimization``: a harmless one, one that is not, and one of a release to come."""

    reduce_bucket_size: int = 1
    elastic_checkpoint: bool = False
    other_layout: int = 0


class TorchCheckpointEngine:
    """The reader that loads what ZeRO has in its files."""


class FastCheckpointEngine:
    """One that refuses it."""


def make(row: tuple[str, int] = ("zero12", 1), **differs: Any) -> Any:
    """A target without anything special but for what is named: of its topology, its engine, or itself."""
    wrapper, stage = row
    topology = {"wrapper": wrapper, "zero_stage": stage, "precision": "float32", "tp": 1, "pp": 1}
    topology |= {"offload": "none/none", **differs.pop("topology", {})}
    engine: dict[str, Any] = {"checkpoint_engine": TorchCheckpointEngine(), "use_node_local_storage": lambda: False}
    engine |= {"_config": SimpleNamespace(zero_config=differs.pop("zero", Zero())), **differs.pop("engine", {})}
    held: dict[str, Any] = {
        "experts": {},
        "params": {"a": 0},
        "owned": {"a"},
        "unfiled": list,
        "has_copies": True,
        **differs,
    }
    place = SimpleNamespace(tp=topology["tp"])
    return SimpleNamespace(topology=SimpleNamespace(**topology), engine=SimpleNamespace(**engine), place=place, **held)


def hold(degree: int, folded: bool = False) -> Any:
    return SimpleNamespace(degree=degree, over_tp=folded)


@pytest.mark.parametrize("row", KNOWN, ids=str)
def test_every_row_in_16_bit_with_other_buckets(row: tuple[str, int]) -> None:
    target = make(row, topology={"precision": "bfloat16"}, zero=Zero(reduce_bucket_size=5))
    assert list_unknown(target) == []


ODD: dict[str, tuple[Any, str]] = {
    "wrapper": (make(("zero9", 9)), "zero9 at ZeRO stage 9"),
    "stage": (make(("bf16", 0)), "bf16 at ZeRO stage 0"),
    "reader": (make(engine={"checkpoint_engine": FastCheckpointEngine()}), "a FastCheckpointEngine"),
    "nvme": (make(("zero3", 3), topology={"offload": "nvme/none"}), "offload nvme/none"),
    "elastic": (make(zero=Zero(elastic_checkpoint=True)), "zero_optimization.elastic_checkpoint"),
    "release to come": (make(zero=Zero(other_layout=2)), "zero_optimization.other_layout"),
    "tensor parallelism at ZeRO 3": (make(("zero3", 3), topology={"tp": 2}), "tensor parallelism"),
    "degrees": (make(experts={"x": hold(2), "y": hold(4)}), "experts of other ranks or degrees"),
    "folded": (make(topology={"tp": 4}, experts={"x": hold(2, True)}), "experts of other ranks or degrees"),
    "frozen experts": (
        make(("zero12", 2), params={"a": 0, "moe.experts.w1.3": 0}, experts={"moe.experts.": hold(2)}),
        "frozen experts",
    ),
    "layer files": (make(("torch", 0), unfiled=lambda: ["tied.w"], has_copies=False), "tied.w (in no layer file)"),
    "node files": (
        make(experts={"x": hold(2)}, engine={"use_node_local_storage": lambda: True}),
        "node-local files",
    ),
}


@pytest.mark.parametrize("odd", ODD)
def test_what_is_in_no_row_is_ours(odd: str) -> None:
    target, told = ODD[odd]
    assert list_unknown(target) == [told]


def test_known_options() -> None:
    assert list_unknown(make(params={"a": 0, "b": 0}, experts={"x": hold(2)}, topology={"tp": 2, "pp": 2})) == []
    assert list_unknown(make(("zero3", 3), topology={"offload": "cpu/cpu"})) == []
