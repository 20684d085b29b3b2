"""The commands on checkpoints with experts."""

from __future__ import annotations

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


def test_weights_of_experts_are_exported(tmp_path: Path, run_json: Run) -> None:
    path, state = write(tmp_path, Topology(1, 4, "bf16", ep=(2, 4)))
    assert run_json("export", path, tmp_path / "out", "--dtype", "fp32")[0] == 0
    exported: dict[str, torch.Tensor] = {}
    for file in (tmp_path / "out").glob("*.safetensors"):
        exported |= load_file(file)
    assert exported.keys() == state.atoms.keys()
    assert all(torch.equal(exported[name], held["fp32"]) for name, held in state.atoms.items())


def test_a_save_of_stage_0_is_named_by_its_module(tmp_path: Path, run_json: Run) -> None:
    """DeepSpeed moves the experts out of the optimizer's group."""
    path, state = write(tmp_path / "saved", Topology(0, 4, "bf16", "unfused", ep=(2, 2)))
    assert run_json("convert", path, tmp_path / "out")[0] == 2
    assert run_json("convert", path, tmp_path / "out", "--groups", "module")[0] == 0
    for name, held in state.atoms.items():
        for each in ("fp32", "exp_avg"):
            found = torch.load(tmp_path / "out" / "zero" / name / f"{each}.pt", weights_only=False)["param"]
            assert torch.equal(found, held[each]), (name, each)
