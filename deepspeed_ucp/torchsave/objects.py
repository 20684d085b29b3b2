"""What a pickle says, as inert data that remembers how it was made: nothing of it is imported, called or built.

Numbers, strings, lists, dicts, tuples and sets are plain. Everything else is one of the classes here, whose parts are
what the pickle gives, so that :mod:`~.repickle` writes again what :mod:`~.unpickle` has read.
"""

from __future__ import annotations

import pickle
import struct
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..atoms import count
from .dtypes import unpack_scalar

RESTORE = 'Restore it from a copy, name a place that has one ("also", --also), or load another tag.'
"""What to do about a damaged file, at the end of messages."""

_NUMPY_FORMATS = {"f8": "<d", "f4": "<f", "f2": "<e", "i8": "<q", "i4": "<i", "b1": "<?"}
_SHORT = 60

MOST_BITS = 512
"""Of an integer that is a setting: seeds have up to 128. Its digits are soon written, and a float holds it."""


@dataclass(frozen=True, slots=True)
class Global:
    """A class or function, by name."""

    module: str
    name: str

    @property
    def kind(self) -> str:
        """Dotted name in Python 3: ``torch.save``'s protocol writes names of Python 2 (``__builtin__.long``)."""
        module, name = NAME_MAPPING.get((self.module, self.name), (self.module, self.name))
        return f"{IMPORT_MAPPING.get(module, module)}.{name}"


@dataclass(eq=False, slots=True)
class PickledObject:
    """An object that a pickle makes by a call. Equal to itself only: what its class takes for equal is not known.

    Attributes:
        op: instruction that makes it: ``pickle.REDUCE`` (parts: function, arguments), ``NEWOBJ`` (class, arguments) or
            ``NEWOBJ_EX`` (class, arguments, keywords).
        parts: what it is made of.
        edits: what changes it afterwards, in order: instruction (``pickle.APPENDS``, ``SETITEMS``, ``ADDITEMS`` or
            ``BUILD``) and operands.
    """

    op: bytes
    parts: list[Any]
    edits: list[tuple[bytes, list[Any]]] = field(default_factory=list)

    @property
    def kind(self) -> str:
        """Dotted name of its class, or of the function whose result it is."""
        maker, calls = self.parts[1][0] if self._is_bare() else self.parts[0], ""
        while isinstance(maker, PickledObject) and len(calls) < _SHORT:
            maker, calls = maker.parts[0], f"{calls}()"
        return f"{maker.kind if isinstance(maker, Global) else 'object'}{calls}"

    @property
    def args(self) -> tuple[Any, ...]:
        """Arguments of the call."""
        given = () if self._is_bare() else self.parts[1]
        return given if isinstance(given, tuple) else (given,)

    @property
    def state(self) -> Any:
        """What its ``__setstate__`` or ``__dict__`` is given; None where nothing is."""
        for op, operands in reversed(self.edits):
            if op == pickle.BUILD:
                return operands[0]
        return None

    @property
    def items(self) -> list[Any]:
        """What it is filled with: items, or pairs of key and value."""
        found: list[Any] = []
        for op, operands in self.edits:
            if op == pickle.SETITEMS:
                found += zip(operands[::2], operands[1::2], strict=True)
            elif op != pickle.BUILD:
                found += operands
        return found

    def get(self, name: str, default: Any = None) -> Any:
        """An attribute from the pickled ``__dict__``."""
        return self.state.get(name, default) if isinstance(self.state, dict) else default

    def _is_bare(self) -> bool:
        """Made by protocols 0 and 1: an object of a class without arguments."""
        maker, args = self.parts[:2]
        return (
            self.op == pickle.REDUCE
            and isinstance(maker, Global)
            and maker.kind == "copyreg._reconstructor"
            and isinstance(args, tuple)
            and len(args) == 3
            and isinstance(args[0], Global)
        )


class OrderedItems(dict[Any, Any]):
    """A ``collections.OrderedDict``; ``state`` is its ``__dict__`` (a module's ``_metadata``), or None."""

    state: Any = None


class TensorSize(tuple[int, ...]):
    """A ``torch.Size``."""

    __slots__ = ()


@dataclass(eq=False, slots=True)
class StorageRef:
    """A storage as ``torch.save`` refers to it: key of its record, storage class, device, number of elements."""

    key: str
    kind: Global
    location: str
    numel: int


@dataclass(eq=False, slots=True)
class TensorRef:
    """A tensor in a file: its storage and its view of it.

    Attributes:
        offset: element of the storage at which it begins.
        shape, stride: per dimension; strides in elements.
        dtype: name of the element type, as ``float32``.
        made: the call by which the pickle makes it.
        data: the bytes (little-endian) of the only element, where the tensor has one and its file was read; else None.
    """

    storage: StorageRef
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    made: PickledObject
    data: bytes | None = None

    @property
    def numel(self) -> int:
        """Number of elements."""
        return count(self.shape)

    def item(self) -> Any:
        """The number in a tensor of one element whose bytes are known."""
        if self.data is None:
            raise TypeError("a tensor whose elements were not read")
        return unpack_scalar(self.dtype, self.data)

    def is_contiguous(self) -> bool:
        """Whether the elements lie in the record in row-major order without gaps."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != expected:
                return self.numel == 0
            expected *= size
        return True


def call(module: str, name: str, *args: Any) -> PickledObject:
    """The object that a function returns."""
    return PickledObject(pickle.REDUCE, [Global(module, name), tuple(args)])


def make_instance(module: str, name: str, fields: Mapping[str, Any]) -> PickledObject:
    """An instance of a class, as a dataclass is pickled: made empty, then given its ``__dict__``."""
    return PickledObject(pickle.NEWOBJ, [Global(module, name), ()], [(pickle.BUILD, [dict(fields)])])


def to_number(value: Any) -> Any:
    """A Python number for a 0-dim tensor or one of numpy's scalars; anything else as it is."""
    if isinstance(value, TensorRef) and value.data is not None and not value.shape:
        return value.item()
    if isinstance(value, PickledObject) and value.kind.endswith(".multiarray.scalar"):
        return _read_numpy_scalar(value)
    return value


def is_short(value: Any) -> bool:
    """Whether a value is an integer of at most 64 bits, as sizes and counts are."""
    return isinstance(value, int) and value.bit_length() <= 64


def is_setting(value: Any) -> bool:
    """Whether a value is an integer as settings are: Python writes none of thousands of digits out."""
    return isinstance(value, int) and value.bit_length() <= MOST_BITS


def to_member(value: Any) -> Any:
    """The value of an enum's member (any call with one number or string); anything else as it is."""
    if isinstance(value, PickledObject) and len(value.args) == 1 and isinstance(value.args[0], (int, str)):
        return value.args[0]
    return value


def _read_numpy_scalar(value: PickledObject) -> Any:
    """The number in ``numpy.core.multiarray.scalar(dtype, bytes)``, as schedulers that compute with numpy leave it."""
    kind, data = value.args if len(value.args) == 2 else (None, None)
    if isinstance(data, PickledObject) and data.kind == "_codecs.encode" and data.args[1:] == ("latin1",):
        data = str(data.args[0]).encode("latin1")
    form = _NUMPY_FORMATS.get(str(kind.args[0])) if isinstance(kind, PickledObject) and kind.args else None
    if form is None or not isinstance(data, bytes) or len(data) != struct.calcsize(form):
        return value
    return struct.unpack(form, data)[0]


def list_parts(value: Any) -> list[Any]:
    """What a value is made of, one level down; [] for plain values and globals."""
    if isinstance(value, dict):
        parts = [part for pair in value.items() for part in pair]
        return [*parts, value.state] if isinstance(value, OrderedItems) else parts
    if isinstance(value, (list, tuple, set, frozenset)):
        return list(value)
    if isinstance(value, PickledObject):
        return [*value.parts, *(operand for _op, operands in value.edits for operand in operands)]
    if isinstance(value, TensorRef):
        return [value.made]
    return []


def walk(root: Any) -> Iterator[Any]:
    """Every value of a tree, depth first; shared parts and cycles are gone through once, without recursion."""
    todo, seen = [root], set[int]()
    while todo:
        value = todo.pop()
        yield value
        parts = [] if id(value) in seen else list_parts(value)
        if parts:
            seen.add(id(value))
            todo += reversed(parts)


def has_more_parts(value: Any, most: int) -> bool:
    """Whether a value written out in full (parts anew wherever they are shared) has more than ``most`` parts.

    64 bits of an integer are a part.

    What is compared, hashed or copied by recursion is held against this first: a chain of tuples that hold their
    predecessor twice takes two bytes a level and doubles what a visitor sees. Takes no more than ``most`` steps.
    """
    todo, found = [value], 1
    while todo and found <= most:
        each = todo.pop()
        parts = list_parts(each)
        found += each.bit_length() >> 6 if isinstance(each, int) else len(parts)
        todo += parts
    return found > most


def describe(value: Any) -> str:
    """A value in a few words for a message, whatever it is: never longer than a line."""
    if isinstance(value, (PickledObject, Global)):
        return _cut(value.kind)
    if isinstance(value, TensorRef):
        return f"tensor {_cut(value.dtype)} {_cut(list(value.shape))}"
    if isinstance(value, int) and value.bit_length() > 4 * _SHORT:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, (str, bytes, bytearray)):
        return _cut(repr(value[:_SHORT]), len(value) > _SHORT)
    if value is None or isinstance(value, (bool, int, float)):
        return repr(value)
    return f"a {type(value).__name__} of {len(list_parts(value))} parts"


def _cut(value: Any, more: bool = False) -> str:
    text = str(value)
    return f"{text[:_SHORT]}…" if more or len(text) > _SHORT else text
