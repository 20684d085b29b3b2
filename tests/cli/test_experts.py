"""The commands on checkpoints with experts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.synth import ExpertLayer, Model, Param, State, Topology, random_state, write_checkpoint

Run = Callable[..., tuple[int, dict[str, Any]]]


def make_model() -> Model:
    """Two layers of four experts each, with a gate."""
    layers = tuple(ExpertLayer(f"h.{number}.mlp", 4, False) for number in range(2))
    params = [Param("wte", (8, 6))]
    for layer in layers:
        params.append(Param(f"{layer.name}.gate.weight", (4, 6)))
        ends = {"fc.weight": (5, 6), "fc.bias": (5,)}
        params += [Param(f"{layer.prefix}{n}.{end}", shape) for n in range(4) for end, shape in ends.items()]
    return Model(tuple(params), experts=layers)


def write(folder: Path, topology: Topology) -> tuple[Path, State]:
    model = make_model()
    state = random_state(model, 1, precision=topology.precision)
    return write_checkpoint(folder, model, state, topology), state


def test_another_expert_parallel_degree_is_no_difference(tmp_path: Path, run_json: Run) -> None:
    one, _ = write(tmp_path / "one", Topology(1, 4, ep=(2, 4)))
    other, _ = write(tmp_path / "other", Topology(2, 4, ep=(1, 2), data_first=True))
    code, found = run_json("diff", one, other)
    assert (code, found["tensors"]) == (0, [])


def test_a_conversion_is_the_same_checkpoint(tmp_path: Path, run_json: Run) -> None:
    path, _ = write(tmp_path, Topology(1, 4, "bf16", ep=(2, 4)))
    assert run_json("convert", path, tmp_path / "out")[0] == 0
    assert run_json("verify", tmp_path / "out")[0] == run_json("diff", path, tmp_path / "out")[0] == 0
    code, planned = run_json("plan", tmp_path / "out", "--target", "dp=4,ep=4,zero=1")
    assert (code, planned["loader"]) == (0, "deepspeed_ucp")


def test_weights_of_experts_are_exported(tmp_path: Path, run_json: Run) -> None:
    path, state = write(tmp_path, Topology(1, 4, "bf16", ep=(2, 4)))
    assert run_json("export", path, tmp_path / "out", "--dtype", "fp32")[0] == 0
    exported: dict[str, torch.Tensor] = {}
    for file in (tmp_path / "out").glob("*.safetensors"):
        exported |= load_file(file)
    assert exported.keys() == state.atoms.keys()
    assert all(torch.equal(exported[name], held["fp32"]) for name, held in state.atoms.items())


def test_a_damaged_file_of_an_expert_is_named_with_its_parameter(tmp_path: Path, run_json: Run) -> None:
    path, _ = write(tmp_path, Topology(1, 4, "bf16", ep=(2, 4)))
    file = path / "layer_1_expert_2_mp_rank_00_model_states.pt"
    data = bytearray(file.read_bytes())
    meta = torch.load(file, map_location="meta", weights_only=False)
    offset = next(iter(meta.values())).untyped_storage()._checkpoint_offset
    data[offset] ^= 1
    file.write_bytes(data)
    code, found = run_json("verify", path)
    (fault,) = found["faults"]
    assert (code, fault["file"]) == (1, file.name)
    assert "h.1.mlp.deepspeed_moe.experts.deepspeed_experts.2.fc.weight" in json.dumps(fault)


def test_a_save_of_stage_0_is_named_by_its_module(tmp_path: Path, run_json: Run) -> None:
    """DeepSpeed moves the experts out of the optimizer's group."""
    path, state = write(tmp_path / "saved", Topology(0, 4, "bf16", "unfused", ep=(2, 2)))
    assert run_json("convert", path, tmp_path / "out")[0] == 2
    assert run_json("convert", path, tmp_path / "out", "--groups", "module")[0] == 0
    for name, held in state.atoms.items():
        for each in ("fp32", "exp_avg"):
            found = torch.load(tmp_path / "out" / "zero" / name / f"{each}.pt", weights_only=False)["param"]
            assert torch.equal(found, held[each]), (name, each)
