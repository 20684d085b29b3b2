"""PEFT's folders: an adapter alone, whose base the live model has."""

from __future__ import annotations

from ...comm import Comm
from ...errors import CheckpointError
from ..findings import Finding
from ..table import FileTable
from . import statedict
from .contents import Contents
from .names import ADAPTER, holds
from .safetensors import read_header

PARTS = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector")
"""What LoRA adds to a module, by PEFT's names (``peft/tuners/lora/layer.py``, 0.21)."""

SAVED = "modules_to_save"
"""What else of a model an adapter has."""

_NAME = "default"
"""Of the adapter in a live model, unless a script names it."""


def read_contents(where: FileTable, comm: Comm) -> tuple[Contents, list[Finding]]:
    """Read the header of the file, with the names of a live model; collective.

    Raises:
        CheckpointError: two tensors are one in a live model; as of :func:`.safetensors.read_header`.
        UnsupportedError: as of :func:`.statedict.read_header`.
    """
    file = next(name for name in where.entries if holds(ADAPTER, name, heads=True))
    if file.endswith(".safetensors"):
        found = where.once(file, lambda: read_header(where, file), comm)
    else:
        found = statedict.split_ties(where.once(file, lambda: statedict.read_header(where, file), comm))[0]

    def rename() -> Contents:
        weights = {name_live(name): tensor for name, tensor in found.items()}
        if len(weights) < len(found):
            raise CheckpointError("two of its tensors are one in a live model; it is damaged.", path=where.path(file))
        return Contents(ADAPTER, file, weights, dropped="a PEFT adapter holds no weights of its base")

    return comm.alike(rename), []


def name_live(name: str) -> str:
    """What a live model calls a tensor of a file (``peft/utils/save_and_load.py``, 0.21)."""
    for part in PARTS:
        if name.endswith(f".{part}"):  # embeddings' and DoRA's, which files have without an ending
            return f"{name}.{_NAME}{'.weight' * (part == PARTS[-1])}"
        head, found, tail = name.rpartition(f".{part}.")
        if found:
            return f"{head}.{part}.{_NAME}.{tail}"
    module, _, tail = name.rpartition(".")
    return f"{module}.{SAVED}.{_NAME}.{tail}"
