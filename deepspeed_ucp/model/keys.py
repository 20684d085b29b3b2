"""Keys of parameters and atoms, state names, and helpers for parameter names."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

TIED = "tied_modules."
"""Prefix of the parameter names of a pipeline's tied modules."""

MASTER = "fp32"
"""State name of the master weight."""

MODULE = "module"
"""State name of tensors without optimizer: frozen or unoptimized parameters, and buffers."""

COPY = "copy"
"""State name of the model's copy of an optimized parameter (16-bit or fp32) in the model states."""

ITEMSIZE = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
    "complex64": 8,
    "complex128": 16,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}


class ParamKey(NamedTuple):
    """A parameter; ``instance`` counts the pipeline stages that hold a parameter of this name with own values."""

    name: str
    instance: int = 0

    def __str__(self) -> str:
        """Format for messages: ``name`` or ``name (instance 1)``."""
        return f"{self.name} (instance {self.instance})" if self.instance else self.name

    def atom(self, state: str) -> AtomKey:
        """Return the key of one of its atoms."""
        return AtomKey(self.name, state, self.instance)


class AtomKey(NamedTuple):
    """One state of a parameter; ``instance`` as in :class:`ParamKey`."""

    name: str
    state: str
    instance: int = 0

    @property
    def param(self) -> ParamKey:
        """The parameter of this state."""
        return ParamKey(self.name, self.instance)


def count(shape: tuple[int, ...]) -> int:
    """Number of elements of a shape."""
    return prod(shape)


def strip_compiled(name: str) -> str:
    """Return a parameter name without the prefixes that ``torch.compile`` inserts, as atoms have it."""
    return name.replace("_orig_mod.", "")


def find_owner(name: str) -> str:
    """Return the layer number (as text) or the tied module's key of a pipeline's parameter."""
    return strip_compiled(name).removeprefix(TIED).partition(".")[0]


def number_layer(name: str) -> int:
    """Return the layer number of a pipeline's parameter; -1 for tied modules, which are registered before layers."""
    head = strip_compiled(name).partition(".")[0]
    return int(head) if head.isdecimal() else -1
