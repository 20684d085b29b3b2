"""Writing pickles as data: objects are nodes that say how a pickle builds them; nothing is imported, nothing runs.

A pickle is a program for a small stack machine. A :class:`Node` holds what makes one object (its creation, then the
changes that follow it), so a graph of nodes can be edited and written without any of its classes being at hand.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from ..errors import UcpError

PROTOCOL: Final = 2
"""What ``torch.save`` writes, and the only one that its restricted unpickler takes without a warning."""


@dataclass(frozen=True, slots=True)
class Global:
    """A class or function, by name."""

    module: str
    name: str


@dataclass(eq=False, slots=True)
class Node:
    """One object of a pickle.

    Attributes:
        op: how it is made: ``list``, ``dict``, ``set`` (empty), ``tuple``, ``frozenset``, ``bytearray``, ``reduce``
            (args: function, arguments), ``newobj`` (class, arguments), ``newobj_ex`` (class, arguments, keywords) or
            ``persid`` (what the persistent id is).
        args: what it is made of.
        edits: what changes it afterwards, in order: (``append``, ``appends``, ``setitem``, ``setitems``, ``additems``
            or ``build``; operands).
    """

    op: str
    args: list[Any] = field(default_factory=list)
    edits: list[tuple[str, list[Any]]] = field(default_factory=list)


def call(module: str, name: str, *args: Any) -> Node:
    """The object that a function returns."""
    return Node("reduce", [Global(module, name), tuple(args)])


def make_instance(module: str, name: str, fields: Mapping[str, Any]) -> Node:
    """An instance of a class, as a dataclass is pickled: made empty, then given its ``__dict__``."""
    return Node("newobj", [Global(module, name), ()], [("build", [dict(fields)])])


_FINISH: dict[str, bytes] = {
    "frozenset": b"\x91",
    "reduce": b"R",
    "newobj": b"\x81",
    "newobj_ex": b"\x92",
    "persid": b"Q",
}
_EMPTY: dict[str, bytes] = {"list": b"]", "dict": b"}", "set": b"\x8f"}
_EDITS: dict[str, bytes] = {
    "append": b"a",
    "appends": b"e",
    "setitem": b"s",
    "setitems": b"u",
    "additems": b"\x90",
    "build": b"b",
}
_MARKED = ("appends", "setitems", "additems", "frozenset")
_SHORT_TUPLES = (b")", b"\x85", b"\x86", b"\x87")
_POP, _POP_MARK, _MARK = b"0", b"1", b"("


def write_pickle(root: Any, protocol: int = PROTOCOL) -> bytes:
    """Pickle a graph.

    Args:
        root: nodes, globals, None, bool, int, float, str, bytes, and plain tuples, lists and dicts of these. Nodes
            may be shared and may refer to each other in cycles; plain containers are written out wherever they are met.
        protocol: pickle protocol to declare.

    Raises:
        UcpError: a value of another type.
    """
    return _Writer(protocol).write(root)


class _Writer:
    """Depth first as Python's own pickler, with a stack of its own: deep graphs need no recursion."""

    def __init__(self, protocol: int) -> None:
        self.out = bytearray(b"\x80" + bytes([protocol]))
        self.memo: dict[Any, int] = {}
        self.todo: list[Any] = []

    def write(self, root: Any) -> bytes:
        self.todo = [(self._save, root)]
        while self.todo:
            action, operand = self.todo.pop()
            action(operand)
        self.out += b"."
        return bytes(self.out)

    def _push(self, *actions: tuple[Callable[[Any], None], Any]) -> None:
        self.todo += reversed(actions)

    def _emit(self, data: bytes) -> None:
        self.out += data

    def _save(self, value: Any) -> None:
        if isinstance(value, Node):
            self._save_node(value)
        elif isinstance(value, (tuple, list, dict)):
            self._save_node(_wrap(value))
        elif isinstance(value, (str, Global)):
            if not self._get(value):
                self.out += encode_atom(value)
                self._put(value)
        else:
            self.out += encode_atom(value)

    def _save_node(self, node: Node) -> None:
        if self._get(node):
            return
        if node.op in _EMPTY or node.op == "bytearray":
            self.out += _encode_creation(node)
            self._put(node)
            self._save_edits(node)
            return
        parts = [(self._save, part) for part in node.args]
        if _is_marked(node):
            self._push((self._emit, _MARK), *parts, (self._finish, node))
        else:
            self._push(*parts, (self._finish, node))

    def _finish(self, node: Node) -> None:
        """The parts are on the stack: make the object, unless one of the parts led to it and has made it already."""
        if node in self.memo:
            self.out += _POP_MARK if _is_marked(node) else _POP * len(node.args)
            self._get(node)
            return
        self.out += _encode_creation(node)
        self._put(node)
        self._save_edits(node)

    def _save_edits(self, node: Node) -> None:
        actions: list[tuple[Callable[[Any], None], Any]] = []
        for kind, operands in node.edits:
            if kind in _MARKED:
                actions.append((self._emit, _MARK))
            actions += [(self._save, operand) for operand in operands]
            actions.append((self._emit, _EDITS[kind]))
        self._push(*actions)

    def _get(self, value: Any) -> bool:
        index = self.memo.get(value)
        if index is not None:
            self.out += b"h" + bytes([index]) if index < 256 else b"j" + struct.pack("<I", index)
        return index is not None

    def _put(self, value: Any) -> None:
        index = len(self.memo)
        self.memo[value] = index
        self.out += b"q" + bytes([index]) if index < 256 else b"r" + struct.pack("<I", index)


def _is_marked(node: Node) -> bool:
    return node.op == "frozenset" or (node.op == "tuple" and len(node.args) > 3)


def _encode_creation(node: Node) -> bytes:
    if node.op == "tuple":
        return _SHORT_TUPLES[len(node.args)] if len(node.args) <= 3 else b"t"
    if node.op == "bytearray":
        return b"\x96" + struct.pack("<Q", len(node.args[0])) + bytes(node.args[0])
    return _EMPTY.get(node.op) or _FINISH[node.op]


def _wrap(value: Any) -> Node:
    if isinstance(value, tuple):
        return Node("tuple", list(value))
    if isinstance(value, list):
        return Node("list", [], [("appends", value)] if value else [])
    pairs = [part for pair in value.items() for part in pair]
    return Node("dict", [], [("setitems", pairs)] if pairs else [])


def encode_atom(value: Any) -> bytes:
    """Opcodes that push a value without parts.

    Raises:
        UcpError: it has no such form.
    """
    if value is None or isinstance(value, bool):
        return {None: b"N", True: b"\x88", False: b"\x89"}[value]
    if isinstance(value, int):
        return _encode_int(value)
    if isinstance(value, float):
        return b"G" + struct.pack(">d", value)
    if isinstance(value, str):
        text = value.encode("utf-8", "surrogatepass")
        return b"X" + struct.pack("<I", len(text)) + text
    if isinstance(value, bytes):
        return b"C" + bytes([len(value)]) + value if len(value) < 256 else b"B" + struct.pack("<I", len(value)) + value
    if isinstance(value, Global):
        return b"c" + f"{value.module}\n{value.name}\n".encode()
    raise UcpError(
        f"a value of type {type(value).__name__} ({value!r:.80}) has no place in a pickle that is written here"
    )


def _encode_int(value: int) -> bytes:
    if 0 <= value < 256:
        return b"K" + bytes([value])
    if 0 <= value < 65536:
        return b"M" + struct.pack("<H", value)
    if -(2**31) <= value < 2**31:
        return b"J" + struct.pack("<i", value)
    size = value.bit_length() // 8 + 1
    data = value.to_bytes(size, "little", signed=True)
    return b"\x8a" + bytes([size]) + data if size < 256 else b"\x8b" + struct.pack("<i", size) + data
