"""Detect files of another save: another step, run, number of ranks or time.

Neither DeepSpeed nor ``torch.save`` gives a save an identity: ``.data/serialization_id`` is a hash of the records'
names and checksums, and zip entries have no times. So all values that the ranks of a launch write alike are compared,
and the file that differs from most is named.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from ...engine_state import KEY
from ...extensions.registry import REGISTRY
from ...model.topology import find_label
from ...torchsave.objects import PickledObject, has_more_parts
from ..findings import FAULT, WARNING, Finding
from .headers import FileHeader
from .save import Save

DEEPSPEEDS = frozenset(
    [
        *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "frozen_param_fragments"),
        *("shared_params", "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names", "ds_config"),
        *("skipped_steps", "global_steps", "global_samples", "dp_world_size", "mp_world_size", "ds_version"),
        *("checkpoint_parallel_dimensions", "autotp_config"),
        *(key for row in REGISTRY for key in row.keys),
    ]
)
"""Keys of a model-states file that DeepSpeed writes (engine.py ``_common_checkpoint_state`` and similar functions)."""

_VERSION, _WRITER, _CONFIG = "ds_version", "the form of its archive", "its whole ds_config"
_SCHEDULER, _CLIENT = "its lr_scheduler", "its client state"
"""Marks: values that are equal in all files; the scheduler and the client state are only in model states."""

_EVERYWHERE = ("kind", "stage", "scaler", "clip_grad", "elastic")
"""Fields of optimizer headers that are equal on all ranks."""

_LIMIT = 20_000
"""Maximum number of values that are hashed; larger trees get no mark."""

Comparison = tuple[Iterable[FileHeader], str, Callable[[FileHeader], Any], str]
"""A value that is equal in all files of a save: the files, its name, its reader, and the severity of a difference."""


def read_marks(tree: Mapping[Any, Any], writer: str) -> dict[str, str]:
    """Return the marks of a state file, each a few bytes.

    Args:
        tree: object tree of the file.
        writer: form of the archive, which differs between torch releases and DeepSpeed's writers.
    """
    others = (*DEEPSPEEDS, "optimizer_state_dict", KEY)  # the plugin's state differs by rank
    client = {key: value for key, value in tree.items() if key not in others}
    marks = {
        _VERSION: str(tree.get("ds_version") or ""),
        _WRITER: writer,
        _CONFIG: _digest(tree.get("ds_config"), _write),
        _SCHEDULER: _digest(tree.get("lr_scheduler"), _write),
        _CLIENT: _digest(client, _keep_letters),
    }
    return {name: mark for name, mark in marks.items() if mark}


def _write(value: Any) -> str:
    """Convert plain data to text; integers of any size to hexadecimal digits."""
    return hex(value) if type(value) is int else str(value)


def _keep_letters(value: Any) -> str:
    """Return a string without digits (``cuda:0``, ``node17``); empty for other values, which may differ by rank."""
    return re.sub(r"\d+", "", value) if isinstance(value, str) else ""


def _digest(value: Any, write: Callable[[Any], str]) -> str:
    """Return a short hash of plain data; empty without data or above the limit."""
    if not value or has_more_parts(value, _LIMIT):
        return ""
    digest, todo = hashlib.sha256(), [value]
    while todo:
        item = todo.pop()
        if isinstance(item, dict):
            digest.update(b"{")
            todo += [part for pair in item.items() for part in pair]
        elif isinstance(item, (list, tuple)):
            digest.update(b"[")
            todo += item
        elif isinstance(item, PickledObject):
            digest.update(item.kind.encode("utf-8", "replace"))
        elif item is None or isinstance(item, (bool, int, float, str)):
            digest.update(write(item).encode("utf-8", "replace") + b";")
    return digest.hexdigest()[:16]


def find_foreign_files(save: Save) -> list[Finding]:
    """Return the first finding for each file of another step, run or world size than most files."""
    by_file: dict[str, Finding] = {}
    differences = (_compare(save, *comparison) for comparison in _list_comparisons(save))
    for finding in chain(_check_world_sizes(save), *differences):
        by_file.setdefault(finding.file, finding)
    return list(by_file.values())


def _check_world_sizes(save: Save) -> Iterator[Finding]:
    most, is_uneven = save.dp * save.tp, any(extension.is_uneven for extension in save.extensions)
    for header in chain(*save.shards):
        counts = header.optim.partition_count if header.optim else ()
        if all(count == save.dp for count in counts):
            continue
        if not is_uneven or not all(0 < count <= most and not most % count for count in counts):
            yield _describe_foreign(save, header, f"was saved by {counts} ranks, the model states say {save.dp}")


def compare_optimizers(headers: Sequence[FileHeader]) -> Iterator[Comparison]:
    """Yield the comparisons of fields that are equal in optimizer files of all ranks."""
    yield from ((headers, name, _read_optim(name), FAULT) for name in _EVERYWHERE)


def _list_comparisons(save: Save) -> Iterator[Comparison]:
    """Yield the comparisons in order of significance: only the first difference of a file is reported."""
    models, shards = list(chain(*save.models)), list(chain(*save.shards))
    files = [*models, *shards]
    yield models, "its step", _read_counters, FAULT
    yield from chain(compare_optimizers(models), compare_optimizers(shards))
    further = [(mp, header) for files in save.further.values() for (mp, *_), header in files.items() if header.optim]
    if further:
        optims = [header for _, header in further]
        yield from compare_optimizers(optims)
        yield optims, "the optimizer's step", read_step, FAULT
        for stage in range(save.pp):
            yield [header for mp, header in further if mp // save.tp == stage], "groups", read_groups, FAULT
    for stage in range(save.pp):
        ranks = slice(stage * save.tp, (stage + 1) * save.tp)
        for same_stage in (save.models[ranks], save.shards[ranks]):
            yield chain(*same_stage), "groups", read_groups, FAULT
    for name in ("partition_count", "alignment"):
        yield from ((headers, name, _read_optim(name), FAULT) for headers in save.shards)
    yield [header for header in files if header.config], "its ds_config", lambda header: header.config, FAULT
    versions, configs = ([header for header in files if mark in header.marks] for mark in (_VERSION, _CONFIG))
    yield versions, _VERSION, _read_mark(_VERSION), FAULT
    yield shards, _WRITER, _read_mark(_WRITER), FAULT  # users sometimes rewrite model states
    yield configs, _CONFIG, _read_mark(_CONFIG), WARNING
    for mark in (_SCHEDULER, _CLIENT):  # a script may save different strings on each rank
        yield models, mark, _read_mark(mark), WARNING


def _read_counters(header: FileHeader) -> dict[str, Any]:
    return {**header.model.counters, "degrees": header.model.degrees} if header.model else {}


def _read_mark(mark: str) -> Callable[[FileHeader], Any]:
    return lambda header: header.marks.get(mark, "")


def _read_optim(attribute: str) -> Callable[[FileHeader], Any]:
    def read(header: FileHeader) -> Any:
        optim = header.optim or (header.model.optim if header.model else None)
        return getattr(optim, attribute) if optim else None

    return read


def read_groups(header: FileHeader) -> Any:
    """Return param groups; labeled ones are sorted, since DeepSpeed's order of these differs by rank."""
    groups = _read_optim("groups")(header)
    return groups and tuple(sorted(groups, key=find_label))


def read_step(header: FileHeader) -> Any:
    """Return the highest step of the optimizer's parameters."""
    optim = header.optim
    values = [*(fields.scalars for fields in optim.tensors), *optim.groups] if optim else []
    return max((fields["step"] for fields in values if isinstance(fields.get("step"), (int, float))), default=None)


def _compare(
    save: Save, headers: Iterable[FileHeader], label: str, read: Callable[[FileHeader], Any], severity: str
) -> Iterator[Finding]:
    alike: list[tuple[Any, list[FileHeader]]] = []
    for header in headers:
        value = read(header)
        # NaN is not equal to itself
        same = (group for known, group in alike if known is value or known == value or repr(known) == repr(value))
        group = next(same, None)
        if group is None:
            alike.append((value, [header]))
        else:
            group.append(header)
    if len(alike) < 2:
        return
    usual, most = max(alike, key=lambda pair: len(pair[1]))
    for value, foreign in alike:
        for header in foreign if foreign is not most else ():
            fault = f"{label} differs from that of {most[0].name} ({_contrast(value, usual)})"
            yield _describe_foreign(save, header, fault, severity)


def _describe_foreign(save: Save, header: FileHeader, fault: str, severity: str = FAULT) -> Finding:
    advice = (
        "The file belongs to another step, run or world size; put the right one back."
        if severity == FAULT
        else "It may be of another step, run or world size, unless the ranks saved different ones on purpose."
    )
    return Finding("foreign", header.name, f"{save.path(header)}: {fault}. {advice}", severity)


def _contrast(mine: Any, other: Any) -> str:
    """Describe the difference of two values; for param groups and dicts, of the differing keys."""
    if isinstance(mine, tuple) and isinstance(other, tuple) and len(mine) == len(other):
        for index, (left, right) in enumerate(zip(mine, other, strict=True)):
            if repr(left) != repr(right) and isinstance(left, dict) and isinstance(right, dict):
                return f"group {index}: {_contrast(left, right)}"
    if isinstance(mine, dict) and isinstance(other, dict):
        keys = [key for key in {**mine, **other} if repr(mine.get(key)) != repr(other.get(key))]
        return ", ".join(f"{key} {mine.get(key)} ≠ {other.get(key)}" for key in keys)
    return f"{mine} ≠ {other}"
