"""Names that PEFT gives tensors: in a live model, in an adapter's file, and in the base alone (PEFT 0.21).

What a live model calls them is in ``peft/tuners/lora/layer.py`` and ``peft/utils/other.py``, what a file does in
``peft/utils/save_and_load.py``.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable
from dataclasses import dataclass

ROOT = "base_model.model."
"""In front of every name of a model that has an adapter."""

_TENSORS = r"lora_(?:embedding_)?[AB]|lora_magnitude_vector|trainable_tokens_delta"
_ADDED = re.compile(
    rf"(?P<module>.+)\.(?!lora_[AB]\.(?:weight|bias)$)(?P<kind>{_TENSORS})\.(?P<adapter>[^.]+)(?P<end>\..+)?"
)
_ADDED_IN_FILE = re.compile(rf"(?P<module>.+)\.(?P<kind>{_TENSORS})(?P<end>\..+)?")
_SAVED = re.compile(r"(?P<module>.+)\.modules_to_save\.(?P<adapter>[^.]+)\.(?P<end>.+)")
_WRAPPED = re.compile(r"\.(?:base_layer|original_module|token_adapter)(?=\.)")


@dataclass(frozen=True, slots=True)
class AdapterTensor:
    """A tensor of an adapter.

    Attributes:
        module: name of the module that it is added to, or that is kept whole.
        kind: ``lora_A``, …; empty for those of ``modules_to_save``.
        adapter: whose it is.
        end: rest of the name, such as ``.weight``.
    """

    module: str
    kind: str
    adapter: str
    end: str

    @property
    def in_file(self) -> str:
        """Its name in an adapter's file."""
        end = "" if self.kind == "lora_magnitude_vector" else self.end
        return f"{self.module}.{self.kind}{end}" if self.kind else f"{self.module}{self.end}"

    @property
    def live(self) -> str:
        """Its name in a live model."""
        kind = self.kind or "modules_to_save"
        return f"{self.module}.{kind}.{self.adapter}{self.end}"


def read_live(name: str) -> AdapterTensor | None:
    """What a live model's name is of; None of the base's, and of any other."""
    if found := _ADDED.fullmatch(name):
        return AdapterTensor(found["module"], found["kind"], found["adapter"], found["end"] or "")
    if found := _SAVED.fullmatch(name):
        return AdapterTensor(found["module"], "", found["adapter"], f".{found['end']}")
    return None


def read_in_file(name: str, adapter: str) -> AdapterTensor:
    """What a name in an adapter's file is of."""
    if found := _ADDED_IN_FILE.fullmatch(name):
        end = ".weight" if found["kind"] == "lora_magnitude_vector" else found["end"] or ""
        return AdapterTensor(found["module"], found["kind"], adapter, end)
    module, dot, end = name.rpartition(".")
    return AdapterTensor(module, "", adapter, dot + end)


def is_added(name: str) -> bool:
    """Whether a live model's tensor is one that an adapter adds, of which the base has none."""
    return _ADDED.fullmatch(name) is not None


def is_added_in_file(name: str) -> bool:
    """Whether an adapter's file has this name for a tensor that an adapter adds, and no live model has it."""
    return _ADDED_IN_FILE.fullmatch(name) is not None and not is_added(name)


def is_kept_whole(name: str) -> bool:
    """Whether a live model's tensor is of ``modules_to_save``; a file has it under each name that is tied to it."""
    return _SAVED.fullmatch(name) is not None


def list_adapted(names: Iterable[str]) -> set[str]:
    """Modules of a live model in whose place there is a layer of PEFT's; ``names``: of all its tensors."""
    held = {tensor.module for tensor in map(read_live, names) if tensor}
    return held | {module.removesuffix(".token_adapter") for module in held}  # which is such a layer in another one


def name_in_base(name: str, adapted: Container[str]) -> str:
    """What the model without an adapter calls a live model's tensor, of the base or of ``modules_to_save``.

    Args:
        adapted: as of :func:`list_adapted`; a module of the base's own may have a name of PEFT's.
    """
    found = read_live(name)
    inner = found.in_file if found and not found.kind else name
    return _WRAPPED.sub(lambda at: "" if inner[: at.start()] in adapted else at[0], inner).removeprefix(ROOT)
