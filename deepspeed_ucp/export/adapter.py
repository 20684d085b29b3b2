"""Adapters of PEFT in a checkpoint: by the names that PEFT gives them in files, or merged into their base.

What a live model calls them is in ``peft/tuners/lora/layer.py``, what a file does in ``peft/utils/save_and_load.py``
(PEFT 0.21). Ranks and factors are in no tag: ``adapter_config.json`` tells them. A merge's arithmetic is PEFT's own.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import CheckpointError, ConfigError, UnsupportedError, shorten
from ..io.disk import explain_full
from ..io.paths import normalize
from ..sources.foreign.adapter import PARTS, SAVED
from ..stream.full_tensors import FullTensor

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model"

_ROOT = "base_model.model."
_LORA = re.compile(rf"(?P<module>.+)\.(?P<kind>{'|'.join(PARTS)})\.(?P<of>[^.]+)(?P<end>\..+)?")
_SAVED = re.compile(rf"(?P<module>.+)\.{SAVED}\.(?P<of>[^.]+)\.(?P<end>.+)")
_ORIGINAL = re.compile(r"(?P<module>.+)\.original_module\.(?P<end>.+)")
_BASE = re.compile(r"(?P<module>.+)\.base_layer\.(?P<end>.+)")


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
        config: of the adapter, as PEFT has it.
    """

    module: str
    parts: Mapping[str, FullTensor]
    config: Mapping[str, Any]


def read_config(path: str | None, folder: str) -> dict[str, Any]:
    """An adapter's configuration.

    Args:
        path: a file, or a folder that has it; None looks beside a checkpoint's folder, where trainers put it.
        folder: the checkpoint's.

    Raises:
        ConfigError: there is none, or it is of another kind of adapter.
    """
    places = [os.path.dirname(normalize(folder)), folder] if path is None else [path]
    files = [os.path.join(place, CONFIG) if os.path.isdir(place) else place for place in places]
    found = next((file for file in files if os.path.isfile(file)), None)
    if found is None:
        raise ConfigError(
            f"{shorten(files)}: no adapter_config.json. Ranks and factors are in no checkpoint: name the run's with "
            "--adapter-config."
        )
    with open(found, encoding="utf-8") as stream:
        try:
            told = dict(json.load(stream))
        except ValueError as error:
            raise ConfigError(f"{found}: is no configuration ({error}).") from None
    if told.get("peft_type") != "LORA":
        raise ConfigError(f"{found}: is of {told.get('peft_type')}; LoRA's are known.")
    return told


def write_config(folder: str, config: Mapping[str, Any]) -> None:
    """Write a configuration that loads for use, as PEFT saves it."""
    path = os.path.join(folder, CONFIG)
    with explain_full(path), open(path, "x", encoding="utf-8") as stream:
        stream.write(json.dumps({**config, "inference_mode": True}, indent=2, sort_keys=True) + "\n")


def choose_adapter(names: Collection[str], adapter: str) -> Adapted:
    """The tensors of an adapter by PEFT's names.

    Raises:
        CheckpointError: there is no such adapter.
    """
    found = Adapted()
    for name in names:
        if match := _LORA.fullmatch(name):
            end = "" if match["kind"] == PARTS[-1] else match["end"] or ""
            new = f"{match['module']}.{match['kind']}{end}"
        elif match := _SAVED.fullmatch(name):
            new = f"{match['module']}.{match['end']}"
        else:
            continue
        if match["of"] == adapter:
            found.written[name] = new
    _require(found, names, adapter)
    return found


def choose_merged(names: Collection[str], adapter: str) -> Adapted:
    """All tensors of the base by its own names, and what is added to which.

    Raises:
        CheckpointError: there is no such adapter, or the base was not saved.
    """
    found, bases, parts = Adapted(), dict[str, str](), dict[str, dict[str, str]]()
    for name in names:
        lora, saved, base = _LORA.fullmatch(name), _SAVED.fullmatch(name), _BASE.fullmatch(name)
        if lora and lora["of"] == adapter:
            parts.setdefault(lora["module"], {})[lora["kind"] + _tell_end(lora["end"])] = name
        if base and base["end"] == "weight":
            bases[base["module"]] = name
        is_other = (saved and saved["of"] != adapter) or _ORIGINAL.fullmatch(name)
        if not lora and not is_other:
            inner = saved or base
            found.written[name] = (f"{inner['module']}.{inner['end']}" if inner else name).removeprefix(_ROOT)
    missing = sorted(parts.keys() - bases.keys())
    if missing:
        raise CheckpointError(
            f"the base weights of {shorten(missing)} are not in the checkpoint (exclude_frozen_parameters). Write the "
            "adapter (--adapter), and merge it into the model that it was trained on: PeftModel.from_pretrained(model, "
            "OUT).merge_and_unload()."
        )
    found.parts = {bases[module]: held for module, held in parts.items()}
    if not parts and not any((match := _SAVED.fullmatch(name)) and match["of"] == adapter for name in found.written):
        _require(Adapted(), names, adapter)
    return found


def _tell_end(end: str | None) -> str:
    return "" if end in (None, ".weight") else str(end)


def _require(found: Adapted, names: Collection[str], adapter: str) -> None:
    if not found.written:
        known = {match["of"] for name in names if (match := _LORA.fullmatch(name) or _SAVED.fullmatch(name))}
        raise CheckpointError(
            f"holds no adapter {adapter!r}; it has {shorten(sorted(known))}. Name one with --adapter-name."
            if known
            else "holds no adapter of PEFT's (no lora_A, lora_B, modules_to_save)."
        )


def check_mergeable(config: Mapping[str, Any], parts: Mapping[str, Mapping[str, str]]) -> None:
    """Refuse what a merge would get wrong.

    Raises:
        UnsupportedError: a variant of LoRA that is not known here, by its name; the way that PEFT has.
    """
    odd = [f"{name}={value!r}" for name, value in config.items() if _is_odd(name, value)]
    kinds = {kind for held in parts.values() for kind in held}
    odd += sorted(kinds - {*PARTS})
    if odd:
        raise UnsupportedError(
            f"--merge: {shorten(odd)} is not known here (LoRA, rsLoRA and DoRA are). Write the adapter (--adapter), "
            "and merge it with PEFT."
        )


def _is_odd(name: str, value: Any) -> bool:
    if name in ("lora_bias", "use_bdlora", "use_qalora", "megatron_config", "alora_invocation_tokens"):
        return bool(value)
    return name.endswith("_config") and name not in ("loftq_config", "lora_ga_config", "corda_config") and bool(value)


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
        from peft.utils.other import get_pattern_key
    except ImportError as error:
        raise UnsupportedError(f"--merge needs the package peft ({error}).") from None
    known = {name: value for name, value in config.items() if name in LoraConfig.__dataclass_fields__}
    known |= {"init_lora_weights": False, "inference_mode": True}
    settings = LoraConfig(**{name: value for name, value in known.items() if name not in ("peft_type", "task_type")})
    kind = "lora_embedding_" if "lora_embedding_A" in parts else "lora_"
    one, other = parts[f"{kind}A"], parts[f"{kind}B"]
    if base.dim() != 2 or one.dim() != 2 or other.dim() != 2:
        raise UnsupportedError(f"--merge: {module} is neither a linear layer nor an embedding. Merge it with PEFT.")
    alphas = settings.alpha_pattern or {}
    alpha = alphas.get(get_pattern_key(list(alphas), module), settings.lora_alpha)
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
