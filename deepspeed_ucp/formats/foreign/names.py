"""File names of foreign checkpoints by format."""

from __future__ import annotations

import re
from collections.abc import Iterable

DCP, SAFETENSORS = "torch.distributed.checkpoint", "safetensors"
STATE_DICT, ADAPTER = "state dict", "PEFT adapter"
MEGATRON = "Megatron-Core"
REFUSAL = (
    "is a checkpoint of Megatron-Core (torch_dist), which is not read. Convert it with Megatron-Bridge to Hugging "
    "Face's format, and load that."
)
"""Message for a checkpoint of Megatron-Core."""

PARTS = ("pytorch_model_fsdp_", "optimizer_")
"""Prefixes of Accelerate's folders for model and optimizer."""

MODEL_FOLDER, OPTIMIZER_FOLDER = (f"{part}0" for part in PARTS)
"""Folders of the first model (accelerate/utils/fsdp_utils.py, ``save_fsdp_model``)."""

CONFIG, QUANTIZED = "config.json", "quantization_config"
"""Configuration of transformers, and its key for quantized weights."""

WEIGHTS_INDEX = "model.safetensors.index.json"
"""Index of sharded weights."""

ADAPTER_CONFIG, ADAPTER_STEM = "adapter_config.json", "adapter_model"
"""Configuration of a PEFT adapter, and the stem of its weights' file."""

WHOLE, OPTIMIZER = "pytorch_model_fsdp.bin", "optimizer.bin"
"""Accelerate's weights and optimizer states with FULL_STATE_DICT; the latter may accompany other weights too."""

TRAINERS = re.compile(
    r"scheduler(_\d+)?\.bin|scheduler\.pt|(sampler|dl_state_dict)(_\d+)?\.bin|random_states_\d+\.pkl"
    r"|rng_state(_\d+)?\.pth|custom_checkpoint_\d+\.pkl|scaler\.pt|trainer_state\.json|training_args\.bin"
)
"""Further files of Accelerate and Hugging Face's Trainer."""

NUMBERED = re.compile(r"optimizer(_\d+)?\.pt|optimizer_\d+\.bin")
"""Optimizer states by number, which the Trainer writes without FSDP."""

TRAINER_STATE = "trainer_state.json"
"""The file that the Trainer writes last."""

SCALER = "scaler.pt"
"""State of the fp16 scaler, which skips steps: the optimizer then counts fewer steps than the trainer."""

META = "meta.pt"
"""Further state of Lightning."""

FORM, BLOCKS, COMMON = "metadata.json", ".metadata", "common.pt"
"""Megatron-Core's files: format, blocks, and data other than tensors."""

_FILES = {
    DCP: r"(?:[^/]+/)?(?:[^/]+\.distcp|(?:__\d+)?\.metadata)",
    SAFETENSORS: r"(?!adapter_)[^/]+\.safetensors(?:\.index\.json)?",
    STATE_DICT: r"(?:pytorch_model|model|consolidated|weights)(?![^/]*_states\.)[^/]*\.(?:bin(?:\.index\.json)?|pth?)",
    ADAPTER: r"adapter_model\.(?:safetensors|bin)|adapter_config\.json",
    MEGATRON: r"metadata\.json|\.metadata|common\.pt|[^/]+\.distcp",
}
"""Format → pattern of all its files. Order: precedence of formats."""

_HEADS = {
    DCP: r"(?:[^/]+/)?(?:__\d+)?\.metadata",
    SAFETENSORS: r"[^/]+\.safetensors",
    STATE_DICT: r"[^/]+\.(?:bin|pt|pth)",
    ADAPTER: r"adapter_model\.(?:safetensors|bin)",
    MEGATRON: r"\.metadata",
}
"""Format → pattern of the files of which at least one is required."""

_FIRST = {
    SAFETENSORS: ("model.safetensors", WEIGHTS_INDEX),
    STATE_DICT: (WHOLE, "pytorch_model.bin", "pytorch_model.bin.index.json"),
    ADAPTER: ("adapter_model.safetensors",),
}
"""Format → files that transformers and PEFT prefer among several models, in order."""


def find_format(names: Iterable[str]) -> str | None:
    """Return the format of a folder with these files; None if it is none of these."""
    names = list(names)
    if WHOLE in names:  # the Trainer also writes equal weights as safetensors, without checksums
        return STATE_DICT
    if len({FORM, BLOCKS, COMMON}.intersection(names)) > 1:  # a single one may be of any other program
        return MEGATRON
    interrupted = DCP if any(holds(DCP, name) for name in names) else None
    return next((kind for kind in _FILES if any(holds(kind, name, heads=True) for name in names)), interrupted)


def holds(kind: str, name: str, *, heads: bool = False) -> bool:
    """Return True for a file of a format; ``heads``: for one of the required files."""
    is_one = re.fullmatch(_FILES[kind], name) is not None
    return is_one and (not heads or re.fullmatch(_HEADS[kind], name) is not None)


def pick_model(kind: str, names: Iterable[str]) -> list[str]:
    """Return the files of the preferred model of a format, or all files."""
    names = list(names)
    first = next((name for name in _FIRST.get(kind, ()) if name in names), "")
    if first.endswith(".index.json"):  # it lists the other files
        return [name for name in names if name == first or not name.endswith(".index.json")]
    return [first] if first else names


def is_foreign(name: str) -> bool:
    """Return True for a file of a foreign format, by its relative path."""
    return name in (CONFIG, OPTIMIZER) or any(holds(kind, name) for kind in _FILES)


def has_zip_directory(name: str) -> bool:
    """Return True for files of ``torch.save`` (with a zip directory) and of DeepSpeed."""
    is_torchs = holds(STATE_DICT, name) and not name.endswith(".json")
    return is_torchs or name in ("adapter_model.bin", OPTIMIZER, COMMON) or not is_foreign(name)
