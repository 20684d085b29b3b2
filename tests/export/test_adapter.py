"""Exported adapters equal PEFT's files to the bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file

from deepspeed_ucp.comm import Comm
from deepspeed_ucp.errors import CheckpointError, ConfigError
from deepspeed_ucp.export.safetensors import export_safetensors
from deepspeed_ucp.export.tensors import ExportOptions
from deepspeed_ucp.formats import open_checkpoint
from deepspeed_ucp.formats.deepspeed.naming import Naming
from deepspeed_ucp.formats.foreign.adapter import read_config
from tests.support.adapters import LORAS, make_base, make_peft
from tests.support.covering import all_turns
from tests.support.exports import check_same, load_all, open_model
from tests.synth import Model, Param, State, Topology, random_state, write_checkpoint
from tests.synth.description import DTYPES
from tests.synth.engines import describe

TOPOLOGIES = (Topology(0), Topology(1, 2, "bf16"), Topology(3, 2, "bf16"))
UNTIED = {**LORAS, "tokens, untied": {**LORAS["lora"], "trainable_token_indices": [1, 4]}}
TIED: dict[str, dict[str, Any]] = {
    "embedding, ensured": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "head, ensured": {"modules_to_save": ["lm_head"], "ensure_weight_tying": True},
    "both, ensured": {"modules_to_save": ["lm_head", "embed_tokens"], "ensure_weight_tying": True},
    "embedding": {"modules_to_save": ["embed_tokens"]},
    "head": {"modules_to_save": ["lm_head"]},
    "both": {"modules_to_save": ["lm_head", "embed_tokens"]},
    "tokens, ensured": {"trainable_token_indices": {"embed_tokens": [1, 3]}, "ensure_weight_tying": True},
    "tokens": {"trainable_token_indices": {"embed_tokens": [1, 3]}},
}
"""Adapters of a model with a tied embedding and head."""


def save(folder: Path, model: PeftModel, topology: Topology) -> str:
    """Write a DeepSpeed save of a model with a trained adapter and a frozen base."""
    described = describe(model)
    state = random_state(described, 1, precision=topology.precision)
    values = {name: param.detach().clone() for name, param in model.named_parameters()}
    atoms = {name: {**held, "fp32": values[name]} for name, held in state.atoms.items()}
    for name in (param.name for param in described.owners if param.frozen):
        atoms[name] = {key: values[name].to(held.dtype) for key, held in state.atoms[name].items()}
        model.get_parameter(name).data = values[name].to(DTYPES[topology.precision]).float()  # the saved value
    return str(write_checkpoint(folder, described, State(atoms, state.scalars), topology))


def export(path: str, out: Path, model: PeftModel, name: str = "default") -> None:
    config = model.peft_config[name].to_dict()
    config = json.loads(json.dumps(config, default=lambda value: getattr(value, "value", None) or sorted(value)))
    options = ExportOptions(adapter=name, adapter_config=config)
    index = open_checkpoint(path, Comm(), Naming(weights_only=True))
    export_safetensors(index, str(out), options=options)


@pytest.mark.parametrize(
    ("kind", "topology"), all_turns([*UNTIED, *TIED], TOPOLOGIES, 1, lambda row: f"{row[0]}-{row[1].label}")
)
def test_an_exported_adapter_equals_pefts_file(tmp_path: Path, kind: str, topology: Topology) -> None:
    """PEFT loads it. A whole module is written under each of its names, and new tokens once."""
    tied = kind in TIED
    model = make_peft(tied=tied, **(UNTIED.get(kind) or {"r": 4, "target_modules": ["q_proj"], **TIED[kind]}))
    export(save(tmp_path, model, topology), tmp_path / "out", model)
    model.save_pretrained(tmp_path / "peft", save_embedding_layers=False)
    written, expected = (load_file(tmp_path / place / "adapter_model.safetensors") for place in ("out", "peft"))
    check_same(written, expected)
    held = dict(PeftModel.from_pretrained(make_base(tied=tied), str(tmp_path / "out")).named_parameters())
    trained = {name for name, param in model.named_parameters() if param.requires_grad}
    assert all(torch.equal(held[name], model.get_parameter(name)) for name in trained)
    if not tied:
        assert {key.name for key in open_checkpoint(str(tmp_path / "peft"), Comm()).atoms} == trained


def test_each_of_two_adapters_is_exported(tmp_path: Path) -> None:
    """A module that one adapter saves whole is part of the base of the other one."""
    model = make_peft(**LORAS["lora"])
    model.add_adapter(
        "other", LoraConfig(r=2, init_lora_weights=False, target_modules=["k_proj"], modules_to_save=["norm"])
    )
    for param in model.parameters():
        param.requires_grad = True
    path = save(tmp_path, model, TOPOLOGIES[0])
    model.save_pretrained(tmp_path / "peft", save_embedding_layers=False)
    for name, folder in (("default", tmp_path / "peft"), ("other", tmp_path / "peft" / "other")):
        export(path, tmp_path / name, model, name)
        check_same(load_all(tmp_path / name), load_all(folder))


class NamesOfPeft(torch.nn.Module):
    """Modules with names that PEFT uses, too: one with an adapter, others without."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.ModuleDict({"base_layer": torch.nn.Linear(4, 4)})
        self.last = torch.nn.ModuleDict({"base_layer": torch.nn.Linear(4, 4), "original_module": torch.nn.Linear(4, 4)})


@pytest.mark.parametrize("bias", ["none", "lora_only"])
def test_modules_named_like_peft_layers_keep_their_names(tmp_path: Path, bias: Any) -> None:
    config = LoraConfig(r=2, init_lora_weights=False, target_modules=["first.base_layer"], bias=bias)
    model = get_peft_model(NamesOfPeft(), config)
    path = save(tmp_path, model, TOPOLOGIES[0])
    export(path, tmp_path / "adapter", model)
    biases = [name for name in load_file(tmp_path / "adapter" / "adapter_model.safetensors") if name.endswith("bias")]
    assert biases == ["base_model.model.first.base_layer.base_layer.bias"] * (bias == "lora_only")


def test_a_checkpoint_without_an_adapter_is_refused(tmp_path: Path) -> None:
    described = Model((Param("a.weight", (3, 5)),))
    index = open_model(tmp_path, Topology(1, 2), described)
    with pytest.raises(CheckpointError, match="no adapter"):
        export_safetensors(index, str(tmp_path / "out"), options=ExportOptions(adapter="default"))


def test_the_configuration_is_found_in_the_parent_folder(tmp_path: Path) -> None:
    tag = tmp_path / "checkpoint-3" / "global_step3"
    tag.mkdir(parents=True)
    with pytest.raises(ConfigError, match="--adapter-config"):
        read_config(None, str(tag))
    (tag.parent / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4}))
    assert read_config(None, str(tag))["r"] == 4
    (tag.parent / "adapter_config.json").write_text(json.dumps({"peft_type": "IA3"}))
    with pytest.raises(ConfigError, match="IA3"):
        read_config(str(tag.parent), str(tag))
