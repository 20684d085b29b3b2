"""Families for Megatron-Core's names: every parameter of the models that they lead to is fed, by shape."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from transformers import PretrainedConfig

from deepspeed_ucp.errors import MismatchError
from deepspeed_ucp.patterns import ShardNC, ShardV, advise_family, from_config
from deepspeed_ucp.plan.predicted import predict_renames
from deepspeed_ucp.plan.renames import RemappedIndex, apply_renames
from deepspeed_ucp.plan.settling import settle_index
from tests.patterns import models
from tests.plan.test_recast import make_index

SMALL = models.Sizes(hidden=16, heads=4, ffn=24, vocab=61, divisor=8)
GATED = replace(SMALL, gated=True, bias=False, kv_heads=2)
CONFIG = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
LLAMA = {**CONFIG, "num_key_value_heads": 2, "head_dim": 4}
ARGS = {"num_attention_heads": 4, "group_query_attention": False, "vocab_size": 61, "num_query_groups": 1}
"""Megatron-LM's without grouped queries: the number of groups is then none that counts."""
GROUPED = {**ARGS, "group_query_attention": True, "num_query_groups": 2, "swiglu": True}


def list_live(kind: str, config: PretrainedConfig) -> dict[str, tuple[tuple[int, ...]]]:
    with torch.device("meta"):
        model = getattr(transformers, kind)(config)
    return {name: (tuple(param.shape),) for name, param in model.named_parameters()}


def carry_out(family: Any, saved: models.Shapes, live: models.Shapes, args: Any) -> RemappedIndex:
    rules = from_config(family)
    index, _ = make_index({name: shape for name, (shape,) in saved.items()}, hints={"args": args})
    return apply_renames(index, live, rules)


def check_fed(made: RemappedIndex, live: models.Shapes) -> None:
    """Everything live is fed with its shape, but that a vocabulary is padded, and everything saved is used."""
    sources = {**made.renamed, **{name: name for name in made.made}}
    assert sources.keys() == live.keys()
    assert set(sources.values()) == {key.name for key in made.index.stored.atoms}
    shapes = {key.name: atom.shape for key, atom in made.index.stored.atoms.items()}
    tables = {name for name, old in sources.items() if shapes[old] != live[name][0]}
    assert all("embed" in name or "wte" in name or "lm_head" in name for name in tables)
    assert {shapes[sources[name]] for name in tables} <= {(64, 16)}


MODELS: dict[str, tuple[str, str, dict[str, Any], models.Sizes, dict[str, Any]]] = {
    "llama": ("mcore-llama", "LlamaForCausalLM", LLAMA, GATED, GROUPED),
    "mistral": ("mcore-llama", "MistralForCausalLM", LLAMA, GATED, GROUPED),
    "mixtral": ("mcore-llama", "MixtralForCausalLM", {**LLAMA, "num_local_experts": 4}, GATED, GROUPED),
    "qwen3moe": (
        "mcore-qwen-moe",
        "Qwen3MoeForCausalLM",
        {**LLAMA, "num_experts": 4, "moe_intermediate_size": 24},
        GATED,
        GROUPED,
    ),
    "starcoder": ("mcore-gpt", "GPTBigCodeForCausalLM", {**CONFIG, "n_inner": 24, "n_positions": 2048}, SMALL, ARGS),
    "neox": ("mcore-gpt-neox", "GPTNeoXForCausalLM", CONFIG, SMALL, ARGS),
}


@pytest.mark.parametrize("engine", [False, True], ids=["local", "transformer engine"])
@pytest.mark.parametrize("model", MODELS)
def test_hugging_face_s_models_are_fed(model: str, engine: bool) -> None:
    family, kind, sizes, saved_sizes, args = MODELS[model]
    experts = sizes.get("num_experts", sizes.get("num_local_experts", 0))
    extra = {"multi_query": False} if model == "starcoder" else {}
    config = getattr(transformers, kind).config_class(vocab_size=61, tie_word_embeddings=False, **sizes, **extra)
    saved = models.mcore(replace(saved_sizes, experts=experts), transformer_engine=engine, untied=True)
    if model == "neox":
        del saved["embedding.position_embeddings.weight"]
    live = list_live(kind, config)
    if model == "qwen3moe":
        for layer in range(2):
            for head in "qk":
                saved[f"decoder.layers.{layer}.self_attention.{head}_layernorm.weight"] = ((4,),)
    check_fed(carry_out(family, saved, live, args), live)


MEGATRON = {"mcore-megatron": ShardNC, "mcore-megatron-interleaved": ShardV}


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("pipeline", [False, True], ids=["plain", "pipeline"])
@pytest.mark.parametrize("kind", ["gpt", "llama"])
@pytest.mark.parametrize("family", MEGATRON)
def test_megatron_deepspeed_s_models_are_fed_and_settled(family: str, kind: str, pipeline: bool, tp: int) -> None:
    sizes, args = (SMALL, ARGS) if kind == "gpt" else (GATED, GROUPED)
    make = models.megatron_pipeline if pipeline else models.megatron_plain
    live = make(sizes, tp, untied=kind == "llama")
    patterns = {"family": family, "variables": {"final": 4}, "original_vocab_size": 61}
    made = carry_out(patterns, models.mcore(sizes, untied=kind == "llama"), live, args)
    check_fed(made, {name: _whole(name, shapes) for name, shapes in live.items()})
    saved = {name: made.renamed.get(name, name) for name in live}
    settled = settle_index(made.index, from_config(patterns), {saved[name]: shapes for name, shapes in live.items()})
    patterns_of = settled.require().patterns
    if tp > 1:
        fused = [each for name, each in patterns_of.items() if "query_key_value" in name or "linear_qkv" in name]
        assert len(fused) in (2, 4) and {type(each) for each in fused} == {MEGATRON[family]}
        assert {type(each) for name, each in patterns_of.items() if "fc1.weight" in name} == {
            ShardV if kind == "gpt" else ShardNC
        }
        assert {each.vocab for name, each in patterns_of.items() if "word" in name} == {61}


def _whole(name: str, shapes: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
    """The whole of a parameter that ranks hold equal parts of."""
    rows = ("word", "lm_head", "output_layer", "query_key_value", "h_to_4h.weight", "h_to_4h.bias")
    cut = 0 if any(each in name and "4h_to_h" not in name for each in rows) else None
    cut = 1 if "dense.weight" in name or "4h_to_h.weight" in name else cut
    times = len(shapes)
    return (tuple(size * times if dim == cut else size for dim, size in enumerate(shapes[0])),)


@pytest.mark.parametrize(
    ("family", "kind", "args", "words"),
    [
        (
            "mcore-llama",
            "LlamaForCausalLM",
            {},
            'needs heads and groups, .* set .*{"heads": <number>, "groups": <number>}',
        ),
        ("mcore-llama", "LlamaForCausalLM", {"num_attention_heads": 4}, "needs groups"),
        ("mcore-llama", "LlamaForCausalLM", {**GROUPED, "num_query_groups": 4}, "rows are not|cannot be made"),
        ("mcore-llama", "LlamaForCausalLM", {**GROUPED, "num_attention_heads": 6}, "rows are not|cannot be made"),
        ("mcore-llama", "LlamaForCausalLM", {**GROUPED, "swiglu": False}, "contradicts .* has no SwiGLU"),
        ("mcore-llama", "LlamaForCausalLM", {**GROUPED, "rotary_interleaved": True}, "neighbouring places"),
        ("mcore-llama", "LlamaForCausalLM", {**GROUPED, "apply_layernorm_1p": True}, "kept less 1"),
        ("mcore-gpt", "GPT2LMHeadModel", ARGS, "transposed, as Hugging Face's GPT-2 does .* such as GPTBigCode"),
    ],
)
def test_what_is_refused(family: str, kind: str, args: dict[str, Any], words: str) -> None:
    config = getattr(transformers, kind).config_class(vocab_size=61, **(LLAMA if "Llama" in kind else CONFIG))
    sizes = GATED if family == "mcore-llama" else SMALL
    with pytest.raises(MismatchError, match=words):
        carry_out(family, models.mcore(sizes, untied=True), list_live(kind, config), args)


def test_a_model_without_gates_is_no_llama() -> None:
    config = transformers.LlamaConfig(vocab_size=61, **{**LLAMA, "intermediate_size": 12})
    with pytest.raises(MismatchError, match="by its shapes gate and up are not fused"):
        carry_out(
            "mcore-llama", models.mcore(replace(GATED, gated=False)), list_live("LlamaForCausalLM", config), GROUPED
        )


def test_a_family_for_both_names_is_told() -> None:
    saved, live = models.mcore(GATED), list_live("LlamaForCausalLM", transformers.LlamaConfig(vocab_size=61, **LLAMA))
    told = advise_family(saved, live)
    assert '"patterns": "mcore-llama" or ' in told and "megatron" not in told
    assert '"mcore-megatron" or "mcore-megatron-interleaved" (' in advise_family(saved, models.megatron_plain(GATED, 1))
    assert advise_family(saved, {"a": ()}) == ""


def test_what_a_forecast_takes_is_one_of_both_names() -> None:
    index, _ = make_index({name: shape for name, (shape,) in models.mcore(SMALL).items()}, hints={"args": ARGS})
    rules = from_config("mcore-megatron")
    made = predict_renames(index, rules)
    assert {*made.renamed, *made.made} == models.megatron_plain(SMALL, 1).keys()
