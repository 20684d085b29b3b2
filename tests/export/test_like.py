"""An export that is like a model of Hugging Face's loads as it is, and one that is not is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from transformers import AutoModelForCausalLM

from deepspeed_ucp.comm import Comm
from deepspeed_ucp.errors import ConfigError, MismatchError
from deepspeed_ucp.export.like import find_model
from deepspeed_ucp.export.safetensors import export_safetensors
from deepspeed_ucp.export.tensors import ExportOptions
from deepspeed_ucp.sources import open_checkpoint
from tests.export.test_safetensors import make_gpt2
from tests.synth import Model, Param, Topology, random_state, write_checkpoint


def save(folder: Path, model: torch.nn.Module, **shapes: tuple[int, ...]) -> str:
    """A DeepSpeed save of a model; ``shapes`` of parameters that it has otherwise."""
    params = {name: tuple(param.shape) for name, param in model.named_parameters()}
    described = Model(tuple(Param(name, shape) for name, shape in {**params, **shapes}.items()))
    return str(write_checkpoint(folder, described, random_state(described, 1), Topology(1, 2)))


def export(path: str, out: Path, like: Path, dtype: str = "bfloat16") -> None:
    index = open_checkpoint(path, Comm())
    export_safetensors(index, str(out), options=ExportOptions(dtype=dtype), like=str(like))


@pytest.mark.parametrize("weights", [False, True], ids=["configuration", "with weights"])
def test_it_loads_in_the_written_element_type(tmp_path: Path, weights: bool) -> None:
    model = make_gpt2(tmp_path / "hf", tied=True)
    if weights:
        model.save_pretrained(tmp_path / "hf")
    export(save(tmp_path, model), tmp_path / "out", tmp_path / "hf")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert loaded.dtype == torch.bfloat16
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "bfloat16" in (config.get("dtype"), config.get("torch_dtype"))


@pytest.mark.parametrize("weights", [False, True], ids=["configuration", "with weights"])
def test_another_model_is_refused_before_anything_is_written(tmp_path: Path, weights: bool) -> None:
    model = make_gpt2(tmp_path / "hf", tied=True)
    if weights:
        model.save_pretrained(tmp_path / "hf")
    name = next(name for name, _ in model.named_parameters())
    wrong = {name: (7, 5), "more.weight": (2,)}
    with pytest.raises(MismatchError, match=rf"not there: more.weight; of another shape: {name} \(7, 5\), there"):
        export(save(tmp_path, model, **wrong), tmp_path / "out", tmp_path / "hf")
    assert not (tmp_path / "out").exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("weights", [False, True], ids=["configuration", "with weights"])
def test_a_tie_that_fsdp_saves_twice_is_one_tensor(tmp_path: Path, weights: bool) -> None:
    """Where both are the same; else it is refused by name."""
    model = make_gpt2(tmp_path / "hf", tied=True)
    if weights:
        model.save_pretrained(tmp_path / "hf")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(torch.arange(4)[None], labels=torch.arange(4)[None]).loss.backward()
    optimizer.step()
    held, states = get_state_dict(model, optimizer)
    dcp.save({"model": held, "optim": states}, checkpoint_id=tmp_path / "same", no_dist=True)
    export(str(tmp_path / "same"), tmp_path / "out", tmp_path / "hf", "float32")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for name, wanted in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], wanted)
    held["lm_head.weight"] = held["lm_head.weight"] + 1
    dcp.save({"model": held, "optim": states}, checkpoint_id=tmp_path / "other", no_dist=True)
    with pytest.raises(MismatchError, match="tied there, with other values here: lm_head.weight to transformer.wte"):
        export(str(tmp_path / "other"), tmp_path / "more", tmp_path / "hf")


def test_a_model_is_found_in_the_hubs_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = tmp_path / "models--some--model" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (tmp_path / "models--some--model" / "refs").mkdir()
    (tmp_path / "models--some--model" / "refs" / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert find_model("some/model") == str(snapshot)
    with pytest.raises(ConfigError, match="neither a folder nor a model in the local cache"):
        find_model("some/other")
    (snapshot / "config.json").unlink()
    with pytest.raises(ConfigError, match="no config.json"):
        find_model(str(snapshot))
