"""What atoms are called: parameters, states, instances; and what counts for all of them."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

TIED = "tied_modules."
"""What the names of a pipeline's tied modules begin with."""

MASTER = "fp32"
"""State name of the master weight."""

MODULE = "module"
"""State name of tensors that no optimizer owns: frozen and unoptimized parameters, buffers."""

COPY = "copy"
"""State name of the model's own copy of an optimized parameter (16-bit, or fp32), as the module states hold it."""

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
    """A parameter; of those that several pipeline stages hold under one name, ``instance`` counts the stages."""

    name: str
    instance: int = 0

    def __str__(self) -> str:
        """For people: ``name``, ``name (instance 1)``."""
        return f"{self.name} (instance {self.instance})" if self.instance else self.name

    def atom(self, state: str) -> AtomKey:
        """The key of one of its atoms."""
        return AtomKey(self.name, state, self.instance)


class AtomKey(NamedTuple):
    """An atom's parameter, state, and instance (see :class:`ParamKey`)."""

    name: str
    state: str
    instance: int = 0

    @property
    def param(self) -> ParamKey:
        """Its parameter."""
        return ParamKey(self.name, self.instance)


def count(shape: tuple[int, ...]) -> int:
    """Number of elements of a shape."""
    return prod(shape)


def strip_compiled(name: str) -> str:
    """Parameter name without the prefixes that ``torch.compile`` inserts: the name that an atom has."""
    return name.replace("_orig_mod.", "")


def find_owner(name: str) -> str:
    """Layer or tied module of a pipeline's parameter."""
    return strip_compiled(name).removeprefix(TIED).partition(".")[0]


def number_layer(name: str) -> int:
    """Number of the layer of a pipeline's parameter; -1 of a tied module's, which were registered before the layers."""
    head = strip_compiled(name).partition(".")[0]
    return int(head) if head.isdecimal() else -1
