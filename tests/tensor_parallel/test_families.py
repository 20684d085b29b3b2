"""Each family of rules on the names and sizes of a real model, at two degrees."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from deepspeed_ucp.errors import MismatchError
from deepspeed_ucp.tensor_parallel.kinds import Partial, Replicate, ShardH, ShardNC, ShardV
from deepspeed_ucp.tensor_parallel.layout import find_faults
from deepspeed_ucp.tensor_parallel.rules import from_arguments, from_config, list_families, load_family

from . import models
from .shards import settle

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

USUAL = {
    "query_key_value": ShardV(),
    "h_to_4h": ShardV(),
    r"(?:attention\.dense|4h_to_h)\.weight": ShardH(),
    r"(?:word_embeddings|lm_head|output_layer|final_linear)\.weight": ShardV(vocab=32000),
}
"""Patterns of most families; all other parameters are replicas."""
QKV = "query_key_value"
GATED = {"h_to_4h": ShardNC(parts=(1, 1))}
EXPERTS = {"weight1": ShardNC(parts=(1, 1), blocks=8), "weight2": ShardH()}
MODELS = {
    "megatron-gpt": (models.PIPELINE, models.GPT3_MEDIUM, {QKV: ShardNC(parts=(1024, 1024, 1024), sized=True)}),
    "megatron-gpt-interleaved": (models.UNTIED_PLAIN, models.LLAMA_70B, GATED),
    "megatron-llama": (
        models.UNTIED_PIPELINE,
        models.LLAMA_70B,
        {QKV: ShardNC(parts=(8192, 1024, 1024), sized=True), **GATED},
    ),
    "bloom": (models.BLOOM, models.BLOOM_176B, {}),
    "gpt-neox": (models.NEOX, models.NEOX_20B, {}),
    "mixtral-moe": (
        models.UNTIED_PLAIN,
        models.MIXTRAL,
        {QKV: ShardNC(parts=(4096, 1024, 1024), sized=True), **EXPERTS},
    ),
}
"""Names, sizes, and the patterns that differ from the usual ones."""


def test_every_family_has_a_test_model():
    assert sorted(MODELS) == [name for name in list_families() if load_family(name).rules]


@pytest.mark.parametrize("family", sorted(MODELS))
@pytest.mark.parametrize(("first", "second"), [(1, 2), (2, 4), (4, 1), (8, 2)], ids=lambda tp: f"tp{tp}")
def test_a_familys_rules_give_a_pattern_to_every_parameter(family, first, second):
    names, sizes, patterns = MODELS[family]
    source, target = (models.make(names, sizes, tp) for tp in (first, second))
    settled = settle(list(source), source, target, from_config({"family": family, "original_vocab_size": 32000}))
    assert set(settled.layouts) == set(source)
    others = Partial() if family == "bloom" else Replicate()
    for name, pattern in settled.patterns.items():
        wanted = (want for regex, want in {**USUAL, **patterns}.items() if re.search(regex, name))
        assert (replace(pattern, unit=1) if hasattr(pattern, "unit") else pattern) == next(wanted, others), name
        assert all(find_faults(layout) == [] for layout in settled.layouts[name])
    assert settled.unused == []


def settle_model(rules, hints=None, names=models.PIPELINE, sizes=models.GPT3_MEDIUM, tp=1):
    source, target = (models.make(names, sizes, degree * tp) for degree in (1, 2))
    return settle(list(source), source, target, rules, hints)


ATTENTION = "2.self_attention.query_key_value.weight"


def test_sizes_are_read_from_saved_arguments():
    """In this model the head width times the number of heads is not the hidden size."""
    source, target = {ATTENTION: ((4096, 1024),)}, {ATTENTION: ((2048, 1024),) * 2}
    args = {"num_attention_heads": 16, "kv_channels": 128, "num_key_value_heads": 8, "hidden_size": 1024}
    settled = settle([ATTENTION], source, target, from_config("megatron-gpt"), {"args": args})
    assert settled.patterns[ATTENTION].parts == (2048, 1024, 1024)


GROUPED = models.Sizes(hidden=512, heads=8, ffn=2048, vocab=1024, kv_heads=2)
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
FEWER_KEYS = {"num_attention_heads": 16, "num_key_value_heads": 4}
REFUSED = [
    ("megatron-llama", {"args": {"num_attention_heads": 64}}, 8, "value.weight: widths .* not whole units of 128"),
    ("megatron-gpt", {"args": {"hidden_size": 512}}, 1, "contradicts itself about hidden: 512 by .*, 1024 by shape"),
    ("megatron-gpt", {"args": FEWER_KEYS}, 1, r"256\] sum to 1536"),
    *((family, hints, 1, f"family {family} contradicts the checkpoint") for family, hints in CONTRADICTIONS),
    *((None, {"args": {**args, "hidden_size": 1024}}, 1, "not known.*query_key_value") for args in UNKNOWN_CLIENTS),
]


@pytest.mark.parametrize(("family", "hints", "tp", "words"), REFUSED)
def test_models_without_a_pattern_for_a_parameter_are_refused(family, hints, tp, words):
    rules = from_config(family) if family else [from_arguments()]
    names, sizes, _ = MODELS[family or "megatron-gpt"]
    with pytest.raises(MismatchError, match=words):
        settle_model(rules, hints, names, sizes, tp)


def test_grouped_query_attention_of_neox_needs_rules():
    with pytest.raises(MismatchError, match="not interleaved per head; give rules"):
        settle_model(from_config("gpt-neox"), names=models.NEOX, sizes=GROUPED)


@pytest.mark.parametrize(
    ("args", "expected"),
    [(OLDER, ShardV(unit=192)), (NEWER, ShardNC(parts=(1024, 1024, 1024), sized=True, unit=64))],
    ids=["before FPDT", "since FPDT"],
)
def test_arguments_of_known_clients_give_fused_attention_a_pattern(args, expected):
    source, target = (models.make(models.PIPELINE, models.GPT3_MEDIUM, tp) for tp in (1, 2))
    names = [name for name in source if re.search("query_key_value|dense_h_to_4h", name)]
    hints = {"args": {**args, "hidden_size": 1024}, "checkpoint_version": 3.0}
    settled = settle(names, source, target, [from_arguments()], hints)
    assert settled.patterns[ATTENTION] == expected
    assert settled.patterns["2.mlp.dense_h_to_4h.bias"] == ShardV()


@pytest.mark.parametrize("version", [None, 0, 2.0, 3.0])
def test_checkpoint_versions_with_per_rank_parts(version):
    hints = {"checkpoint_version": version, "args": {"transformer_impl": "local"}}
    rules = from_config({"family": "megatron-gpt", "original_vocab_size": 50257})
    assert settle_model(rules, hints).origin[ATTENTION] == "family megatron-gpt"


@pytest.mark.parametrize(
    ("rows", "columns", "whole", "kind"), [(320, 64, (640, 64), ShardNC), (256, 80, (256, 160), ShardH)]
)
def test_transposed_experts_are_recognised_by_their_shape(rows, columns, whole, kind):
    """MegaBlocks keeps w2 as [experts × ffn, hidden]; Mixtral as [experts × hidden, ffn]."""
    name, gate = (f"layers.0.block_sparse_moe.{part}" for part in ("experts.w2", "gate.weight"))
    common = {"layers.0.norm.weight": (64,), gate: (4, 64)}
    source = {key: (shape,) * 2 for key, shape in {**common, name: (rows, columns)}.items()}
    target = {key: (shape,) for key, shape in {**common, name: whole}.items()}
    assert type(settle(list(source), source, target, from_config("mixtral-moe")).patterns[name]) is kind
