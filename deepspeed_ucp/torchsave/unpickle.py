"""The pickle machine: reads a pickle as inert data (:mod:`~.objects`); nothing of it is imported, called or built.

Pickles are hostile input, and time and memory stay proportional to their length: every instruction makes at most one
object out of what lies in the stream or on the stack; lengths are held against the bytes that are there, the memo is a
table of what was put into it (whatever numbers it is given), and only short keys are hashed.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from ..errors import CheckpointError, UnsupportedError
from .dtypes import STORAGE_DTYPES, is_dtype
from .objects import Global, OrderedItems, PickledObject, StorageRef, TensorRef, TensorSize, describe, has_more_parts

MOST_DIMENSIONS: Final = 64
"""Of a tensor, as torch has it. A shape in the memo can be given to any number of tensors, which copy it."""

MOST_KEY_PARTS: Final = 256
"""Of a dictionary's key or a set's item, written out in full. Python hashes nested tuples anew each time, in C and by
recursion: sharing makes that exponential, depth makes it overflow the stack."""

_FAULTS = (ValueError, IndexError, KeyError, TypeError, OverflowError, MemoryError, struct.error)
_LARGE = 1 << 16
_TENSORS = ("", "Double", "Float", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool")
_ALLOCATING = frozenset(
    (
        *("builtins.bytearray", "builtins.bytes", "numpy.void", "numpy.ndarray"),
        *("numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct"),
        *(f"torch.{name}{kind}" for name in _TENSORS for kind in ("Tensor", "Storage")),
        "torch.storage.UntypedStorage",
    )
)
"""What makes as many bytes as a number says. No writer pickles them so; what they hold stands in the file."""
_MOST_ARGUMENTS = 16  # of a call whose result is looked into
_MAKERS = (Global, PickledObject)
_HASHED_AT_ONCE = frozenset((str, int, float, bool, bytes, type(None), Global, PickledObject, TensorRef))
_NAMES = {getattr(pickle, name): name for name in pickle.__all__ if name.isupper() and len(name) > 1}


@dataclass(frozen=True, slots=True)
class Pickled:
    """One pickle of a file.

    Attributes:
        root: its object.
        protocol: that it declares; 0 where it declares none.
        end: position behind it.
        tensors: of it, in the order in which they are made.
        storages: that it refers to, by key.
        globals: classes and functions that it names.
    """

    root: Any
    protocol: int
    end: int
    tensors: list[TensorRef]
    storages: dict[str, StorageRef]
    globals: list[Global]


def read_pickle(data: bytes, path: str, start: int = 0) -> Pickled:
    """Read the pickle at byte ``start`` of ``data``.

    Args:
        path: file for messages.

    Raises:
        CheckpointError: it is damaged, does not end, or is made to harm.
        UnsupportedError: it uses instructions that Python 3 and ``torch.save`` do not write.
    """
    machine = _Machine(data, path)
    try:
        end = machine.run(start)
        root = machine.finish()
    except EOFError:
        raise CheckpointError(f"{path}: its pickle cannot be read (it does not end); the file is truncated.") from None
    except _FAULTS as error:
        kind, text = type(error).__name__, str(error)[:200]
        raise CheckpointError(f"{path}: its pickle cannot be read ({kind}: {text}); the file is damaged.") from None
    return Pickled(root, machine.protocol, end, machine.tensors, machine.storages, machine.globals)


class _Machine:
    """Stack, marks and memo of the machine that pickles are programs for."""

    __slots__ = (
        "allocating",
        "data",
        "end",
        "globals",
        "marks",
        "memo",
        "path",
        "protocol",
        "stack",
        "storages",
        "tensors",
        "views",
    )

    def __init__(self, data: bytes, path: str) -> None:
        self.data, self.path = data, path
        self.protocol = 0
        self.end: int | None = None  # behind STOP
        self.stack: list[Any] = []
        self.marks: list[int] = []  # heights of the stack
        self.memo: dict[int, Any] = {}
        self.tensors: list[TensorRef] = []
        self.storages: dict[str, StorageRef] = {}
        self.globals: list[Global] = []
        self.allocating: set[int] = set()  # globals of :data:`_ALLOCATING`, by identity
        self.views: dict[int, Callable[..., Any]] = {}  # of globals whose results are looked into, by identity

    def run(self, at: int) -> int:
        """Run the instructions from byte ``at``; each takes the position behind it and returns the next one's.

        Small numbers and the memo's are two thirds of all instructions, and cheaper here than a call each.
        """
        data, size, opcodes, stack, memo, unpack = self.data, len(self.data), _OPCODES, self.stack, self.memo, _UNPACK
        while 0 <= at < size:
            code = data[at]
            if code == _BINPUT:
                memo[data[at + 1]] = stack[-1]
                at += 2
            elif code == _BININT1:
                stack.append(data[at + 1])
                at += 2
            elif code == _BINGET:
                stack.append(memo[data[at + 1]])
                at += 2
            elif code == _LONG_BINPUT:
                memo[unpack(data, at + 1)[0]] = stack[-1]
                at += 5
            elif code == _LONG_BINGET:
                stack.append(memo[unpack(data, at + 1)[0]])
                at += 5
            else:
                at = opcodes[code](self, at + 1)
        if self.end is None:
            raise EOFError
        return self.end

    def finish(self) -> Any:
        """The object, when all is done."""
        if len(self.stack) != 1 or self.marks:
            raise ValueError(f"{len(self.stack)} objects left on its stack")
        return self.stack.pop()

    def take(self, number: int) -> list[Any]:
        """The topmost objects."""
        low = len(self.stack) - number
        if low < 0:
            raise IndexError("its stack is empty")
        taken = self.stack[low:]
        del self.stack[low:]
        return taken

    def take_marked(self) -> list[Any]:
        """The objects above the last mark, which goes as well."""
        low = self.marks.pop()
        taken = self.stack[low:]
        del self.stack[low:]
        return taken

    def name(self, module: str, name: str) -> None:
        """Push a global."""
        named = Global(module, name)
        self.globals.append(named)
        self.stack.append(named)
        if view := _VIEWS.get(named.kind):
            self.views[id(named)] = view
        elif named.kind in _ALLOCATING:
            self.allocating.add(id(named))

    def make(self, op: str, number: int) -> None:
        """Push the object that a call makes; tensors and a few containers by what they are."""
        parts = self.take(number)
        maker, args = parts[0], parts[1]
        if not isinstance(maker, _MAKERS) or not isinstance(args, tuple):
            raise ValueError(f"it calls {describe(maker)} with {describe(args)}")
        if id(maker) in self.allocating and any(map(_is_large, (*args[:_MOST_ARGUMENTS], parts[1:]))):
            raise ValueError(f"it calls {describe(maker)} for a memory of many bytes")
        made: Any = PickledObject(op, parts)
        view = self.views.get(id(maker))
        if view and op == "reduce" and len(args) <= _MOST_ARGUMENTS:
            made = view(made, *args)
            if isinstance(made, TensorRef):
                self.tensors.append(made)
        self.stack.append(made)

    def edit(self, op: str, operands: list[Any]) -> None:
        """Change what lies on top."""
        if not self.stack:
            raise IndexError("its stack is empty")
        changed = self.stack[-1]
        edit = _PLAIN_EDITS.get((type(changed), op))
        if edit:
            edit(changed, operands)
        elif op == "setitems" and len(operands) % 2:
            raise ValueError("a key without a value")
        else:
            _find_made(changed).edits.append((op, operands))

    def refer(self, pid: Any) -> None:
        """Push what a persistent id means: a storage, or in the legacy format a class with its source text."""
        if isinstance(pid, tuple) and len(pid) > 1 and pid[0] == "module" and isinstance(pid[1], Global):
            self.stack.append(pid[1])
            return
        if not _names_storage(pid):
            raise UnsupportedError(
                f"{self.path}: its pickle refers to {describe(pid)} instead of a storage; it is damaged or too old."
            )
        _, kind, key, location, numel = pid[:5]
        storage = StorageRef(str(key), kind, location, numel)
        self.storages[storage.key] = storage
        self.stack.append(storage)


def _is_large(value: Any) -> bool:
    """Whether a value is a large number, or a tuple with one: a count of elements."""
    numbers = value[:MOST_DIMENSIONS] if isinstance(value, tuple) else (value,)
    return any(isinstance(number, int) and number > _LARGE for number in numbers)


def _find_made(value: Any) -> PickledObject:
    """The object that a change is recorded with."""
    if isinstance(value, TensorRef):
        return value.made
    if not isinstance(value, PickledObject):
        raise ValueError(f"it changes {describe(value)}, which is no object of it")
    return value


def _names_storage(pid: Any) -> bool:
    """Whether a persistent id is ("storage", class, key, location, elements); a sixth part, of old views, is None."""
    if not isinstance(pid, tuple) or len(pid) not in (5, 6) or pid[5:] not in ((), (None,)):
        return False
    _, kind, key, location, numel = pid[:5]
    whole = isinstance(numel, int) and numel >= 0 and (isinstance(key, str) or _is_short(key))
    return pid[0] == "storage" and isinstance(kind, Global) and isinstance(location, str) and whole


def _is_short(number: Any) -> bool:
    """Whether a value is an integer of a few digits."""
    return isinstance(number, int) and number.bit_length() <= 64


def _check_keys(keys: list[Any]) -> None:
    """Refuse keys that are costly to hash (:data:`MOST_KEY_PARTS`)."""
    for key in keys:
        if type(key) not in _HASHED_AT_ONCE and has_more_parts(key, MOST_KEY_PARTS):
            raise ValueError(f"a key of more than {MOST_KEY_PARTS} parts")


def _fill_dict(changed: dict[Any, Any], operands: list[Any]) -> None:
    keys = operands[::2]
    _check_keys(keys)
    changed.update(zip(keys, operands[1::2], strict=True))


def _fill_set(changed: set[Any], operands: list[Any]) -> None:
    _check_keys(operands)
    changed.update(operands)


def _set_state(changed: OrderedItems, operands: list[Any]) -> None:
    changed.state = operands[0]


_PLAIN_EDITS: dict[tuple[type, str], Callable[[Any, list[Any]], None]] = {
    (list, "append"): list.extend,
    (list, "appends"): list.extend,
    (dict, "setitem"): _fill_dict,
    (dict, "setitems"): _fill_dict,
    (OrderedItems, "setitem"): _fill_dict,
    (OrderedItems, "setitems"): _fill_dict,
    (OrderedItems, "build"): _set_state,
    (set, "additems"): _fill_set,
}


def _view_tensor(made: PickledObject, *args: Any) -> Any:
    """``_rebuild_tensor`` and ``_v2``: the storage class tells the element type."""
    storage = args[0]
    if not isinstance(storage, StorageRef):
        return made
    return _make_tensor(made, storage, STORAGE_DTYPES.get(storage.kind.name, "uint8"), *args[1:4])


def _view_typed_tensor(made: PickledObject, *args: Any) -> Any:
    """``_rebuild_tensor_v3``: a dtype without a storage class, over untyped bytes."""
    storage, dtype = args[0], args[6]
    if not isinstance(storage, StorageRef) or not isinstance(dtype, Global) or not is_dtype(dtype.kind):
        return made
    return _make_tensor(made, storage, dtype.name, *args[1:4])


def _make_tensor(made: PickledObject, storage: StorageRef, dtype: str, offset: Any, shape: Any, stride: Any) -> Any:
    fits = isinstance(offset, int) and isinstance(shape, tuple) and isinstance(stride, tuple)
    if not fits or len(shape) != len(stride) or len(shape) > MOST_DIMENSIONS or offset < 0:
        raise ValueError(f"a tensor at {describe(offset)} of shape {describe(shape)} and strides {describe(stride)}")
    for size in (*shape, *stride):
        if not isinstance(size, int) or size < 0:
            raise ValueError(f"a tensor of shape {describe(shape)} and strides {describe(stride)}")
    return TensorRef(storage, offset, tuple(shape), stride, dtype, made)


def _view_parameter(made: PickledObject, *args: Any) -> Any:
    return _remake(args[0], made)


def _view_subclass(made: PickledObject, *args: Any) -> Any:
    """A tensor that carries Python attributes, as ZeRO 3's flat buffers do after a step."""
    inner, given = args[0], args[2]
    view = _VIEWS.get(inner.kind) if isinstance(inner, Global) else None
    few = isinstance(given, tuple) and len(given) <= _MOST_ARGUMENTS
    if view in (_view_tensor, _view_typed_tensor, _view_parameter) and few:
        return _remake(view(made, *given), made)
    return made


def _remake(value: Any, made: PickledObject) -> Any:
    """The same tensor, made by another call."""
    if not isinstance(value, TensorRef):
        return made
    return TensorRef(value.storage, value.offset, value.shape, value.stride, value.dtype, made)


def _view_ordered(made: PickledObject, *args: Any) -> Any:
    return made if args else OrderedItems()


def _view_size(made: PickledObject, *args: Any) -> Any:
    sizes = args[0] if args else None
    return TensorSize(sizes) if isinstance(sizes, tuple) and len(sizes) <= MOST_DIMENSIONS else made


_VIEWS: dict[str, Callable[..., Any]] = {
    "torch._utils._rebuild_tensor": _view_tensor,
    "torch._utils._rebuild_tensor_v2": _view_tensor,
    "torch._utils._rebuild_tensor_v3": _view_typed_tensor,
    "torch._utils._rebuild_parameter": _view_parameter,
    "torch._utils._rebuild_parameter_with_state": _view_parameter,
    "torch._tensor._rebuild_from_type": _view_subclass,
    "torch._tensor._rebuild_from_type_v2": _view_subclass,
    "torch.Size": _view_size,
    "collections.OrderedDict": _view_ordered,
}
"""Calls whose results are looked into; each gets the call and its arguments, and calls nothing of the file."""


_Opcode = Callable[[_Machine, int], int]
_BYTE, _SHORT, _INT, _LONG = (struct.Struct(form) for form in ("<B", "<H", "<I", "<Q"))
_UNPACK = _INT.unpack_from
_BININT1, _BINPUT, _LONG_BINPUT = pickle.BININT1[0], pickle.BINPUT[0], pickle.LONG_BINPUT[0]
_BINGET, _LONG_BINGET = pickle.BINGET[0], pickle.LONG_BINGET[0]
"""Instructions that :meth:`_Machine.run` takes itself."""


def _push_sized(head: struct.Struct, decode: Callable[[bytes], Any]) -> _Opcode:
    """An instruction that is followed by a length and as many bytes."""
    width, unpack = head.size, head.unpack_from

    def push(machine: _Machine, at: int) -> int:
        low = at + width
        high = low + unpack(machine.data, at)[0]
        if high > len(machine.data):
            raise EOFError
        machine.stack.append(decode(machine.data[low:high]))
        return high  # type: ignore[no-any-return]

    return push


def _push_text(head: struct.Struct) -> _Opcode:
    """Like :func:`_push_sized`, of the instructions that are met most of all these."""
    width, unpack = head.size, head.unpack_from

    def push(machine: _Machine, at: int) -> int:
        low = at + width
        high = low + unpack(machine.data, at)[0]
        if high > len(machine.data):
            raise EOFError
        machine.stack.append(str(machine.data[low:high], "utf-8", "surrogatepass"))
        return high  # type: ignore[no-any-return]

    return push


def _push_number(head: struct.Struct) -> _Opcode:
    width, unpack = head.size, head.unpack_from

    def push(machine: _Machine, at: int) -> int:
        machine.stack.append(unpack(machine.data, at)[0])
        return at + width

    return push


def _find_line(machine: _Machine, at: int) -> int:
    """Position of the next newline."""
    end = machine.data.find(b"\n", at)
    if end < 0:
        raise EOFError
    return end


def _with_line(apply: Callable[[_Machine, bytes], None]) -> _Opcode:
    """An instruction that is followed by a line of text."""

    def run(machine: _Machine, at: int) -> int:
        end = _find_line(machine, at)
        apply(machine, machine.data[at:end])
        return end + 1

    return run


def _push_line(decode: Callable[[bytes], Any]) -> _Opcode:
    return _with_line(lambda machine, line: machine.stack.append(decode(line)))


def _plain(apply: Callable[[_Machine], None]) -> _Opcode:
    """An instruction that nothing follows."""

    def run(machine: _Machine, at: int) -> int:
        apply(machine)
        return at

    return run


def _push(make: Callable[[], Any]) -> _Opcode:
    def push(machine: _Machine, at: int) -> int:
        machine.stack.append(make())
        return at

    return push


def _push_value(value: Any) -> _Opcode:
    """An instruction that pushes what cannot be changed."""

    def push(machine: _Machine, at: int) -> int:
        machine.stack.append(value)
        return at

    return push


def _push_tuple(number: int) -> _Opcode:
    def push(machine: _Machine, at: int) -> int:
        stack = machine.stack
        if len(stack) < number:
            raise IndexError("its stack is empty")
        stack[-number:] = (tuple(stack[-number:]),)
        return at

    return push


def _push_marked(machine: _Machine, at: int) -> int:
    stack, low = machine.stack, machine.marks.pop()
    stack[low:] = (tuple(stack[low:]),)
    return at


def _call(op: str, number: int) -> _Opcode:
    def call(machine: _Machine, at: int) -> int:
        machine.make(op, number)
        return at

    return call


def _refer(machine: _Machine, at: int) -> int:
    machine.refer(machine.take(1)[0])
    return at


def _edit(op: str, number: int) -> _Opcode:
    def edit(machine: _Machine, at: int) -> int:
        machine.edit(op, machine.take(number))
        return at

    return edit


def _edit_marked(op: str) -> _Opcode:
    def edit(machine: _Machine, at: int) -> int:
        machine.edit(op, machine.take_marked())
        return at

    return edit


def _get_line(machine: _Machine, line: bytes) -> None:
    machine.stack.append(machine.memo[int(line)])


def _put_line(machine: _Machine, line: bytes) -> None:
    machine.memo[int(line)] = machine.stack[-1]


def _memoize(machine: _Machine, at: int) -> int:
    machine.memo[len(machine.memo)] = machine.stack[-1]
    return at


def _mark(machine: _Machine, at: int) -> int:
    machine.marks.append(len(machine.stack))
    return at


def _pop(machine: _Machine) -> None:
    if machine.marks and machine.marks[-1] == len(machine.stack):
        machine.marks.pop()
    else:
        machine.take(1)


def _declare(machine: _Machine, at: int) -> int:
    machine.protocol = machine.data[at]
    return at + 1


def _stop(machine: _Machine, at: int) -> int:
    machine.end = at
    return -1


def _global(machine: _Machine, at: int) -> int:
    end = _find_line(machine, at)
    last = _find_line(machine, end + 1)
    machine.name(machine.data[at:end].decode(), machine.data[end + 1 : last].decode())
    return last + 1


def _stack_global(machine: _Machine) -> None:
    module, name = machine.take(2)
    if not isinstance(module, str) or not isinstance(name, str):
        raise ValueError("a global whose name is no string")
    machine.name(module, name)


def _dict_marked(machine: _Machine) -> None:
    operands = machine.take_marked()
    machine.stack.append({})
    machine.edit("setitems", operands)


def _frozenset_marked(machine: _Machine) -> None:
    items = machine.take_marked()
    _check_keys(items)
    machine.stack.append(frozenset(items))


def _decode_escaped(data: bytes) -> str:
    return data.decode("raw-unicode-escape")


def _decode_long(data: bytes) -> int:
    return int.from_bytes(data, "little", signed=True)


def _decode_long_line(data: bytes) -> int:
    return int(data.removesuffix(b"L"))


def _decode_int_line(data: bytes) -> int:
    return {b"00": False, b"01": True}[data] if data in (b"00", b"01") else int(data)


_TABLE: dict[bytes, _Opcode] = {
    pickle.NONE: _push_value(None),
    pickle.NEWTRUE: _push_value(True),
    pickle.NEWFALSE: _push_value(False),
    pickle.INT: _push_line(_decode_int_line),
    pickle.LONG: _push_line(_decode_long_line),
    pickle.FLOAT: _push_line(float),
    pickle.UNICODE: _push_line(_decode_escaped),
    pickle.BININT: _push_number(struct.Struct("<i")),
    pickle.BININT2: _push_number(_SHORT),
    pickle.BINFLOAT: _push_number(struct.Struct(">d")),
    pickle.LONG1: _push_sized(_BYTE, _decode_long),
    pickle.LONG4: _push_sized(_INT, _decode_long),
    pickle.SHORT_BINUNICODE: _push_text(_BYTE),
    pickle.BINUNICODE: _push_text(_INT),
    pickle.BINUNICODE8: _push_text(_LONG),
    pickle.SHORT_BINBYTES: _push_sized(_BYTE, bytes),
    pickle.BINBYTES: _push_sized(_INT, bytes),
    pickle.BINBYTES8: _push_sized(_LONG, bytes),
    pickle.BYTEARRAY8: _push_sized(_LONG, bytearray),
    pickle.EMPTY_LIST: _push(list),
    pickle.EMPTY_DICT: _push(dict),
    pickle.EMPTY_SET: _push(set),
    pickle.EMPTY_TUPLE: _push_value(()),
    pickle.TUPLE: _push_marked,
    pickle.TUPLE1: _push_tuple(1),
    pickle.TUPLE2: _push_tuple(2),
    pickle.TUPLE3: _push_tuple(3),
    pickle.LIST: _plain(lambda machine: machine.stack.append(machine.take_marked())),
    pickle.DICT: _plain(_dict_marked),
    pickle.FROZENSET: _plain(_frozenset_marked),
    pickle.GLOBAL: _global,
    pickle.STACK_GLOBAL: _plain(_stack_global),
    pickle.REDUCE: _call("reduce", 2),
    pickle.NEWOBJ: _call("newobj", 2),
    pickle.NEWOBJ_EX: _call("newobj_ex", 3),
    pickle.BINPERSID: _refer,
    pickle.APPEND: _edit("append", 1),
    pickle.SETITEM: _edit("setitem", 2),
    pickle.BUILD: _edit("build", 1),
    pickle.APPENDS: _edit_marked("appends"),
    pickle.SETITEMS: _edit_marked("setitems"),
    pickle.ADDITEMS: _edit_marked("additems"),
    pickle.GET: _with_line(_get_line),
    pickle.PUT: _with_line(_put_line),
    pickle.MEMOIZE: _memoize,
    pickle.MARK: _mark,
    pickle.POP: _plain(_pop),
    pickle.POP_MARK: _plain(lambda machine: machine.take_marked().clear()),
    pickle.DUP: _plain(lambda machine: machine.stack.append(machine.stack[-1])),
    pickle.PROTO: _declare,
    pickle.FRAME: lambda _machine, at: at + 8,
    pickle.STOP: _stop,
}


def _refuse(code: int) -> _Opcode:
    name = _NAMES.get(bytes([code]), f"{code:#04x}")

    def refuse(machine: _Machine, _at: int) -> int:
        if bytes([code]) not in _NAMES:
            raise ValueError(f"{name} is no instruction")
        raise UnsupportedError(
            f"{machine.path}: its pickle uses the instruction {name}, which Python 3's pickle and torch.save do not "
            "write; save the checkpoint anew with a current release."
        )

    return refuse


_OPCODES: list[_Opcode] = [_TABLE.get(bytes([code]), _refuse(code)) for code in range(256)]
