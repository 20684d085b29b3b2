"""Writes inert data (:mod:`~.objects`) as a pickle: objects come back as the pickle would have made them that was read.

Shared parts stay shared and cycles stay closed, by identity.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable
from typing import Any, Final

from ..errors import UcpError
from .objects import Global, OrderedItems, PickledObject, StorageRef, TensorRef, TensorSize, describe

PROTOCOL: Final = 2
"""What ``torch.save`` writes, and the only one that its restricted unpickler takes without a warning."""

_OPCODES = {
    "reduce": pickle.REDUCE,
    "newobj": pickle.NEWOBJ,
    "newobj_ex": pickle.NEWOBJ_EX,
    "append": pickle.APPEND,
    "appends": pickle.APPENDS,
    "setitem": pickle.SETITEM,
    "setitems": pickle.SETITEMS,
    "additems": pickle.ADDITEMS,
    "build": pickle.BUILD,
}
_MARKED = ("appends", "setitems", "additems")
_SHORT_TUPLES = (pickle.EMPTY_TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3)


def write_pickle(root: Any, protocol: int = PROTOCOL) -> bytes:
    """Pickle inert data.

    Args:
        root: the classes of :mod:`~.objects`, None, bool, int, float, str, bytes, bytearray, and tuples, lists, dicts,
            sets and frozensets of these, in cycles or not.
        protocol: to declare; sets, frozensets and bytearrays are written as protocols 4 and 5 write them.

    Raises:
        UcpError: a value of another type.
    """
    return _Writer(protocol).write(root)


class _Writer:
    """Depth first as Python's own pickler, with a stack of its own: deep graphs need no recursion."""

    def __init__(self, protocol: int) -> None:
        self.out = bytearray(pickle.PROTO + bytes([protocol]))
        self.memo: dict[Any, int] = {}  # strings and globals by value, everything else by identity
        self.kept: list[Any] = []  # what is known by its identity must live on
        self.todo: list[tuple[Callable[[Any], None], Any]] = []

    def write(self, root: Any) -> bytes:
        self.todo = [(self._save, root)]
        while self.todo:
            action, operand = self.todo.pop()
            action(operand)
        return bytes(self.out + pickle.STOP)

    def _push(self, *actions: tuple[Callable[[Any], None], Any]) -> None:
        self.todo += reversed(actions)

    def _emit(self, data: bytes) -> None:
        self.out += data

    def _save(self, value: Any) -> None:
        value = value.made if isinstance(value, TensorRef) else value
        if self._get(value):
            return
        save = _SAVERS.get(type(value))
        if save is None:
            self._emit(_encode_atom(value))
        else:
            save(self, value)

    def _save_atom(self, value: Any) -> None:
        self._emit(_encode_atom(value))
        self._put(value)

    def _save_list(self, value: list[Any]) -> None:
        self._start(value, pickle.EMPTY_LIST, [("appends", value)])

    def _save_dict(self, value: dict[Any, Any]) -> None:
        self._start(value, pickle.EMPTY_DICT, [("setitems", _flatten(value))])

    def _save_set(self, value: set[Any]) -> None:
        self._start(value, pickle.EMPTY_SET, [("additems", list(value))])

    def _save_ordered(self, value: OrderedItems) -> None:
        self._push((self._save, Global("collections", "OrderedDict")), (self._fill_ordered, value))

    def _fill_ordered(self, value: OrderedItems) -> None:
        state = [] if value.state is None else [("build", [value.state])]
        self._start(value, pickle.EMPTY_TUPLE + pickle.REDUCE, [("setitems", _flatten(value)), *state])

    def _start(self, value: Any, opcodes: bytes, edits: list[tuple[str, list[Any]]]) -> None:
        """Make an object that is known before its contents."""
        self._emit(opcodes)
        self._put(value)
        self._save_edits(edits)

    def _save_bytearray(self, value: bytearray) -> None:
        self._emit(pickle.BYTEARRAY8 + struct.pack("<Q", len(value)) + value)
        self._put(value)

    def _save_tuple(self, value: tuple[Any, ...]) -> None:
        if len(value) <= 3:
            self._save_parts(value, value, _SHORT_TUPLES[len(value)])
        else:
            self._save_parts(value, value, pickle.TUPLE, marked=True)

    def _save_frozenset(self, value: frozenset[Any]) -> None:
        self._save_parts(value, value, pickle.FROZENSET, marked=True)

    def _save_size(self, value: TensorSize) -> None:
        self._save_parts(value, (Global("torch", "Size"), (tuple(value),)), pickle.REDUCE)

    def _save_storage(self, value: StorageRef) -> None:
        """A storage is not remembered: its persistent id is written wherever it is referred to."""
        pid = ("storage", value.kind, value.key, value.location, value.numel)
        self._push((self._save, pid), (self._emit, pickle.BINPERSID))

    def _save_object(self, value: PickledObject) -> None:
        self._save_parts(value, value.parts, _OPCODES[value.op])

    def _save_parts(self, value: Any, parts: Any, opcode: bytes, *, marked: bool = False) -> None:
        """Make an object out of its parts, unless one of these leads to it and has made it meanwhile."""
        drop = pickle.POP_MARK if marked else pickle.POP * len(parts)

        def finish(value: Any) -> None:
            if id(value) in self.memo:
                self._emit(drop)
                self._get(value)
            else:
                edits = value.edits if isinstance(value, PickledObject) else []
                self._start(value, opcode, edits)

        mark = pickle.MARK if marked else b""
        self._push((self._emit, mark), *((self._save, part) for part in parts), (finish, value))

    def _save_edits(self, edits: list[tuple[str, list[Any]]]) -> None:
        for name, operands in reversed(edits):
            if operands:
                mark = pickle.MARK if name in _MARKED else b""
                self._push((self._emit, mark), *((self._save, each) for each in operands), (self._emit, _OPCODES[name]))

    def _get(self, value: Any) -> bool:
        index = self.memo.get(_identify(value))
        if index is not None:
            self._emit(_number(pickle.BINGET, pickle.LONG_BINGET, index))
        return index is not None

    def _put(self, value: Any) -> None:
        if value == ():
            return
        index = len(self.memo)
        self.memo[_identify(value)] = index
        self.kept.append(value)
        self._emit(_number(pickle.BINPUT, pickle.LONG_BINPUT, index))


_SAVERS: dict[type, Callable[[_Writer, Any], None]] = {
    str: _Writer._save_atom,
    Global: _Writer._save_atom,
    list: _Writer._save_list,
    dict: _Writer._save_dict,
    set: _Writer._save_set,
    OrderedItems: _Writer._save_ordered,
    bytearray: _Writer._save_bytearray,
    tuple: _Writer._save_tuple,
    frozenset: _Writer._save_frozenset,
    TensorSize: _Writer._save_size,
    StorageRef: _Writer._save_storage,
    PickledObject: _Writer._save_object,
}


def _identify(value: Any) -> Any:
    return value if isinstance(value, (str, Global)) else id(value)


def _flatten(value: dict[Any, Any]) -> list[Any]:
    return [part for pair in value.items() for part in pair]


def _number(short: bytes, long: bytes, index: int) -> bytes:
    return short + bytes([index]) if index < 256 else long + struct.pack("<I", index)


def _encode_atom(value: Any) -> bytes:
    """Opcodes that push a value without parts.

    Raises:
        UcpError: it has no such form.
    """
    if value is None or isinstance(value, bool):
        return {None: pickle.NONE, True: pickle.NEWTRUE, False: pickle.NEWFALSE}[value]
    if isinstance(value, int):
        return _encode_int(value)
    if isinstance(value, float):
        return pickle.BINFLOAT + struct.pack(">d", value)
    if isinstance(value, str):
        text = value.encode("utf-8", "surrogatepass")
        return pickle.BINUNICODE + struct.pack("<I", len(text)) + text
    if isinstance(value, bytes):
        return _number(pickle.SHORT_BINBYTES, pickle.BINBYTES, len(value)) + value
    if isinstance(value, Global):
        return pickle.GLOBAL + f"{value.module}\n{value.name}\n".encode()
    raise UcpError(f"a value of type {type(value).__name__} ({describe(value)}) has no place in a pickle")


def _encode_int(value: int) -> bytes:
    if 0 <= value < 256:
        return pickle.BININT1 + bytes([value])
    if 0 <= value < 65536:
        return pickle.BININT2 + struct.pack("<H", value)
    if -(2**31) <= value < 2**31:
        return pickle.BININT + struct.pack("<i", value)
    size = value.bit_length() // 8 + 1
    data = value.to_bytes(size, "little", signed=True)
    return pickle.LONG1 + bytes([size]) + data if size < 256 else pickle.LONG4 + struct.pack("<i", size) + data
