"""Read plain data about the model from client state, without building classes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ...errors import CheckpointError
from ...tensor_parallel.metadata import INFO
from ...torchsave.objects import PickledObject, TensorRef, describe, has_more_parts, is_int64, to_number, unwrap_enum

_NUMBERS = ("checkpoint_version", "iteration")
_PLAIN = (str, int, float, bool, type(None))
_MOST_PARTS = 1_000_000  # of each hint, written out in full
_SETS = ("builtins.set", "builtins.frozenset")


def read_hints(tree: Mapping[Any, Any]) -> dict[str, Any]:
    """Read the plain data about the model in a model-states file.

    Its keys are ``universal_checkpoint_info``, ``args``, ``checkpoint_version`` and ``iteration``. Dataclass instances
    become dicts of their fields with their class's name under ``__class__``. ``args`` (a Namespace or a dict, see
    Megatron-DeepSpeed's ``checkpointing.py``) keeps only scalars and lists of scalars.
    """
    for key in (INFO, "args"):
        if has_more_parts(tree.get(key), _MOST_PARTS):
            raise ValueError(f"{key} has more than {_MOST_PARTS} parts")
    hints: dict[str, Any] = {}
    info = simplify_object(tree.get(INFO))
    if isinstance(info, dict):
        hints[INFO] = {key: value for key, value in info.items() if key != "__class__"}
    fields = _get_fields(tree.get("args"))
    if fields is not None:
        plain = {str(key): simplify_object(value) for key, value in fields.items()}
        hints["args"] = {key: value for key, value in plain.items() if _is_basic(value) and _is_basic(fields[key])}
    for key in _NUMBERS:
        value = simplify_object(tree.get(key))
        if isinstance(value, (int, float)):
            hints[key] = value
    return hints


def simplify_object(value: Any) -> Any:
    """Convert an inert object tree to plain data.

    Stand-ins become dicts of fields, 0-dim tensors become numbers, sets become sorted lists. Values without plain form
    (a tensor, a function, an integer with more digits than any setting) become None.
    """
    if isinstance(value, _PLAIN):
        return value if not isinstance(value, int) or is_int64(value) else None
    if isinstance(value, dict):
        return {_simplify_key(key): simplify_object(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [simplify_object(item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, (set, frozenset)):
        return sorted((simplify_object(item) for item in value), key=str)
    if isinstance(value, TensorRef):
        return None if value.data is None else value.item()
    if isinstance(value, PickledObject):
        return _simplify_instance(value)
    return None if (plain := unwrap_enum(value)) is value else plain


def _simplify_key(key: Any) -> Any:
    if isinstance(key, (str, float)) or is_int64(key):
        return key
    return describe(key) if isinstance(key, int) else str(key)


def _simplify_instance(value: PickledObject) -> Any:
    kind = value.kind.rpartition(".")[2]
    fields = _get_fields(value)
    if fields is not None:
        return {"__class__": kind, **{str(key): simplify_object(field) for key, field in fields.items()}}
    if value.kind == "re._compile":  # a compiled pattern: its source
        return value.args[0]
    if value.kind in _SETS and value.args:
        return sorted((simplify_object(item) for item in value.args[0]), key=str)
    if (number := to_number(unwrap_enum(value))) is not value:
        return number
    if value.items and all(isinstance(item, tuple) and len(item) == 2 for item in value.items):  # a kind of dict
        return {key: simplify_object(item) for key, item in value.items}
    return None


def _get_fields(value: Any) -> dict[Any, Any] | None:
    if isinstance(value, dict):
        return value
    if not isinstance(value, PickledObject):
        return None
    if isinstance(value.state, dict):
        return value.state
    if isinstance(value.state, tuple) and len(value.state) == 2:  # ``__dict__`` and ``__slots__``
        parts = [part for part in value.state if isinstance(part, dict)]
        return {key: field for part in parts for key, field in part.items()} if parts else None
    return None


def _is_basic(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(isinstance(item, _PLAIN) for item in value)
    return isinstance(value, _PLAIN) or (isinstance(value, TensorRef) and value.shape == ())


def join_hints(hints: Iterable[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """Merge the hints of every model-parallel rank's file; refuse contradictory ones.

    Ranks may describe only their local parameters: dicts and lists are merged. ``args`` come from the first rank.

    Args:
        hints: (path, hints) of each file, starting with the first model-parallel rank.
    """
    joined: dict[str, Any] = {}
    first = ""
    for path, read in hints:
        if not joined:
            joined, first = dict(read), path
            continue
        for key in (INFO, *_NUMBERS):
            if key in read and read[key] != joined.get(key):
                joined[key] = _merge_values(joined.get(key), read[key], (first, path, key))
    return joined


def _merge_values(one: Any, other: Any, where: tuple[str, str, str]) -> Any:
    if one == other or other is None:
        return one
    if one is None:
        return other
    if isinstance(one, dict) and isinstance(other, dict):
        first, path, key = where
        both = {**one, **other}
        return {name: _merge_values(one.get(name), other.get(name), (first, path, f"{key}[{name!r}]")) for name in both}
    if isinstance(one, list) and isinstance(other, list):
        return [*one, *(item for item in other if item not in one)]
    raise CheckpointError(
        f"its {where[2]} is {other!r}, {where[0]} has {one!r}. The file belongs to another run; put the "
        "right one back.",
        path=where[1],
    )
