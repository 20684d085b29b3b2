"""Megatron-DeepSpeed's part of a checkpoint: client state, metadata of several releases, and nested module dict.

Sources: Megatron-DeepSpeed's `megatron/checkpointing.py` (`save_checkpoint`, `_universal_checkpoint_info`),
`megatron/model/gpt_model.py` (the pattern lists; the older ones of 2023-10 and 2024-01 verbatim) and
`megatron/model/language_model.py` (`state_dict_for_save_checkpoint`).
"""

from __future__ import annotations

from argparse import Namespace
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch

_OLD_REPLICATED = [
    r"tied_modules.embed.word_embeddings.norm.weight",
    r"tied_modules.embed.word_embeddings.norm.bias",
    r"tied_modules.embed.position_embeddings.weight",
    r"\d+.input_layernorm.weight",
    r"\d+.input_layernorm.bias",
    r"\d+.post_attention_layernorm.weight",
    r"\d+.post_attention_layernorm.bias",
    r"\d+.self_attention.dense.bias",
    r"\d+.mlp.dense_4h_to_h.bias",
    r"\d+.weight",
    r"\d+.bias",
]


def megatron_args(**changes: Any) -> Namespace:
    """Return the arguments of a small GPT; `changes` replace or add some."""
    defaults: dict[str, Any] = {
        "hidden_size": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "kv_channels": 2,
        "make_vocab_size_divisible_by": 4,
        "padded_vocab_size": 16,
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "no_pipeline_parallel": False,
        "swiglu": False,
        "normalization": "layernorm",
        "add_bias_linear": True,
        "add_position_embedding": True,
        "untie_embeddings_and_output_weights": False,
        "num_experts": [1],
        "consumed_train_samples": 12,
        "consumed_train_tokens": 72,
    }
    return Namespace(**{**defaults, **changes})


def client_state(args: Namespace, iteration: int, info: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return `save_checkpoint`'s `client_state` without RNG states; `info=None`: as before 2023-10."""
    universal = {} if info is None else {"universal_checkpoint_info": dict(info)}
    tokens = args.consumed_train_tokens
    return {"args": args, "checkpoint_version": 3.0, "iteration": iteration, "tokens": tokens, **universal}


def universal_info(args: Namespace, original_vocab_size: int) -> dict[str, Any]:
    """`_universal_checkpoint_info` of the newest release.

    It names row-parallel and replicated parameters only if tensor_model_parallel_size is more than 1.
    """
    pipe = not args.no_pipeline_parallel
    info = _vocabulary(args, original_vocab_size)
    info["vocabulary_parameter_patterns"] = _vocabulary_patterns(args)
    if pipe:
        info["pipeline_replicated_parameter_patterns"] = _pipeline_replicated(args)
    prefix = _prefix(args)
    if args.tensor_model_parallel_size > 1:
        info["tp_replicated_parameter_patterns"] = _tp_replicated(args)
        rows = ("mlp.dense_4h_to_h.weight", "self_attention.dense.weight")
        info["parameter_with_row_parallelism_patterns"] = [prefix + r"\d+." + row for row in rows]
    fused = ["weight", *["bias"] * args.add_bias_linear] if args.swiglu else []
    info["parameter_with_2_sub_params_cat_dim_0"] = [prefix + r"\d+.mlp.dense_h_to_4h." + kind for kind in fused]
    return info


def old_universal_info(
    args: Namespace, original_vocab_size: int, *, pipeline_replicated: bool = False
) -> dict[str, Any]:
    """Return the fixed lists of GPTModelPipe in 2023-10, or in 2024-01 with `pipeline_replicated`.

    Their second row-parallel pattern matches no parameter ("mlp.self_attention"), which was a bug of the release.
    """
    embedding = "tied_modules.embed.word_embeddings.weight"
    info = _vocabulary(args, original_vocab_size)
    info["vocabulary_parameter_patterns"] = [embedding]
    if pipeline_replicated:
        positions = "tied_modules.embed.position_embeddings.weight"
        info["pipeline_replicated_parameter_patterns"] = [embedding, positions]
    info["tp_replicated_parameter_patterns"] = list(_OLD_REPLICATED)
    rows = [r"\d+.mlp.dense_4h_to_h.weight", r"\d+.mlp.self_attention.dense.weight"]
    info["parameter_with_row_parallelism_patterns"] = rows
    return info


def nested_module(module: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Convert a flat state_dict to the `module` that Megatron-DeepSpeed's GPTModel saves without a pipeline.

    It is language_model -> embedding -> each embedding -> "weight"; names below "encoder" stay flat.
    """
    language: dict[str, Any] = {"embedding": {}, "encoder": OrderedDict()}
    for name, tensor in module.items():
        part, _, rest = name.removeprefix("language_model.").partition(".")
        if part == "embedding":
            embedding, _, rest = rest.partition(".")
            language["embedding"].setdefault(embedding, OrderedDict())[rest] = tensor
        else:
            language.setdefault(part, OrderedDict())[rest] = tensor
    return {"language_model": language}


def _vocabulary(args: Namespace, original_vocab_size: int) -> dict[str, Any]:
    return {
        "universal_checkpoint_version": 0.2,
        "original_vocab_size": original_vocab_size,
        "padded_vocab_size": args.padded_vocab_size,
    }


def _vocabulary_patterns(args: Namespace) -> list[str]:
    untied = args.untie_embeddings_and_output_weights
    if args.no_pipeline_parallel:
        output = ["language_model.output_layer.weight"] * untied
        return ["language_model.embedding.word_embeddings.weight", *output]
    if untied:
        return [r"\d+.word_embeddings.weight", r"\d+.lm_head.weight"]
    return [r"tied_modules.embed.word_embeddings.weight"]


def _pipeline_replicated(args: Namespace) -> list[str]:
    if args.untie_embeddings_and_output_weights:
        return []
    positions = [r"tied_modules.embed.position_embeddings.weight"] * args.add_position_embedding
    return [*_vocabulary_patterns(args), *positions]


def _tp_replicated(args: Namespace) -> list[str]:
    pipe, prefix = not args.no_pipeline_parallel, _prefix(args)
    biased = args.normalization == "layernorm"
    norm = r"\d+." if pipe else "language_model.encoder.final_layernorm."
    embedding = "tied_modules.embed." if pipe else "language_model.embedding."
    linear = [r"\d+.self_attention.dense.bias", r"\d+.mlp.dense_4h_to_h.bias"] * args.add_bias_linear
    biases = [r"\d+.input_layernorm.bias", r"\d+.post_attention_layernorm.bias"] * biased
    return [
        prefix + r"\d+.input_layernorm.weight",
        prefix + r"\d+.post_attention_layernorm.weight",
        norm + "weight",
        *[norm + "bias"] * biased,
        *[embedding + "position_embeddings.weight"] * args.add_position_embedding,
        *[prefix + name for name in (*linear, *biases)],
    ]


def _prefix(args: Namespace) -> str:
    return "language_model.encoder.layers." if args.no_pipeline_parallel else ""
