"""Comparing what is not an element: scalars, hyper-parameters, counters, scaler, scheduler and client state.

Client state is compared as it lies in the files, without running any of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from ..atoms import ITEMSIZE, AtomicIndex, ParamKey
from ..io.store import read_bytes
from ..torchsave.objects import Global, PickledObject, TensorRef, describe, to_number
from ..torchsave.torchfile import TorchFile, read_header

ABSENT = "(absent)"
"""Stands for a value that one side does not have."""

LIMIT = 100
"""Differences of the client state that are told."""

TOPOLOGY = ("dp_world_size", "mp_world_size")
_MODEL = (
    *("module", "optimizer", "buffer_names", "param_shapes", "frozen_param_shapes", "frozen_param_fragments"),
    *("shared_params", "checkpoint_parallel_dimensions", "universal_checkpoint_info", "global_steps"),
    *("global_samples", "skipped_steps", *TOPOLOGY),
)
"""Keys of the model states that the index tells, or that describe the topology."""

_ASIDE = ("ds_config", "ds_version")
"""Keys whose differences are information."""

_SETS = ("builtins.set", "builtins.frozenset")
_PIECE = 4 << 20


@dataclass(frozen=True, slots=True)
class ValueDifference:
    """A value that is not the same.

    Attributes:
        section: ``scalar``, ``hyper-parameter``, ``counter``, ``scaler``, ``clipping`` or ``client``.
        key: which; a path with dots in the client state.
        left, right: of A and B; ``ABSENT`` where there is none.
        names: the parameters it concerns.
    """

    section: str
    key: str
    left: Any
    right: Any
    names: tuple[str, ...] = ()


def compare_values(
    left: AtomicIndex, right: AtomicIndex, names: Mapping[str, str], wants: Callable[[str], bool]
) -> list[ValueDifference]:
    """Scalars and hyper-parameters of the parameters that both have, alike differences joined.

    Args:
        names: A's names → B's, of those that differ.
        wants: whether a parameter is compared.
    """
    found: dict[tuple[str, str, str, str], tuple[Any, Any, list[str]]] = {}
    for section, mine, theirs in (
        ("scalar", _list_scalars(left), _list_scalars(right)),
        ("hyper-parameter", _list_hyper(left), _list_hyper(right)),
    ):
        for param in mine:
            partner = theirs.get(_find_partner(param, right, theirs, names)) if wants(param.name) else None
            if partner is None or (section == "hyper-parameter" and not (mine[param] and partner)):
                continue  # the atoms tell what one side lacks, and some files keep no hyper-parameters
            for key, a, b in _differ_in_keys(mine[param], partner):
                found.setdefault((section, key, repr(a), repr(b)), (a, b, []))[2].append(str(param))
    return [ValueDifference(section, key, a, b, tuple(held)) for (section, key, *_), (a, b, held) in found.items()]


def compare_runs(left: AtomicIndex, right: AtomicIndex) -> tuple[list[ValueDifference], list[str]]:
    """Counters, scaler, clipping, scheduler and client state; and in words what is only information.

    Raises:
        CheckpointError: a state file cannot be read.
    """
    found = [
        ValueDifference("counter", key, a, b)
        for key, a, b in _differ_in_keys(left.run.counters, right.run.counters)
        if key not in TOPOLOGY
    ]
    if _is_scaling(left.run.scaler) or _is_scaling(right.run.scaler):
        found += [
            ValueDifference("scaler", key, a, b) for key, a, b in _differ_in_keys(left.run.scaler, right.run.scaler)
        ]
    notes = [
        f"{side} keeps no hyper-parameters" for side, index in (("A", left), ("B", right)) if not _keeps_hyper(index)
    ]
    clipping = (left.run.clip_grad, right.run.clip_grad)
    if None not in clipping and not is_same(*clipping):
        found.append(ValueDifference("clipping", "clip_grad", *clipping))
    if left.run.state_file and right.run.state_file:
        client, told = _compare_clients(read_header(left.run.state_file), read_header(right.run.state_file))
        found, notes = found + client, notes + told
    return found, notes


def is_same(left: Any, right: Any) -> bool:
    """Equal as values: 1 and 1.0, lists and tuples, NaN and NaN."""
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(map(is_same, left, right))
    if isinstance(left, float) and isinstance(right, float) and math.isnan(left):
        return math.isnan(right)
    return bool(left == right)


def _open(value: PickledObject) -> tuple[Any, Any, Any]:
    """What two objects of a class are compared by; a set's items come in any order."""
    if value.kind in _SETS and value.args:
        return tuple(sorted(value.args[0], key=describe)), None, []
    return value.args, value.state, value.items


def _differ_in_keys(left: Mapping[str, Any], right: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    for key in dict.fromkeys((*left, *right)):
        a, b = left.get(key, ABSENT), right.get(key, ABSENT)
        if not is_same(a, b):
            yield key, a, b


def _find_partner(
    param: ParamKey, index: AtomicIndex, held: Mapping[ParamKey, Any], names: Mapping[str, str]
) -> ParamKey:
    name = names.get(param.name, param.name)
    candidates = (ParamKey(name, param.instance), ParamKey(name), ParamKey(index.resolve(name)))
    return next((each for each in candidates if each in held), candidates[1])


def _list_scalars(index: AtomicIndex) -> dict[ParamKey, dict[str, Any]]:
    """Per parameter; ``step`` may be kept with the group."""
    found = {param: dict(scalars) for param, scalars in index.run.scalars.items()}
    for group in index.run.groups:
        for param in group.members if "step" in group.hyper else ():
            found.setdefault(param, {}).setdefault("step", group.hyper["step"])
    return found


def _list_hyper(index: AtomicIndex) -> dict[ParamKey, dict[str, Any]]:
    return {
        param: {key: value for key, value in group.hyper.items() if key != "step"}
        for group in index.run.groups
        for param in group.members
    }


def _keeps_hyper(index: AtomicIndex) -> bool:
    held = _list_hyper(index)
    return not held or any(held.values())


def _is_scaling(scaler: Mapping[str, Any]) -> bool:
    """A static scale of 1 is none."""
    return bool(scaler) and (bool(scaler.get("dynamic")) or scaler.get("cur_scale", 1) != 1)


def _compare_clients(left: TorchFile, right: TorchFile) -> tuple[list[ValueDifference], list[str]]:
    trees = [file.tree if isinstance(file.tree, dict) else {} for file in (left, right)]
    mine, theirs = ({key: value for key, value in tree.items() if key not in _MODEL} for tree in trees)
    comparer = _Comparer(left, right)
    found, notes = [], []
    for key in dict.fromkeys((*mine, *theirs)):
        a, b = mine.get(key, ABSENT), theirs.get(key, ABSENT)
        if a in (None, ABSENT) and b in (None, ABSENT):
            continue  # DeepSpeed keeps None where it has nothing
        for place, first, second in islice(comparer.differ(a, b, str(key)), LIMIT):
            if key in _ASIDE:
                notes.append(f"{place}: {first} → {second}")
            else:
                found.append(ValueDifference("client", place, first, second))
    return found, notes


class _Comparer:
    """Compares two object trees, with the bytes of their tensors."""

    def __init__(self, left: TorchFile, right: TorchFile) -> None:
        self.left, self.right = left, right
        self.seen: set[tuple[int, int]] = set()

    def differ(self, left: Any, right: Any, place: str) -> Iterator[tuple[str, Any, Any]]:
        """(path, of A, of B) of everything that differs."""
        if isinstance(left, TensorRef) and isinstance(right, TensorRef):
            yield from self._differ_tensors(left, right, place)
        elif isinstance(left, PickledObject) and isinstance(right, PickledObject) and left.kind == right.kind:
            if (id(left), id(right)) not in self.seen:
                self.seen.add((id(left), id(right)))
                for a, b in zip(_open(left), _open(right), strict=True):
                    yield from self.differ(a, b, place)
        elif type(left) is type(right) and isinstance(left, (dict, list, tuple)):
            if (id(left), id(right)) not in self.seen:
                self.seen.add((id(left), id(right)))
                yield from self._differ_parts(left, right, place)
        elif not _is_same_leaf(left, right):
            yield place, _tell(left), _tell(right)

    def _differ_parts(self, left: Any, right: Any, place: str) -> Iterator[tuple[str, Any, Any]]:
        if not isinstance(left, dict):
            left, right = dict(enumerate(left)), dict(enumerate(right))
        for key in dict.fromkeys((*left, *right)):
            if key not in left or key not in right:
                yield f"{place}.{key}", _tell(left.get(key, ABSENT)), _tell(right.get(key, ABSENT))
            else:
                yield from self.differ(left[key], right[key], f"{place}.{key}")

    def _differ_tensors(self, left: TensorRef, right: TensorRef, place: str) -> Iterator[tuple[str, Any, Any]]:
        kinds = [(ref.dtype, ref.shape, ref.stride) for ref in (left, right)]
        if kinds[0] != kinds[1] or (left.data is not None and left.data != right.data):
            yield place, _tell(left), _tell(right)
            return
        size = ITEMSIZE.get(left.dtype, 1)
        for low in range(0, _span(left) * size, _PIECE):
            nbytes = min(_PIECE, _span(left) * size - low)
            if self._read(self.left, left, low, nbytes) != self._read(self.right, right, low, nbytes):
                yield place, f"{_tell(left)}", "other elements"
                return

    @staticmethod
    def _read(file: TorchFile, ref: TensorRef, low: int, nbytes: int) -> bytes:
        offset = file.storages[ref.storage.key].offset + ref.offset * ITEMSIZE.get(ref.dtype, 1)
        return read_bytes(file.path, offset + low, nbytes)


def _is_same_leaf(left: Any, right: Any) -> bool:
    return not isinstance(left, (TensorRef, PickledObject)) and is_same(left, right)


def _span(ref: TensorRef) -> int:
    """Elements from a tensor's first to its last."""
    if not ref.numel:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(ref.shape, ref.stride, strict=True))


def _tell(value: Any) -> Any:
    """A value for a message: plain ones as they are, others in a few words."""
    value = to_number(value)
    if isinstance(value, PickledObject):
        return f"object of {value.kind}"
    if isinstance(value, (Global, TensorRef)):
        return describe(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value if not isinstance(value, str) or len(value) <= 80 else value[:79] + "…"
    text = repr(value)
    return text if len(text) <= 80 else text[:79] + "…"
