"""Each family of rules on the names and sizes of a real model, at two degrees."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from deepspeed_ucp.errors import ConfigError, MismatchError
from deepspeed_ucp.tensor_parallel.kinds import Partial, Replicate, ShardH, ShardNC, ShardV
from deepspeed_ucp.tensor_parallel.layout import find_faults
from deepspeed_ucp.tensor_parallel.rules import from_arguments, from_config, list_families, load_family

from . import models
from .shards import settle

KV = 1024
CLIENT = {
    "deepspeed_activation_checkpointing": False,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "kv_channels": 64,
    "swiglu": False,
    "transformer_impl": "local",
}
OLDER, NEWER = CLIENT, {**CLIENT, "ds_sequence_parallel_fpdt": False}
"""Arguments of Megatron-DeepSpeed before and since FPDT."""

MODELS = {
    "megatron-gpt": (
        lambda tp: models.megatron_pipeline(models.GPT3_MEDIUM, tp),
        {
            r".*query_key_value\..*": ShardNC(parts=(1024, 1024, 1024), sized=True),
            r".*h_to_4h\..*": ShardV(),
            r".*(?:self_attention\.dense|4h_to_h)\.weight": ShardH(),
            r".*(?:layernorm\.\w+|position_embeddings\.weight|dense\.bias|4h_to_h\.bias)|4\.\w+": Replicate(),
            r".*word_embeddings\.weight": ShardV(),
        },
    ),
    "megatron-gpt-interleaved": (
        lambda tp: models.megatron_plain(models.LLAMA_70B, tp, untied=True),
        {
            r".*query_key_value\.weight": ShardV(),
            r".*h_to_4h\.weight": ShardNC(parts=(1, 1)),
            r".*(?:self_attention\.dense|4h_to_h)\.weight": ShardH(),
            r".*layernorm\.weight": Replicate(),
            r".*(?:word_embeddings|output_layer)\.weight": ShardV(),
        },
    ),
    "megatron-llama": (
        lambda tp: models.megatron_pipeline(models.LLAMA_70B, tp, untied=True),
        {
            r".*query_key_value\.weight": ShardNC(parts=(8192, KV, KV), sized=True),
            r".*h_to_4h\.weight": ShardNC(parts=(1, 1)),
            r".*(?:self_attention\.dense|4h_to_h)\.weight": ShardH(),
            r".*layernorm\.weight|4\.weight": Replicate(),
            r".*(?:word_embeddings|lm_head)\.weight": ShardV(),
        },
    ),
    "bloom": (
        lambda tp: models.bloom_pipeline(models.BLOOM_176B, tp),
        {
            r".*(?:query_key_value|h_to_4h)\..*": ShardV(unit=3),
            r".*(?:self_attention\.dense|4h_to_h)\.weight": ShardH(),
            r".*(?:layernorm|norm)\.\w+|5\.\w+|.*(?:dense|4h_to_h)\.bias": Partial(),
            r".*word_embeddings\.weight": ShardV(),
        },
    ),
    "gpt-neox": (
        lambda tp: models.neox_pipeline(models.NEOX_20B, tp),
        {
            r".*(?:query_key_value|h_to_4h)\..*": ShardV(unit=3),
            r".*(?:attention\.dense|4h_to_h)\.weight": ShardH(),
            r".*norm\.\w+|.*(?:dense|4h_to_h)\.bias": Replicate(),
            r".*(?:word_embeddings|final_linear)\.weight": ShardV(),
        },
    ),
    "mixtral-moe": (
        lambda tp: models.megatron_plain(models.MIXTRAL, tp, untied=True),
        {
            r".*query_key_value\.weight": ShardNC(parts=(4096, KV, KV), sized=True),
            r".*weight1": ShardNC(parts=(1, 1), blocks=8),
            r".*(?:self_attention\.dense\.weight|weight2)": ShardH(),
            r".*(?:layernorm|router)\.weight": Replicate(),
            r".*(?:word_embeddings|output_layer)\.weight": ShardV(),
        },
    ),
}


def strip_unit(pattern):
    return replace(pattern, unit=1, vocab=None)


def test_every_family_has_a_test_model():
    found = [name for name in list_families() if load_family(name).rules]
    assert sorted(MODELS) == found


@pytest.mark.parametrize("family", sorted(MODELS))
@pytest.mark.parametrize(("first", "second"), [(1, 2), (2, 4), (4, 1), (8, 2)], ids=lambda tp: f"tp{tp}")
def test_a_familys_rules_give_a_pattern_to_every_parameter(family, first, second):
    make, expected = MODELS[family]
    source, target = make(first), make(second)
    vocab = 32000
    rules = from_config({"family": family, "original_vocab_size": vocab})
    settled = settle(list(source), source, target, rules)
    assert set(settled.layouts) == set(source)
    for name, pattern in settled.patterns.items():
        (wanted,) = {str(want): want for regex, want in expected.items() if re.fullmatch(regex, name)}.values()
        assert type(pattern) is type(wanted), name
        if isinstance(wanted, (ShardV, ShardH, ShardNC)):
            assert strip_unit(pattern) == strip_unit(wanted), name
        assert (pattern.vocab == vocab) == bool(
            re.search("word_embeddings.weight|lm_head|output_layer|final_linear", name)
        )
        assert all(find_faults(layout) == [] for layout in settled.layouts[name])
    assert settled.unused == []


def settle_model(make, rules, hints=None):
    source, target = make(1), make(2)
    return settle(list(source), source, target, rules, hints=hints)


def test_sizes_are_read_from_saved_arguments():
    """In this model the head width times the number of heads is not the hidden size."""
    sizes = models.Sizes(hidden=1024, heads=16, ffn=4096, vocab=1024)
    source, target = models.megatron_pipeline(sizes, 1), models.megatron_pipeline(sizes, 2)
    names = [name for name in source if "query_key_value" in name]
    for side in (source, target):
        tp = len(side[names[0]])
        side.update({name: ((4096 // tp, *side[name][0][1:]),) * tp for name in names})
    args = {"num_attention_heads": 16, "kv_channels": 128, "num_key_value_heads": 8, "hidden_size": 1024}
    settled = settle(list(source), source, target, from_config("megatron-gpt"), hints={"args": args})
    assert settled.patterns[names[0]].parts == (2048, 1024, 1024)


QKV = "2.self_attention.query_key_value.weight"
CONTRADICTIONS = [
    ("megatron-gpt", {"checkpoint_version": 1.0}),
    ("megatron-gpt", {"args": {"transformer_impl": "transformer_engine"}}),
    ("megatron-gpt", {"args": {"use_mcore_models": True}}),
    ("megatron-gpt-interleaved", {"checkpoint_version": 0}),
    ("megatron-gpt", {"args": OLDER}),
    ("megatron-gpt", {"args": {**NEWER, "num_key_value_heads": 2}}),
    ("megatron-gpt-interleaved", {"args": NEWER}),
    ("megatron-llama", {"args": OLDER}),
    ("megatron-llama", {"args": {**NEWER, "num_key_value_heads": 2}}),
    ("bloom", {"args": NEWER}),
    ("megatron-llama", {"args": {"swiglu": False}}),
    ("bloom", {"checkpoint_version": 1.0}),
]
UNKNOWN_CLIENTS = [
    {"num_attention_heads": 16, "kv_channels": 64, "num_key_value_heads": 16, "ds_sequence_parallel_size": 1},
    {**NEWER, "num_key_value_heads": 2},
    {**NEWER, "transformer_impl": "transformer_engine"},
]
GROUPED = models.Sizes(hidden=512, heads=8, ffn=2048, vocab=1024, kv_heads=2)
GPT = MODELS["megatron-gpt"][0]

REFUSED = [
    (
        lambda tp: models.megatron_pipeline(models.LLAMA_70B, 8 * tp, untied=True),
        "megatron-llama",
        {"args": {"num_attention_heads": 64}},
        r"query_key_value.weight: widths .* not whole units of 128",
    ),
    (GPT, "megatron-gpt", {"args": {"hidden_size": 512}}, "contradicts itself about hidden: 512 by .*, 1024 by shape"),
    (GPT, "megatron-gpt", {"args": {"num_attention_heads": 16, "num_key_value_heads": 4}}, r"256\] sum to 1536"),
    (lambda tp: models.neox_pipeline(GROUPED, tp), "gpt-neox", None, "not interleaved per head; give rules"),
    *((MODELS[name][0], name, hints, f"family {name} contradicts the checkpoint") for name, hints in CONTRADICTIONS),
    *((GPT, None, {"args": {**args, "hidden_size": 1024}}, "not known.*query_key_value") for args in UNKNOWN_CLIENTS),
]


@pytest.mark.parametrize(("make", "family", "hints", "words"), REFUSED)
def test_models_without_a_pattern_for_a_parameter_are_refused(make, family, hints, words):
    rules = from_config(family) if family else [from_arguments()]
    with pytest.raises(MismatchError, match=words):
        settle_model(make, rules, hints)


@pytest.mark.parametrize(
    ("args", "expected"),
    [(OLDER, ShardV(unit=192)), (NEWER, ShardNC(parts=(1024, 1024, 1024), sized=True, unit=64))],
    ids=["before FPDT", "since FPDT"],
)
def test_arguments_of_known_clients_give_fused_attention_a_pattern(args, expected):
    source, target = GPT(1), GPT(2)
    names = [name for name in source if "query_key_value" in name or "dense_h_to_4h" in name]
    hints = {"args": {**args, "hidden_size": 1024}, "checkpoint_version": 3.0}
    settled = settle(names, source, target, [from_arguments()], hints=hints)
    assert settled.patterns[QKV] == expected
    assert settled.patterns["2.mlp.dense_h_to_4h.bias"] == ShardV()


@pytest.mark.parametrize("version", [None, 0, 2.0, 3.0])
def test_checkpoint_versions_with_per_rank_parts(version):
    hints = {"checkpoint_version": version, "args": {"transformer_impl": "local"}}
    rules = from_config({"family": "megatron-gpt", "original_vocab_size": 50257})
    assert settle_model(GPT, rules, hints).origin[QKV] == "family megatron-gpt"


def test_transposed_experts_are_recognised_by_their_shape():
    """MegaBlocks keeps w2 as [experts × ffn, hidden]; Mixtral as [experts × hidden, ffn]."""
    common = {"layers.0.norm.weight": ((64,),), "layers.0.block_sparse_moe.gate.weight": ((4, 64),)}
    name = "layers.0.block_sparse_moe.experts.w2"
    for local, kind in (((4 * 80, 64), ShardNC), ((4 * 64, 80), ShardH)):
        source = {name_: shape * 2 for name_, shape in {**common, name: (local,)}.items()}
        target = dict(common)
        target[name] = ((4 * 160, 64),) if kind is ShardNC else ((4 * 64, 160),)
        settled = settle(list(source), source, target, from_config("mixtral-moe"))
        assert type(settled.patterns[name]) is kind


def test_an_unknown_family_is_refused():
    with pytest.raises(ConfigError, match="there is no family 'megatron'. Did you mean 'megatron-gpt'"):
        load_family("megatron")
    with pytest.raises(ConfigError, match="there is no family 'mine'. Families: bloom"):
        load_family("mine")


def test_a_family_of_another_model_is_reported():
    source, target = {"a.weight": ((4,), (4,))}, {"a.weight": ((8,),)}
    rules = from_config({"rules": [{"match": r"a\.weight", "pattern": "shard-v"}], "family": "bloom"})
    assert settle(["a.weight"], source, target, rules).unused == ["family bloom: no rule matches any parameter"]
