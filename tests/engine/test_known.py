"""DeepSpeed loads an unchanged topology only in configurations that are known to be restored."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel

from deepspeed_ucp.engine.known import KNOWN, list_unknown
from deepspeed_ucp.extensions.experts.engine import LiveExperts, LocalExperts
from deepspeed_ucp.model.wrappers import WRAPPERS


class Zero(BaseModel):
    """Fields of ``zero_optimization``: a harmless one, two that change saves or loads, and one of a future release."""

    reduce_bucket_size: int = 1
    compute_grad_norm: bool = True
    elastic_checkpoint: bool = False
    other_layout: int = 0


class TorchCheckpointEngine:
    """A reader that loads ZeRO's files."""


class FastCheckpointEngine:
    """A reader that refuses ZeRO's files."""


def make(row: tuple[str, int] = ("zero12", 1), **differs: Any) -> Any:
    wrapper, stage = row
    topology = {"wrapper": wrapper, "zero_stage": stage, "precision": "float32", "tp": 1, "pp": 1}
    topology |= {"offload": "none/none", **differs.pop("topology", {})}
    engine: dict[str, Any] = {"checkpoint_engine": TorchCheckpointEngine(), "use_node_local_storage": lambda: False}
    engine |= {"_config": SimpleNamespace(zero_config=differs.pop("zero", Zero())), **differs.pop("engine", {})}
    shares = differs.pop("experts", {})
    plain: dict[str, Any] = {
        "extensions": [LiveExperts()] if shares else [],
        "shares": shares,
        "params": {"a": 0},
        "owned": {"a"},
        "flats": [SimpleNamespace(dtype="float32")],
        "unfiled": list,
        "traits": WRAPPERS["zero12"],
    }
    return SimpleNamespace(
        topology=SimpleNamespace(**topology),
        engine=SimpleNamespace(**engine),
        parallel=SimpleNamespace(tp=topology["tp"]),
        **plain | differs,
    )


def hold(degree: int, unsharded: bool = False) -> LocalExperts:
    return LocalExperts(degree, None, unsharded, True, ())


UNKNOWN: dict[str, tuple[Any, str]] = {
    "wrapper": (make(("zero9", 9)), "zero9 at ZeRO stage 9"),
    "stage": (make(("bf16", 0)), "bf16 at ZeRO stage 0"),
    "masters in 16 bit": (make(flats=[SimpleNamespace(dtype="bfloat16")]), "masters in 16 bit"),
    "reader": (make(engine={"checkpoint_engine": FastCheckpointEngine()}), "a FastCheckpointEngine"),
    "nvme": (make(("zero3", 3), topology={"offload": "nvme/none"}), "offload nvme/none"),
    "elastic": (make(zero=Zero(elastic_checkpoint=True)), "zero_optimization.elastic_checkpoint"),
    "no norm": (make(zero=Zero(compute_grad_norm=False)), "zero_optimization.compute_grad_norm"),
    "release to come": (make(zero=Zero(other_layout=2)), "zero_optimization.other_layout"),
    "tensor parallelism at ZeRO 3": (make(("zero3", 3), topology={"tp": 2}), "tensor parallelism"),
    "degrees": (make(experts={"x": hold(2), "y": hold(4)}), "experts of other ranks or degrees"),
    "folded": (make(topology={"tp": 4}, experts={"x": hold(2, True)}), "experts of other ranks or degrees"),
    "frozen experts": (
        make(("zero12", 2), params={"a": 0, "moe.experts.w1.3": 0}, experts={"moe.experts.": hold(2)}),
        "frozen experts",
    ),
    "layer files": (
        make(("torch", 0), unfiled=lambda: ["tied.w"], traits=WRAPPERS["torch"]),
        "tied.w (in no layer file)",
    ),
    "node files": (
        make(experts={"x": hold(2)}, engine={"use_node_local_storage": lambda: True}),
        "node-local files",
    ),
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_options_with_unknown_effect_are_listed(case: str) -> None:
    target, text = UNKNOWN[case]
    assert list_unknown(target) == [text]


@pytest.mark.parametrize(
    "target",
    [
        *(make(row, topology={"precision": "bfloat16"}, zero=Zero(reduce_bucket_size=5)) for row in KNOWN),
        make(params={"a": 0, "b": 0}, experts={"x": hold(2)}, topology={"tp": 2, "pp": 2}),
        make(("zero3", 3), topology={"offload": "cpu/cpu"}),
    ],
    ids=lambda target: f"{target.topology.wrapper}-{target.topology.zero_stage}",
)
def test_known_options_are_not_listed(target: Any) -> None:
    assert list_unknown(target) == []


@pytest.mark.parametrize(
    ("helpers", "scheduler", "scaler", "unknown"),
    [
        ((), None, {}, []),
        (("lr_scheduler",), object(), {"dynamic": True}, []),
        (("lr_scheduler",), None, {"dynamic": False, "cur_scale": 8.0}, ["lr_scheduler on", "another loss scale"]),
        (("random_ltd",), object(), {}, ["lr_scheduler on", "random_ltd on"]),
        (None, object(), {}, []),
    ],
)
def test_state_of_one_side_is_listed(helpers: Any, scheduler: Any, scaler: dict[str, Any], unknown: list[str]) -> None:
    engine = {"lr_scheduler": scheduler, "random_ltd_enabled": lambda: False}
    wrapped = SimpleNamespace(loss_scaler=SimpleNamespace(dynamic=True, cur_scale=512.0))
    index: Any = SimpleNamespace(helpers=helpers, scaler=scaler, unnoticed=())
    found = list_unknown(make(engine=engine, wrapped=wrapped), index)
    assert len(found) == len(unknown) and all(map(str.startswith, found, unknown))
