"""What atoms are called: parameters, states, instances; and what counts for all of them."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

MASTER = "fp32"
"""State name of the master weight."""

MODULE = "module"
"""State name of tensors that no optimizer owns: frozen and unoptimized parameters, buffers."""

COPY = "copy"
"""State name of the model's own copy of an optimized parameter (16-bit, or fp32), as the module states hold it."""

MOMENTUM = "momentum_buffer"
"""State name of what Muon keeps; other optimizers keep a state of that name as well."""

USE_MUON = "use_muon"
"""Hyper-parameter of the param groups of DeepSpeed's Muon: whether it is used, or an Adam."""

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
