"""Engine features that the plugin refuses or leaves to DeepSpeed's own load."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from deepspeed.runtime.data_pipeline.data_sampling.data_sampler import DeepSpeedDataSampler

from ..engine_state import RANDOM_STATES, find_state
from ..errors import UnsupportedError, shorten
from ..extensions.registry import REGISTRY, find_for_engine
from ..model.wrappers import find_live

OWN_LOAD = 'To use DeepSpeed\'s own load anyway, set "checkpoint": {"universal": false}.'
"""Remedy at the end of refusals."""


class UnknownLayoutError(UnsupportedError):
    """Unknown layout of an engine's state: DeepSpeed loads it in the same topology."""


def check_engine(engine: Any) -> None:
    """Raise UnsupportedError for an engine with state that no load restores."""
    for find, message in _REFUSED:
        names = find(engine)
        if names:
            listed = "" if names is True else f" ({shorten(names)})"
            raise UnsupportedError(f"{message.format(listed)} {OWN_LOAD}")


def _list_offloaded(engine: Any) -> list[str]:
    """List states that ``engine.offload_states`` moved; a load would not reach them."""
    return sorted(str(getattr(state, "value", state)) for state in getattr(engine.optimizer, "offloaded_states", ()))


def _list_backed(engine: Any) -> list[int]:
    """List sub-groups of a second optimizer (partial offload), which no save contains."""
    devices: dict[int, str] = getattr(engine.optimizer, "subgroup_to_device", {})
    is_split = hasattr(engine.optimizer, "backup_optimizer")
    return [number for number, device in devices.items() if is_split and device != "cpu"]


def _list_sharded_bases(engine: Any) -> list[str]:
    """List LoRA ``OptimizedLinear`` modules with a base weight sliced over the ranks."""
    modules = engine.module.named_modules()
    return [name for name, child in modules if hasattr(child, "lora_config") and getattr(child, "zero_shards", 1) > 1]


_REFUSED: tuple[tuple[Callable[[Any], Any], str], ...] = (
    (
        lambda engine: bool(getattr(engine, "zenflow", False)),
        "The engine runs ZenFlow{}: its selected columns, their moments, the gradients between two updates, and its "
        "step are not saved, so that no load restores them. Resume without zero_optimization.zenflow.",
    ),
    (
        lambda engine: type(engine.optimizer).__name__ == "SuperOffloadOptimizer_Stage3",
        "The engine runs SuperOffload{}, whose moments are in another process: no load restores them. Resume without "
        "offload_optimizer.super_offload.",
    ),
    (
        _list_offloaded,
        "engine.offload_states() has moved states of this engine{}, and a load would not reach them. Call "
        "engine.reload_states() before load_checkpoint.",
    ),
    (
        _list_backed,
        "offload_optimizer.ratio keeps sub-groups on the accelerator{} with a second optimizer, whose states DeepSpeed "
        "neither saves nor loads. Resume with ratio 1.",
    ),
    (
        _list_sharded_bases,
        "LoRA OptimizedLinear with base_weight_sharding > 1{}: every rank has another slice of the frozen base "
        "weights, and a save contains only rank 0's. Resume with base_weight_sharding 1.",
    ),
)
"""Features refused in any topology: a function that returns True or names, and the message."""


def find_data_sampler(engine: Any) -> DeepSpeedDataSampler | None:
    """Return the curriculum-learning sampler (``data_efficiency``), or None."""
    sampler = getattr(getattr(engine, "training_dataloader", None), "data_sampler", None)
    return sampler if isinstance(sampler, DeepSpeedDataSampler) else None


def has_drawn(engine: Any) -> bool:
    """Return True if the engine's data sampler has drawn samples."""
    return bool(getattr(find_data_sampler(engine), "data_clusters", None))


def writes_states(engine: Any) -> bool:
    """Return True if a save's model states should contain the optimizer states.

    They should in 16 bits without ZeRO. DeepSpeed 0.17.6 to 0.18.4 use these wrappers at ZeRO 1 too, with bf16 weights
    and fp32 gradients.
    """
    wrapper = find_live(engine.optimizer)
    return wrapper is not None and wrapper.has_copies and not wrapper.is_cut


def list_unsaved(engine: Any) -> list[str]:
    """Describe state that no save contains: a load leaves the live values."""
    notes = []
    kind = type(getattr(engine.optimizer, "optimizer", engine.optimizer)).__name__
    if kind in ("OnebitAdam", "ZeroOneAdam", "OnebitLamb"):  # to 0.18, ``runtime/fp16/onebit/``
        notes.append("1-bit optimizers: DeepSpeed saves only rank 0's compression errors; a load resets all of them")
    if getattr(engine._config.zero_config, "zero_quantized_nontrainable_weights", False):
        notes.append(
            "zero_quantized_nontrainable_weights: DeepSpeed saves frozen weights without their scales, and restores "
            "them only if this model's frozen weights equal the saved ones before the load"
        )
    if find_data_sampler(engine) is not None and RANDOM_STATES not in find_state(engine).carried:
        notes.append(
            "curriculum learning: DeepSpeed saves numpy's global generator instead of its sampler's generator, which "
            "restarts from its seed; call deepspeed_ucp.rng.follow(engine) before saves and loads to restore it"
        )
    return notes


def list_pending(engine: Any) -> list[str]:
    """Describe gradients of a begun step, which no load clears."""
    if getattr(engine, "_is_gradient_accumulation_boundary", None) is not None:  # the script or a trainer counts
        return []
    done = getattr(engine, "micro_steps", 0)
    if not done or not done % (number := int(engine.gradient_accumulation_steps())):
        return []
    return [
        f"this engine has taken {done % number} of the {number} micro batches of a step: their gradients are added to "
        "the first step after the load. Load between two steps, or into a new engine."
    ]


def describe_own_files(engine: Any, folder: str) -> tuple[str, str | None, dict[str, Any]]:
    """Return the paths of this rank's files, and engine facts to compare with them.

    Returns:
        Model states, ZeRO optimizer states (None at stage 0), and facts for
        :func:`deepspeed_ucp.formats.deepspeed.ownfiles.compare_own_files`.
    """
    load_dir, tag = os.path.split(os.path.abspath(folder))
    model, wrapped = engine._get_ckpt_name(load_dir, tag), engine.optimizer
    facts = {
        "ZeRO stage": int(engine.zero_optimization_stage()),
        "precision": find_declared_precision(engine),
        "model-parallel ranks": int(engine.mp_world_size),
        **{flag: bool(engine._config._param_dict.get(flag, False)) for row in REGISTRY for flag in row.flags},
        **{fact: value for row in REGISTRY for fact, value in row.facts.items()},
    }
    for extension in find_for_engine(engine):
        facts |= extension.describe_engine(engine)
    if not hasattr(wrapped, "partition_count"):
        return model, None, {**facts, "order of parameters": list(engine.module.state_dict())}
    counts, shapes = wrapped.partition_count, engine._get_zero_param_shapes()
    describe_groups = getattr(wrapped, "_zero3_partition_group_metadata", lambda: None)
    facts |= {
        "data-parallel ranks": int(engine.seq_dp_world_size),
        "parameters": [[(name, tuple(shape)) for name, shape in group.items()] for group in shapes],
        "partitions": [int(count) for count in (counts if isinstance(counts, (list, tuple)) else [counts])],
        "partition groups": describe_groups(),
    }
    return model, engine._get_zero_ckpt_name(load_dir, tag), facts


def find_declared_precision(engine: Any) -> str:
    """Return the dtype name that the ds_config sets, ``float32`` by default."""
    return "bfloat16" if engine.bfloat16_enabled() else "float16" if engine.fp16_enabled() else "float32"
