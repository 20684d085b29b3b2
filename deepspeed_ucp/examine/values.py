"""Compares values other than tensors: scalars, counters, client state and others.

Client state is compared as stored; none of its code is run.
"""

from __future__ import annotations

import math
import reprlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from ..formats.deepspeed.ownfiles import find_state_file
from ..formats.deepspeed.reading import select_extra_states
from ..io.store import read_bytes
from ..model.index import BATCH_SIZES, INITIAL_SIZES, SCRIPT_BATCH, SHUFFLED, AtomicIndex
from ..model.storage import ITEMSIZE, WEIGHTS, ParamKey
from ..secrets import hide_at
from ..torchsave.objects import PickledObject, TensorRef, describe, to_number
from ..torchsave.torchfile import TorchFile, read_header
from .pairing import list_partners

ABSENT = "(absent)"

LIMIT = 100
"""Largest number of reported differences of the client state."""

TOPOLOGY = ("dp_world_size", "mp_world_size", *BATCH_SIZES, SCRIPT_BATCH, *INITIAL_SIZES, SHUFFLED)
_MODEL = (
    *("module", "optimizer", "buffer_names", "param_shapes", "frozen_param_shapes", "frozen_param_fragments"),
    *("shared_params", "checkpoint_parallel_dimensions", "universal_checkpoint_info", "global_steps"),
    *("global_samples", "skipped_steps", *TOPOLOGY),
)
"""Keys of the model states that the index holds, or that describe the topology."""

_ASIDE = ("ds_config", "ds_version")
"""Keys whose differences are information."""

_SETS = ("builtins.set", "builtins.frozenset")
_PIECE = 4 << 20
_LONGEST = 200
"""Characters of a path."""


@dataclass(frozen=True, slots=True)
class ValueDifference:
    """A value that differs.

    Attributes:
        section: ``scalar``, ``hyper-parameter``, ``counter``, ``scaler``, ``clipping`` or ``client``.
        key: name of the value; a path with dots in the client state.
        left, right: values of A and B; ``ABSENT`` if missing.
    """

    section: str
    key: str
    left: Any
    right: Any
    names: tuple[str, ...] = ()


def compare_values(
    left: AtomicIndex, right: AtomicIndex, names: Mapping[str, str], wants: Callable[[str], bool]
) -> list[ValueDifference]:
    """Compare scalars and hyper-parameters of the parameters that both sides have.

    ``names`` maps A's names to B's where they differ; ``wants`` chooses the parameters.
    """
    differences: list[ValueDifference] = []
    for section, mine, theirs in (
        ("scalar", _list_scalars(left), _list_scalars(right)),
        ("hyper-parameter", _list_hyper(left), _list_hyper(right)),
    ):
        for param in filter(lambda param: wants(param.name), mine):
            partner = next(
                (theirs[candidate] for candidate in list_partners(param, right, names) if candidate in theirs), None
            )
            if partner is None or (section == "hyper-parameter" and not (mine[param] and partner)):
                continue  # missing parameters are reported elsewhere, and some files keep no hyper-parameters
            differences += [
                ValueDifference(section, *candidate, (str(param),))
                for candidate in differ_in_keys(mine[param], partner)
            ]
    return join_alike(differences)


def join_alike(differences: Iterable[ValueDifference]) -> list[ValueDifference]:
    """Join equal differences of several parameters into one."""
    joined: dict[tuple[str, ...], list[ValueDifference]] = defaultdict(list)
    for difference in differences:
        joined[difference.section, difference.key, repr(difference.left), repr(difference.right)].append(difference)
    return [
        replace(alike[0], names=tuple(name for difference in alike for name in difference.names))
        for alike in joined.values()
    ]


def compare_runs(left: AtomicIndex, right: AtomicIndex) -> tuple[list[ValueDifference], list[str]]:
    """Compare counters, scaler, clipping, scheduler and client state of two saves."""
    sections: list[tuple[str, dict[str, Any], dict[str, Any]]] = [("counter", left.counters, right.counters)]
    if _is_scaling(left.scaler) or _is_scaling(right.scaler):
        sections.append(("scaler", left.scaler, right.scaler))
    if left.clip_grad is not None and right.clip_grad is not None:
        sections.append(("clipping", {"clip_grad": left.clip_grad}, {"clip_grad": right.clip_grad}))
    differences = [
        ValueDifference(section, key, a, b)
        for section, mine, theirs in sections
        for key, a, b in differ_in_keys(mine, theirs)
        if key not in TOPOLOGY
    ]
    kept = [("A", _list_hyper(left)), ("B", _list_hyper(right))]
    notes = [f"{side} keeps no hyper-parameters" for side, hyper in kept if hyper and not any(hyper.values())]
    if left.state_file and right.state_file and not (left.format or right.format):
        client, more = _compare_clients(read_header(left.state_file), read_header(right.state_file))
        client += _compare_other_clients(left, right, client)
        differences, notes = differences + client, notes + more
        if left.written_degrees != right.written_degrees:
            notes.append("client states of other model-parallel ranks than the first are not compared")
    return differences, notes


def _compare_other_clients(
    left: AtomicIndex, right: AtomicIndex, known: Sequence[ValueDifference]
) -> Iterator[ValueDifference]:
    """Compare further model-parallel ranks' client states; omit ``known`` differences."""
    tp, pp = left.written_degrees
    for rank in range(1, tp * pp if right.written_degrees == (tp, pp) else 1):
        paths = find_state_file(left, rank), find_state_file(right, rank)
        if paths[0] and paths[1]:
            differences, _ = _compare_clients(read_header(paths[0]), read_header(paths[1]))
            yield from (replace(new, key=f"{new.key} (mp rank {rank})") for new in differences if new not in known)


def is_same(left: Any, right: Any) -> bool:
    """Return True for equal values: also 1 and 1.0, lists and tuples, NaN and NaN."""
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(map(is_same, left, right))
    if isinstance(left, float) and isinstance(right, float) and math.isnan(left):
        return math.isnan(right)
    return bool(left == right)


def differ_in_keys(left: Mapping[str, Any], right: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield (key, value of A, value of B) for each difference; ``ABSENT`` if missing."""
    for key in dict.fromkeys((*left, *right)):
        a, b = left.get(key, ABSENT), right.get(key, ABSENT)
        if not is_same(a, b):
            yield key, a, b


def _list_scalars(index: AtomicIndex) -> dict[ParamKey, dict[str, Any]]:
    """Return each parameter's optimizer scalars, including its group's ``step``."""
    by_param = {key.param: dict[str, Any]() for key in index.atoms if key.state not in WEIGHTS}
    by_param |= {param: dict(scalars) for param, scalars in index.scalars.items()}
    for group in index.groups:
        for param in group.members if "step" in group.hyper else ():
            by_param.setdefault(param, {}).setdefault("step", group.hyper["step"])
    return by_param


def _list_hyper(index: AtomicIndex) -> dict[ParamKey, dict[str, Any]]:
    return {
        param: {key: value for key, value in group.hyper.items() if key != "step"}
        for group in index.groups
        for param in group.members
    }


def _is_scaling(scaler: Mapping[str, Any]) -> bool:
    """Return True if losses are scaled: not by a static scale of 1."""
    return bool(scaler) and (bool(scaler.get("dynamic")) or scaler.get("cur_scale", 1) != 1)


def _compare_clients(left: TorchFile, right: TorchFile) -> tuple[list[ValueDifference], list[str]]:
    mine, theirs = map(_select_client, (left, right))
    differences, notes = [], []
    seen: set[tuple[int, int]] = set()
    for key in dict.fromkeys((*mine, *theirs)):
        a, b = mine.get(key, ABSENT), theirs.get(key, ABSENT)
        if a in (None, ABSENT) and b in (None, ABSENT):  # DeepSpeed saves None for missing values
            continue
        for path, *values in islice(_differ_in_trees(left, right, (str(key), a, b), seen), LIMIT):
            first, second = (describe_value(path, value) for value in values)
            if key in _ASIDE:
                notes.append(f"{path}: {first} → {second}")
            else:
                differences.append(ValueDifference("client", path, first, second))
    return differences, notes


def _select_client(file: TorchFile) -> dict[Any, Any]:
    """Return a state file's entries that the index lacks, and modules' extra states."""
    tree = file.tree if isinstance(file.tree, dict) else {}
    extra = {f"module.{name}": state for name, state in select_extra_states(tree).items()}
    return {key: value for key, value in tree.items() if key not in _MODEL} | extra


def _differ_in_trees(
    left: TorchFile, right: TorchFile, begin: tuple[str, Any, Any], seen: set[tuple[int, int]]
) -> Iterator[tuple[str, Any, Any]]:
    """Yield (path, value of A, value of B) for all differences of two object trees.

    ``seen`` has the compared pairs: shared parts would take exponential time otherwise.
    """
    todo = [begin]
    while todo:
        path, a, b = todo.pop()
        parts = _pair_parts(path, a, b)
        if isinstance(a, TensorRef) and isinstance(b, TensorRef):
            if (other := _describe_other(left, a, right, b)) is not None:
                yield path, _shorten(a), other
        elif parts is None:
            if isinstance(a, PickledObject | TensorRef) or not is_same(a, b):
                yield path, _shorten(a), _shorten(b)
        elif (id(a), id(b)) not in seen:
            seen.add((id(a), id(b)))
            todo += reversed(parts)


def _pair_parts(path: str, left: Any, right: Any) -> list[tuple[str, Any, Any]] | None:
    """Return pairs of parts of two containers or objects by path, or None for others."""
    if isinstance(left, PickledObject) and isinstance(right, PickledObject) and left.kind == right.kind:
        return [(path, a, b) for a, b in zip(_take_apart(left), _take_apart(right), strict=True)]
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        left, right = dict(enumerate(left)), dict(enumerate(right))
    if not (isinstance(left, dict) and isinstance(right, dict)):
        return None
    keys = dict.fromkeys((*left, *right))
    return [(f"{path}.{key}"[:_LONGEST], left.get(key, ABSENT), right.get(key, ABSENT)) for key in keys]


def _take_apart(value: PickledObject) -> tuple[Any, Any, Any]:
    """Return the comparable parts of an object; a set's items are sorted."""
    if value.kind in _SETS and value.args:
        return tuple(sorted(value.args[0], key=describe)), None, []
    return value.args, value.state, value.items


def _describe_other(left: TorchFile, first: TensorRef, right: TorchFile, second: TensorRef) -> str | None:
    """Describe the tensor of B if it differs from the tensor of A, else return None."""
    kinds = [(ref.dtype, ref.shape, ref.stride) for ref in (first, second)]
    if kinds[0] != kinds[1] or (first.data is not None and first.data != second.data):
        return str(_shorten(second))
    ends = sum((size - 1) * stride for size, stride in zip(first.shape, first.stride, strict=True))
    nbytes = (ends + 1 if first.numel else 0) * ITEMSIZE.get(first.dtype, 1)
    for low in range(0, nbytes, _PIECE):
        piece = min(_PIECE, nbytes - low)
        if _read(left, first, low, piece) != _read(right, second, low, piece):
            return "other elements"
    return None


def _read(file: TorchFile, ref: TensorRef, low: int, nbytes: int) -> bytes:
    offset = file.storages[ref.storage.key].offset + ref.offset * ITEMSIZE.get(ref.dtype, 1)
    return read_bytes(file.path, offset + low, nbytes)


class _Words(reprlib.Repr):
    def repr_instance(self, x: Any, level: int) -> str:
        return describe(x)


def describe_value(path: str, value: Any) -> Any:
    """Shorten a value at a path for a message; hide it if it looks like a secret."""
    return value if value is ABSENT else _shorten(hide_at(path, value))


def _shorten(value: Any) -> Any:
    """Shorten a value for a message; plain values are unchanged."""
    value = to_number(value)
    if isinstance(value, int) and value.bit_length() > 64:  # Python refuses to print thousands of digits
        return describe(value)
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, PickledObject):
        return f"object of {describe(value)}"
    text = value if isinstance(value, str) else _Words().repr(value)
    return text if len(text) <= 80 else text[:79] + "…"
