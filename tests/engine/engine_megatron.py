"""The example's GPT with what Megatron-DeepSpeed's releases put into a checkpoint, and without what it leaves out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from unittest import mock

from engine_3d import LAYERS, MODELS, STEPS, Launch, Local, _listen, make_trainer, tell, train

from tests.synth.megatron import client_state, megatron_args, nested_module, old_universal_info, universal_info

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


def save_each(model: str, launch: Launch, folder: str, states: Mapping[str, Mapping[str, Any]], nested: bool) -> Local:
    """Train, save once with each client state into a folder of its name, go on.

    Args:
        nested: `module` as Megatron-DeepSpeed saves it without a pipeline.
    """
    trainer = make_trainer(model, launch)
    train(trainer, STEPS[0])
    module = trainer.engine.module
    flat = module.state_dict
    with mock.patch.object(module, "state_dict", lambda *args, **options: nested_module(flat(*args, **options))):
        if not nested:
            module.state_dict = flat
        for name, state in states.items():
            trainer.engine.save_checkpoint(f"{folder}/{name}", client_state=dict(state))
    local = tell(trainer)
    local.losses = train(trainer, STEPS[1])
    trainer.engine.destroy()
    return local


def resume_each(model: str, launch: Launch, folders: Sequence[str], patterns: Any) -> list[Local]:
    """Load one folder after the other into one engine, which trains in between; go on from the last."""
    trainer = make_trainer(model, launch, {"patterns": patterns} if patterns else True, seed=2)
    found = []
    for folder in folders:
        train(trainer, 1)
        with _listen() as log:
            _, state = trainer.engine.load_checkpoint(folder)
        local = tell(trainer)
        local.log, local.client_state = log, state
        local.direct, local.reason = trainer.engine.ucp_report.direct, trainer.engine.ucp_report.reason
        found.append(local)
    found[-1].losses = train(trainer, STEPS[1])
    trainer.engine.destroy()
    return found
