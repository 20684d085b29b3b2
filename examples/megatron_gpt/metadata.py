"""The client state that describes the model, as in Megatron-DeepSpeed."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from config import Degrees, GPTConfig


@dataclass(frozen=True)
class Names:
    """Regular expressions of parameter names; `layer` is a prefix."""

    layer: str
    embedding: str
    head: str
    final_norm: str


def find_names(config: GPTConfig, pipeline: bool) -> Names:
    if not pipeline:
        encoder = r"language_model\.encoder"
        head = r"language_model\.output_layer"
        return Names(rf"{encoder}\.layers\.\d+", r"language_model\.embedding", head, rf"{encoder}\.final_layernorm")
    return Names(r"\d+", r"\d+" if config.untied else r"tied_modules\.embed", r"\d+\.lm_head", r"\d+")


def fused_widths(config: GPTConfig) -> dict[str, tuple[int, ...]]:
    """Return the widths of parts that are fused along dimension 0, by the parameter's name within a layer."""
    query, key = config.heads * config.head_width, config.key_heads * config.head_width
    kinds = (".weight", ".bias") if config.bias else (".weight",)
    fused = {f"self_attention.query_key_value{kind}": (query, key, key) for kind in kinds}
    gate_up = (config.ffn_width,) * (2 if config.swiglu else 1)
    if config.experts and not config.deepspeed_moe:
        fused["mlp.experts.weight1"] = gate_up * config.experts
    elif config.swiglu and not config.experts:
        fused |= {f"mlp.dense_h_to_4h{kind}": gate_up for kind in kinds}
    return fused


def universal_checkpoint_info(config: GPTConfig, degrees: Degrees) -> dict[str, Any]:
    """Describe how each parameter is cut, under the keys of `deepspeed.checkpoint.constants` (default: on dimension 0).

    Unlike Megatron-DeepSpeed it names row-parallel and replicated parameters also if tp is 1, and the fused query, key
    and value: without these a change of tp scrambles them.
    """
    names = find_names(config, degrees.pipeline)
    tables = [rf"{names.embedding}\.word_embeddings\.weight"] + [rf"{names.head}\.weight"] * config.untied
    norms = [names.final_norm, rf"{names.layer}\.input_layernorm", rf"{names.layer}\.post_attention_layernorm"]
    replicated = [rf"{norm}\.{kind}" for norm in norms for kind in ("weight", "bias")]
    replicated += [rf"{names.layer}\.{name}\.bias" for name in (r"self_attention\.dense", r"mlp\.dense_4h_to_h")]
    replicated += [rf"{names.embedding}\.position_embeddings\.weight", rf"{names.layer}\.mlp\.router\.weight"]
    row_parallel = (r"self_attention\.dense\.weight", r"mlp\.dense_4h_to_h\.weight", r"mlp\.experts\.weight2")
    fused = {names.layer + r"\." + re.escape(name): widths for name, widths in fused_widths(config).items()}
    return {
        "universal_checkpoint_version": 0.4,
        "original_vocab_size": config.vocabulary,
        "vocabulary_parameter_patterns": tables,
        "tp_replicated_parameter_patterns": replicated,
        "parameter_with_row_parallelism_patterns": [rf"{names.layer}\.{name}" for name in row_parallel],
        "parameter_with_sub_params": [
            {"patterns": [name], "shape": [widths] + [config.hidden] * (not name.endswith("bias")), "partition_dim": 0}
            for name, widths in fused.items()
        ],
        "sub_param_shard_widths": {
            name: [[width // degrees.tp] * degrees.tp for width in widths] for name, widths in fused.items()
        },
    }


def megatron_arguments(config: GPTConfig, degrees: Degrees) -> argparse.Namespace:
    """Return the configuration under the names of Megatron-DeepSpeed's arguments."""
    return argparse.Namespace(
        num_layers=config.layers,
        hidden_size=config.hidden,
        num_attention_heads=config.heads,
        num_key_value_heads=config.key_heads,
        ffn_hidden_size=config.ffn_width,
        seq_length=config.context,
        max_position_embeddings=config.context,
        make_vocab_size_divisible_by=config.vocabulary_divisor,
        padded_vocab_size=config.padded_vocabulary(degrees.tp),
        tensor_model_parallel_size=degrees.tp,
        pipeline_model_parallel_size=degrees.pp,
        ds_sequence_parallel_size=degrees.sp,
        no_pipeline_parallel=not degrees.pipeline,
        swiglu=config.swiglu,
        normalization="rmsnorm" if config.rmsnorm else "layernorm",
        add_position_embedding=not config.rotary,
        use_rotary_position_embeddings=config.rotary,
        untie_embeddings_and_output_weights=config.untied,
        add_bias_linear=config.bias,
        num_experts=[config.experts or 1],
        topk=config.top_k,
    )
