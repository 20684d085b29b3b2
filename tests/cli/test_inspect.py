"""``ds_ucp inspect``: its JSON describes the synthesised checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deepspeed_ucp.cli.dispatch import main
from tests.cli.samples import PATTERNS, cut, make_gpt, write_sample
from tests.properties.samples import PIPE, RULES
from tests.synth import Topology, random_state

ZERO1 = Topology(1, 4, "bf16")
ZERO3 = Topology(3, 4, "bf16")
THREE_D = Topology(1, 2, "bf16", tp=2, pp=2)
TENSOR = Topology(2, 2, "bf16", tp=2)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Topology], Path]:
    return cache(lambda topology: write_sample(tmp_path_factory.mktemp(topology.label), topology))


@pytest.mark.parametrize("topology", [ZERO1, ZERO3, TENSOR, THREE_D], ids=lambda t: t.label)
def test_inspect_describes_the_contents_of_a_checkpoint(
    topology: Topology, checkpoints: Callable[[Topology], Path], run_json: Any
) -> None:
    model = PIPE if topology.pp > 1 else make_gpt()
    patterns = json.dumps(RULES) if topology.pp > 1 else PATTERNS
    options = ["--patterns", patterns] if topology.tp > 1 else []
    code, result = run_json("inspect", checkpoints(topology), *options)
    assert code == 0
    degrees = [result["topology"][key] for key in ("zero_stage", "dp", "tp", "pp", "precision", "master")]
    assert degrees == [topology.stage, topology.dp, topology.tp, topology.pp, "bfloat16", "float32"]
    assert result["counters"]["global_steps"] == 3
    assert (result["optimizer"]["name"], result["optimizer"]["states"]) == ("AdamW", ["exp_avg", "exp_avg_sq"])
    assert {row["scalars"].get("step") for row in result["parameters"] if row["kind"] == "trained"} == {3}
    assert [group["hyper"]["lr"] for group in result["optimizer"]["groups"]] == [1e-3, 5e-4]
    assert result["client_state"]["keys"] == {"epoch": "2"}
    shapes = {row["name"]: tuple(row["shape"]) for row in result["parameters"] if not row["instance"]}
    buffers = {name: tuple(tensor.shape) for name, tensor in model.buffers.items()}
    assert shapes == {param.name: param.shape for param in model.owners} | buffers
    assert result["ties"] == {param.name: param.alias_of for param in model.params if param.alias_of}
    for kind, names in (("frozen", [p.name for p in model.owners if p.frozen]), ("buffer", list(model.buffers))):
        assert [row["name"] for row in result["parameters"] if row["kind"] == kind] == names
    assert result["findings"] == []
    totals = result["totals"]
    assert totals["elements"] == sum(param.numel for param in model.owners)
    assert totals["file_bytes"] == sum(file["size"] for file in result["files"])
    assert {file["name"] for file in result["files"]} == {path.name for path in checkpoints(topology).iterdir()}
    assert totals["states"] == 2 * totals["masters"]
    stored = sum(row["nbytes"] for row in result["parameters"])
    assert stored == totals["masters"] + totals["states"] + totals["module"]


@pytest.mark.parametrize("topology", [ZERO1, ZERO3, THREE_D], ids=lambda t: t.label)
def test_inspect_param_lists_the_bytes_of_a_parameter(
    topology: Topology, checkpoints: Callable[[Topology], Path], run_json: Any
) -> None:
    """Reading these offsets of these files gives the parameter."""
    folder = checkpoints(topology)
    model = PIPE if topology.pp > 1 else make_gpt()
    name = "1.up" if topology.pp > 1 else "h.2.mlp.dense_4h_to_h.weight"
    state = random_state(model, 0, precision="bf16", topology=topology)
    _, result = run_json("inspect", folder, "--param", name)
    assert result["hyper"]["lr"] == 1e-3
    for each in ("fp32", "exp_avg", "exp_avg_sq"):
        for rank, shape in enumerate(result["shards"]):
            held = np.zeros(int(np.prod(shape)), np.float32)
            for part in (part for part in result["layout"] if (part["state"], part["rank"]) == (each, rank)):
                data = (folder / part["file"]).read_bytes()[part["offset"] :][: part["bytes"]]
                held[part["start"] :][: part["numel"]] = np.frombuffer(data, np.float32)
            expected = cut(name, state.atoms[name][each], topology.tp, rank)
            assert np.array_equal(held.reshape(shape), expected.numpy()), each


@pytest.fixture(scope="module")
def converted(checkpoints: Callable[[Topology], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    destination = tmp_path_factory.mktemp("atomic") / "made"
    assert main(["convert", str(checkpoints(TENSOR)), str(destination), "--patterns", PATTERNS, "-q", "--json"]) == 0
    return destination


def test_inspect_of_an_atomic_checkpoint_names_its_source(
    converted: Path, checkpoints: Callable[[Topology], Path], run_json: Any
) -> None:
    _, result = run_json("inspect", converted)
    _, source = run_json("inspect", checkpoints(TENSOR), "--patterns", PATTERNS)
    assert result["topology"]["wrapper"] == "atomic"
    assert result["written_by"]["tool"].startswith("deepspeed_ucp ")
    assert result["written_by"]["source"]["topology"]["tp"] == 2
    files = {each["name"]: each["size"] for each in result["written_by"]["source"]["fingerprint"]["files"]}
    assert files.items() <= {each["name"]: each["size"] for each in source["files"]}.items()
    for each in (result, source):
        each["rows"] = {row["name"]: (row["shape"], row["pattern"], row["kind"]) for row in each["parameters"]}
        each |= {"step": each["counters"]["global_steps"], "elements": each["totals"]["elements"]}
    assert all(result[key] == source[key] for key in ("rows", "ties", "step", "elements"))
    assert result["totals"]["files"] == sum(path.is_file() for path in converted.rglob("*"))


def test_a_hyper_parameter_of_thousands_of_digits_is_shortened(
    tmp_path: Path, run_json: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Python refuses to print such an integer."""
    folder = write_sample(tmp_path, ZERO1)
    for path in folder.glob("*optim_states.pt"):
        tree = torch.load(path, weights_only=False)
        tree["optimizer_state_dict"]["base_optimizer_state"]["param_groups"][0]["seed"] = 10**5000
        torch.save(tree, path)
    code, result = run_json("inspect", folder)
    assert code == 0
    assert "an integer of 16610 bits" in json.dumps(result["optimizer"]["groups"][0]["hyper"]["seed"])
    assert main(["inspect", str(folder)]) == 0
    assert "an integer of 16610 bits" in " ".join(capsys.readouterr().out.split())
