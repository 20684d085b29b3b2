"""Exports with `--like` load as a given model of Hugging Face, or are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import get_state_dict
from transformers import AutoModelForCausalLM, LlamaForCausalLM, MixtralForCausalLM, Qwen2MoeForCausalLM

from deepspeed_ucp.comm import Comm
from deepspeed_ucp.errors import ConfigError, MismatchError
from deepspeed_ucp.export.like import find_model
from deepspeed_ucp.export.safetensors import export_safetensors
from deepspeed_ucp.export.tensors import ExportOptions
from deepspeed_ucp.formats import open_checkpoint
from deepspeed_ucp.tensor_parallel.rename import Rename
from tests.support.exports import check_same, load_all, make_gpt2
from tests.support.hub import MIXTRAL, QWEN, TIED
from tests.synth import Model, Param, Topology, random_state, write_checkpoint


def save(folder: Path, model: torch.nn.Module, **shapes: tuple[int, ...]) -> str:
    """Write a DeepSpeed save of a model, with other ``shapes`` of some parameters."""
    params = {name: tuple(param.shape) for name, param in model.named_parameters()}
    described = Model(tuple(Param(name, shape) for name, shape in {**params, **shapes}.items()))
    return str(write_checkpoint(folder, described, random_state(described, 1), Topology(1, 2)))


def export(path: str, out: Path, like: Path, dtype: str = "bfloat16") -> None:
    index = open_checkpoint(path, Comm())
    export_safetensors(index, str(out), options=ExportOptions(dtype=dtype), like=str(like))


with_or_without_weights = pytest.mark.parametrize("weights", [False, True], ids=["configuration", "with weights"])


@pytest.fixture
def gpt2(tmp_path: Path, weights: bool) -> Any:
    """A model, with its configuration and optionally its weights in the folder ``hf``."""
    model = make_gpt2(tmp_path / "hf", tied=True)
    if weights:
        model.save_pretrained(tmp_path / "hf")
    return model


@with_or_without_weights
def test_an_export_loads_in_its_dtype(tmp_path: Path, gpt2: Any) -> None:
    export(save(tmp_path, gpt2), tmp_path / "out", tmp_path / "hf")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert loaded.dtype == torch.bfloat16
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "bfloat16" in (config.get("dtype"), config.get("torch_dtype"))


@with_or_without_weights
def test_another_model_is_refused_before_files_are_written(tmp_path: Path, gpt2: Any) -> None:
    name = next(name for name, _ in gpt2.named_parameters())
    wrong = {name: (7, 5), "more.weight": (2,)}
    with pytest.raises(MismatchError, match=rf"not there: more.weight; of another shape: {name} \(7, 5\), there"):
        export(save(tmp_path, gpt2, **wrong), tmp_path / "out", tmp_path / "hf")
    assert not (tmp_path / "out").exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@with_or_without_weights
def test_tied_tensors_that_fsdp_saves_twice_are_exported_once(tmp_path: Path, gpt2: Any) -> None:
    optimizer = torch.optim.AdamW(gpt2.parameters(), lr=1e-2)
    gpt2(torch.arange(4)[None], labels=torch.arange(4)[None]).loss.backward()
    optimizer.step()
    held, states = get_state_dict(gpt2, optimizer)
    dcp.save({"model": held, "optim": states}, checkpoint_id=tmp_path / "same", no_dist=True)
    export(str(tmp_path / "same"), tmp_path / "out", tmp_path / "hf", "float32")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for name, wanted in gpt2.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], wanted)
    held["lm_head.weight"] = held["lm_head.weight"] + 1
    dcp.save({"model": held, "optim": states}, checkpoint_id=tmp_path / "other", no_dist=True)
    with pytest.raises(MismatchError, match="tied there, with other values here: lm_head.weight to transformer.wte"):
        export(str(tmp_path / "other"), tmp_path / "more", tmp_path / "hf")


EXPERTS = {"mixtral": (MixtralForCausalLM, MIXTRAL), "qwen2-moe": (Qwen2MoeForCausalLM, QWEN)}


@with_or_without_weights
@pytest.mark.parametrize("name", EXPERTS)
def test_fused_experts_are_exported_like_by_save_pretrained(tmp_path: Path, name: str, weights: bool) -> None:
    kind, config = EXPERTS[name]
    model = kind(config)
    model.save_pretrained(tmp_path / "hf")
    wanted = load_all(tmp_path / "hf")
    if not weights:
        (tmp_path / "hf" / "model.safetensors").unlink()
    path = save(tmp_path, model)
    export(path, tmp_path / "out", tmp_path / "hf", "float32")
    assert load_all(tmp_path / "out").keys() == wanted.keys()
    loaded, loading_info = kind.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(loading_info.values()), loading_info
    index = open_checkpoint(path, Comm())
    export_safetensors(index, str(tmp_path / "live"), options=ExportOptions())
    check_same(dict(loaded.state_dict()), load_all(tmp_path / "live"))


def test_an_adapter_is_not_exported_as_a_model(tmp_path: Path) -> None:
    MixtralForCausalLM(MIXTRAL).save_pretrained(tmp_path / "hf")
    lora = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    path = save(tmp_path, get_peft_model(MixtralForCausalLM(MIXTRAL), lora))
    with pytest.raises(MismatchError, match=r"write it with --adapter.*merge_and_unload"):
        export(path, tmp_path / "out", tmp_path / "hf")


def test_transposed_tensors_keep_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """from_pretrained also accepts the names in memory."""
    from transformers import conversion_mapping
    from transformers.core_model_loading import Transpose, WeightConverter

    odd = WeightConverter("self_attn.q.weight", "self_attn.q_proj.weight", [Transpose(0, 1)])
    monkeypatch.setitem(conversion_mapping._checkpoint_conversion_mapping_cache, "llama", [odd])
    model = LlamaForCausalLM(TIED)
    TIED.save_pretrained(tmp_path / "hf")
    export(save(tmp_path, model), tmp_path / "out", tmp_path / "hf")
    assert load_all(tmp_path / "out").keys() == model.state_dict().keys() - {"lm_head.weight"}


def test_the_users_rename_rules_take_precedence(tmp_path: Path) -> None:
    MIXTRAL.save_pretrained(tmp_path / "hf")
    path, out = save(tmp_path, MixtralForCausalLM(MIXTRAL)), tmp_path / "out"
    options = ExportOptions(renames=(Rename("(?P<x>.*)gate_up_proj", "{x}gate_up_proj"),))
    export_safetensors(open_checkpoint(path, Comm()), str(out), options=options, like=str(tmp_path / "hf"))
    assert {"gate_up_proj", "w2"} <= {part for name in load_all(out) for part in name.split(".")}


def test_an_old_folder_of_the_same_model_is_accepted(tmp_path: Path) -> None:
    """It has buffers that newer models compute, and both names of a tie."""
    model = LlamaForCausalLM(TIED)
    model.save_pretrained(tmp_path / "hf")
    held = load_all(tmp_path / "hf")
    old = {"lm_head.weight": torch.ones(32, 16), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    save_file({**held, **old}, tmp_path / "hf" / "model.safetensors")
    export(save(tmp_path, model), tmp_path / "out", tmp_path / "hf")
    assert load_all(tmp_path / "out").keys() == held.keys()


def test_further_files_of_a_model_are_copied(tmp_path: Path) -> None:
    """These are files of the tokenizer, the processors and the model's code, without adapter and quantization."""
    wanted = ["tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "source.spm", "spiece.model"]
    wanted += ["chat_template.jinja", "special_tokens_map.json", "video_preprocessor_config.json", "modeling_my.py"]
    wanted += ["generation_config.json", "preprocessor_config.json", "qwen.tiktoken", "target_vocab.json"]
    wanted += ["tekken.json", "additional_chat_templates/tool_use.jinja"]
    model = make_gpt2(tmp_path / "hf", tied=True)
    (tmp_path / "hf/additional_chat_templates").mkdir()
    left = ("adapter_config.json", "README.md", "onnx.bin", "additional_chat_templates/notes.txt")
    for name in (*wanted, *left):
        (tmp_path / "hf" / name).write_text(name)
    config = tmp_path / "hf" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "quantization_config": {"quant_method": "fp8"}}))
    export(save(tmp_path, model), out := tmp_path / "out", tmp_path / "hf")
    written = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    assert written == {*wanted, "config.json", "model.safetensors"}
    assert all((out / name).read_text() == name for name in wanted)
    assert "quantization_config" not in json.loads((out / "config.json").read_text())


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
