"""PEFT's folders: an adapter alone, whose base the live model has."""

from __future__ import annotations

from collections.abc import Collection

from ...comm import Comm
from ...errors import CheckpointError
from ...patterns.adapters import read_in_file
from ..findings import Finding
from ..table import FileTable
from . import statedict
from .contents import Contents
from .names import ADAPTER, holds
from .safetensors import read_header

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
        weights = {name_live(name, found): tensor for name, tensor in found.items()}
        if len(weights) < len(found):
            raise CheckpointError("two of its tensors are one in a live model; it is damaged.", path=where.path(file))
        return Contents(ADAPTER, file, weights, dropped="a PEFT adapter holds no weights of its base")

    return comm.alike(rename), []


def name_live(name: str, others: Collection[str]) -> str:
    """What a live model calls a tensor of a file.

    Args:
        others: all names of the file. A bias without its weight is the base's own, trained with the adapter.
    """
    module, _, end = name.rpartition(".")
    is_base = end == "bias" and ".lora_" not in name and f"{module}.weight" not in others
    return name if is_base else read_in_file(name, _NAME).live
