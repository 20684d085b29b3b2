"""File names of foreign checkpoints, by format: the one place that knows them."""

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

"""The formats, in the order in which a folder is asked for them."""

PARTS = ("pytorch_model_fsdp_", "optimizer_")
"""What the names of Accelerate's folders begin with, of which one has the model and one the optimizer."""

MODEL_FOLDER, OPTIMIZER_FOLDER = (f"{part}0" for part in PARTS)
"""Those of its first model (accelerate/utils/fsdp_utils.py, ``save_fsdp_model``)."""

CONFIG, QUANTIZED = "config.json", "quantization_config"
"""Of a model of transformers; its key for weights that the files do not hold plain."""

WEIGHTS_INDEX = "model.safetensors.index.json"
"""Of its weights in several files."""

ADAPTER_CONFIG, ADAPTER_STEM = "adapter_config.json", "adapter_model"
"""Of an adapter of PEFT's; what the name of its weights' file begins with."""

WHOLE, OPTIMIZER = "pytorch_model_fsdp.bin", "optimizer.bin"
"""Accelerate's with FULL_STATE_DICT, of which the second may lie beside other weights too."""

TRAINERS = re.compile(
    r"scheduler(_\d+)?\.bin|scheduler\.pt|(sampler|dl_state_dict)(_\d+)?\.bin|random_states_\d+\.pkl"
    r"|rng_state(_\d+)?\.pth|custom_checkpoint_\d+\.pkl|scaler\.pt|trainer_state\.json|training_args\.bin"
)
"""What Accelerate and Hugging Face's Trainer keep beside model and optimizer."""

NUMBERED = re.compile(r"optimizer(_\d+)?\.pt|optimizer_\d+\.bin")
"""States of an optimizer by number, as the Trainer keeps them without FSDP."""

TRAINER_STATE = "trainer_state.json"
"""Which the Trainer writes last."""

SCALER = "scaler.pt"
"""Which they keep of fp16, whose first steps are skipped: the optimizer has taken fewer than the trainer."""

META = "meta.pt"
"""What Lightning keeps beside them."""

FORM, BLOCKS, COMMON = "metadata.json", ".metadata", "common.pt"
"""Of Megatron-Core's checkpoints: which form it is; what blocks there are; what is no tensor."""

_FILES = {
    DCP: r"(?:[^/]+/)?(?:[^/]+\.distcp|(?:__\d+)?\.metadata)",
    SAFETENSORS: r"(?!adapter_)[^/]+\.safetensors(?:\.index\.json)?",
    STATE_DICT: r"(?:pytorch_model|model|consolidated|weights)(?![^/]*_states\.)[^/]*\.(?:bin(?:\.index\.json)?|pth?)",
    ADAPTER: r"adapter_model\.(?:safetensors|bin)|adapter_config\.json",
    MEGATRON: r"metadata\.json|\.metadata|common\.pt|[^/]+\.distcp",
}
"""All files of a format, by their path in the folder."""

_HEADS = {
    DCP: r"(?:[^/]+/)?(?:__\d+)?\.metadata",
    SAFETENSORS: r"[^/]+\.safetensors",
    STATE_DICT: r"[^/]+\.(?:bin|pt|pth)",
    ADAPTER: r"adapter_model\.(?:safetensors|bin)",
    MEGATRON: r"\.metadata",
}
"""Those of them without which there is no checkpoint."""

_FIRST = {
    SAFETENSORS: ("model.safetensors", WEIGHTS_INDEX),
    STATE_DICT: (WHOLE, "pytorch_model.bin", "pytorch_model.bin.index.json"),
    ADAPTER: ("adapter_model.safetensors",),
}
"""Which of several models in a folder transformers and PEFT take, the first that is there."""


def find_format(names: Iterable[str]) -> str | None:
    """Of which format a folder with these files is; None of none."""
    names = list(names)
    if WHOLE in names:  # the Trainer writes the same weights as safetensors too, without checksums
        return STATE_DICT
    if len({FORM, BLOCKS, COMMON}.intersection(names)) > 1:  # one alone is anybody's
        return MEGATRON
    interrupted = DCP if any(holds(DCP, name) for name in names) else None
    return next((kind for kind in _FILES if any(holds(kind, name, heads=True) for name in names)), interrupted)


def holds(kind: str, name: str, *, heads: bool = False) -> bool:
    """Whether a file is one of a format's; ``heads``: of those without which there is no checkpoint."""
    is_one = re.fullmatch(_FILES[kind], name) is not None
    return is_one and (not heads or re.fullmatch(_HEADS[kind], name) is not None)


def pick_model(kind: str, names: Iterable[str]) -> list[str]:
    """The files of a format that may be those of the model: without the others, where it has the name for it."""
    names = list(names)
    first = next((name for name in _FIRST.get(kind, ()) if name in names), "")
    if first.endswith(".index.json"):  # which tells whose the other files are
        return [name for name in names if name == first or not name.endswith(".index.json")]
    return [first] if first else names


def is_foreign(name: str) -> bool:
    """Whether a file, by its path in a folder, is one of a foreign format's."""
    return name in (CONFIG, OPTIMIZER) or any(holds(kind, name) for kind in _FILES)


def has_directory(name: str) -> bool:
    """Whether a file is one that ``torch.save`` wrote, which lists its own records, or no foreign one."""
    return holds(STATE_DICT, name) or name in ("adapter_model.bin", OPTIMIZER, COMMON) or not is_foreign(name)
