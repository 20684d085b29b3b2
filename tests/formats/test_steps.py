"""Steps that FusedAdam counts once per group, and stale copies of offloaded states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed_ucp.comm import Comm
from deepspeed_ucp.formats import open_checkpoint
from deepspeed_ucp.formats.deepspeed.naming import Naming
from deepspeed_ucp.model import AtomicIndex
from tests.synth import Model, Param, Topology, build_files, random_state, write_files

MODEL = Model((Param("a", (9, 5)), Param("b", (17,)), Param("c", (3,)), Param("d", (4,), group=1)))
FUSED = {"bias_correction": True, "step": 0}
"""Entries of a param group of DeepSpeed's FusedAdam."""


def open_steps(folder: Path, steps: list[int | None], group: dict[str, Any], *, half: str = "") -> AtomicIndex:
    """Open a stage-0 save with these steps (None: no state); ``half`` names a parameter with 16-bit states."""
    files = build_files(MODEL, random_state(MODEL, 0), Topology(0))
    optimizer = files["mp_rank_00_model_states.pt"]["optimizer"]
    for place, (param, step) in enumerate(zip(MODEL.params, steps, strict=True)):
        held = optimizer["state"].pop(place)
        if step is not None:
            states = {n: t.bfloat16() if param.name == half else t for n, t in held.items() if torch.is_tensor(t)}
            optimizer["state"][place] = {**states, "step": step}
    for each in optimizer["param_groups"]:
        each.update(group)
    write_files(folder, files)
    groups = [["a", "b", "c"], ["d"]]
    return open_checkpoint(str(folder), Comm(), Naming(groups=groups))


@pytest.mark.parametrize(
    ("steps", "group", "half", "told"),
    [
        pytest.param([0, 0, 7, 7], FUSED, "", [7, 7, 7, 7], id="the last one counts for its group"),
        pytest.param([0, 7, None, 5], FUSED, "", [7, 7, None, 5], id="the last one that has states"),
        pytest.param([0, 0, 0, 0], FUSED, "", [0, 0, 0, 0], id="none"),
        pytest.param([3, 0, 7, 7], FUSED, "", [3, 0, 7, 7], id="the last one was another for a while"),
        pytest.param([0, 0, 14, 7], FUSED, "b", [0, 0, 14, 7], id="several dtypes each count"),
        pytest.param([0, 0, 7, 7], {"bias_correction": True}, "", [0, 0, 7, 7], id="another optimizer"),
        pytest.param([0, 0, 7, 7], {**FUSED, "step": 7}, "", [0, 0, 7, 7], id="a group that counts itself"),
    ],
)
def test_steps_of_deepspeeds_fused_adam(
    steps: list[int | None], group: dict[str, Any], half: str, told: list[int | None], tmp_path: Path
) -> None:
    index = open_steps(tmp_path, steps, group, half=half)
    found = {param.name: held["step"] for param, held in index.run.scalars.items() if held}
    assert found == {n: step for n, step in zip("abcd", told, strict=True) if step is not None}


@pytest.mark.parametrize("stage", [1, 3])
def test_buffers_of_offload_states_are_ignored(stage: int, tmp_path: Path) -> None:
    files = build_files(MODEL, random_state(MODEL, 0), Topology(stage, 2))
    for tree in (tree for name, tree in files.items() if "optim_states" in name):
        outer = tree["optimizer_state_dict"]
        inner = outer.get("base_optimizer_state") or outer["optimizer_state_dict"]
        for held in inner["state"].values():
            held["exp_avg_offload_buffer"] = torch.zeros_like(held["exp_avg"])
            held["own_offload_buffer"] = torch.zeros_like(held["exp_avg"])
    write_files(tmp_path, files)
    states = {key.state for key in open_checkpoint(str(tmp_path), Comm()).stored.atoms}
    assert "exp_avg_offload_buffer" not in states
    assert "own_offload_buffer" in states
