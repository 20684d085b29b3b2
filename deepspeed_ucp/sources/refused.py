"""Saves of engines whose files do not hold, or not as here known, what a load has to restore: refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..atoms import COPY, MASTER, MODULE, Atom, AtomKey, strip_compiled
from ..errors import UnsupportedError, shorten
from .family import Save


def refuse_engines(save: Save) -> None:
    """Refuse what no load of ours can take apart, whatever is wanted of it.

    Raises:
        UnsupportedError: says which engine wrote the files, and what to do.
    """
    config, path = save.model(0).config, save.path(save.main)
    zero = config.get("zero_optimization") or {}
    if zero.get("zenflow"):
        raise UnsupportedError(
            f"{path}: was saved by ZenFlow, which keeps transposed partitions and states of its own. Only DeepSpeed's "
            "own load takes it, with ZenFlow, in the topology that saved it."
        )
    if (config.get("expert_parallel") or {}).get("enabled"):
        raise UnsupportedError(
            f"{path}: is a mixture-of-experts checkpoint (AutoEP), which this release does not convert. It can be "
            "resumed by DeepSpeed itself in the topology that wrote it."
        )
    sliced = [name for mp in range(len(save.models)) for name in _list_sliced_bases(save, mp)]
    if sliced:
        raise UnsupportedError(
            f"{path}: of the frozen base weights of LoRA's OptimizedLinear only rank 0's slice was saved "
            f"(base_weight_sharding > 1): {shorten(dict.fromkeys(sliced))}. Take them from the model that the training "
            "began with, and save with base_weight_sharding 1."
        )


def _list_sliced_bases(save: Save, mp: int) -> list[str]:
    model = save.model(mp)
    saved = {name: piece.shape for name, piece in (model.module or {}).items()}
    shapes = {strip_compiled(name): shape for name, shape in (*saved.items(), *model.frozen_shapes.items())}
    shapes.update({strip_compiled(name): shape for group in model.param_shapes or () for name, shape in group})
    found = []
    for name, down in shapes.items():
        base = name.removesuffix(".lora_weight_1.weight")
        up, weight = shapes.get(f"{base}.lora_weight_2.weight"), shapes.get(f"{base}.weight")
        if base != name and up and weight and len(weight) == 1 and weight[0] < up[0] * down[-1]:
            found.append(f"{base}.weight")
    return found


def find_lost_states(save: Save, atoms: Mapping[AtomKey, Atom]) -> dict[str, str]:
    """Parameters whose optimizer states SuperOffload kept in another process, where no save finds them."""
    zero = save.model(0).config.get("zero_optimization") or {}
    if describe_offload(zero).partition("/")[0] != "superoffload" or not save.model(0).counters.get("global_steps"):
        return {}
    kept = {key.param for key in atoms if key.state not in (MASTER, MODULE, COPY)}
    what = "not in the files: SuperOffload kept it in another process"
    return {f"{key.param}.moments": what for key in atoms if key.state == MASTER and key.param not in kept}


def describe_offload(zero: Mapping[str, Any]) -> str:
    """Devices of optimizer and parameter offload in a ds_config, as ``optimizer/param``; the deprecated keys count."""
    devices = []
    for section, deprecated in (("offload_optimizer", "cpu_offload"), ("offload_param", "cpu_offload_param")):
        options = zero.get(section)
        device = options.get("device") if isinstance(options, dict) else None
        device = device or ("cpu" if zero.get(deprecated) else "none")
        devices.append("superoffload" if isinstance(options, dict) and options.get("super_offload") else str(device))
    return "/".join(devices)
