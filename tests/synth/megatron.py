"""Megatron-DeepSpeed's part of a checkpoint: client state, metadata, and nested module dict.

Sources: Megatron-DeepSpeed's `megatron/checkpointing.py` (`save_checkpoint`, `_universal_checkpoint_info`),
`megatron/model/gpt_model.py` (the pattern lists) and `megatron/model/language_model.py`
(`state_dict_for_save_checkpoint`).
"""

from __future__ import annotations

from argparse import Namespace
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch


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
        "swiglu": False,
        "num_experts": [1],
        "consumed_train_samples": 12,
        "consumed_train_tokens": 72,
    }
    return Namespace(**{**defaults, **changes})


def client_state(args: Namespace, iteration: int, vocabulary: int) -> dict[str, Any]:
    """Return `save_checkpoint`'s `client_state` without RNG states, of a model with a vocabulary of this size."""
    info = universal_info(args, vocabulary)
    known = {"checkpoint_version": 3.0, "tokens": args.consumed_train_tokens}
    return {"args": args, "iteration": iteration, **known, "universal_checkpoint_info": info}


def universal_info(args: Namespace, original_vocab_size: int) -> dict[str, Any]:
    """`_universal_checkpoint_info` of the newest release, with its lists for every kind of model together.

    It names row-parallel and replicated parameters only if tensor_model_parallel_size is more than 1.
    """

    def in_layers(*names: str) -> list[str]:
        """With a pipeline, and without."""
        return [rf"{prefix}\d+.{name}" for prefix in ("", "language_model.encoder.layers.") for name in names]

    embed, plain = "tied_modules.embed.", "language_model.embedding."
    words = [embed, plain, r"\d+."]
    info: dict[str, Any] = {
        "universal_checkpoint_version": 0.2,
        "original_vocab_size": original_vocab_size,
        "padded_vocab_size": args.padded_vocab_size,
        "vocabulary_parameter_patterns": [f"{prefix}word_embeddings.weight" for prefix in words]
        + [r"\d+.lm_head.weight", "language_model.output_layer.weight"],
        "pipeline_replicated_parameter_patterns": [f"{embed}{kind}_embeddings.weight" for kind in ("word", "position")],
        "parameter_with_2_sub_params_cat_dim_0": in_layers("mlp.dense_h_to_4h.weight") * args.swiglu,
    }
    if args.tensor_model_parallel_size > 1:
        norms = ("input_layernorm", "post_attention_layernorm")
        weights = ("mlp.dense_4h_to_h", "self_attention.dense")
        finals = (r"\d+", "language_model.encoder.final_layernorm")
        info["tp_replicated_parameter_patterns"] = [
            *in_layers(*(f"{norm}.{kind}" for norm in norms for kind in ("weight", "bias"))),
            *in_layers(*(f"{weight}.bias" for weight in weights)),
            *(f"{norm}.{kind}" for norm in finals for kind in ("weight", "bias")),
            *(f"{prefix}position_embeddings.weight" for prefix in (embed, plain)),
        ]
        info["parameter_with_row_parallelism_patterns"] = in_layers(*(f"{weight}.weight" for weight in weights))
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
