"""Read a pickle as inert data (:mod:`~.objects`) without executing it.

Imports, calls and instances are recorded. Pickles are hostile input. Time and memory stay proportional to their length:
each instruction makes at most one object from the stream or the stack, the memo is a dictionary, and keys are hashed
only if that is cheap and rarely collides.
"""

from __future__ import annotations

import io
import pickle
import re
import struct
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

from ..errors import UnsupportedError
from ..io.memory import pause_collection
from ..model.index import Use
from .objects import (
    STORAGE_DTYPES,
    Global,
    OrderedItems,
    PickledObject,
    StorageRef,
    TensorRef,
    TensorSize,
    describe,
    has_more_parts,
    is_dtype,
    is_int64,
    is_setting_int,
    make_damage_error,
    walk,
)

MOST_DIMENSIONS: Final = 64
"""Limit of a tensor's dimensions, as in torch: any number of tensors can copy one long shape from the memo."""

MOST_KEY_PARTS: Final = 256
"""Limit for a dictionary's key or a set's item, counted by :func:`has_more_parts`. Python hashes nested tuples by
recursion in C: sharing makes that exponential, depth overflows the stack."""

_MOST_COLLISIONS = 32  # keys of one dictionary with equal hashes; n of them cost n² comparisons
_FAULTS = (
    *(ValueError, IndexError, KeyError, TypeError, AttributeError, OverflowError, MemoryError),
    *(struct.error, pickle.UnpicklingError),
)
_LARGE = 1 << 16
_TENSORS = ("", "Double", "Float", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool")
_ALLOCATING = (
    *("builtins.bytearray", "builtins.bytes", "numpy.void", "numpy.ndarray"),
    *("numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct"),
    *(f"torch.{name}{kind}" for name in _TENSORS for kind in ("Tensor", "Storage")),
    "torch.storage.UntypedStorage",
)
"""Callables that allocate as many bytes as their argument says. No writer pickles such calls."""
_MOST_ARGUMENTS = 16  # of a call that a function in `_CALL_READERS` examines
_CHEAP = frozenset((str, float, bool, bytes, type(None), Global, TensorRef))
"""Types of keys whose hashes are cached or computed from a few bytes."""

GETATTR = "builtins.getattr"
_ORDERED, _PARTIAL, _UUID = "collections.OrderedDict", "functools.partial", "uuid.UUID"
_WITH_ATTRIBUTES = (
    *("types.SimpleNamespace", "argparse.Namespace"),
    *("torch._tensor._rebuild_from_type", "torch._tensor._rebuild_from_type_v2"),
)
"""Callables that may set attributes of their result. No writer edits such a result afterwards."""
_FRACTION = re.compile(r"-?[0-9]{1,150}(/[0-9]{1,150})?")


def read_pickle(source: bytes | io.BufferedReader[Any], path: str) -> Pickled:
    """Read a pickle, or the next one of a stream; ``path`` is for messages.

    Raises:
        CheckpointError: the pickle is damaged, truncated or malicious.
        UnsupportedError: it has instructions that Python 3 and ``torch.save`` do not write.
    """
    pickled = Pickled(io.BytesIO(source) if isinstance(source, bytes) else source, path)
    try:
        with pause_collection():
            pickled.load()
    except EOFError:
        raise make_damage_error(path, "its pickle cannot be read (it does not end); the file is truncated.") from None
    except _FAULTS as error:
        kind, text = type(error).__name__, str(error)[:200]
        raise make_damage_error(path, f"its pickle cannot be read ({kind}: {text}); the file is damaged.") from None
    return pickled


def check_keys(keys: Iterable[Any], known: dict[int, list[Any]]) -> None:
    """Refuse keys that are expensive to hash or compare, before anything hashes them.

    Args:
        known: earlier expensive keys of the same dictionary by hash; the function adds to it.

    Raises:
        ValueError: a key is too large, or too many different keys have the same hash.
    """
    for key in keys:
        if type(key) in _CHEAP or type(key) is PickledObject or is_int64(key):
            continue
        if has_more_parts(key, MOST_KEY_PARTS):
            raise ValueError(f"a key of more than {MOST_KEY_PARTS} parts")
        try:
            collisions = known.setdefault(hash(key), [])
        except TypeError:
            continue  # unhashable: the dictionary itself raises
        if key not in collisions:
            collisions.append(key)
        if len(collisions) > _MOST_COLLISIONS:
            raise ValueError(f"a key of more than {_MOST_COLLISIONS} that have one hash")


class Pickled(pickle._Unpickler):
    """A pickle and its content; runs only the instructions of :data:`_INSTRUCTIONS`.

    Python's readers of numbers, strings and plain containers are used as they are (:data:`_INERT`). The methods here
    replace every instruction that could run code, hash values or allocate more than the stream contains.

    Attributes:
        root: the pickled object, after :meth:`load`.
        proto: declared protocol, or 0.
        tensors: its tensors in the order in which they are made.
    """

    def __init__(self, stream: io.BytesIO | io.BufferedReader[Any], path: str) -> None:
        super().__init__(stream)
        self.path, self.read, self.readline = path, stream.read, stream.readline
        self.stack: list[Any] = []
        self.metastack: list[list[Any]] = []  # the stacks below each mark
        self.append = self.stack.append
        self.memo: dict[int, Any] = {}
        self.root: Any = None
        self.proto = 0
        self.tensors: list[TensorRef] = []
        self.storages: dict[str, StorageRef] = {}
        self.globals: list[Global] = []
        self.made: set[Global] = set()  # classes of plain values
        self.called: set[Global] = set()  # called with arguments
        self.states: dict[Global, set[str]] = defaultdict(set)  # callables whose results get attributes: state types
        self.with_custom_methods: set[Global] = set()  # see `Use`
        self.hashed: list[tuple[Global, Any]] = []  # classes whose hash reads an attribute, with the attributes
        self.looked_up: set[str] = set()
        self.used: list[Any] = []  # values that a call or hash may read, and callables with more than plain results
        self.readers: dict[int, Callable[..., Any]] = {}  # functions of `_CALL_READERS` by identity of their global
        self.keys: dict[int, dict[int, list[Any]]] = defaultdict(dict)  # `check_keys`, by identity of the dictionary
        self.plain: set[int] = set()  # identities of globals whose bare instances with attributes are already recorded

    def load(self) -> None:
        """Run the instructions up to STOP."""
        for code in iter(partial(self.read, 1), pickle.STOP):
            if code in _INSTRUCTIONS:
                _INSTRUCTIONS[code](self)
            else:
                self.refuse(code)
        if len(self.stack) != 1 or self.metastack:
            raise ValueError(f"{len(self.stack)} objects left on its stack")
        self.root = self.stack.pop()

    def refuse(self, code: bytes) -> None:
        """Raise the error for an instruction that is not in :data:`_INSTRUCTIONS`."""
        if not code:
            raise EOFError
        if code not in _NAMES:
            raise ValueError(f"{code[0]:#04x} is not an instruction")
        raise UnsupportedError(
            f"its pickle uses the instruction {_NAMES[code]}, which Python 3's pickle and torch.save do "
            "not write; save the checkpoint again with a current release.",
            path=self.path,
        )

    def load_put(self) -> None:
        index = int(self.readline())
        if not is_int64(index):
            raise ValueError("a large number in its memo")
        self.memo[index] = self.stack[-1]

    def load_bytearray8(self) -> None:
        (size,) = struct.unpack("<Q", self.read(8))
        self.append(bytearray(self.read(size)))  # not allocated before it is read: the size may be forged

    def find_class(self, module: str, name: str) -> Global:
        named = Global(module, name)
        self.globals.append(named)
        if reader := _CALL_READERS.get(named.kind):
            self.readers[id(named)] = reader
        return named

    def persistent_load(self, pid: Any) -> Any:
        """Return the storage of a persistent id; in the legacy format also a class."""
        if not _is_storage_id(pid):
            if isinstance(pid, tuple) and len(pid) > 1 and pid[0] == "module" and isinstance(pid[1], Global):
                return pid[1]  # pickled with its source
            raise UnsupportedError(
                f"its pickle refers to {describe(pid)} instead of a storage; it is damaged or too old.", path=self.path
            )
        _, kind, key, location, numel = pid[:5]
        storage = StorageRef(str(key), kind, location, numel)
        self.storages[storage.key] = storage
        return storage

    def load_newobj(self) -> None:
        stack = self.stack
        if len(stack) > 1 and stack[-1] == () and id(stack[-2]) in self.plain:
            self.append(PickledObject(pickle.NEWOBJ, [stack.pop(-2), stack.pop()]))
        else:
            self._make(pickle.NEWOBJ, 2)

    def _make(self, op: bytes, number: int) -> None:
        """Push the result of a call: a tensor, a known container, or a recorded call."""
        parts = self._pop(number)
        maker, args = parts[0], parts[1]
        if not isinstance(maker, (Global, PickledObject)) or not isinstance(args, tuple):
            raise ValueError(f"it calls {describe(maker)} with {describe(args)}")
        made: Any = None
        reader = self.readers.get(id(maker))
        if reader is _refuse_allocation or (reader and op == pickle.REDUCE and len(args) <= _MOST_ARGUMENTS):
            made = reader(parts)
            if type(made) is TensorRef:
                self.tensors.append(made)
        if made is None:
            made = PickledObject(op, parts)
            if type(maker) is Global and (args or op == pickle.NEWOBJ_EX):
                self.called.add(maker)
            if type(maker) is Global and (_is_plain_call(op, maker, args) if args else op == pickle.NEWOBJ):
                self.made.add(maker)
                self.used += args
            elif op == pickle.REDUCE and _is_getattr_call(maker, args):
                self.looked_up.add(f"{args[0].kind}.{args[1]}")
                self.used.append(args)
            else:
                self.used += parts
        self.append(made)

    def pop_mark(self) -> list[Any]:
        items = self.stack
        self.stack = self.metastack.pop()
        self.append = self.stack.append
        return items

    def _pop(self, number: int) -> list[Any]:
        items = self.stack[-number:]
        if len(items) < number:
            raise IndexError("its stack is empty")
        del self.stack[-number:]
        return items

    def _append_items(self, items: list[Any]) -> None:
        changed = self.stack[-1]
        if type(changed) is list:
            changed += items
        else:
            self._edit(changed, pickle.APPENDS, items)

    def load_dict(self) -> None:
        items = self.pop_mark()
        self.append({})
        self._set_items(items)

    def _set_items(self, items: list[Any]) -> None:
        """Add entries, alternating keys and values, to the topmost object."""
        changed, keys = self.stack[-1], items[::2]
        if len(items) % 2:
            raise ValueError("a key without a value")
        if isinstance(changed, dict):
            self._check_keys(keys, changed)
            changed.update(zip(keys, items[1::2], strict=True))
        else:
            self.used += keys
            self._edit(changed, pickle.SETITEMS, items)

    def load_additems(self) -> None:
        items = self.pop_mark()
        changed = self.stack[-1]
        if type(changed) is set:
            self._check_keys(items, changed)
            changed.update(items)
        else:
            self.used += items
            self._edit(changed, pickle.ADDITEMS, items)

    def _check_keys(self, keys: list[Any], changed: Any) -> None:
        if costly := [key for key in keys if type(key) not in _CHEAP]:
            self.used += costly
            check_keys(costly, self.keys[id(changed)])

    def load_frozenset(self) -> None:
        items = self.pop_mark()
        self.used += items
        check_keys(items, {})
        self.append(frozenset(items))

    def load_build(self) -> None:
        state = self.stack.pop()
        changed = self.stack[-1]
        is_bare = type(state) is dict and _is_bare(changed)
        if is_bare and id(changed.parts[0]) in self.plain:
            changed.edits.append((pickle.BUILD, [state]))
        elif type(changed) is OrderedItems:
            if changed.state is not None:
                self.with_custom_methods.update(one for one in self.globals if one.kind == _ORDERED)
            changed.state = state
        else:
            self._edit(changed, pickle.BUILD, [state])
            if is_bare and type(changed.parts[0]) is Global and changed.kind != _UUID:
                self.plain.add(id(changed.parts[0]))

    def _edit(self, changed: Any, op: bytes, operands: list[Any]) -> None:
        """Record a change of an object made by a call."""
        made = _find_call(changed)
        maker, gives = made.parts[0], op == pickle.BUILD
        named = type(maker) is Global
        if named and maker not in self.with_custom_methods and _may_call_custom_method(op, made):
            self.with_custom_methods.add(maker)
        if named and gives:
            self.states[maker].add(type(operands[0]).__name__)
            self.hashed += [(maker, operands[0])] if maker.kind == _UUID else ()
        plain = gives and type(operands[0]) in (dict, list)
        if not plain or (made.op != pickle.NEWOBJ and type(changed) is PickledObject):
            keeps = named and gives and maker.kind == _PARTIAL
            self.used += (None if keeps else maker, operands if gives else None)
        made.edits.append((op, operands))

    def list_uses(self) -> tuple[dict[Global, Use], tuple[Use, ...]]:
        """Return the uses of named classes and functions, and of their attributes.

        Values that were popped from the stack count as used too.
        """
        named = dict.fromkeys(self.globals)
        looks_up = any(named_global.kind == GETATTR for named_global in named)
        self.used += (pair for pair in self.hashed if not _is_cheap_to_hash(pair[1]))
        used = {part for part in walk(self.used) if type(part) is Global} if self.made or looks_up else set[Global]()
        others = {*used, *self.made, *self.states}

        def make_use(one: Global) -> Use:
            value = one in self.made and one not in used
            member = one.kind == GETATTR and not any(other.kind == GETATTR for other in others)
            states = frozenset(self.states.get(one, ()))
            return Use(one.kind, value, states, one in self.called, one in self.with_custom_methods, member)

        members = tuple(Use(name, member=True) for name in sorted(self.looked_up))
        return {one: make_use(one) for one in named}, members


def _is_bare(made: Any) -> bool:
    """Return True for an object that was made without arguments and not edited."""
    return type(made) is PickledObject and made.op == pickle.NEWOBJ and not made.edits and made.parts[1] == ()


def _is_plain_call(op: bytes, maker: Global, args: tuple[Any, ...]) -> bool:
    """Return True if a call makes a plain value cheaply, in its class's pickled form."""
    if op == pickle.NEWOBJ_EX:
        return False
    if maker.kind == _PARTIAL:
        return len(args) == 1  # the function, which is not called before the partial is
    if maker.kind == "builtins.range":
        return all(map(is_int64, args))
    text = args[0] if len(args) == 1 and type(args[0]) is str else None
    if maker.kind == "fractions.Fraction":  # a string with an exponent could make a number of any length
        return all(map(is_setting_int, args)) if text is None else _FRACTION.fullmatch(text) is not None
    return maker.kind == "decimal.Decimal" and text is not None


def _is_cheap_to_hash(state: Any) -> bool:
    """Return True for a UUID's ``__dict__`` whose values are all bounded integers."""
    return isinstance(state, dict) and all(value is None or is_setting_int(value) for value in state.values())


def _may_call_custom_method(op: bytes, made: PickledObject) -> bool:
    """Return True if ``op`` may look up a method that the file set (see :class:`Use`)."""
    before, fills = made.edits[-1][0] if made.edits else b"", op in (pickle.APPENDS, pickle.ADDITEMS)
    if before == pickle.BUILD or (fills and before == pickle.SETITEMS):
        return True
    given = (made.args or made.op == pickle.NEWOBJ_EX) and made.kind in _WITH_ATTRIBUTES
    filled = made.edits if op == pickle.BUILD else ()
    keys = (key for kind, operands in filled if kind == pickle.SETITEMS for key in operands[::2])
    return bool(given) or any(
        type(key) is PickledObject or (type(key) is str and key == "__setstate__") for key in keys
    )


def _is_getattr_call(maker: Any, args: tuple[Any, ...]) -> bool:
    """Return True for a call ``getattr(class, "name")``."""
    called = type(maker) is Global and maker.kind == GETATTR and len(args) == 2
    return called and type(args[0]) is Global and type(args[1]) is str


def _find_call(value: Any) -> PickledObject:
    """Return the call in which a change of ``value`` is recorded."""
    if isinstance(value, TensorRef):
        return value.made
    if not isinstance(value, PickledObject):
        raise ValueError(f"it changes {describe(value)}, which it did not make by a call")
    return value


def _is_storage_id(pid: Any) -> bool:
    """Return True if a persistent id is ("storage", class, key, location, elements)."""
    if not isinstance(pid, tuple) or len(pid) not in (5, 6) or pid[5:] not in ((), (None,)):
        return False
    _, kind, key, location, numel = pid[:5]
    named = pid[0] == "storage" and isinstance(kind, Global) and (isinstance(key, str) or is_int64(key))
    return named and isinstance(location, str) and isinstance(numel, int) and numel >= 0


def _refuse_allocation(parts: list[Any]) -> None:
    """Raise ValueError if a call of :data:`_ALLOCATING` has large numbers or keywords."""
    args = parts[1][:_MOST_ARGUMENTS]
    for value in (*args, args):
        numbers = value[:MOST_DIMENSIONS] if isinstance(value, tuple) else (value,)
        if len(parts) > 2 or any(isinstance(number, int) and number > _LARGE for number in numbers):
            raise ValueError(f"it calls {describe(parts[0])} to allocate many bytes")


def _read_tensor(parts: list[Any]) -> TensorRef | None:
    """Read ``_rebuild_tensor`` and ``_v2``: the storage class names the element type."""
    storage, *view = parts[1]
    if not isinstance(storage, StorageRef):
        return None
    return _make_tensor(parts, storage, STORAGE_DTYPES.get(storage.kind.name, "uint8"), view[:3], view[5:])


def _read_typed_tensor(parts: list[Any]) -> TensorRef | None:
    """Read ``_rebuild_tensor_v3``: a dtype without a storage class, in untyped bytes."""
    storage, offset, shape, stride, _grad, _hooks, dtype, *metadata = parts[1]
    if not isinstance(storage, StorageRef) or not isinstance(dtype, Global) or not is_dtype(dtype.kind):
        return None
    return _make_tensor(parts, storage, dtype.name, (offset, shape, stride), metadata)


def _make_tensor(
    parts: list[Any], storage: StorageRef, dtype: str, view: Sequence[Any], metadata: Sequence[Any]
) -> TensorRef:
    offset, shape, stride = view
    fits = isinstance(offset, int) and isinstance(shape, tuple) and isinstance(stride, tuple)
    if not fits or len(shape) != len(stride) or len(shape) > MOST_DIMENSIONS or offset < 0:
        raise ValueError(f"a tensor at {describe(offset)} of shape {describe(shape)} and strides {describe(stride)}")
    for size in (*shape, *stride):
        if not isinstance(size, int) or size < 0:
            raise ValueError(f"a tensor of shape {describe(shape)} and strides {describe(stride)}")
    lazy = any(isinstance(bits, dict) and (bits.get("neg") or bits.get("conj")) for bits in metadata[:1])
    return TensorRef(storage, offset, tuple(shape), stride, dtype, PickledObject(pickle.REDUCE, parts), lazy)


def _read_parameter(parts: list[Any]) -> TensorRef | None:
    return _replace_call(parts[1][0], parts)


def _read_subclass(parts: list[Any]) -> TensorRef | None:
    """Read a tensor with attributes, such as ZeRO 3's flat buffers after a step."""
    inner, _kind, args, *_ = parts[1]
    reader = _CALL_READERS.get(inner.kind) if isinstance(inner, Global) else None
    few = isinstance(args, tuple) and len(args) <= _MOST_ARGUMENTS
    if reader in (_read_tensor, _read_typed_tensor, _read_parameter) and few:
        return _replace_call(reader([inner, args]), parts)
    return None


def _replace_call(value: Any, parts: list[Any]) -> TensorRef | None:
    """Return a tensor with ``parts`` as the call that makes it; None for other values."""
    return replace(value, made=PickledObject(pickle.REDUCE, parts)) if isinstance(value, TensorRef) else None


def _read_size(parts: list[Any]) -> TensorSize | None:
    sizes = parts[1][0] if parts[1] else None
    return TensorSize(sizes) if isinstance(sizes, tuple) and len(sizes) <= MOST_DIMENSIONS else None


_CALL_READERS: dict[str, Callable[[list[Any]], Any]] = {
    **dict.fromkeys(_ALLOCATING, _refuse_allocation),
    "torch._utils._rebuild_tensor": _read_tensor,
    "torch._utils._rebuild_tensor_v2": _read_tensor,
    "torch._utils._rebuild_tensor_v3": _read_typed_tensor,
    "torch._utils._rebuild_parameter": _read_parameter,
    "torch._utils._rebuild_parameter_with_state": _read_parameter,
    "torch._tensor._rebuild_from_type": _read_subclass,
    "torch._tensor._rebuild_from_type_v2": _read_subclass,
    "torch.Size": _read_size,
    "collections.OrderedDict": lambda parts: None if parts[1] else OrderedItems(),
}
"""Readers of known calls: they get the function and its arguments, run neither, and return None for a call that is only
recorded."""

_INERT = """
    proto none true false int binint binint1 binint2 long long1 long4 float binfloat
    unicode binunicode binunicode8 short_binunicode binbytes binbytes8 short_binbytes
    empty_list empty_dictionary empty_set empty_tuple tuple tuple1 tuple2 tuple3 list
    global stack_global binpersid mark pop pop_mark dup get binget long_binget binput long_binput memoize
"""
"""Instructions whose reader in Python's unpickler runs, hashes and imports nothing. New instructions are refused."""

_INSTRUCTIONS: dict[bytes, Callable[[Pickled], None]] = {
    bytes([code]): getattr(Pickled, load.__name__)
    for code, load in pickle._Unpickler.dispatch.items()
    if load.__name__ in vars(Pickled) or load.__name__.removeprefix("load_") in _INERT.split()
} | {
    pickle.FRAME: lambda pickled: pickled.read(8),  # its length, which only buffered readers need
    pickle.REDUCE: lambda pickled: pickled._make(pickle.REDUCE, 2),
    pickle.NEWOBJ_EX: lambda pickled: pickled._make(pickle.NEWOBJ_EX, 3),
    pickle.APPEND: lambda pickled: pickled._append_items(pickled._pop(1)),
    pickle.APPENDS: lambda pickled: pickled._append_items(pickled.pop_mark()),
    pickle.SETITEM: lambda pickled: pickled._set_items(pickled._pop(2)),
    pickle.SETITEMS: lambda pickled: pickled._set_items(pickled.pop_mark()),
}
_NAMES = {getattr(pickle, name): name for name in pickle.__all__ if name.isupper() and len(name) > 1}
