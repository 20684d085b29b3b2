"""PEFT's folders: an adapter alone, whose base the live model has."""

from __future__ import annotations

from ...comm import Comm
from ..findings import Finding
from ..table import FileTable
from . import statedict
from .contents import Contents
from .names import ADAPTER, holds
from .safetensors import read_header, tell_unchecked

_NAME = "default"
"""Of the adapter in a live model, unless a script names it."""

_PARTS = (".lora_A", ".lora_B", ".lora_embedding_A", ".lora_embedding_B", ".lora_magnitude_vector")


def read_contents(where: FileTable, comm: Comm) -> tuple[Contents, list[Finding]]:
    """Read the header of the file, with the names of a live model; collective.

    Raises:
        CheckpointError, UnsupportedError: as of :func:`.safetensors.read_header` and :func:`.statedict.read_header`.
    """
    file = next(name for name in where.entries if holds(ADAPTER, name, heads=True))
    if file.endswith(".safetensors"):
        found, findings = where.once(file, lambda: read_header(where, file), comm), [tell_unchecked(where, file)]
    else:
        (found, _), findings = where.once(file, lambda: statedict.read_header(where, file), comm), []
    weights = {name_live(name): tensor for name, tensor in found.items()}
    dropped = "a PEFT adapter holds no weights of its base"
    return Contents(ADAPTER, file, weights, dropped=dropped), findings


def name_live(name: str) -> str:
    """What a live model calls a tensor of a file (``peft/utils/save_and_load.py``, 0.21)."""
    if name.endswith(_PARTS):  # embeddings' and DoRA's, which files have without an ending
        end = ".weight" if name.endswith(_PARTS[-1]) else ""
        return f"{name}.{_NAME}{end}"
    for part in _PARTS:
        head, found, tail = name.rpartition(f"{part}.")
        if found:
            return f"{head}{part}.{_NAME}.{tail}"
    module, _, tail = name.rpartition(".")
    return f"{module}.modules_to_save.{_NAME}.{tail}"
