"""Names of PEFT 0.21's tensors: live, in an adapter's file, in the base model.

Live names are made in ``peft/tuners/lora/layer.py`` and ``peft/utils/other.py``, names in files in
``peft/utils/save_and_load.py``.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable
from dataclasses import dataclass

ROOT = "base_model.model."
"""Prefix of every name in a model with an adapter."""

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
        module: name of the adapted module, or of a module in ``modules_to_save``.
        kind: ``lora_A``, …; empty for ``modules_to_save``.
        end: rest of the name, such as ``.weight``.
    """

    module: str
    kind: str
    adapter: str
    end: str

    @property
    def in_file(self) -> str:
        """Name in an adapter's file."""
        end = "" if self.kind == "lora_magnitude_vector" else self.end
        return f"{self.module}.{self.kind}{end}" if self.kind else f"{self.module}{self.end}"

    @property
    def live(self) -> str:
        """Name in a live model."""
        kind = self.kind or "modules_to_save"
        return f"{self.module}.{kind}.{self.adapter}{self.end}"


def read_live(name: str) -> AdapterTensor | None:
    """Parse a live model's name; None if it is not an adapter's."""
    if match := _ADDED.fullmatch(name):
        return AdapterTensor(match["module"], match["kind"], match["adapter"], match["end"] or "")
    if match := _SAVED.fullmatch(name):
        return AdapterTensor(match["module"], "", match["adapter"], f".{match['end']}")
    return None


def read_in_file(name: str, adapter: str) -> AdapterTensor:
    """Parse a name in an adapter's file."""
    if match := _ADDED_IN_FILE.fullmatch(name):
        end = ".weight" if match["kind"] == "lora_magnitude_vector" else match["end"] or ""
        return AdapterTensor(match["module"], match["kind"], adapter, end)
    module, dot, end = name.rpartition(".")
    return AdapterTensor(module, "", adapter, dot + end)


def is_added(name: str) -> bool:
    """Return True if an adapter adds this live tensor: the base model has none."""
    return _ADDED.fullmatch(name) is not None


def is_added_in_file(name: str) -> bool:
    """Return True for an added tensor's name in a file, unless it is a live name too."""
    return _ADDED_IN_FILE.fullmatch(name) is not None and not is_added(name)


def is_in_modules_to_save(name: str) -> bool:
    """Return True if a live tensor belongs to ``modules_to_save``."""
    return _SAVED.fullmatch(name) is not None


def list_adapted(names: Iterable[str]) -> set[str]:
    """List the modules that PEFT has wrapped, from a live model's tensor names."""
    modules = {tensor.module for tensor in map(read_live, names) if tensor}
    return modules | {module.removesuffix(".token_adapter") for module in modules}  # a wrapped layer inside another


def name_in_base(name: str, adapted: Container[str]) -> str:
    """Return a live tensor's name in the base model, which must have the tensor.

    Args:
        adapted: result of :func:`list_adapted`; other modules may have one of PEFT's names by chance.
    """
    adapter = read_live(name)
    inner = adapter.in_file if adapter and not adapter.kind else name
    return _WRAPPED.sub(lambda match: "" if inner[: match.start()] in adapted else match[0], inner).removeprefix(ROOT)
