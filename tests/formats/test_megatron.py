"""Saves of Megatron-DeepSpeed: nested module dicts, names with other prefixes, and hints in the client state."""

from __future__ import annotations

import enum
import re
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.checkpoint.universal_checkpoint import SubparamShape

from deepspeed_ucp.errors import CheckpointError, UnsupportedError
from deepspeed_ucp.formats.deepspeed.hints import join_hints
from deepspeed_ucp.formats.deepspeed.module import match_names
from deepspeed_ucp.formats.deepspeed.naming import Naming
from deepspeed_ucp.model.index import AtomicIndex
from deepspeed_ucp.model.storage import COPY
from deepspeed_ucp.tensor_parallel.metadata import INFO
from tests.formats.saves import make_files, open_files, read_all
from tests.support.pythons import OLD_MEMBERS
from tests.synth import Model, Param, Run, Topology
from tests.synth.megatron import client_state, megatron_args, nested_module

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


def open_nested(folder: Path, topology: Topology, nest: Callable[..., Mapping[str, Any]] | None) -> AtomicIndex:
    files = make_files(GPT, topology, run=Run(nest=nest) if nest else Run())
    return open_files(folder, files, Naming(GPT.live_groups))


def check_nested(folder: Path, topology: Topology, nest: Callable[..., Mapping[str, Any]]) -> set[str]:
    """Check that a nested module and a plain one give the same index; return the names of the module's copies."""
    nested, plain = open_nested(folder / "nested", topology, nest), open_nested(folder / "plain", topology, None)
    for field in ("topology", "groups", "scalars", "instances", "buffers", "flats"):
        assert getattr(nested, field) == getattr(plain, field), field
    held, copies = read_all(nested), {key.name for key in nested.atoms if key.state == COPY}
    for key, shards in read_all(plain).items():
        if key.state != COPY or key.name in copies:
            assert all(one.equal(other) for one, other in zip(held.pop(key), shards, strict=True)), key
    assert not held
    return copies


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=lambda t: t.label)
def test_keys_of_megatrons_nested_module_are_joined_to_names(tmp_path: Path, topology: Topology) -> None:
    assert check_nested(tmp_path, topology, nested_module) == {p.name for p in GPT.params if not p.frozen}


def strip(module: Mapping[str, Any]) -> dict[str, Any]:
    return dict(nested_module(module)["language_model"])


def wrap(module: Mapping[str, Any]) -> dict[str, Any]:
    return {"model": nested_module(module)}


@pytest.mark.parametrize("nest", [strip, wrap], ids=["shorter", "longer"])
@pytest.mark.parametrize("topology", TOPOLOGIES[:3], ids=lambda t: t.label)
def test_names_with_another_prefix_are_recognized(tmp_path: Path, topology: Topology, nest: Any) -> None:
    """ZeRO 1 does not list the frozen parameter; it gets the common prefix of the others."""
    check_nested(tmp_path, topology, nest)


def rename(module: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in module.items() if "frozen" in name or "steps" in name}
    return {"weights": {f"w{i}": module[name] for i, name in enumerate(n for n in module if n not in kept)}, **kept}


def test_copies_under_unrelated_names_are_omitted(tmp_path: Path) -> None:
    assert not check_nested(tmp_path, Topology(2, 2, "bf16", tp=2), rename)


def test_a_frozen_parameter_under_an_unrelated_name_is_kept(tmp_path: Path) -> None:
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
def test_match_names_maps_keys_with_a_unique_match(keys: list[str], names: set[str], found: dict[str, str]) -> None:
    assert match_names(keys, names) == found


# -- hints about the model, read without building any class of the file -----------------------------------------------

MODEL = Model((Param("a.col", (4, 3)), Param("b.row", (3, 4))))


class Color(enum.Enum):
    """A class that other processes cannot import."""

    RED = "red"


def open_with(folder: Path, *states: dict[str, Any], topology: Topology | None = None) -> dict[str, Any]:
    """Return the hints of a checkpoint whose model-parallel ranks saved these client states."""
    topology = topology or Topology(1, 2, tp=len(states))
    files = make_files(MODEL, topology)
    for name, content in files.items():
        if match := re.search(r"mp_rank_(\d+)_model", name):
            content.update(states[int(match[1])])
    return open_files(folder, files).hints


def test_hints_come_from_megatrons_client_state(tmp_path: Path) -> None:
    state = client_state(megatron_args(tensor_model_parallel_size=2), 7, 13)
    hints = open_with(tmp_path, state, state)
    assert hints == {**{key: state[key] for key in hints}, "args": vars(state["args"])}
    assert hints.keys() == {"args", "checkpoint_version", "iteration", INFO}


def test_objects_in_hints_become_dicts_of_their_fields(tmp_path: Path) -> None:
    affine = pytest.importorskip("deepspeed.checkpoint.affine")
    piece = affine.AffinePiece((2, 3), 0, (3, 1), 6, (3, 1), [1, 0], 0.5)
    info = {
        "parameter_with_sub_params": [SubparamShape(["a.*"], ((2, 2), 3), 0)],
        "piece": piece,
        "map": affine.contiguous_split_map((4, 3), [2, 2], 0),
        "pattern": re.compile(r"\d+\.w"),
        "color": Color.RED,
        "sizes": torch.Size([2, 3]),
        "number": torch.tensor(2.5),
        "set": {3, 1},
        "tensor": torch.ones(3),
        1: "kept",
    }
    found = open_with(tmp_path, {INFO: info})[INFO]
    assert found["parameter_with_sub_params"] == [
        {"__class__": "SubparamShape", "patterns": ["a.*"], "shape": ((2, 2), 3), "partition_dim": 0}
    ]
    assert found["piece"] == {
        "__class__": "AffinePiece",
        "shape": (2, 3),
        "source_offset": 0,
        "source_strides": (3, 1),
        "dest_offset": 6,
        "dest_strides": (3, 1),
        "locations": [0, 1],
        "scale": 0.5,
    }
    assert found["map"]["__class__"] == "ParamAffineMap"
    assert found["map"]["logical_shape"] == (4, 3)
    assert {len(pieces) for pieces in found["map"]["pieces_by_rank"].values()} == {1}
    assert (found["pattern"], found["color"], found["sizes"]) == (r"\d+\.w", None if OLD_MEMBERS else "red", (2, 3))
    assert (found["number"], found["set"], found["tensor"], found[1]) == (2.5, [1, 3], None, "kept")


ARGS = Namespace(a=1, b="x", c=[1, None], d={"no": 1}, e=torch.ones(2), f=Color.RED, g=(1, 2), h=[[1]])
FIRST = {"version": 0.4, "rows": ["a", "b"], "affine_map": {"params": {"a": 1, "b": [2]}}, "only": None}
SECOND = {"version": 0.4, "rows": ["b", "c"], "affine_map": {"params": {"b": [2], "c": 3}}, "only": "here"}
BOTH = {"version": 0.4, "rows": ["a", "b", "c"], "affine_map": {"params": {"a": 1, "b": [2], "c": 3}}, "only": "here"}


@pytest.mark.parametrize(
    ("key", "states", "expected"),
    [
        ("args", [ARGS], {"a": 1, "b": "x", "c": [1, None], "g": (1, 2)}),
        ("args", [{"a": 1, "d": {"no": 1}}], {"a": 1}),
        ("args", ["a string"], "none"),
        *((INFO, [odd], "none") for odd in (torch.ones(2), "text", Color.RED, open_with)),
        (INFO, [FIRST, SECOND], BOTH),
    ],
)
def test_hints_are_plain_dicts_merged_over_ranks(tmp_path: Path, key: str, states: list[Any], expected: Any) -> None:
    assert open_with(tmp_path, *({key: state} for state in states)).get(key, "none") == expected


def test_hints_of_other_ranks_are_used_if_rank_0_lacks_them() -> None:
    assert join_hints([("a", {}), ("b", {"iteration": 3, INFO: {"x": 1}})]) == {"iteration": 3, INFO: {"x": 1}}


def test_contradictory_hints_of_ranks_are_refused(tmp_path: Path) -> None:
    states = [{INFO: {"affine_map": {"a": {"shape": (2, rank)}}}} for rank in range(2)]
    with pytest.raises(
        CheckpointError, match=r"mp_rank_01_.*\['affine_map'\]\['a'\]\['shape'\] is \(2, 1\), .*mp_rank_00"
    ):
        open_with(tmp_path, *states)
    with pytest.raises(CheckpointError, match="mp_rank_01_.*its iteration is 8, .* has 7"):
        open_with(tmp_path, {"iteration": 7}, {"iteration": 8})


def test_zero3_files_of_further_ranks_may_lack_hints(tmp_path: Path) -> None:
    files = make_files(MODEL, Topology(3, 3, tp=2))
    for name, content in files.items():
        if "rank_0_mp" in name and "model" in name:
            content.update(iteration=5)
    assert open_files(tmp_path, files).hints == {"iteration": 5}
