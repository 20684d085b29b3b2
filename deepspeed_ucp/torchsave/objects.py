"""Inert data of a pickle, and its element types: no class is imported or called.

Numbers, strings, lists, dicts, tuples and sets are plain Python values. Every other object is an instance of a class
in this module that records how the pickle makes it, so that :mod:`~.repickle` can write it again.
"""

from __future__ import annotations

import pickle
import re
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from ..errors import CheckpointError
from ..io.cast import find_dtype
from ..model.storage import ITEMSIZE, count

STORAGE_DTYPES: Final = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
}
"""Storage class → dtype; other dtypes are written as untyped bytes (torch/storage.py ``_new_dtypes``)."""

STORAGES: Final = {dtype: name for name, dtype in STORAGE_DTYPES.items()}

_NAME = re.compile(r"bool|b?float\d+\w*|complex\d+|q?u?int\d+(x\d+)?|bits\d+(x\d+)?")
"""Pickled names of torch's dtypes. A pattern, because importing torch takes seconds."""


def is_dtype(kind: str) -> bool:
    """Return True if a dotted name names a torch dtype."""
    module, _, name = kind.rpartition(".")
    return module == "torch" and _NAME.fullmatch(name) is not None


def is_storage(kind: str) -> bool:
    """Return True if a dotted name names a torch storage class."""
    module, _, name = kind.rpartition(".")
    return module in ("torch", "torch.storage") and (name in STORAGE_DTYPES or name == "UntypedStorage")


def pack_scalar(dtype: str, value: Any) -> bytes:
    """Return the bytes of a number; CheckpointError if the dtype cannot hold it."""
    try:
        if dtype not in ITEMSIZE:
            raise KeyError(dtype)
        kind = find_dtype(dtype)
        if kind.kind in "iu" and value != int(value):
            raise ValueError(f"{value} is not an integer")
        return np.asarray(value, kind).tobytes()
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise CheckpointError(
            f"a 0-dim tensor of dtype {dtype} cannot be written ({error}); known: {', '.join(ITEMSIZE)}"
        ) from None


RESTORE = 'Restore it from a copy, name a place that has one ("also", --also), or load another tag.'
"""Remedy for a damaged file, at the end of error messages."""


def make_damage_error(path: str, text: str) -> CheckpointError:
    """Return the error of a damaged file, with the remedy."""
    return CheckpointError(f"{text} {RESTORE}", path=path)


_NUMPY_FORMATS = ("f8", "f4", "f2", "i8", "i4", "b1")
_SHORT = 60

MOST_BITS = 512
"""Limit for integer settings. Seeds have up to 128 bits; larger integers take long to print and overflow a float."""


@dataclass(frozen=True, slots=True)
class Global:
    """A class or function, by name."""

    module: str
    name: str

    @property
    def kind(self) -> str:
        """Dotted name in Python 3; pickles of protocol 2 contain the name in Python 2."""
        module, name = NAME_MAPPING.get((self.module, self.name), (self.module, self.name))
        return f"{IMPORT_MAPPING.get(module, module)}.{name}"


@dataclass(eq=False, slots=True)  # the ``__eq__`` of its class is unknown
class PickledObject:
    """An object that a pickle makes by a call, compared by identity.

    Attributes:
        op: instruction that makes it: ``pickle.REDUCE`` (parts: function, arguments), ``NEWOBJ`` (class, arguments) or
            ``NEWOBJ_EX`` (class, arguments, keywords).
        parts: operands of ``op``.
        edits: later changes in order: instruction (``pickle.APPENDS``, ``SETITEMS``, ``ADDITEMS`` or ``BUILD``) and
            its operands.
    """

    op: bytes
    parts: list[Any]
    edits: list[tuple[bytes, list[Any]]] = field(default_factory=list)

    @property
    def kind(self) -> str:
        """Dotted name of the class, or of the function that returns the object."""
        maker, calls = self.parts[1][0] if self._is_bare() else self.parts[0], ""
        while isinstance(maker, PickledObject) and len(calls) < _SHORT:
            maker, calls = maker.parts[0], f"{calls}()"
        return f"{maker.kind if isinstance(maker, Global) else 'object'}{calls}"

    @property
    def args(self) -> tuple[Any, ...]:
        given = () if self._is_bare() else self.parts[1]
        return given if isinstance(given, tuple) else (given,)

    @property
    def state(self) -> Any:
        """Argument of the last ``__setstate__`` or ``__dict__`` update, or None."""
        for op, operands in reversed(self.edits):
            if op == pickle.BUILD:
                return operands[0]
        return None

    @property
    def items(self) -> list[Any]:
        """Items added to the object, or pairs of key and value."""
        added: list[Any] = []
        for op, operands in self.edits:
            if op == pickle.SETITEMS:
                added += zip(operands[::2], operands[1::2], strict=True)
            elif op != pickle.BUILD:
                added += operands
        return added

    def get(self, name: str, default: Any = None) -> Any:
        """Return an attribute of the pickled ``__dict__``."""
        return self.state.get(name, default) if isinstance(self.state, dict) else default

    def _is_bare(self) -> bool:
        """Return True for an instance without arguments as protocols 0 and 1 make it."""
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
    """A ``collections.OrderedDict``; ``state`` is its ``__dict__`` or None."""

    state: Any = None  # for example a module's ``_metadata``


class TensorSize(tuple[int, ...]):
    """A ``torch.Size``."""

    __slots__ = ()


@dataclass(eq=False, slots=True)
class StorageRef:
    """A storage: key of its record, storage class, device, number of elements."""

    key: str
    kind: Global
    location: str
    numel: int


@dataclass(eq=False, slots=True)
class TensorRef:
    """A tensor in a file: a view of a storage.

    Attributes:
        offset: first element in the storage.
        shape, stride: per dimension; strides in elements.
        made: the call by which the pickle makes the tensor.
        lazy: the bytes must still be negated or conjugated (torch's neg and conj bits).
        data: little-endian bytes of the only element if the tensor has one and the file was read, else None.
    """

    storage: StorageRef
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    made: PickledObject
    lazy: bool = False
    data: bytes | None = None

    @property
    def numel(self) -> int:
        return count(self.shape)

    def item(self) -> Any:
        """Return the number in a one-element tensor; TypeError if its bytes were not read."""
        if self.data is None:
            raise TypeError("the elements of this tensor were not read")
        return np.frombuffer(self.data, find_dtype(self.dtype))[0].item()

    @property
    def fault(self) -> str:
        """Why the bytes are not contiguous row-major elements; empty if they are."""
        if self.lazy:
            return "torch's neg or conj bit changes the meaning of its bytes"
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != expected and self.numel:
                return f"its memory is not contiguous (shape {self.shape}, strides {self.stride})"
            expected *= size
        return ""


def call(module: str, name: str, *args: Any) -> PickledObject:
    """Return the inert form of a function call."""
    return PickledObject(pickle.REDUCE, [Global(module, name), tuple(args)])


def make_instance(module: str, name: str, fields: Mapping[str, Any]) -> PickledObject:
    """Return the inert form of an instance whose ``__dict__`` is ``fields``."""
    return PickledObject(pickle.NEWOBJ, [Global(module, name), ()], [(pickle.BUILD, [dict(fields)])])


def to_number(value: Any) -> Any:
    """Return the number in a 0-dim tensor or a numpy scalar; other values as they are."""
    if isinstance(value, TensorRef) and value.data is not None and not value.shape:
        return value.item()
    if isinstance(value, PickledObject) and value.kind.endswith(".multiarray.scalar"):
        return _read_numpy_scalar(value)
    return value


def is_int64(value: Any) -> bool:
    """Return True for an integer of at most 64 bits, such as a size or a count."""
    return isinstance(value, int) and value.bit_length() <= 64


def is_setting_int(value: Any) -> bool:
    """Return True for an integer of at most :data:`MOST_BITS` bits."""
    return isinstance(value, int) and value.bit_length() <= MOST_BITS


def unwrap_enum(value: Any) -> Any:
    """Return an enum member's value or a dtype's name; other values as they are."""
    if isinstance(value, Global) and is_dtype(value.kind):
        return value.name
    # An enum member is pickled as a call with its value.
    if isinstance(value, PickledObject) and len(value.args) == 1 and isinstance(value.args[0], (int, str)):
        return value.args[0]
    return value


def _read_numpy_scalar(value: PickledObject) -> Any:
    """Return the number in ``multiarray.scalar(dtype, bytes)``, else the call itself."""
    kind, data = value.args if len(value.args) == 2 else (None, None)
    if isinstance(data, PickledObject) and data.kind == "_codecs.encode" and data.args[1:] == ("latin1",):
        data = str(data.args[0]).encode("latin1")
    form = str(kind.args[0]) if isinstance(kind, PickledObject) and kind.args else ""
    if form not in _NUMPY_FORMATS or not isinstance(data, bytes) or len(data) != int(form[1]):
        return value
    return np.frombuffer(data, f"<{form}")[0].item()


def list_parts(value: Any) -> list[Any]:
    """List the direct parts of a value; [] for plain values and globals."""
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
    """Yield all values of a tree, depth first; shared parts are expanded once."""
    todo, seen = [root], set[int]()
    while todo:
        value = todo.pop()
        yield value
        parts = [] if id(value) in seen else list_parts(value)
        if parts:
            seen.add(id(value))
            todo += reversed(parts)


def has_more_parts(value: Any, most: int) -> bool:
    """Return True if a value has more than ``most`` parts.

    Shared parts count at each use, and each 64 bits of an integer as one part. Check this before comparing, hashing or
    copying a value recursively: a chain of tuples that contain their predecessor twice takes two bytes per level and
    doubles the work. Takes at most ``most`` steps.
    """
    todo, number = [value], 1
    while todo and number <= most:
        part = todo.pop()
        parts = list_parts(part)
        number += part.bit_length() >> 6 if isinstance(part, int) else len(parts)
        todo += parts
    return number > most


def describe(value: Any) -> str:
    """Describe any inert value in a few words for a message."""
    if isinstance(value, (PickledObject, Global)):
        return _shorten(value.kind)
    if isinstance(value, TensorRef):
        return f"tensor {_shorten(value.dtype)} {_shorten(list(value.shape))}"
    if isinstance(value, int) and value.bit_length() > 4 * _SHORT:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, (str, bytes, bytearray)):
        return _shorten(repr(value[:_SHORT]), len(value) > _SHORT)
    if value is None or isinstance(value, (bool, int, float)):
        return repr(value)
    return f"a {type(value).__name__} of {len(list_parts(value))} parts"


def _shorten(value: Any, more: bool = False) -> str:
    text = str(value)
    return f"{text[:_SHORT]}…" if more or len(text) > _SHORT else text
