"""Write inert data (:mod:`~.objects`) as a pickle, with its sharing and cycles."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from ..errors import UcpError
from .objects import Global, OrderedItems, PickledObject, StorageRef, TensorRef, TensorSize, describe

PROTOCOL: Final = 2
"""Protocol of ``torch.save``, and the only one that its restricted unpickler accepts without a warning."""

_NUMBERS = (type(None), bool, int, float)
_TUPLES = (pickle.EMPTY_TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3)
_END = object()

_Edits = Sequence[tuple[bytes, Sequence[Any]]]


def write_pickle(root: Any, protocol: int = PROTOCOL) -> bytes:
    """Pickle inert data.

    Args:
        root: instances of the classes of :mod:`~.objects`, None, bool, int, float, str, bytes, bytearray, and tuples,
            lists, dicts, sets and frozensets of these; cycles are allowed.
        protocol: declared protocol; sets, frozensets and bytearrays are written as protocols 4 and 5 write them.

    Raises:
        UcpError: a value has another type.
    """
    writer = _Writer(protocol)
    stack = [writer.write(root)]
    while stack:  # depth first like Python's own pickler, but without recursion
        part = next(stack[-1], _END)
        if part is _END:
            stack.pop()
        else:
            stack.append(writer.write(part))
    return bytes(writer.out + pickle.STOP)


class _Writer:
    """Output buffer and memo of one pickle."""

    def __init__(self, protocol: int) -> None:
        self.out = bytearray(pickle.PROTO + bytes([protocol]))
        self.memo: dict[Any, int] = {}  # strings and globals by value, other objects by identity
        self.kept: list[Any] = []  # keeps objects alive whose identity is in the memo

    def write(self, value: Any) -> Iterator[Any]:
        """Write a value; yields each part at the position where the caller must write it."""
        value = value.made if isinstance(value, TensorRef) else value
        if isinstance(value, StorageRef):  # not in the memo: each reference writes the persistent id
            yield "storage", value.kind, value.key, value.location, value.numel
            self.out += pickle.BINPERSID
        elif type(value) in _NUMBERS:
            self.out += pickle.dumps(value, 2)[2:-1]  # without PROTO and STOP
        elif not self._write_reference(value):
            yield from self._write_new(value)

    def _write_new(self, value: Any) -> Iterator[Any]:
        if type(value) not in _MAKERS:
            raise UcpError(f"a value of type {type(value).__name__} ({describe(value)}) cannot be written to a pickle")
        op, parts, edits = _MAKERS[type(value)](value)
        marked = op in (pickle.TUPLE, pickle.FROZENSET)
        self.out += pickle.MARK * marked
        yield from parts
        if parts and self._write_reference(value, pickle.POP_MARK if marked else pickle.POP * len(parts)):
            return  # a cycle: one of its parts refers to the value and has written it
        self.out += op
        self._memoize(value)
        for op, operands in edits:
            if operands:
                self.out += pickle.MARK * (op != pickle.BUILD)
                yield from operands
                self.out += op

    def _write_reference(self, value: Any, before: bytes = b"") -> bool:
        """Write ``before`` and a memo reference if the value is in the memo; True if so."""
        index = self.memo.get(_make_memo_key(value))
        if index is not None:
            self.out += before + _encode_index(pickle.BINGET, pickle.LONG_BINGET, index)
        return index is not None

    def _memoize(self, value: Any) -> None:
        if value == ():
            return
        index = len(self.memo)
        self.memo[_make_memo_key(value)] = index
        self.kept.append(value)
        self.out += _encode_index(pickle.BINPUT, pickle.LONG_BINPUT, index)


def _make_memo_key(value: Any) -> Any:
    return value if isinstance(value, (str, Global)) else id(value)


def _encode_index(short: bytes, long: bytes, index: int) -> bytes:
    return short + bytes([index]) if index < 256 else long + index.to_bytes(4, "little")


_Made = tuple[bytes, Sequence[Any], _Edits]  # how a value is made: the instruction, its operands, and later edits


def _make_set_items(value: dict[Any, Any]) -> tuple[bytes, Sequence[Any]]:
    return pickle.SETITEMS, [part for pair in value.items() for part in pair]


def _make_ordered(value: OrderedItems) -> _Made:
    state = () if value.state is None else (value.state,)
    return pickle.REDUCE, (Global("collections", "OrderedDict"), ()), [_make_set_items(value), (pickle.BUILD, state)]


def _make_text(value: str | bytes) -> _Made:
    return pickle.dumps(value, 3)[2:-3], (), ()  # without PROTO, BINPUT and STOP


_MAKERS: dict[type, Callable[[Any], _Made]] = {
    PickledObject: lambda value: (value.op, value.parts, value.edits),
    Global: lambda value: (pickle.GLOBAL + f"{value.module}\n{value.name}\n".encode(), (), ()),
    TensorSize: lambda value: (pickle.REDUCE, (Global("torch", "Size"), (tuple(value),)), ()),
    OrderedItems: _make_ordered,
    str: _make_text,
    bytes: _make_text,
    bytearray: lambda value: (pickle.BYTEARRAY8 + len(value).to_bytes(8, "little") + value, (), ()),
    tuple: lambda value: (_TUPLES[len(value)] if len(value) < len(_TUPLES) else pickle.TUPLE, value, ()),
    list: lambda value: (pickle.EMPTY_LIST, (), [(pickle.APPENDS, value)]),
    dict: lambda value: (pickle.EMPTY_DICT, (), [_make_set_items(value)]),
    set: lambda value: (pickle.EMPTY_SET, (), [(pickle.ADDITEMS, tuple(value))]),
    frozenset: lambda value: (pickle.FROZENSET, tuple(value), ()),
}
