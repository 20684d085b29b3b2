"""What Megatron-DeepSpeed's releases put into a checkpoint of the example's GPT."""

from __future__ import annotations

from typing import Any

from tests.support.engines.gpt import LAYERS, MODELS
from tests.support.engines.parallel import STEPS, Launch
from tests.synth.megatron import client_state, megatron_args, old_universal_info, universal_info

RELEASES = ("newest", "2024-01", "2023-10", "none")


def make_client_states(model: str, launch: Launch) -> dict[str, dict[str, Any]]:
    """By release what `checkpointing.py` passes as `client_state`."""
    args = make_arguments(model, launch)
    infos = {
        "newest": universal_info(args, 256),
        "2024-01": old_universal_info(args, 256, pipeline_replicated=True),
        "2023-10": old_universal_info(args, 256),
        "none": None,
    }
    return {release: client_state(args, STEPS[0], infos[release]) for release in RELEASES}


def make_arguments(model: str, launch: Launch) -> Any:
    """Megatron-DeepSpeed's arguments for a model."""
    sizes = {"kv_heads": 0, "ffn": 0, "swiglu": False, "rmsnorm": False, "rotary": False, "untied": False, "bias": True}
    sizes.update(MODELS[model])
    return megatron_args(
        num_layers=LAYERS,
        hidden_size=sizes["hidden"],
        ffn_hidden_size=sizes["ffn"] or 4 * sizes["hidden"],
        num_attention_heads=sizes["heads"],
        num_key_value_heads=sizes["kv_heads"] or sizes["heads"],
        kv_channels=sizes["hidden"] // sizes["heads"],
        max_position_embeddings=sizes["context"],
        seq_length=sizes["context"],
        padded_vocab_size=sizes["vocabulary"],
        make_vocab_size_divisible_by=sizes["vocabulary_divisor"],
        tensor_model_parallel_size=launch.tp,
        pipeline_model_parallel_size=launch.pp,
        no_pipeline_parallel=not launch.pipeline,
        swiglu=sizes["swiglu"],
        normalization="rmsnorm" if sizes["rmsnorm"] else "layernorm",
        add_bias_linear=sizes["bias"],
        add_position_embedding=not sizes["rotary"],
        use_rotary_position_embeddings=sizes["rotary"],
        untie_embeddings_and_output_weights=sizes["untied"],
    )
