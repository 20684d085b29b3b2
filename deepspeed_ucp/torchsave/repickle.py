"""State files taken apart and put together again without running any of their pickle.

The pickle's program is followed symbolically: what each instruction would make becomes a node (``opcodes``), which
keeps the very calls, arguments and changes that the file holds. Nothing is imported or called, so classes need not be
at hand, and objects come back from the new file as they would from the old one: shared parts stay shared, cycles stay
closed. Entries of the top-level dictionary can be left out or replaced; the storages that remain are copied.
"""

from __future__ import annotations

import io
import os
import pickletools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import IO, Any, Final

from isal import isal_zlib

from ..errors import CheckpointError, UnsupportedError
from ..io.regular import open_regular
from ..io.store import read_bytes
from .opcodes import PROTOCOL, Global, Node, write_pickle
from .records import list_records
from .torchfile import Blob, check_crc, is_zip, read_header
from .torchzip import Stream, write_torch_file

CHUNK: Final = 4 << 20
"""Bytes of a storage that are in memory at a time."""

NOTHING: Final[Mapping[str, bytes]] = MappingProxyType({})

_DATA = "data/"
_LEGACY_FRONT = 3  # pickles in front of the object: magic number, protocol, sizes of the machine's types


@dataclass(frozen=True, slots=True)
class PickledFile:
    """A ``torch.save`` file as a graph.

    Attributes:
        root: the object.
        protocol: of its pickle.
        blobs: where the storages' bytes lie.
    """

    path: str
    root: Any
    protocol: int
    blobs: dict[str, Blob]


def open_pickled(path: str) -> PickledFile:
    """Read a ``torch.save`` file's object as a graph; the storages' bytes are left alone.

    Raises:
        CheckpointError: the file is damaged.
        UnsupportedError: its pickle uses what ``torch.save`` does not write.
    """
    if is_zip(path):
        return _open_zip(path)
    blobs = read_header(path).blobs
    with open_regular(path) as stream:
        for _ in range(_LEGACY_FRONT):
            parse_pickle(stream, path)
        root, protocol = parse_pickle(stream, path)
    return PickledFile(path, root, protocol, blobs)


def _open_zip(path: str) -> PickledFile:
    records = {record.name: record for record in list_records(path).records}
    pickled = records.get("data.pkl")
    if pickled is None:
        raise CheckpointError(f"{path}: a torch.save file has a data.pkl, this zip has none; the file is damaged.")
    data = read_bytes(path, pickled.offset, pickled.nbytes)
    check_crc(path, "data.pkl", isal_zlib.crc32(data), pickled.crc)
    root, protocol = parse_pickle(io.BytesIO(data), path)
    blobs = {name[len(_DATA) :]: Blob(r.offset, r.nbytes, r.crc) for name, r in records.items() if name[:5] == _DATA}
    return PickledFile(path, root, protocol, blobs)


def parse_pickle(stream: IO[bytes], path: str) -> tuple[Any, int]:
    """The graph of the next pickle in a stream, and the pickle's protocol; the stream is left behind it.

    Raises:
        CheckpointError: it is damaged.
        UnsupportedError: it uses instructions that Python 3 does not write.
    """
    machine = _Machine(path)
    try:
        return machine.run(stream), machine.protocol
    except (ValueError, IndexError, KeyError, TypeError, EOFError, UnicodeError, OverflowError) as error:
        kind = type(error).__name__
        raise CheckpointError(f"{path}: its pickle cannot be read ({kind}: {error}); the file is damaged.") from error


_CONSTANTS: dict[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_ATOMS = frozenset(
    (
        *("INT", "LONG", "BININT", "BININT1", "BININT2", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
        *("UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
    )
)
_EMPTY = {"EMPTY_LIST": "list", "EMPTY_DICT": "dict", "EMPTY_SET": "set", "EMPTY_TUPLE": "tuple"}
_FROM_MARK = {"TUPLE": "tuple", "FROZENSET": "frozenset"}
_FILLED = {"LIST": ("list", "appends"), "DICT": ("dict", "setitems")}
_FROM_TOP = {
    "TUPLE1": ("tuple", 1),
    "TUPLE2": ("tuple", 2),
    "TUPLE3": ("tuple", 3),
    "REDUCE": ("reduce", 2),
    "NEWOBJ": ("newobj", 2),
    "NEWOBJ_EX": ("newobj_ex", 3),
}
_EDITS = {"APPEND": ("append", 1), "SETITEM": ("setitem", 2), "BUILD": ("build", 1)}
_EDITS_FROM_MARK = {"APPENDS": "appends", "SETITEMS": "setitems", "ADDITEMS": "additems"}
_IGNORED = frozenset(("FRAME", "STOP"))


class _Machine:
    """The pickle machine's stack, marks and memo, over nodes."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.protocol = 0
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []
        self.memo: dict[int, Any] = {}

    def run(self, stream: IO[bytes]) -> Any:
        for opcode, operand, _position in pickletools.genops(stream):
            name = opcode.name
            if name in _ATOMS:
                self.stack.append(operand)
            elif not (self._make(name, operand) or self._edit(name) or self._move(name, operand)):
                raise UnsupportedError(
                    f"{self.path}: its pickle uses the instruction {name}, which Python 3's pickle and torch.save do "
                    "not write; save the checkpoint anew with a current release."
                )
        if len(self.stack) != 1 or self.below:
            raise ValueError(f"{len(self.stack)} objects left on its stack")
        return self.stack.pop()

    def _take(self, number: int) -> list[Any]:
        if number > len(self.stack):
            raise IndexError("its stack is empty")
        taken = self.stack[len(self.stack) - number :]
        del self.stack[len(self.stack) - number :]
        return taken

    def _take_marked(self) -> list[Any]:
        taken, self.stack = self.stack, self.below.pop()
        return taken

    def _make(self, name: str, operand: Any) -> bool:
        """Instructions that push something new."""
        if name in _CONSTANTS:
            self.stack.append(_CONSTANTS[name])
        elif name in _EMPTY:
            self.stack.append(Node(_EMPTY[name]))
        elif name in _FROM_TOP:
            kind, number = _FROM_TOP[name]
            self.stack.append(Node(kind, self._take(number)))
        elif name in _FROM_MARK:
            made = Node(_FROM_MARK[name], self._take_marked())
            self.stack.append(made)
        elif name in _FILLED:
            kind, edit = _FILLED[name]
            made = Node(kind, [], [(edit, self._take_marked())])
            self.stack.append(made)
        elif name == "GLOBAL":
            self.stack.append(Global(*operand.split(" ", 1)))
        elif name == "STACK_GLOBAL":
            self.stack.append(Global(*self._take(2)))
        elif name == "BYTEARRAY8":
            self.stack.append(Node("bytearray", [operand]))
        elif name == "BINPERSID":
            self.stack.append(self._refer(self.stack.pop()))
        else:
            return False
        return True

    def _edit(self, name: str) -> bool:
        """Instructions that change what lies on top."""
        if name in _EDITS:
            kind, number = _EDITS[name]
            operands = self._take(number)
        elif name in _EDITS_FROM_MARK:
            kind, operands = _EDITS_FROM_MARK[name], self._take_marked()
        else:
            return False
        changed = self.stack[-1]
        if not isinstance(changed, Node):
            raise ValueError(f"it changes {changed!r:.80}, which is no object of it")
        if kind == "setitems" and len(operands) % 2:
            raise ValueError("a key without a value")
        changed.edits.append((kind, operands))
        return True

    def _move(self, name: str, operand: Any) -> bool:
        """Instructions that move things between stack and memo."""
        if name.endswith("GET"):
            self.stack.append(self.memo[int(operand)])
        elif name.endswith("PUT"):
            self.memo[int(operand)] = self.stack[-1]
        elif name == "MEMOIZE":
            self.memo[len(self.memo)] = self.stack[-1]
        elif name == "MARK":
            self.below.append(self.stack)
            self.stack = []
        elif name == "POP" and self.stack:
            self.stack.pop()
        elif name in ("POP", "POP_MARK"):
            self._take_marked()
        elif name == "DUP":
            self.stack.append(self.stack[-1])
        elif name == "PROTO":
            self.protocol = operand
        else:
            return name in _IGNORED
        return True

    def _refer(self, pid: Any) -> Any:
        """A persistent id, in the form that the zip format has."""
        parts = pid.args if isinstance(pid, Node) and pid.op == "tuple" else [None]
        if parts[0] == "module" and len(parts) > 1:  # legacy: a class, with its source text
            return parts[1]
        if parts[0] != "storage" or len(parts) < 5 or any(part is not None for part in parts[5:]):
            raise UnsupportedError(f"{self.path}: its pickle refers to something else than a storage; it is too old.")
        return Node("persid", [Node("tuple", parts[:5])])


def read_entries(node: Any) -> dict[Any, Any]:
    """What a dictionary's node was filled with, where keys are plain; {} for anything else."""
    found: dict[Any, Any] = {}
    for kind, operands in node.edits if isinstance(node, Node) else ():
        if kind in ("setitem", "setitems"):
            pairs = zip(operands[::2], operands[1::2], strict=True)
            found.update((key, value) for key, value in pairs if not isinstance(key, Node))
    return found


def read_items(node: Any) -> list[Any]:
    """What a list's node was filled with; [] for anything else."""
    edits = node.edits if isinstance(node, Node) and node.op == "list" else ()
    return [item for kind, operands in edits if kind in ("append", "appends") for item in operands]


def map_entries(node: Node, change: Callable[[Any, Any], tuple[Any, ...]]) -> Node:
    """A copy of a dictionary's node with other entries.

    Args:
        change: key, value → (key, value) to keep, or () to leave the entry out.
    """
    edits = []
    for kind, operands in node.edits:
        if kind in ("setitem", "setitems"):
            pairs = zip(operands[::2], operands[1::2], strict=True)
            kind, operands = "setitems", [part for pair in pairs for part in change(*pair)]
        edits.append((kind, operands))
    return Node(node.op, node.args, edits)


def list_storages(root: Any) -> dict[str, int]:
    """Elements of the storages that a graph refers to, by key, in the order in which it does."""
    found: dict[str, int] = {}
    for node in walk_nodes(root):
        if node.op == "persid":
            pid = node.args[0]
            _kind, _type, key, _location, numel = pid.args if isinstance(pid, Node) else pid
            found[str(key)] = numel
    return found


def walk_nodes(root: Any) -> Iterator[Node]:
    """Every node of a graph once, depth first."""
    todo, seen = [root], set[int]()
    while todo:
        value = todo.pop()
        if isinstance(value, Node):
            if id(value) in seen:
                continue
            seen.add(id(value))
            yield value
            parts = [*value.args, *(operand for _kind, operands in value.edits for operand in operands)]
        elif isinstance(value, (tuple, list)):
            parts = list(value)
        elif isinstance(value, dict):
            parts = [part for pair in value.items() for part in pair]
        else:
            continue
        todo += reversed(parts)


def count_bytes(file: PickledFile, root: Any) -> int:
    """Bytes of the storages that a part of a file's graph refers to."""
    return sum(file.blobs[key].nbytes for key in list_storages(root) if key in file.blobs)


def save_pickled(file: PickledFile, root: Any, path: str, added: Mapping[str, bytes] = NOTHING) -> tuple[int, int]:
    """Write a graph made of a file's parts as a ``torch.save`` file, with the storages that it refers to.

    Args:
        added: storages that are not the file's, by key.

    Returns:
        Size of the new file, and CRC32 of its directory.

    Raises:
        CheckpointError: a storage is missing, or its bytes are not what was saved.
        OSError: the new file cannot be written.
    """
    storages: dict[str, bytes | Stream] = {
        key: added[key] if key in added else _open_storage(file, key, numel)
        for key, numel in list_storages(root).items()
    }
    crc = write_torch_file(path, write_pickle(root, max(file.protocol, PROTOCOL)), storages)
    return os.stat(path).st_size, crc


def _open_storage(file: PickledFile, key: str, numel: int) -> Stream:
    blob = file.blobs.get(key) if numel else Blob(0, 0, 0)
    if blob is None:
        raise CheckpointError(f"{file.path}: storage {key} of a tensor is missing; the file is damaged.")
    return Stream(blob.nbytes, _read_storage(file.path, key, blob))


def _read_storage(path: str, key: str, blob: Blob) -> Iterator[bytes]:
    crc = 0
    for low in range(0, blob.nbytes, CHUNK):
        data = read_bytes(path, blob.offset + low, min(CHUNK, blob.nbytes - low))
        crc = isal_zlib.crc32(data, crc)
        yield data
    check_crc(path, f"data/{key}", crc, blob.crc)
