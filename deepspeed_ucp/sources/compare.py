"""Whether files belong together: same step, same run, same number of ranks, written in one go.

DeepSpeed gives a save no identity, and ``torch.save`` writes none: its ``.data/serialization_id`` is a hash of the
records' names and checksums, its zip entries have no times. So everything is compared that every rank of a launch
writes alike, and the file that differs from most is named.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain, pairwise
from typing import Any

from ..engine_state import KEY
from ..errors import CheckpointError, shorten
from ..io.jsonfile import read_json
from ..io.paths import find_tag_folder, is_url, normalize
from ..io.store import find_entry
from ..torchsave.objects import PickledObject, has_more_parts
from .files import Entry, scan_if_there
from .findings import FAULT, WARNING, Finding
from .foreign.names import ADAPTER, SAFETENSORS, SCALER, STATE_DICT, TRAINER_STATE, find_format
from .headers import FileHeader
from .latest import LATEST, read_tag
from .save import Save

DEEPSPEEDS = frozenset(
    [
        *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "frozen_param_fragments"),
        *("shared_params", "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names", "ds_config"),
        *("skipped_steps", "global_steps", "global_samples", "dp_world_size", "mp_world_size", "ds_version"),
        *("checkpoint_parallel_dimensions", "num_experts", "autotp_config", "ds_autoep_layers"),
    ]
)
"""Keys of a model-states file that DeepSpeed writes (engine.py ``_common_checkpoint_state`` and kin)."""

_VERSION, _WRITER, _CONFIG = "ds_version", "the form of its archive", "its whole ds_config"
_SCHEDULER, _CLIENT = "its lr_scheduler", "its client state"
"""Marks: what all files have alike; the scheduler and the client state are in the model states alone."""

_EVERYWHERE = ("kind", "stage", "scaler", "clip_grad", "elastic")
"""Fields of the optimizer's headers that all ranks have alike."""

_LIMIT = 20_000
"""Values that are looked at; what is larger gets no mark."""

_SLACK = 120.0
"""Seconds that the files of one save may lie apart in any case."""

_SLOWEST, _SLOWEST_SHARED = 10 << 20, 256 << 20
"""Bytes per second at which the slowest storage writes a file, or is copied to, and that of many ranks all files."""

Comparison = tuple[Iterable[FileHeader], str, Callable[[FileHeader], Any], str]
"""Something that files of one save have alike: which files, what it is called, where a header has it; its severity."""


def read_marks(tree: Mapping[Any, Any], writer: str) -> dict[str, str]:
    """The marks of a state file, each a few bytes.

    Args:
        tree: its object tree.
        writer: the form of its archive, which differs between torch releases and DeepSpeed's writers.
    """
    others = (*DEEPSPEEDS, "optimizer_state_dict", KEY)  # what a save carries is a rank's own
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
    """Integers in hexadecimal digits, of which there may be any number."""
    return hex(value) if type(value) is int else str(value)


def _keep_letters(value: Any) -> str:
    """A string without its digits (``cuda:0``, ``node17``); nothing of other values, which may be a rank's own."""
    return re.sub(r"\d+", "", value) if isinstance(value, str) else ""


def _digest(value: Any, write: Callable[[Any], str]) -> str:
    """A short hash of plain data; empty where there is none, or too much of it."""
    if not value or has_more_parts(value, _LIMIT):
        return ""
    found, todo = hashlib.sha256(), [value]
    while todo:
        each = todo.pop()
        if isinstance(each, dict):
            found.update(b"{")
            todo += [part for pair in each.items() for part in pair]
        elif isinstance(each, (list, tuple)):
            found.update(b"[")
            todo += each
        elif isinstance(each, PickledObject):
            found.update(each.kind.encode("utf-8", "replace"))
        elif each is None or isinstance(each, (bool, int, float, str)):
            found.update(write(each).encode("utf-8", "replace") + b";")
    return found.hexdigest()[:16]


def find_foreign_files(save: Save) -> list[Finding]:
    """A finding for every file that is of another step, run or world size than most; of two the first one counts."""
    found: dict[str, Finding] = {}
    for finding in chain(_check_world_sizes(save), *(_compare(save, *each) for each in _list_comparisons(save))):
        found.setdefault(finding.file, finding)
    return list(found.values())


def _check_world_sizes(save: Save) -> Iterator[Finding]:
    most = save.dp * save.tp
    for header in chain(*save.shards):
        counts = header.optim.partition_count if header.optim else ()
        if all(count == save.dp for count in counts):
            continue
        # Groups of experts are cut over fewer ranks; whether there are any is asked last, as the file may be missing.
        if not all(0 < count <= most and not most % count for count in counts) or not save.model(0).experts:
            yield _describe_foreign(save, header, f"was saved by {counts} ranks, the model states say {save.dp}")


def _list_comparisons(save: Save) -> Iterator[Comparison]:
    """The comparisons in the order in which they tell: the first that fails is what is told of a file."""
    models, shards = list(chain(*save.models)), list(chain(*save.shards))
    files = [*models, *shards]
    yield models, "its step", _read_counters, FAULT
    experts = list(save.expert_optims.values())
    for headers in (models, shards, experts):
        yield from ((headers, each, _read_optim(each), FAULT) for each in _EVERYWHERE)
    yield experts, "the optimizer's step", _read_step, FAULT
    for stage in range(save.pp):
        ranks = slice(stage * save.tp, (stage + 1) * save.tp)
        of_stage = [header for (mp, _), header in save.expert_optims.items() if mp // save.tp == stage]
        for held in (of_stage, chain(*save.models[ranks]), chain(*save.shards[ranks])):
            yield held, "groups", _read_groups, FAULT
    for each in ("partition_count", "alignment"):
        yield from ((held, each, _read_optim(each), FAULT) for held in save.shards)
    yield [header for header in files if header.config], "its ds_config", lambda header: header.config, FAULT
    versions, configs = ([header for header in files if mark in header.marks] for mark in (_VERSION, _CONFIG))
    yield versions, _VERSION, _read_mark(_VERSION), FAULT  # of experts' model states older releases tell neither
    yield shards, _WRITER, _read_mark(_WRITER), FAULT  # model states are rewritten by hand now and then
    yield configs, _CONFIG, _read_mark(_CONFIG), WARNING
    for mark in (_SCHEDULER, _CLIENT):  # a client may well give each rank strings of its own
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


def _read_groups(header: FileHeader) -> Any:
    """Param groups; those of experts by name: of several degrees DeepSpeed makes them in any order on each rank."""
    groups = _read_optim("groups")(header)
    return groups and tuple(sorted(groups, key=lambda group: str(group.get("name")) if group.get("moe") else ""))


def _read_step(header: FileHeader) -> Any:
    """The last step that the optimizer has taken with any of its parameters."""
    optim = header.optim
    held = [*(each.scalars for each in optim.tensors), *optim.groups] if optim else []
    return max((each["step"] for each in held if isinstance(each.get("step"), (int, float))), default=None)


def _compare(
    save: Save, headers: Iterable[FileHeader], what: str, read: Callable[[FileHeader], Any], severity: str
) -> Iterator[Finding]:
    alike: list[tuple[Any, list[FileHeader]]] = []
    for header in headers:
        value = read(header)
        # NaN is not equal to itself
        same = (held for known, held in alike if known is value or known == value or repr(known) == repr(value))
        held = next(same, None)
        if held is None:
            alike.append((value, [header]))
        else:
            held.append(header)
    if len(alike) < 2:
        return
    usual, most = max(alike, key=lambda each: len(each[1]))
    for value, foreign in alike:
        for header in foreign if foreign is not most else ():
            fault = f"{what} differs from that of {most[0].name} ({_contrast(value, usual)})"
            yield _describe_foreign(save, header, fault, severity)


def _describe_foreign(save: Save, header: FileHeader, fault: str, severity: str = FAULT) -> Finding:
    advice = (
        "The file belongs to another step, run or world size; put the right one back."
        if severity == FAULT
        else "It may be of another step, run or world size, unless the ranks saved different ones on purpose."
    )
    return Finding("foreign", header.name, f"{save.path(header)}: {fault}. {advice}", severity)


def _contrast(mine: Any, other: Any) -> str:
    """What two values differ in; of param groups and dicts the keys."""
    if isinstance(mine, tuple) and isinstance(other, tuple) and len(mine) == len(other):
        for index, (left, right) in enumerate(zip(mine, other, strict=True)):
            if repr(left) != repr(right) and isinstance(left, dict) and isinstance(right, dict):
                return f"group {index}: {_contrast(left, right)}"
    if isinstance(mine, dict) and isinstance(other, dict):
        keys = [key for key in {**mine, **other} if repr(mine.get(key)) != repr(other.get(key))]
        return ", ".join(f"{key} {mine.get(key)} ≠ {other.get(key)}" for key in keys)
    return f"{mine} ≠ {other}"


def find_late_files(folder: str, entries: Mapping[str, Entry], used: Sequence[str]) -> list[Finding]:
    """A warning where a save's files were not written in one go, by the times of their last change.

    A copy may have times of its own, a restored file has a newer one, and clocks differ: so it is no more.

    Args:
        folder: the tag's folder.
        entries: its files; the time of one of which it is not known is 0.
        used: those of the save.
    """
    times = sorted((entries[name].changed, name) for name in used if name in entries and entries[name].changed)
    if not times:
        return []
    sizes = [entries[name].size for _, name in times]
    slack = _SLACK + max(max(sizes) / _SLOWEST, sum(sizes) / _SLOWEST_SHARED)
    gap = _find_gap(folder, times, slack) if times[1:] else None
    return [gap] if gap else _find_unfinished(folder, times, slack)


def _find_gap(folder: str, times: Sequence[tuple[float, str]], slack: float) -> Finding | None:
    """One gap that is longer than all the rest: two saves, or a file that was put there later."""
    gap, at = max((after[0] - before[0], at) for at, (before, after) in enumerate(pairwise(times), 1))
    rest = times[-1][0] - times[0][0] - gap
    if gap <= max(slack, 2 * rest):
        return None
    older, newer = [name for _, name in times[:at]], [name for _, name in times[at:]]
    fewer, others = (older, "before") if len(older) < len(newer) else (newer, "after")
    text = (
        f"{folder}: {shorten(fewer)} were written {_name_span(gap)} {others} the other files. A save over an older one "
        "that was cut off leaves files of two, which nothing else may tell; load another one if that is what happened."
    )
    return Finding("times", fewer[0], text, WARNING, tuple(fewer))


def _find_unfinished(folder: str, times: Sequence[tuple[float, str]], slack: float) -> list[Finding]:
    """``latest`` is written after all files of a save: some older and some newer are those of two saves."""
    parent, tag = os.path.split(normalize(find_tag_folder(folder)))
    path = os.path.join(parent, LATEST)
    try:
        told = find_entry(path)
        late = [name for changed, name in times if told and changed > told.changed + slack]
        are_two = 0 < len(late) < len(times)
        if told is None or (is_url(path) and not are_two) or read_tag(path) != tag:
            return []
        if not are_two:
            return _find_newer(folder, max(told.changed, times[-1][0]), slack)
    except (OSError, CheckpointError):
        return []
    text = (
        f"{folder}: {shorten(late)} were written after `{LATEST}`, the other files before it. A save into this tag may "
        "have been cut off; load another tag if that is what happened."
    )
    return [Finding("times", late[0], text, WARNING, tuple(late))]


def _find_newer(folder: str, written: float, slack: float) -> list[Finding]:
    """A trainer that saves weights alone where it saved all before leaves the older save's tag, of time ``written``."""
    held = scan_if_there(os.path.dirname(normalize(find_tag_folder(folder))))
    late = sorted(name for name, each in held.items() if each.changed > written + slack)
    weights = [name for name in late if find_format([name]) in (SAFETENSORS, STATE_DICT, ADAPTER)]
    if not weights or TRAINER_STATE not in late:
        return []
    text = (
        f"{folder}: {shorten(weights)} and {TRAINER_STATE} beside it were written "
        f"{_name_span(held[weights[0]].changed - written)} later. If they are of a save of weights alone "
        f"(save_only_model), what this tag holds is older; to begin with them, move the tag and `{LATEST}` away."
    )
    return [Finding("times", weights[0], text, WARNING)]


def find_other_step(file: str, steps: Any, told: Any = None) -> list[Finding]:
    """A warning where what lies beside tensors is of another step than these.

    A trainer counts steps that fp16 has skipped and, of DeepSpeed's with older versions of Accelerate, an epoch's last
    one that lacks batches to accumulate: the optimizer then has taken fewer.

    Args:
        file: that tells of a step, by its path.
        steps: that the optimizer has taken; 0 or None where nothing tells.
        told: that step; without it the file is a trainer's state, which is read, unless it is a store's.
    """
    fewer: float = 0
    if told is None and not is_url(file):
        with suppress(OSError, CheckpointError, ValueError, TypeError, OverflowError):
            state = read_json(file)
            told, fewer = state.get("global_step"), math.ceil(state.get("epoch") or 0)
            fewer = math.inf if find_entry(os.path.join(os.path.dirname(file), SCALER)) else fewer
    if type(told) is not int or not steps or told - fewer <= steps <= told:
        return []
    text = (
        f"{file}: tells of step {told}, the optimizer of {steps}. They are of two saves, unless steps were skipped, or "
        "one of them was begun anew."
    )
    return [Finding("foreign", os.path.basename(file), text, WARNING)]


def _name_span(seconds: float) -> str:
    for unit, name in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds:.0f} seconds"
