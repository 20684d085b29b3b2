"""Loads rename, join and cut tensors like transformers and PEFT, to the bit."""

from __future__ import annotations

import copy
import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from deepspeed_ucp.comm import Comm
from deepspeed_ucp.errors import MismatchError, UnsupportedError
from deepspeed_ucp.extensions.huggingface import TensorMap, describe_config, find_tied, map_checkpoint, read_config
from deepspeed_ucp.formats import open_checkpoint
from deepspeed_ucp.load.tags import report_absent
from deepspeed_ucp.model.index import AtomicIndex
from deepspeed_ucp.model.storage import strip_compiled
from deepspeed_ucp.plan.derive import derive
from deepspeed_ucp.stream.full_tensors import assemble_full_tensors
from deepspeed_ucp.stream.reader import AtomReader
from tests.support.exports import check_same
from tests.support.hub import MIXTRAL, QWEN, SIZES, TIED
from tests.support.wholes import read_whole
from tests.synth import Model, Param, Topology, random_state, write_checkpoint

pytest.importorskip("transformers", minversion="5.0", reason="before 5.0 names in memory are those of the files")

GPT2 = hf.GPT2Config(vocab_size=32, n_embd=16, n_layer=1, n_head=2, n_positions=8)
BERT = hf.BertConfig(vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2)
LLAMA = hf.LlamaConfig(**SIZES)
GRANITE = hf.GraniteMoeConfig(**SIZES, num_local_experts=3)
T5 = hf.T5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0)

PAIRS = {
    "the same": (hf.LlamaForCausalLM, hf.LlamaForCausalLM, LLAMA),
    "base, tied head": (hf.LlamaModel, hf.LlamaForCausalLM, TIED),
    "base of a head": (hf.GPT2Model, hf.GPT2LMHeadModel, GPT2),
    "head's base": (hf.LlamaForCausalLM, hf.LlamaModel, LLAMA),
    "experts, renamed": (hf.MixtralForCausalLM, hf.MixtralForCausalLM, MIXTRAL),
    "experts, more than ten": (hf.Qwen2MoeForCausalLM, hf.Qwen2MoeForCausalLM, QWEN),
    "experts, renamed whole": (hf.GraniteMoeForCausalLM, hf.GraniteMoeForCausalLM, GRANITE),
}
"""Saved class, live class, and their configuration."""


def read(folder: Path, module: Any, own: Collection[str] = ()) -> tuple[TensorMap, AtomicIndex]:
    index = open_checkpoint(str(folder), Comm())
    reading = map_checkpoint(index, module, {strip_compiled(name) for name in module.state_dict()}, own)
    return reading, derive(index, reading.derived, reading.dropped) if reading.derived or reading.dropped else index


def read_tensors(index: AtomicIndex) -> dict[str, torch.Tensor]:
    full = assemble_full_tensors(index)
    with AtomReader(index) as reader:
        held = {key.name: full.tensors[key] for key in index.atoms}
        return {name: read_whole(reader, tensor) for name, tensor in held.items()}


def check_read(found: dict[str, torch.Tensor], wanted: torch.nn.Module, *alone: str) -> None:
    """Check for all tensors of the model except tied ones, and no others except ``alone``."""
    held = dict(wanted.state_dict())
    places = {held[name].data_ptr() for name in found.keys() - {*alone}}
    tied = {name for name in held.keys() - found.keys() if held[name].data_ptr() in places}
    check_same({n: found[n] for n in found if n not in alone}, {n: held[n] for n in held if n not in tied})


@pytest.mark.parametrize("case", PAIRS)
def test_tensors_are_renamed_and_cut_like_by_transformers(tmp_path: Path, case: str) -> None:
    saved, live, config = PAIRS[case]
    torch.manual_seed(0)
    saved(config).save_pretrained(tmp_path)
    reading, index = read(tmp_path, live(config))
    check_read(read_tensors(index), live.from_pretrained(tmp_path), *["lm_head.weight"] * (case == "head's base"))
    assert bool(reading.describe()) == (case != "the same")


@pytest.mark.parametrize(
    ("live", "odd"),
    [
        ({}, ""),
        ({"vocab_size": 40, "tie_word_embeddings": True}, ""),
        ({"num_attention_heads": 4, "num_key_value_heads": 4}, "num_attention_heads 2 (here 4)"),
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, "rope_theta 10000.0 (here 500000.0)"),
    ],
)
@pytest.mark.parametrize("old", [False, True], ids=["5", "4"])
def test_a_differing_configuration_is_described(tmp_path: Path, old: bool, live: dict[str, Any], odd: str) -> None:
    hf.LlamaForCausalLM(LLAMA).save_pretrained(tmp_path)
    if old:  # the form of transformers 4
        config = {**LLAMA.to_dict(), "rope_theta": 10000.0}
        del config["rope_parameters"]
        (tmp_path / "config.json").write_text(json.dumps(config))
    index = open_checkpoint(str(tmp_path), Comm())
    notes = describe_config(index, read_config(hf.LlamaForCausalLM(hf.LlamaConfig(**{**SIZES, **live}))))
    assert [odd in note for note in notes] == [True] * bool(odd)


def test_old_names_are_renamed_and_old_buffers_ignored(tmp_path: Path) -> None:
    model = hf.BertForMaskedLM(BERT)
    model.save_pretrained(tmp_path)
    held = load_file(tmp_path / "model.safetensors")
    old = {name.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta"): held[name] for name in held}
    (tmp_path / "model.safetensors").unlink()
    torch.save({**old, "bert.embeddings.position_ids": torch.arange(4)}, tmp_path / "pytorch_model.bin")
    reading, index = read(tmp_path, model)
    check_read(read_tensors(index), model)
    assert "bert.embeddings.position_ids is of no use" in reading.describe()


def test_optimizer_states_are_renamed_with_their_parameters(tmp_path: Path) -> None:
    """Transformers 5 resumes a run of transformers 4, whose modules have the names of the files."""
    hf.Qwen2MoeForCausalLM(QWEN).save_pretrained(tmp_path / "hf")
    shapes = {name: tuple(held.shape) for name, held in load_file(tmp_path / "hf" / "model.safetensors").items()}
    described = Model(tuple(Param(name, shape) for name, shape in shapes.items()))
    state = random_state(described, 1)
    path = write_checkpoint(tmp_path, described, state, Topology(3, 2))
    _, index = read(path, model := hf.Qwen2MoeForCausalLM(QWEN))
    assert {param.name for param in index.atoms.storages} == set(model.state_dict())
    full, name = assemble_full_tensors(index), "model.layers.1.mlp.experts"
    with AtomReader(index) as reader:
        for each in ("fp32", "exp_avg"):
            parts = [[state.atoms[f"{name}.{e}.{p}_proj.weight"][each] for p in ("gate", "up")] for e in range(12)]
            key = next(key for key in full.tensors if key.name == f"{name}.gate_up_proj" and key.state == each)
            found = read_whole(reader, full.tensors[key])
            check_same({each: found}, {each: torch.stack([*map(torch.cat, parts)])})


def test_trained_tensors_of_a_run_are_neither_renamed_nor_dropped(tmp_path: Path) -> None:
    """Transformers would rename or ignore them."""
    live = hf.LlamaForCausalLM(LLAMA)
    live._keys_to_ignore_on_load_unexpected = ["mtp", "inv_freq"]
    more = [Param("norm.weight", (16,)), Param("mtp.weight", (2,)), Param("inv_freq", (2,), frozen=True)]
    names = [Param(name, tuple(held.shape)) for name, held in live.state_dict().items()]
    described = Model((*names, *more))
    path = write_checkpoint(tmp_path, described, random_state(described, 1), Topology(1, 1))
    reading, _ = read(path, live)
    assert (reading.derived, reading.dropped) == ({}, {"inv_freq"})  # no trained tensor


def test_transposing_conversions_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import conversion_mapping
    from transformers.core_model_loading import Transpose, WeightConverter

    odd = WeightConverter("self_attn.q.weight", "self_attn.q_proj.weight", [Transpose(0, 1)])
    monkeypatch.setitem(conversion_mapping._checkpoint_conversion_mapping_cache, "llama", [odd])
    model = hf.LlamaForCausalLM(LLAMA)
    save_file({"model.layers.0.self_attn.q.weight": torch.ones(16, 16)}, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedError, match=r"q.weight → .*q_proj.weight.*\(Transpose\).*from_pretrained before"):
        read(tmp_path, model)
    reading, _ = read(tmp_path, model, own={"model.layers.0.self_attn.q.weight"})  # a rule of the user
    assert not reading.derived


def test_incomplete_experts_are_refused(tmp_path: Path) -> None:
    names = [*(f"{expert}.gate_proj" for expert in range(12)), "3.up_proj"]
    held = {f"model.layers.0.mlp.experts.{name}.weight": torch.ones(6, 16) for name in names}
    save_file(held, tmp_path / "model.safetensors")
    with pytest.raises(MismatchError, match=r"gate_up_proj is made of .*up_proj.weight: only .*0.gate_proj.weight"):
        read(tmp_path, hf.Qwen2MoeForCausalLM(QWEN))


def test_names_of_models_of_other_libraries_are_kept(tmp_path: Path) -> None:
    save_file({"embed_tokens.weight": torch.ones(32, 16)}, tmp_path / "model.safetensors")
    assert not read(tmp_path, torch.nn.Linear(2, 2))[0].derived


class Wrapping(torch.nn.Module):
    """A module that wraps a library's model, like Lightning."""

    def __init__(self, *inner: torch.nn.Module) -> None:
        super().__init__()
        self.model, *others = inner
        self.others = torch.nn.ModuleList(others)
        self.value = torch.nn.Linear(2, 1)


def test_names_of_a_wrapped_model_get_the_wrappers_prefix(tmp_path: Path) -> None:
    """With two models the mapping is ambiguous."""
    hf.Qwen2MoeForCausalLM(QWEN).save_pretrained(tmp_path)
    live = hf.Qwen2MoeForCausalLM(QWEN)
    found = read_tensors(read(tmp_path, Wrapping(live))[1])
    assert found.keys() == {f"model.{name}" for name in live.state_dict()}
    check_same(
        {"it": found["model.model.layers.1.mlp.experts.down_proj"]},
        {"it": hf.Qwen2MoeForCausalLM.from_pretrained(tmp_path).model.layers[1].mlp.experts.down_proj},
    )
    compiled = torch.nn.Module()
    compiled.add_module("_orig_mod", live)  # like torch.compile
    assert read_tensors(read(tmp_path, compiled)[1]).keys() == set(live.state_dict())
    assert not read(tmp_path, Wrapping(live, hf.LlamaForCausalLM(LLAMA)))[0].derived
    wrap().save_pretrained(tmp_path / "peft")
    held = read_tensors(read(tmp_path / "peft", Wrapping(around := wrap("other")))[1])
    assert held.keys() == {f"model.{name}" for name, param in around.named_parameters() if param.requires_grad}


def wrap(name: str = "default", **options: Any) -> Any:
    lora = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"], **options)
    return get_peft_model(hf.LlamaForCausalLM(LLAMA), lora, adapter_name=name)


@pytest.mark.parametrize("saved", [hf.LlamaForCausalLM, hf.LlamaModel], ids=["model", "base"])
def test_a_base_is_loaded_into_a_wrapped_model(tmp_path: Path, saved: Any) -> None:
    model = saved(LLAMA)
    model.save_pretrained(tmp_path)
    live = wrap()
    reading, index = read(tmp_path, live)
    found, held = read_tensors(index), dict(model.state_dict())
    lacking = {name for name in live.state_dict() if saved is hf.LlamaModel and "lm_head" in name}
    assert reading.declared_new | found.keys() | lacking == live.state_dict().keys()
    assert all("lora_" in name for name in reading.declared_new)
    key = "layers.1.self_attn.q_proj"
    inside = key if saved is hf.LlamaModel else f"model.{key}"
    check_same({"it": found[f"base_model.model.model.{key}.base_layer.weight"]}, {"it": held[f"{inside}.weight"]})
    if saved is hf.LlamaForCausalLM:
        for part in ("original_module", "modules_to_save.default"):
            check_same({"it": found[f"base_model.model.lm_head.{part}.weight"]}, {"it": held["lm_head.weight"]})


@pytest.mark.parametrize("saved", ["shared", "encoder.embed_tokens", "decoder.embed_tokens", "lm_head"])
def test_a_tied_embedding_is_read_under_any_of_its_names(tmp_path: Path, saved: str) -> None:
    """The live model may be only an encoder, without the decoder's name, or a copy of it by PEFT."""
    model = hf.T5ForConditionalGeneration(T5)
    ties = {f"{name}.weight" for name in ("shared", "encoder.embed_tokens", "decoder.embed_tokens", "lm_head")}
    held = {key: value.clone() for key, value in model.state_dict().items() if key not in ties - {f"{saved}.weight"}}
    save_file(held, tmp_path / "model.safetensors")
    wanted = {"it": model.shared.weight.detach()}
    found = read_tensors(read(tmp_path, hf.T5EncoderModel(T5))[1])
    (name,) = {"shared.weight", "encoder.embed_tokens.weight"} & found.keys()
    check_same({"it": found[name]}, wanted)
    adapted: Any = get_peft_model(
        hf.T5ForConditionalGeneration(T5), LoraConfig(target_modules=["q"], modules_to_save=["lm_head"])
    )
    found = read_tensors(read(tmp_path, adapted)[1])
    check_same({"it": found["base_model.model.lm_head.modules_to_save.default.weight"]}, wanted)


def test_an_untied_head_supplies_no_embedding() -> None:
    encoder = hf.T5EncoderModel(copy.deepcopy(T5))
    assert find_tied(encoder, ["shared.weight"], ["lm_head.weight"]) == {"shared.weight": "lm_head.weight"}
    encoder.config.tie_word_embeddings = False
    assert find_tied(encoder, ["shared.weight"], ["lm_head.weight"]) == {}


def test_base_models_may_have_modules_with_names_of_peft(tmp_path: Path) -> None:
    parts = {"base_layer": torch.nn.Linear(2, 2), "other": torch.nn.Linear(2, 2)}
    base = torch.nn.Sequential(torch.nn.ModuleDict(parts))
    save_file(base.state_dict(), tmp_path / "model.safetensors")
    live: Any = get_peft_model(base, LoraConfig(r=2, target_modules=["other"]))
    reading, index = read(tmp_path, live)
    assert {*read_tensors(index)} == live.state_dict().keys() - reading.declared_new
    assert "base_model.model.0.base_layer.weight" in reading.derived


def test_an_adapter_loads_into_the_only_adapter_of_a_model(tmp_path: Path) -> None:
    wrap().save_pretrained(tmp_path)
    index = read(tmp_path, wrap("other"))[1]
    trained = {name for name, param in wrap("other").named_parameters() if param.requires_grad}
    assert {param.name for param in index.atoms.storages} == trained
    two = wrap("one")
    two.add_adapter("two", two.peft_config["one"])
    assert not read(tmp_path, two)[0].derived


def test_an_id_of_the_hub_as_folder_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise a run that should start from a model would start from scratch."""
    snapshot = tmp_path / "models--some--model" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (tmp_path / "models--some--model" / "refs").mkdir()
    (tmp_path / "models--some--model" / "refs" / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    caplog.set_level("INFO")
    monkeypatch.chdir(tmp_path)
    for place, text in (("some/model", f"local cache: name {snapshot}"), ("some/other", "some/other: does not exist")):
        report_absent([place], Comm(), require=False)
        assert text in caplog.messages[-1] and caplog.records[-1].levelname == "WARNING"
