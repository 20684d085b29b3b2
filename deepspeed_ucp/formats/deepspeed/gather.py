"""Gather a save: identify its files, read each header on one rank, compare them.

1. :meth:`.Save.of` sorts the names in the folder by role.
2. :func:`identify_save` reads the first model and optimizer states, and lists the names of all files.
3. All ranks read the other headers, each file on one rank, and exchange them in a compact form.
4. :func:`~.save.arrange_headers` sorts the headers by role; the comparisons return findings.
"""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

from ...comm import Comm
from ...errors import CheckpointError, UcpError, UnsupportedError, shorten
from ...extensions.registry import find_for_save
from ...io.jsonfile import read_json
from ...io.paths import Entry, choose_map, find_tag_folder, is_url, join_path, normalize
from ...io.store import find_entry
from ...model.topology import find_precision
from ...model.wrappers import Form
from ..findings import COPY, WARNING, Finding, from_error, from_failure, make_error
from ..foreign.names import ADAPTER, SAFETENSORS, SCALER, STATE_DICT, TRAINER_STATE, find_format
from ..latest import LATEST, read_tag
from ..locations import FileTable, are_places_alike, describe_hosts, list_variants
from .files import SEAL, Key, read_model_rank, scan_if_there, strip_writer
from .headers import FileHeader, HeaderDelta, HeaderTemplate, encode_header
from .reading import read_file
from .save import Save, arrange_headers, count_ranks, find_foreign_files, name_expected_files

_OVERWRITTEN = (
    " DeepSpeed's fast writer does not truncate files that it overwrites: a save into an existing tag may keep the end "
    "of a longer file. Next time save into a new tag, or delete the old one first."
)

_SLACK = 120.0  # minimum tolerance in seconds between the files of one save

_SLOWEST, _SLOWEST_SHARED = 10 << 20, 256 << 20
"""Bytes per second of the slowest storage: for one file, and for the files of many ranks together."""

ReadResult = FileHeader | Finding
"""A file's header, or the fault that prevents reading it."""


def gather_save(where: FileTable, comm: Comm) -> tuple[Save | None, list[Finding]]:
    """Read and compare a save's headers, each on a rank that sees it (collective).

    Returns:
        The save, or None if it cannot be read at all; and all faults and warnings (those about times on rank 0 only).
    """
    try:
        save = Save.of(where)
    except (CheckpointError, UnsupportedError) as error:
        return None, _explain_unidentified(where.folder, error)
    results = ReadResults(where, comm)
    findings = _identify_together(results, save, comm)
    if not save.first:
        return None, findings
    headers, unreadable = _read_rest(results, save, comm)
    missing = _find_missing(save, _describe_holders(save, comm))
    arranged = arrange_headers(save, headers)
    for more in (unreadable, missing, find_foreign_files(save), _find_foreign_variants(where, save, comm)):
        findings += skip_faulty(more, findings)
    if make_error(findings) is None:
        findings += arranged
    findings += _find_leftovers(save, {SEAL, *save.expected, *(header.name for header in save.headers)})
    return save, findings + (_find_late(where, headers) if comm.rank == 0 else [])


def skip_faulty(more: Iterable[Finding], findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings of ``more`` for files without a fault in ``findings``."""
    faulty = {finding.file for finding in findings if finding.is_fault}
    return [finding for finding in more if finding.file not in faulty]


class ReadResults(dict[str, ReadResult]):
    """The headers or faults of files, each read on first access.

    If ranks see different files, an access is collective, and a rank that sees the file reads it.
    """

    def __init__(self, where: FileTable, comm: Comm) -> None:
        self.where, self.comm = where, comm

    def __missing__(self, name: str) -> ReadResult:
        is_partial = self.where.access.is_partial
        result = self.where.once(name, lambda: self.read(name), self.comm) if is_partial else self.read(name)
        self[name] = result
        return result

    def read(self, name: str) -> ReadResult:
        """Return a file's header from its first readable place, or the fault.

        Not collective. A file without checksums is only read from its first place, as nothing else identifies a copy.
        """
        first = self.where.list_folders(name)[0]

        def read(folder: str) -> FileHeader:
            header = read_file(folder, name)
            if folder != first and not header.checked:
                raise CheckpointError("has no checksums to identify it.", path=join_path(folder, name))
            return header

        try:
            return self.where.read(name, read)
        except UnsupportedError as error:
            return Finding("unsupported", name, str(error))
        except CheckpointError as error:
            # An error of the operating system may occur on one node only; damage is the same for all.
            is_local = isinstance(error.__cause__, OSError) and self.comm.size > 1
            reader = f" (looked at by rank {self.comm.rank})" if is_local else ""
            finding = from_failure("header", name, error)
            advice = _OVERWRITTEN if strip_writer(name) != name else ""
            return replace(finding, text=f"{finding.text}{reader}{advice}")


# -- the first files ---------------------------------------------------------------------------------------------------


def _identify_together(results: ReadResults, save: Save, comm: Comm) -> list[Finding]:
    """Set a save's first headers and expected names; return the faults (collective).

    Rank 0 identifies the save if it sees all files; else each file is read by a rank that sees it.
    """
    if save.where.access.is_partial:
        return identify_save(save, results)
    if comm.rank:  # meanwhile each other rank reads a file that it will probably be assigned
        roles = (save.names["model"] or save.names["model_zero3"], save.names["optim"])
        further = [name for files in roles for _, name in sorted(files.items())[1:]]
        with suppress(Exception):  # a real fault is raised again when the rank is assigned the file
            results[further[comm.rank - 1]]  # fills the cache

    def identify() -> tuple[list[FileHeader], dict[str, str], list[Finding]]:
        faults = identify_save(save, results)
        return save.first, save.expected, faults

    save.first, save.expected, faults = comm.once(identify)
    if comm.rank and save.first:
        save.extensions = find_for_save(save)
    return faults


def identify_save(save: Save, results: ReadResults) -> list[Finding]:
    """Set a save's first headers and expected names, from as few files as possible.

    Returns:
        The faults of the files that were read; if ``save.first`` stays empty, the reason.
    """
    try:
        save.first = _choose_first(save, results)
        save.extensions = find_for_save(save, partial(_find_readable, save, results))
        save.expected = name_expected_files(save)
    except (CheckpointError, UnsupportedError) as error:
        save.first, save.extensions = [], []
        faults = [result for result in results.values() if isinstance(result, Finding)]
        return faults or _explain_unidentified(save.folder, error)
    read = (results.get(name) for name in save.expected)
    return [result for result in read if isinstance(result, Finding)]


def _explain_unidentified(folder: str, error: UcpError) -> list[Finding]:
    """Convert an identification's error to findings ``missing`` or ``unsupported``."""
    return [
        finding if finding.kind == "unsupported" else replace(finding, kind="missing")
        for finding in from_error(folder, error)
    ]


def _find_readable(save: Save, results: ReadResults, role: str, keys: Iterable[Key] | None = None) -> FileHeader | None:
    """Return the first readable header of a role's files, in the order of their ranks."""
    files = save.names[role]
    read = (results[files[key]] for key in sorted(files if keys is None else keys))
    return next((result for result in read if isinstance(result, FileHeader)), None)


def _choose_first(save: Save, results: ReadResults) -> list[FileHeader]:
    """Return the first readable model header and its optimizer header, if any."""
    plain, sharded = (_find_readable(save, results, role) for role in ("model", "model_zero3"))
    candidates = []
    mate = _find_optim(save, results, plain, Form.PARTITIONS)
    optim = plain.require_model().optim if plain else None
    if plain and optim and not optim.traits.is_cut:
        candidates.append([plain])  # it has overwritten the model file of any ZeRO 1/2 shards: these are leftovers
    elif plain and mate:
        candidates.append([plain, mate])
    mate = _find_optim(save, results, sharded, Form.RESERVED)
    if sharded and mate:
        candidates.append([sharded, mate])
    if len(candidates) > 1:
        raise CheckpointError(
            f"holds the files of two saves ({candidates[0][0].name} and {candidates[1][-1].name} "
            "do not belong together). Remove the older save's files.",
            path=save.folder,
        )
    if candidates:
        return candidates[0]
    if plain and (plain.require_model().module or save.names["layer"]) and not save.names["optim"]:
        return [plain]  # weights only: enough for load_optimizer_states=False
    known = next((header.name for header in (plain, sharded) if header), "the model states")
    raise CheckpointError(
        f"the optimizer states that go with {known} are missing; the folder has only "
        f"{shorten(sorted(save.where.entries))}. Copy the whole folder, or load with load_optimizer_states=False if "
        "the model states hold the weights (ZeRO 0-2).",
        path=save.folder,
    )


def _find_optim(save: Save, results: ReadResults, model: FileHeader | None, form: Form) -> FileHeader | None:
    """Return the first readable optimizer header whose layout is ``form``, or None.

    Files with the prefix of the saved precision (engine.py ``_get_zero_ckpt_prefix``) come first.
    """
    if model is None:
        return None
    usual = "bf16_" if find_precision(model.config) == "bfloat16" else ""
    keys = save.names["optim"]
    for prefix in sorted({prefix for prefix, _, _ in keys}, key=lambda prefix: (prefix != usual, prefix)):
        header = _find_readable(save, results, "optim", (key for key in keys if key[0] == prefix))
        if header and header.require_optim().traits.form is form:
            return header
    return None


# -- all other files ---------------------------------------------------------------------------------------------------


def _read_rest(results: ReadResults, save: Save, comm: Comm) -> tuple[list[FileHeader], list[Finding]]:
    """Return ``save.first`` and all other headers, each read by one rank, and faults."""
    first, entries = save.first, save.where.entries
    known = {header.name for header in first}
    names = [name for name in save.expected if name in entries and name not in known]
    further = {name for (_, rank), name in save.names["model_zero3"].items() if rank}
    common, templates = HeaderTemplate(first[-1]), dict[HeaderTemplate, bytes]()

    def read(name: str) -> HeaderDelta | ReadResult:
        result = results.pop(name, None) or results.read(name)  # keep only the compact form of thousands
        if isinstance(result, Finding):
            return result
        return encode_header(_drop_repeated(result, first[0], repeats=name in further), common, templates)

    shared = save.where.share(names, read, comm, choose_map(save.folder), first=1)
    packed = {b"": common}
    decoded = [result.decode(packed) if isinstance(result, HeaderDelta) else result for result in shared]
    headers = [result for result in decoded if isinstance(result, FileHeader)]
    return [*first, *headers], [result for result in decoded if isinstance(result, Finding)]


def _drop_repeated(header: FileHeader, first: FileHeader, *, repeats: bool) -> FileHeader:
    """Drop parts that are used only from the first file's header; add missing degrees.

    ``repeats``: the file repeats the model of its model-parallel rank's first file.
    """
    model, known = header.model, first.require_model()
    if model is None:
        return header
    hints = {} if repeats or model.hints == known.hints else model.hints
    model = replace(model, degrees=model.degrees or known.degrees)
    if repeats:
        model = replace(model, module={}, buffers=(), param_shapes=(), shared={}, facts={})
    return replace(header, model=replace(model, hints=hints, client_storages=()))


# -- faults and warnings ----------------------------------------------------------------------------------------------


def _find_missing(save: Save, holders: str) -> list[Finding]:
    """Return the faults of missing files; ``holders``: see :func:`_describe_holders`."""
    mp, dp = count_ranks(save.first[0].require_model())
    ranks = (f"{mp} model-parallel x " if mp > 1 else "") + f"{dp} data-parallel ranks"
    text = f"the checkpoint was saved by {ranks} and needs all of their files. {COPY}"
    text += f" The machines see different files of it: {holders}." if holders else ""
    return [
        Finding("missing", name, f"{save.path(name)} is missing; {reason or text}")
        for name, reason in save.expected.items()
        if name not in save.where.entries
    ]


def _describe_holders(save: Save, comm: Comm) -> str:
    """Describe each machine's present and former files; empty if equal (collective)."""
    where = save.where
    present = describe_hosts(where)
    if not present:
        return ""
    had = where.once(SEAL, lambda: _read_hosts(save.path(SEAL)), comm) if SEAL in where.entries else {}
    lost = {host: [name for name in names if name not in where.entries] for host, names in had.items()}
    return "; ".join([*(f"{host} had {shorten(names)}" for host, names in lost.items() if names), present])


def _read_hosts(path: str) -> dict[str, list[str]]:
    """Return machine → its files as recorded in a seal; empty if it is unreadable."""
    from .seal import read_seal

    try:
        return read_seal(path).hosts
    except (UcpError, FileNotFoundError):
        return {}


def _find_foreign_variants(where: FileTable, save: Save, comm: Comm) -> list[Finding]:
    """Return faults of nodes' own model states that are of another save (collective)."""
    if not where.access.is_partial:
        return []
    read = comm.gather_results(lambda: [_read_variant(folder, name) for folder, name in list_variants(where)])
    variants = [header for headers in read for header in headers if header.model]
    models = [[*headers] for headers in save.models]
    for header in variants:
        mp = read_model_rank(header.name.partition(" ")[0])
        if mp is not None and mp < len(models):
            models[mp].append(_drop_repeated(header, save.main, repeats=True))
    names = {header.name for header in variants}
    return [
        fault for fault in find_foreign_files(replace(save, models=models)) if fault.file in names and fault.is_fault
    ]


def _read_variant(folder: str, name: str) -> FileHeader:
    """Return the header of a node's own file, named with the host; empty on failure."""
    label = f"{name} of {socket.gethostname()}"
    try:
        return replace(read_file(folder, name), name=label)
    except (CheckpointError, UnsupportedError):
        return FileHeader(label, 0, None)


def _find_leftovers(save: Save, expected: Iterable[str]) -> Iterator[Finding]:
    """Yield a warning for every file that no load reads."""
    files = (name for name, entry in save.where.entries.items() if not entry.is_folder)
    for name in sorted(name for name in files if name not in expected):
        of = save.copies.get(name)
        why = f"another rank's copy of {of}" if of else "left by an earlier save into this folder"
        text = f"{save.path(name)}: {why}; it is not loaded."
        yield Finding("leftover", name, text, WARNING, (of,) if of else ())


def _find_late(where: FileTable, headers: Sequence[FileHeader]) -> list[Finding]:
    """Warn of files written at another time; judge copies of a save place by place."""
    names = [header.name for header in headers]
    late = find_late_files(where.folder, where.entries, names)
    if not late or not are_places_alike(where, {header.name: header.crc for header in headers}):
        return late
    places = zip(where.folders, where.visible, strict=True)
    return [finding for folder, entries in places for finding in find_late_files(folder, entries, names)]


# -- times and steps ---------------------------------------------------------------------------------------------------


def find_late_files(folder: str, entries: Mapping[str, Entry], used: Sequence[str]) -> list[Finding]:
    """Warn if modification times show that a save's files were not written together.

    This is only a warning, since copies and restored files have other times and clocks differ.

    ``entries``: its files; an unknown time is 0.
    """
    times = sorted((entries[name].changed, name) for name in used if name in entries and entries[name].changed)
    if not times:
        return []
    sizes = [entries[name].size for _, name in times]
    slack = _SLACK + max(max(sizes) / _SLOWEST, sum(sizes) / _SLOWEST_SHARED)
    gap = _find_gap(folder, times, slack) if times[1:] else None
    return [gap] if gap else _find_unfinished(folder, times, slack)


def _find_gap(folder: str, times: Sequence[tuple[float, str]], slack: float) -> Finding | None:
    """Warn of one gap of more than ``slack`` and twice the remaining time span."""
    gap, at = max((after[0] - before[0], at) for at, (before, after) in enumerate(pairwise(times), 1))
    rest = times[-1][0] - times[0][0] - gap
    if gap <= max(slack, 2 * rest):
        return None
    older, newer = [name for _, name in times[:at]], [name for _, name in times[at:]]
    fewer, others = (older, "before") if len(older) < len(newer) else (newer, "after")
    text = (
        f"{folder}: {shorten(fewer)} were written {_format_duration(gap)} {others} the other files. An interrupted "
        "save over an older one leaves files of both, which no other check may detect; load another tag in that case."
    )
    return Finding("times", fewer[0], text, WARNING, tuple(fewer))


def _find_unfinished(folder: str, times: Sequence[tuple[float, str]], slack: float) -> list[Finding]:
    """Warn of files written before and after ``latest``, else of newer weights."""
    parent, tag = os.path.split(normalize(find_tag_folder(folder)))
    path = os.path.join(parent, LATEST)
    try:
        entry = find_entry(path)
        late = [name for changed, name in times if entry and changed > entry.changed + slack]
        are_two = 0 < len(late) < len(times)
        if entry is None or (is_url(path) and not are_two) or read_tag(path) != tag:
            return []
        if not are_two:
            return _find_newer(folder, max(entry.changed, times[-1][0]), slack)
    except (OSError, CheckpointError):
        return []
    text = (
        f"{folder}: {shorten(late)} were written after `{LATEST}`, the other files before it. A save into this tag may "
        "have been cut off; load another tag in that case."
    )
    return [Finding("times", late[0], text, WARNING, tuple(late))]


def _find_newer(folder: str, written: float, slack: float) -> list[Finding]:
    """Warn of a trainer's weights in the parent folder, saved after ``written``."""
    entries = scan_if_there(os.path.dirname(normalize(find_tag_folder(folder))))
    late = sorted(name for name, entry in entries.items() if entry.changed > written + slack)
    weights = [name for name in late if find_format([name]) in (SAFETENSORS, STATE_DICT, ADAPTER)]
    if not weights or TRAINER_STATE not in late:
        return []
    text = (
        f"{folder}: {shorten(weights)} and {TRAINER_STATE} in its parent folder were written "
        f"{_format_duration(entries[weights[0]].changed - written)} later. If they are of a save of weights alone "
        f"(save_only_model), this tag is older; to start from these weights, move the tag and `{LATEST}` away."
    )
    return [Finding("times", weights[0], text, WARNING)]


def find_step_mismatch(file: str, steps: Any, counted: Any = None) -> list[Finding]:
    """Warn if a step count differs from the optimizer's by more than skipped steps.

    The optimizer may have taken fewer steps: a trainer also counts steps that fp16 has skipped and, with DeepSpeed and
    older versions of Accelerate, the incomplete last step of each epoch.

    Args:
        steps: steps of the optimizer; 0 or None if unknown.
        counted: step of the file; by default it is read from the file, a trainer's state on a file system.
    """
    fewer: float = 0
    if counted is None and not is_url(file):
        with suppress(OSError, CheckpointError, ValueError, TypeError, OverflowError):
            state = read_json(file)
            counted, fewer = state.get("global_step"), math.ceil(state.get("epoch") or 0)
            fewer = math.inf if find_entry(os.path.join(os.path.dirname(file), SCALER)) else fewer
    if type(counted) is not int or not steps or counted - fewer <= steps <= counted:
        return []
    text = (
        f"{file}: counts {counted} steps, the optimizer {steps}. They are of two saves, unless steps were skipped or "
        "one of them was restarted."
    )
    return [Finding("foreign", os.path.basename(file), text, WARNING)]


def _format_duration(seconds: float) -> str:
    for unit, name in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds:.0f} seconds"
