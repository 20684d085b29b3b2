"""Looking at a pickle without running anything of it.

Every global that the pickle names becomes an inert stand-in; tensors become :class:`TensorRef`. Only a handful of
callables is really called, all of them ours or plain containers.
"""

from __future__ import annotations

import pickle
import re
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import IO, Any

from ..atoms import count
from ..errors import CheckpointError


@dataclass(frozen=True, slots=True)
class StorageRef:
    """A storage as ``torch.save`` refers to it: key of its record, dtype, number of elements."""

    key: str
    dtype: str
    numel: int


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A tensor in a file: its storage and its view of it (offset and strides in elements)."""

    storage: StorageRef
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def dtype(self) -> str:
        """Name of the element type, as ``float32``."""
        return self.storage.dtype

    @property
    def numel(self) -> int:
        """Number of elements."""
        return count(self.shape)

    def is_contiguous(self) -> bool:
        """Whether the elements lie in the record in row-major order without gaps."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != expected:
                return self.numel == 0
            expected *= size
        return True


@dataclass(eq=False)
class Opaque:
    """Stand-in for an object of a class that is not looked into: its name, arguments and state."""

    kind: str
    args: tuple[Any, ...] = ()
    state: Any = None
    items: list[Any] = field(default_factory=list)

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def append(self, item: Any) -> None:
        """Pickle's APPEND."""
        self.items.append(item)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items.append((key, value))

    def __call__(self, *args: Any, **kwargs: Any) -> Opaque:
        """What a call of it would give: ``functools.partial(cls.__new__, …)()`` of objects with keyword arguments."""
        return Opaque(f"{self.kind}()", (self, *args, kwargs) if kwargs else (self, *args))

    def __eq__(self, other: object) -> bool:
        """By what was pickled; every file has stand-in classes of its own."""
        if not isinstance(other, Opaque):
            return NotImplemented
        mine, theirs = ((each.kind, each.args, each.state, each.items) for each in (self, other))
        return mine == theirs

    def __hash__(self) -> int:
        return hash(self.kind)

    def get(self, name: str, default: Any = None) -> Any:
        """An attribute from the pickled ``__dict__``."""
        return self.state.get(name, default) if isinstance(self.state, dict) else default

    def __reduce__(self) -> Any:
        return _rebuild_opaque, (self.kind, self.args, self.state, self.items)


def _rebuild_opaque(kind: str, args: tuple[Any, ...], state: Any, items: list[Any]) -> Opaque:
    return Opaque(kind, args, state, items)


class SafeUnpickler(pickle.Unpickler):
    """Unpickles the skeleton of a ``torch.save`` pickle; runs no code of it.

    ``storages`` collects the storages that it meets: the legacy format does not store their element size.
    """

    storages: dict[str, StorageRef] | None = None

    def find_class(self, module: str, name: str) -> Any:
        module = _RENAMED.get(module, module)
        known = _KNOWN.get((module, name))
        if known is not None:
            return known
        if module == "torch" and _DTYPE.fullmatch(name):
            return name
        if module in ("torch", "torch.storage") and name.endswith("Storage"):
            return _StorageType(name)
        return _make_stand_in(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        if isinstance(pid, tuple) and pid[0] == "module":  # legacy files: a module's class with its source text
            return pid[1]
        if not isinstance(pid, tuple) or pid[0] != "storage":
            raise pickle.UnpicklingError(f"unknown persistent id {pid!r}")
        _kind, storage, key, _location, numel, *_ = pid
        dtype = storage.dtype if isinstance(storage, _StorageType) else str(storage)
        found = StorageRef(str(key), dtype, int(numel))
        if self.storages is not None:
            self.storages[found.key] = found
        return found


@dataclass(frozen=True, slots=True)
class _StorageType:
    name: str

    @property
    def dtype(self) -> str:
        return _STORAGE_DTYPES.get(self.name, "uint8")

    def __call__(self, *_args: Any) -> Any:
        raise pickle.UnpicklingError(f"{self.name} is not built while looking at a file")


_STORAGE_DTYPES = {
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
    "UntypedStorage": "uint8",
}


def _make_stand_in(kind: str) -> type[Opaque]:
    def construct(self: Opaque, *args: Any, **kwargs: Any) -> None:
        Opaque.__init__(self, kind, (*args, kwargs) if kwargs else args)

    def create(cls: type[Opaque], *args: Any) -> Opaque:
        made = object.__new__(cls)
        Opaque.__init__(made, kind, args)
        return made

    return type("StandIn", (Opaque,), {"__init__": construct, "__new__": create})


def _rebuild_tensor(
    storage: StorageRef, offset: int, shape: Any, stride: Any, *_rest: Any, dtype: Any = None
) -> TensorRef:
    return TensorRef(storage, int(offset), tuple(map(int, shape)), tuple(map(int, stride)))


def _rebuild_tensor_v3(
    storage: StorageRef, offset: int, shape: Any, stride: Any, _grad: Any, _hooks: Any, dtype: Any, *_rest: Any
) -> TensorRef:
    size = {"uint16": 2, "uint32": 4, "uint64": 8}.get(str(dtype), 1)
    typed = StorageRef(storage.key, str(dtype), storage.numel // size)
    return TensorRef(typed, int(offset), tuple(map(int, shape)), tuple(map(int, stride)))


def _rebuild_parameter(data: Any, *_rest: Any) -> Any:
    return data


def _rebuild_from_type(make: Callable[..., Any], _kind: Any, args: Any, _state: Any = None) -> Any:
    """A tensor that carries Python attributes, as ZeRO 3's flat buffers do after a step."""
    return make(*args)


def _reconstruct(cls: Any, _base: Any = None, _state: Any = None) -> Any:
    return cls()


class _Sealed:
    """A function that a pickle may call but not change (its BUILD opcode could set attributes of a plain one)."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __setstate__(self, _state: Any) -> None:
        raise pickle.UnpicklingError("the pickle tries to change a function")


_DTYPE = re.compile(r"bool|b?float\d+\w*|complex\d+|q?u?int\d+(x\d+)?|bits\d+(x\d+)?")
"""Names of torch's dtypes as it pickles them; torch itself takes seconds to import."""

_RENAMED = {"__builtin__": "builtins", "copy_reg": "copyreg"}
"""Modules by the names of Python 2, which the pickle protocol of ``torch.save`` writes."""

_KNOWN: dict[tuple[str, str], Callable[..., Any]] = {
    ("torch._utils", "_rebuild_tensor"): _Sealed(_rebuild_tensor),
    ("torch._utils", "_rebuild_tensor_v2"): _Sealed(_rebuild_tensor),
    ("torch._utils", "_rebuild_tensor_v3"): _Sealed(_rebuild_tensor_v3),
    ("torch._utils", "_rebuild_parameter"): _Sealed(_rebuild_parameter),
    ("torch._utils", "_rebuild_parameter_with_state"): _Sealed(_rebuild_parameter),
    ("torch._tensor", "_rebuild_from_type"): _Sealed(_rebuild_from_type),
    ("torch._tensor", "_rebuild_from_type_v2"): _Sealed(_rebuild_from_type),
    ("torch", "Size"): tuple,
    ("collections", "OrderedDict"): OrderedDict,
    ("copyreg", "_reconstructor"): _Sealed(_reconstruct),
    ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset,
    ("builtins", "complex"): complex,
    ("builtins", "bytearray"): _make_stand_in("builtins.bytearray"),
    ("builtins", "slice"): slice,
    ("builtins", "object"): _make_stand_in("builtins.object"),
}


def load_skeleton(stream: IO[bytes], path: str, storages: dict[str, StorageRef] | None = None) -> Any:
    """Unpickle one object from ``stream`` without running code of it; ``storages`` is filled with what it refers to.

    Raises:
        CheckpointError: the pickle is damaged.
    """
    unpickler = SafeUnpickler(stream, encoding="utf-8")
    unpickler.storages = storages
    try:
        return unpickler.load()
    except (pickle.UnpicklingError, EOFError, ValueError, TypeError, AttributeError, KeyError, IndexError) as error:
        raise CheckpointError(f"{path}: its pickle cannot be read ({error}); the file is damaged.") from error


def simplify(value: Any) -> Any:
    """Enum stand-ins → their value, so that headers compare with plain numbers."""
    if isinstance(value, Opaque) and len(value.args) == 1 and isinstance(value.args[0], (int, str)):
        return value.args[0]
    return value
