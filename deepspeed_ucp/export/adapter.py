"""Adapters of PEFT in a checkpoint: by the names that PEFT gives them in files, or merged into their base.

Ranks and factors are in no tag: ``adapter_config.json`` tells them. A merge's arithmetic is PEFT's own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..atoms import MODULE, Atom, AtomicIndex, Atoms, ParamKey, Record, Records, Shard
from ..errors import CheckpointError, UnsupportedError, shorten
from ..io.disk import explain_full
from ..patterns.adapters import is_original, list_adapted, name_in_base, name_wrapped, read_live
from ..sources.foreign.adapter import find_alpha
from ..sources.foreign.names import ADAPTER_CONFIG
from ..stream.full_tensors import FullTensor

_BASE = ".base_layer.weight"

_CHANGING = ("pissa", "olora", "corda", "lora_ga", "loftq")
"""Ways to begin an adapter that change its base."""

_KINDS = {"lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector"}
"""Of tensors that a merge knows."""

_ODD = (
    "alora_invocation_tokens",
    "layer_replication",
    "lora_bias",
    "megatron_config",
    "target_parameters",
    "trainable_token_indices",
    "use_bdlora",
    "use_qalora",
)
"""Of a configuration, what a merge does not know."""


@dataclass(slots=True)
class Adapted:
    """What of a checkpoint an adapter changes.

    Attributes:
        written: saved name → name to be written; other names are left out.
        parts: of a merge by the saved name of a base weight the saved names of what is added to it, by kind.
    """

    written: dict[str, str] = field(default_factory=dict)
    parts: dict[str, dict[str, str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Merge:
    """A base weight's adapter.

    Attributes:
        module: its name, as the configuration's patterns see it.
        parts: by kind (``lora_A``, ``lora_magnitude_vector``…).
    """

    module: str
    parts: Mapping[str, FullTensor]


def write_config(folder: str, config: Mapping[str, Any]) -> None:
    """Write a configuration that loads for use, as PEFT saves it."""
    path = os.path.join(folder, ADAPTER_CONFIG)
    with explain_full(path), open(path, "x", encoding="utf-8") as stream:
        stream.write(json.dumps({**config, "inference_mode": True}, indent=2, sort_keys=True) + "\n")


def choose_adapter(names: Collection[str], adapter: str, config: Mapping[str, Any]) -> Adapted:
    """The tensors of an adapter by PEFT's names.

    Args:
        config: its configuration, which tells whether biases of the base are trained with it.

    Raises:
        CheckpointError: there is no such adapter.
    """
    found = Adapted()
    told, own = config.get("bias", "none"), {f"{module}.base_layer.bias" for module in list_adapted(names)}
    for name in names:
        tensor = read_live(name)
        if tensor is not None and tensor.adapter == adapter:
            found.written[name] = tensor.in_file
        elif tensor is None and (name.endswith(".bias") if told == "all" else told != "none" and name in own):
            found.written[name] = name
    if not any(map(read_live, found.written)):
        raise _explain_absence(names, adapter)
    return found


def choose_merged(names: Collection[str], adapter: str, config: Mapping[str, Any]) -> Adapted:
    """All tensors of the base by its own names, and what is added to which.

    Raises:
        CheckpointError: there is no such adapter, or the base was not saved.
        UnsupportedError: a variant of LoRA that is not known here, by its name.
    """
    _refuse_odd(_list_odd(config))
    parts, tensors = _list_parts(names, adapter), {name: read_live(name) for name in names}
    _refuse_odd(sorted({kind for held in parts.values() for kind in held} - _KINDS))
    adapted = list_adapted(names)
    kept = {
        name: name_in_base(name, adapted) for name, t in tensors.items() if t and not t.kind and t.adapter == adapter
    }
    base = {name: name_in_base(name, adapted) for name, t in tensors.items() if t is None}
    hidden = {name for name, new in base.items() if is_original(name) and new in kept.values()}
    found = Adapted(kept | {name: new for name, new in base.items() if name not in hidden})
    missing = sorted(module for module in parts if f"{module}{_BASE}" not in found.written)
    if missing:
        model = config.get("base_model_name_or_path") or "BASE"
        raise CheckpointError(
            f"the base weights of {shorten(missing)} are not in the checkpoint (exclude_frozen_parameters). Name the "
            f"model that the adapter was trained on: --like {model}."
        )
    found.parts = {f"{module}{_BASE}": held for module, held in parts.items()}
    if not parts and not kept:
        raise _explain_absence(names, adapter)
    return found


def _list_parts(names: Collection[str], adapter: str) -> dict[str, dict[str, str]]:
    """Saved names of what is added, by module and kind."""
    parts: dict[str, dict[str, str]] = {}
    for name in names:
        tensor = read_live(name)
        if tensor and tensor.kind and tensor.adapter == adapter:
            parts.setdefault(tensor.module, {})[tensor.kind + tensor.end.removesuffix(".weight")] = name
    return parts


def _explain_absence(names: Collection[str], adapter: str) -> CheckpointError:
    known = {tensor.adapter for tensor in map(read_live, names) if tensor}
    return CheckpointError(
        f"holds no adapter {adapter!r}; it has {shorten(sorted(known))}. Name one with --adapter-name."
        if known
        else "holds no adapter of PEFT's (no lora_A, lora_B, modules_to_save)."
    )


def add_base(index: AtomicIndex, base: AtomicIndex, adapter: str, config: Mapping[str, Any]) -> AtomicIndex:
    """A checkpoint that holds an adapter alone, with the weights of its base beside it; the same where it has them.

    Args:
        base: the model that the adapter was trained on, under its own names.

    Raises:
        UnsupportedError: the adapter's way to begin has changed its base; the base is cut.
    """
    names = {param.name for param in index.stored.atoms.held}
    parts = _list_parts(names, adapter)
    if not parts or any(f"{module}{_BASE}" in names for module in parts):
        return index
    begun = str(config.get("init_lora_weights", "")).lower()
    if begun.startswith(_CHANGING):
        raise UnsupportedError(
            f"--merge: the adapter began with init_lora_weights={begun!r}, which changes its base, and the checkpoint "
            "has none. Write the adapter (--adapter), and merge it with PEFT."
        )
    if index.run.topology.tp > 1:
        raise UnsupportedError("--merge: the adapter is cut by tensor parallelism, the base in --like is whole.")
    adapted = list_adapted(names)
    known = {name_in_base(name, adapted) for name in names if not (tensor := read_live(name)) or not tensor.kind}
    weights = {
        name_wrapped(key.name, parts): atom
        for key, atom in base.stored.atoms.items()
        if key.state == MODULE and key.name not in known
    }
    return _add_weights(index, base, weights)


def _add_weights(index: AtomicIndex, other: AtomicIndex, weights: Mapping[str, Atom]) -> AtomicIndex:
    """An index with some of another one's tensors, by name."""
    files, records = len(index.stored.files), len(index.stored.records)
    held = {**index.stored.atoms.held}
    for name, atom in weights.items():
        shards = tuple(
            Shard(shard.shape, tuple(replace(part, record=part.record + records) for part in shard.fragments))
            for shard in atom.shards
        )
        held[ParamKey(name)] = [*Atom(name, MODULE, atom.dtype, shards).list_storages()]
    moved = (Record(each.file + files, each.offset, each.nbytes, each.crc) for each in other.stored.records)
    return index.change(
        files=(*index.stored.files, *other.stored.files),
        records=Records.of([*index.stored.records, *moved]),
        atoms=Atoms(held, [*index.stored.atoms.module, *map(ParamKey, weights)]),
    )


def _list_odd(config: Mapping[str, Any]) -> list[str]:
    plain = ("loftq_config", "lora_ga_config", "corda_config", "eva_config")  # ways to begin
    odd = (name for name in config if name in _ODD or (name.endswith("_config") and name not in plain))
    return [f"{name}={config[name]!r}" for name in odd if config[name]]


def _refuse_odd(odd: Collection[str]) -> None:
    if odd:
        raise UnsupportedError(
            f"--merge: {shorten(odd)} is not known here (LoRA, rsLoRA and DoRA are). Write the adapter (--adapter), "
            "and merge it with PEFT."
        )


def merge(base: Any, parts: Mapping[str, Any], module: str, config: Mapping[str, Any]) -> Any:
    """A base weight with its adapter, by PEFT's own layers.

    Args:
        base: fp32 tensor; it is changed.
        parts: fp32 tensors by kind.
        module: name, as the configuration's patterns see it.
        config: of the adapter.

    Raises:
        UnsupportedError: PEFT is not installed, or the layer is of another kind than a linear one or an embedding.
    """
    try:
        import torch
        from peft import LoraConfig
        from peft.tuners.lora.layer import Embedding, Linear
    except ImportError as error:
        raise UnsupportedError(f"--merge needs the package peft ({error}).") from None
    known = {name: value for name, value in config.items() if name in LoraConfig.__dataclass_fields__}
    known |= {"init_lora_weights": False, "inference_mode": True}
    settings = LoraConfig(**{name: value for name, value in known.items() if name not in ("peft_type", "task_type")})
    kind = "lora_embedding_" if "lora_embedding_A" in parts else "lora_"
    one, other = parts[f"{kind}A"], parts[f"{kind}B"]
    if base.dim() != 2 or one.dim() != 2 or other.dim() != 2:
        raise UnsupportedError(f"--merge: {module} is neither a linear layer nor an embedding. Merge it with PEFT.")
    alpha = find_alpha(config, module)
    with torch.device("meta"):
        if kind == "lora_":
            inner: Any = torch.nn.Linear(one.shape[1], other.shape[0], bias=False)
        else:
            inner = torch.nn.Embedding(one.shape[1], other.shape[0])
    inner.weight = torch.nn.Parameter(base, requires_grad=False)
    layer = (Linear if kind == "lora_" else Embedding)(
        inner, "default", config=settings, r=one.shape[0], lora_alpha=alpha
    )
    with torch.no_grad():
        for name, value in (("A", one), ("B", other)):
            held = getattr(layer, f"{kind}{name}")["default"]
            (held.weight if kind == "lora_" else held).data = value
        if "lora_magnitude_vector" in parts:
            layer.lora_magnitude_vector["default"].weight.data = parts["lora_magnitude_vector"]
        layer.merge()
    return layer.get_base_layer().weight.data
