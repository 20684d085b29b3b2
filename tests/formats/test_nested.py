"""Module dicts that are nested, as Megatron-DeepSpeed saves them without a pipeline, and names with other prefixes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed_ucp.errors import UnsupportedError
from deepspeed_ucp.formats.deepspeed.module import match_names
from deepspeed_ucp.model import COPY, AtomicIndex
from tests.formats.parallel import check_parallel, write_and_open
from tests.synth import Model, Param, Run, State, Topology, random_state
from tests.synth.megatron import nested_module

PREFIX = "language_model."
GPT = Model(
    (
        Param(PREFIX + "embedding.word_embeddings.col", (9, 3)),
        Param(PREFIX + "embedding.position_embeddings.weight", (4, 3)),
        Param(PREFIX + "encoder.layers.0.input_layernorm.weight", (3,), group=1),
        Param(PREFIX + "encoder.layers.0.mlp.dense.row", (3, 12)),
        Param(PREFIX + "encoder.layers.1.frozen.col", (4, 2), frozen=True),
        Param(PREFIX + "encoder.final_layernorm.weight", (3,), group=1),
    ),
    {PREFIX + "encoder.steps": torch.arange(2)},
)
TOPOLOGIES = [
    Topology(1, 2, "bf16", tp=2),
    Topology(2, 2, "fp32", tp=2),
    Topology(1, 2, "bf16", "bf16"),
    Topology(0, 1, "fp32", tp=2),
    Topology(0, 1, "fp16", "fused", tp=3),
    Topology(0, 1, "fp16", "unfused"),
]


def draw(topology: Topology) -> State:
    return random_state(GPT, 0, precision=topology.precision)


def open_nested(folder: Path, topology: Topology, nest: Callable[..., Mapping[str, Any]]) -> AtomicIndex:
    return write_and_open(folder, GPT, draw(topology), topology, Run(nest=nest))


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=lambda t: t.label)
def test_megatrons_nested_module_has_the_names_joined(tmp_path: Path, topology: Topology) -> None:
    index = open_nested(tmp_path, topology, nested_module)
    check_parallel(index, GPT, draw(topology), topology)
    assert {key.name for key in index.stored.atoms if key.state == COPY} == {p.name for p in GPT.params if not p.frozen}


def strip(module: Mapping[str, Any]) -> dict[str, Any]:
    """Drop the outermost name."""
    return dict(nested_module(module)["language_model"])


def wrap(module: Mapping[str, Any]) -> dict[str, Any]:
    return {"model": nested_module(module)}


@pytest.mark.parametrize("nest", [strip, wrap], ids=["shorter", "longer"])
@pytest.mark.parametrize("topology", TOPOLOGIES[:3], ids=lambda t: t.label)
def test_names_with_another_prefix_are_recognized(tmp_path: Path, topology: Topology, nest: Any) -> None:
    """The frozen parameter, which ZeRO 1 lists nowhere, takes the prefix that all others have."""
    check_parallel(open_nested(tmp_path, topology, nest), GPT, draw(topology), topology)


def rename(module: Mapping[str, Any]) -> dict[str, Any]:
    """Rename all optimized parameters."""
    kept = {name: value for name, value in module.items() if "frozen" in name or "steps" in name}
    return {"weights": {f"w{i}": module[name] for i, name in enumerate(n for n in module if n not in kept)}, **kept}


def test_copies_of_other_names_are_left_out(tmp_path: Path) -> None:
    topology = Topology(2, 2, "bf16", tp=2)
    index = open_nested(tmp_path, topology, rename)
    check_parallel(index, GPT, draw(topology), topology)
    assert COPY not in {key.state for key in index.stored.atoms}


def test_a_frozen_parameter_of_another_name_is_not_lost(tmp_path: Path) -> None:
    def lose(module: Mapping[str, Any]) -> dict[str, Any]:
        return {"weights": {f"w{i}": value for i, value in enumerate(module.values())}}

    with pytest.raises(UnsupportedError, match=r"mp_rank_00.*nested, and these have ambiguous names: weights\.w0"):
        open_nested(tmp_path, Topology(1, 2), lose)


@pytest.mark.parametrize(
    ("keys", "names", "found"),
    [
        (["a.b"], {"a.b"}, {"a.b": "a.b"}),
        (["a.b", "a.c"], {"m.a.b", "m.a.c"}, {"a.b": "m.a.b", "a.c": "m.a.c"}),
        (["m.a.b", "m.c"], {"a.b"}, {"m.a.b": "a.b", "m.c": "c"}),
        (["x.w", "y.w"], {"w"}, {}),
        (["x.w"], {"y.w"}, {}),
        (["w", "x.w"], {"w", "y.x.w"}, {"w": "w", "x.w": "y.x.w"}),
        (["w"], {"a.w", "b.w"}, {}),
        (["a.w", "a.x"], {"w", "y"}, {"a.w": "w"}),
    ],
    ids=["equal", "shorter", "longer", "two fit", "none fits", "longest", "taken twice", "one without mate"],
)
def test_names_are_matched_where_one_fits(keys: list[str], names: set[str], found: dict[str, str]) -> None:
    assert match_names(keys, names) == found
