"""Scheduler and client state: real objects, made of harmless classes only.

The file's pickle is first read as inert data (:mod:`~deepspeed_ucp.torchsave.unpickle`): all objections are known
before any code runs. Then only the client's part is pickled again and unpickled, with the classes that were found
harmless. The model's tensors stay in the file.
"""

from __future__ import annotations

import abc
import argparse
import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import io
import pathlib
import pickle
import sys
import types
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch._weights_only_unpickler import _get_allowed_globals

from ..engine.finish import PICKLED
from ..errors import CheckpointError, UcpError, UnsupportedError, shorten
from ..formats.deepspeed.reading import select_extra_states
from ..model.index import Use
from ..torchsave.objects import STORAGE_DTYPES, Global, PickledObject, describe, walk
from ..torchsave.repickle import PROTOCOL, write_pickle
from ..torchsave.rewrite import open_storage
from ..torchsave.torchfile import TorchFile, read_header
from ..torchsave.unpickle import GETATTR, check_keys

EXTRA_STATES = "deepspeed_ucp.extra_states"
"""Key of the modules' extra states in the result."""

_BULKY = ("module", "optimizer", "frozen_param_fragments")
"""The model's tensors, which the index reads; they do not belong to the client."""

_COPIES = 16
"""Limit for the total size of all calls' arguments, in multiples of the file's size: each call may copy its own, which
may be the same long string.
"""


def read_objects(path: str, *, trust_pickle: bool) -> dict[str, Any]:
    """Read everything but the model's tensors from a model-states file.

    Raises:
        CheckpointError: the client state is damaged.
        UnsupportedError: it holds classes that are not known to be harmless, or that this process cannot create.
    """
    return make_objects(read_header(path), trust_pickle=trust_pickle)


def make_objects(
    file: TorchFile, *, trust_pickle: bool, checked: bool = True, has_option: bool = False
) -> dict[str, Any]:
    """Like :func:`read_objects`, for a header that is already parsed.

    Args:
        checked: compare tensors with their checksums.
        has_option: the ``trust_pickle`` option of the ds_config applies to this file, and a refusal names it.
    """
    if not checked:
        file = replace(file, records={name: record._replace(crc=None) for name, record in file.records.items()})
    kept = _drop_tensors(file)
    allowed = None
    if not trust_pickle:
        uses = [file.uses[value] for value in walk(kept) if isinstance(value, Global)]
        allowed = {**_require_allowed(dict.fromkeys(uses, file.path), has_option=has_option), GETATTR: _get_member}
        _check_calls(file, [value for value in walk(kept) if isinstance(value, PickledObject)])
    return _unpickle(file, kept, allowed)


def _get_member(kind: object, name: object) -> Any:
    """``getattr`` for enum members, as Python 3.11.0 to 3.11.3 pickle them."""
    if not (isinstance(kind, type) and issubclass(kind, enum.Enum) and name in kind.__members__):
        raise AttributeError(f"{kind!r} is no enum with a member {name!r}")
    return kind.__members__[str(name)]


def check_trusted(named: Mapping[Use, str]) -> None:
    """Refuse pickled classes whose code DeepSpeed's load would run; values are paths."""
    _require_allowed(named, has_option=True)


def _require_allowed(named: Mapping[Use, str], *, has_option: bool) -> dict[str, Any]:
    """Return all allowed objects by dotted name; refuse ``named`` classes (→ path)."""
    safe = {_dotted_name(value): value for value in safe_classes()}
    harmless = safe | _list_numpy_functions() | {"builtins.Ellipsis": ...}
    consented = torch.serialization.get_safe_globals()  # objects, or pairs of an object and its name
    pairs = [entry if isinstance(entry, tuple) else (entry, _dotted_name(entry)) for entry in consented]
    allowed = {**harmless, **_get_allowed_globals(), **{name: entry for entry, name in pairs}}
    objects = {use: allowed.get(use.kind) or _VALUES.get(use.kind) or _find_imported(use.kind) for use in named}
    unknown = [use for use in named if not _is_allowed(use, objects[use], allowed)]
    if unknown:
        kinds = shorten(dict.fromkeys(use.kind for use in unknown), 20)
        option = ' or set "checkpoint": {"universal": {"trust_pickle": true}}' if has_option else ""
        raise UnsupportedError(
            f"holds objects that are not unpickled without your consent ({kinds}). If you trust "
            f"the checkpoint, allow these classes with torch.serialization.add_safe_globals{option}.",
            path=named[unknown[0]],
        )
    return {**allowed, **{use.kind: value for use, value in objects.items() if not use.member}}


def _drop_tensors(file: TorchFile) -> dict[Any, Any]:
    """Return a state file's entries except model tensors, plus extra states."""
    if not isinstance(file.tree, dict):
        raise CheckpointError(
            f"holds a {type(file.tree).__name__}, a DeepSpeed state file holds a dict.", path=file.path
        )
    kept = {key: value for key, value in file.tree.items() if key not in _BULKY}
    if isinstance(file.tree.get("module"), dict):
        kept[EXTRA_STATES] = select_extra_states(file.tree)
    return kept


def _list_numpy_functions() -> dict[str, Any]:
    """Return numpy's unpickling functions by their names in numpy 1 and numpy 2."""
    core = getattr(np, "_core", None) or np.core
    functions = {"multiarray._reconstruct": core.multiarray._reconstruct, "multiarray.scalar": core.multiarray.scalar}
    functions["numeric._frombuffer"] = core.numeric._frombuffer
    names = {f"numpy.{room}.{name}": function for room in ("core", "_core") for name, function in functions.items()}
    return {**names, "numpy.bool": np.bool_}


def _dotted_name(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"


def _is_allowed(use: Use, value: Any, allowed: Mapping[str, Any]) -> bool:
    """Return True if a pickle's use of an object runs no code of the file's choice.

    Args:
        value: the object in this process; None if no imported package has it.
        allowed: harmless objects, and those that the user or a library consented to (``add_safe_globals``). Consent
            does not let a file choose the code that setting attributes calls.
    """
    if use.member:
        return use.kind == GETATTR or _is_member(use.kind, allowed)
    if use.custom_methods:
        return False
    if use.states and isinstance(value, type) and issubclass(value, enum.Enum):
        return False  # its members are shared by the whole process
    is_value = use.value and (use.kind in _VALUES or _is_value(value, use))
    return use.kind in allowed or is_value or _is_harmless(value, use)


def _is_member(name: str, allowed: Mapping[str, Any]) -> bool:
    """Return True if a name is an enum's member; the file names the class separately."""
    kind, _, member = name.rpartition(".")
    value = allowed.get(kind) or _find_imported(kind)
    return isinstance(value, type) and issubclass(value, enum.Enum) and member in value.__members__


def _find_imported(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(sys.modules.get(module), "__dict__", {}).get(attribute)


def _is_value(value: Any, use: Use) -> bool:
    """Return True if making an instance and setting its attributes runs no class code.

    This holds for dataclasses, and for classes without code that runs implicitly. Classes of the standard library are
    excluded: some of them are tools that execute their attributes.
    """
    if type(value) not in _PLAIN_KINDS or value.__new__ is not object.__new__:
        return False
    classes = [kind for kind in value.__mro__ if kind is not object]
    reviewed = [kind for kind in classes if _dotted_name(kind) in _REVIEWED]
    namespaces = [vars(kind) for kind in classes if kind not in reviewed]
    runs = [item[name] for item in namespaces for name in _RUN_BY_ATTRIBUTES if name in item]
    dicts = [vars(kind).get("__dict__") for kind in classes]
    plain = all(isinstance(item, (types.GetSetDescriptorType, types.NoneType)) for item in dicts)
    listed = "list" in use.states and any("__setstate__" in vars(kind) for kind in reviewed)
    if not plain or listed or not all(item is _FROZEN for item in runs):
        return False
    return bool(reviewed) or hasattr(value, "__dataclass_fields__") or all(map(_runs_no_hooks, classes))


def _runs_no_hooks(kind: type) -> bool:
    """Return True if using an instance runs no class code, such as dunder methods."""
    inert = (types.FunctionType, classmethod, staticmethod, types.GetSetDescriptorType, types.MemberDescriptorType)
    special = [
        name for name in vars(kind) if name.startswith("__") and name.endswith("__") and name not in _QUIET.split()
    ]
    bound = [value for value in vars(kind).values() if hasattr(type(value), "__get__") and not isinstance(value, inert)]
    is_python = bool(kind.__flags__ & _HEAP_TYPE) and "__module__" in vars(kind)
    return is_python and kind.__module__.split(".")[0] not in sys.stdlib_module_names and not special and not bound


def _is_harmless(value: Any, use: Use) -> bool:
    """Return True if unpickling an instance of ``value`` runs only an enum's code."""
    if not isinstance(value, type):
        return isinstance(value, torch.dtype)
    if issubclass(value, (enum.Enum, np.generic)):
        return True
    classes = [kind for kind in value.__mro__ if kind not in (dict, list, object)]
    plain = issubclass(value, (dict, list)) and all(kind.__module__ != "builtins" for kind in classes)
    named = [name for kind in classes for name in vars(kind) if _dotted_name(kind) not in _REVIEWED]
    runs = any(name in named for name in _RUN_BY_PICKLE.split())
    named_by_file = use.called and any("__getattr__" in vars(kind) for kind in classes)  # by an entry's name
    return plain and type(value) in _PLAIN_KINDS and not (runs or named_by_file or any(map(_sets_by_code, classes)))


_PLAIN_KINDS = (type, abc.ABCMeta)
"""Metaclasses whose call runs no code but ``__new__`` and ``__init__``."""

_VALUES: dict[str, Any] = {
    "builtins.range": range,
    "decimal.Decimal": decimal.Decimal,
    "fractions.Fraction": fractions.Fraction,
    "functools.partial": functools.partial,
    "uuid.UUID": uuid.UUID,
}
"""Harmless by themselves. Passed to a call or hashed, they make numbers or lists of any length, or call something."""

_REVIEWED = frozenset(
    [
        "collections.UserDict",
        "transformers.configuration_utils.PreTrainedConfig",
        "transformers.configuration_utils.PretrainedConfig",
        "transformers.integrations.heterogeneity.configuration_utils.HeterogeneousConfigMixin",
        "transformers.generation.configuration_utils.GenerationConfig",
        "transformers.tokenization_utils_base.BatchEncoding",
        "lightning.fabric.utilities.data.AttributeDict",
        "lightning.pytorch.utilities.parsing.AttributeDict",
        "lightning_fabric.utilities.data.AttributeDict",
        "pytorch_lightning.utilities.parsing.AttributeDict",
    ]
)
"""Classes whose source was reviewed: they keep the attributes that they are given, and do nothing else."""

_HEAP_TYPE = 1 << 9
"""``Py_TPFLAGS_HEAPTYPE``: set for classes made by Python code."""

_QUIET = """
    __module__ __qualname__ __doc__ __dict__ __weakref__ __slots__ __annotations__ __init__ __init_subclass__
    __orig_bases__ __parameters__ __abstractmethods__ __firstlineno__ __slotnames__ __static_attributes__ __annotate__
    __annotate_func__ __annotations_cache__ __class_getitem__
"""
"""The special names that a class may have for :func:`_runs_no_hooks`."""


def _sets_by_code(kind: type) -> bool:
    """Return True if setting an instance's attribute may run code of this class."""
    harmless = (types.MemberDescriptorType, types.GetSetDescriptorType)
    values = [value for value in vars(kind).values() if not isinstance(value, harmless)]
    return any(value.fset if isinstance(value, property) else hasattr(type(value), "__set__") for value in values)


_RUN_BY_PICKLE = """
    __new__ __init__ __setstate__ __setitem__ append extend __del__ __getattribute__ __setattr__ __hash__ __eq__
"""
"""Methods that unpickling or discarding an object may call."""


_RUN_BY_ATTRIBUTES = ("__setstate__", "__getattribute__", "__getattr__", "__del__")
_FROZEN = getattr(dataclasses, "_dataclass_setstate", None)
"""The ``__setstate__`` of a frozen dataclass with slots: it bypasses the class's ``__setattr__``."""


def _check_calls(file: TorchFile, calls: Sequence[PickledObject]) -> None:
    """Refuse calls that copy many times the file's size, or whose keys hash endlessly.

    Keys are elements of collections and first parts of pairs, as a call may make a set or dict of them.
    """
    sized = (arg for made in calls for arg in made.args if isinstance(arg, (str, bytes, bytearray, list, tuple)))
    if sum(map(len, sized)) > _COPIES * file.size:
        raise CheckpointError("its objects copy one value over and over; the file is made to harm.", path=file.path)
    for made in calls:
        given = [item for arg in made.args if isinstance(arg, (list, tuple, dict)) for item in arg]
        given += [item[0] for item in given if isinstance(item, (list, tuple)) and item]
        filled = [key for op, operands in made.edits if op == pickle.SETITEMS for key in operands[::2]]
        try:
            check_keys([key for key in (*given, *filled) if isinstance(key, (int, tuple, frozenset))], {})
        except ValueError as error:
            raise CheckpointError(f"{describe(made)} has {error}.", path=file.path) from None


def _unpickle(file: TorchFile, kept: Mapping[Any, Any], allowed: dict[str, Any] | None) -> dict[str, Any]:
    try:
        data = write_pickle(dict(kept), max(file.protocol, PROTOCOL))
        return _ClientUnpickler(data, file, allowed).load()  # type: ignore[no-any-return]
    except UcpError:
        raise
    except Exception as error:  # the data was read before as inert data: code of the objects has failed
        kind = type(error).__name__
        raise UnsupportedError(
            f"its client state cannot be unpickled ({kind}: {error}). Install what its classes "
            "need, as in the run that saved it; for the weights alone use `ds_ucp export`.",
            path=file.path,
        ) from error


class _ClientUnpickler(pickle.Unpickler):
    """Unpickles client state with the allowed classes (None: all), to the CPU."""

    def __init__(self, data: bytes, file: TorchFile, allowed: Mapping[str, Any] | None) -> None:
        super().__init__(io.BytesIO(data))
        self.file, self.allowed = file, allowed
        self.storages: dict[str, Any] = {}

    def find_class(self, module: str, name: str) -> Any:
        if module in ("torch", "torch.storage") and name.endswith("Storage"):
            return getattr(torch, STORAGE_DTYPES.get(name, "uint8"))  # storages are referenced, never created by calls
        kind = Global(module, name).kind
        if self.allowed is not None:
            return self.allowed[kind]
        return _list_numpy_functions().get(kind) or super().find_class(module, name)

    def persistent_load(self, pid: Any) -> Any:
        _storage, dtype, key, _location, numel = pid
        if key not in self.storages:
            data = bytearray().join(open_storage(self.file, key, numel).pieces)
            empty = torch.UntypedStorage(0)
            self.storages[key] = torch.frombuffer(data, dtype=torch.uint8).untyped_storage() if data else empty
        return torch.storage.TypedStorage(wrap_storage=self.storages[key], dtype=dtype, _internal=True)


def safe_classes() -> list[Any]:
    """Return harmless classes that client states and DeepSpeed's headers often have."""
    classes: list[Any] = [
        argparse.Namespace,
        types.SimpleNamespace,
        collections.OrderedDict,
        collections.Counter,
        collections.defaultdict,
        collections.deque,
        datetime.datetime,
        datetime.timedelta,
        datetime.timezone,
        datetime.date,
        datetime.time,
        pathlib.PosixPath,
        pathlib.PurePosixPath,
        *(int, float, bool, str, list, dict, tuple, set, frozenset, slice, complex, bytearray, bytes, object),
        torch.Size,
        torch.Generator,
        np.ndarray,
        np.dtype,
        *{type(np.dtype(code)) for code in np.typecodes["AllInteger"] + np.typecodes["Float"] + "?cSUmM"},
    ]
    return [*classes, *PICKLED]
