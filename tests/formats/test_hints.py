"""Hints about the model in the client state, read without building any class of the file."""

from __future__ import annotations

import enum
import re
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.checkpoint.universal_checkpoint import SubparamShape

from deepspeed_ucp.comm import Comm
from deepspeed_ucp.errors import CheckpointError
from deepspeed_ucp.formats import open_checkpoint
from deepspeed_ucp.formats.deepspeed.hints import join_hints
from deepspeed_ucp.tensor_parallel.metadata import INFO
from tests.formats.parallel import tail_cut
from tests.support.pythons import OLD_MEMBERS
from tests.synth import Model, Param, Run, Topology, build_files, random_state, write_files
from tests.synth.megatron import client_state, megatron_args, old_universal_info, universal_info

MODEL = Model((Param("a.col", (4, 3)), Param("b.row", (3, 4))))


class Color(enum.Enum):
    """A class that only exists here."""

    RED = "red"


def open_with(folder: Path, *states: dict[str, Any], topology: Topology | None = None) -> dict[str, Any]:
    """The hints of a checkpoint whose model-parallel ranks' files carry these client states."""
    topology = topology or Topology(1, 2, tp=len(states))
    files = build_files(MODEL, random_state(MODEL, 0), topology, Run(), cut=tail_cut)
    for name, content in files.items():
        if match := re.search(r"mp_rank_(\d+)_model", name):
            content.update(states[int(match[1])])
    write_files(folder, files)
    return open_checkpoint(str(folder), Comm()).model.hints


@pytest.mark.parametrize("make", [universal_info, old_universal_info], ids=["newest", "2023"])
def test_megatrons_client_state_is_taken_over(tmp_path: Path, make: Any) -> None:
    args = megatron_args(tensor_model_parallel_size=2)
    info = make(args, 13)
    hints = open_with(tmp_path, *[client_state(args, 7, info)] * 2)
    assert hints[INFO] == info
    assert (hints["iteration"], hints["checkpoint_version"]) == (7, 3.0)
    assert hints["args"] == vars(args)


def test_objects_become_their_fields(tmp_path: Path) -> None:
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


def test_only_plain_arguments_remain(tmp_path: Path) -> None:
    args = Namespace(a=1, b="x", c=[1, None], d={"no": 1}, e=torch.ones(2), f=Color.RED, g=(1, 2), h=[[1]])
    assert open_with(tmp_path, {"args": args})["args"] == {"a": 1, "b": "x", "c": [1, None], "g": (1, 2)}
    assert open_with(tmp_path, {"args": {"a": 1, "d": {"no": 1}}})["args"] == {"a": 1}
    assert "args" not in open_with(tmp_path, {"args": "a string"})


@pytest.mark.parametrize(
    "info", [torch.ones(2), "text", Color.RED, open_with], ids=["tensor", "text", "enum", "function"]
)
def test_values_other_than_dicts_are_ignored(tmp_path: Path, info: Any) -> None:
    assert INFO not in open_with(tmp_path, {INFO: info})


def test_hints_of_all_ranks_are_merged(tmp_path: Path) -> None:
    first = {"version": 0.4, "rows": ["a", "b"], "affine_map": {"params": {"a": 1, "b": [2]}}, "only": None}
    second = {"version": 0.4, "rows": ["b", "c"], "affine_map": {"params": {"b": [2], "c": 3}}, "only": "here"}
    found = open_with(tmp_path, {INFO: first}, {INFO: second})[INFO]
    assert found == {
        "version": 0.4,
        "rows": ["a", "b", "c"],
        "affine_map": {"params": {"a": 1, "b": [2], "c": 3}},
        "only": "here",
    }


def test_hints_that_the_first_rank_lacks_are_found() -> None:
    assert join_hints([("a", {}), ("b", {"iteration": 3, INFO: {"x": 1}})]) == {"iteration": 3, INFO: {"x": 1}}


def test_ranks_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    states = [{INFO: {"affine_map": {"a": {"shape": (2, rank)}}}} for rank in range(2)]
    with pytest.raises(
        CheckpointError, match=r"mp_rank_01_.*\['affine_map'\]\['a'\]\['shape'\] is \(2, 1\), .*mp_rank_00"
    ):
        open_with(tmp_path, *states)
    with pytest.raises(CheckpointError, match="mp_rank_01_.*its iteration is 8, .* has 7"):
        open_with(tmp_path, {"iteration": 7}, {"iteration": 8})


def test_zero3_files_of_further_ranks_need_not_repeat_it(tmp_path: Path) -> None:
    topology = Topology(3, 3, tp=2)
    files = build_files(MODEL, random_state(MODEL, 0), topology, Run(), cut=tail_cut)
    for name, content in files.items():
        if "rank_0_mp" in name and "model" in name:
            content.update(iteration=5)
    write_files(tmp_path, files)
    assert open_checkpoint(str(tmp_path), Comm()).model.hints == {"iteration": 5}
