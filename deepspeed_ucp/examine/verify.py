"""Looks at every byte of a checkpoint: checksums of all records, and whether its files make up one whole save."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from ..atoms import AtomicIndex
from ..comm import Comm
from ..errors import CheckpointError, ConfigError, MismatchError, UcpError, UnsupportedError, shorten
from ..io.scan import ScanFile, Scanned, scan_files
from ..sources import open_checkpoint
from ..sources.atomic import is_atomic
from ..sources.atomic.manifest import Manifest, read_manifest
from ..sources.files import MANIFEST
from ..sources.samples import check_samples
from ..sources.survey import find_old_files, survey_folder
from ..stream.progress import Bar, default_workers, no_bar
from ..torchsave.records import FileRecords, list_records
from .faults import Fault, judge_file, name_contents
from .inventory import compare_contents, compare_names


@dataclass(frozen=True, slots=True)
class FileReport:
    """A file that was looked at: bytes, records, and the bytes of records without a checksum."""

    name: str
    nbytes: int
    records: int = 0
    unchecked: int = 0


@dataclass(frozen=True, slots=True)
class Verification:
    """What looking at a checkpoint has found.

    Attributes:
        folder: which.
        kind: ``normal`` or ``atomic``.
        topology: what wrote it, in words; empty where that cannot be told.
        files: all files that hold tensors or state.
        others: further files, which are not looked into.
        read: bytes read.
        seconds: time from listing to result.
        faults: by file.
        fingerprint: of the source of an atomic checkpoint.
    """

    folder: str
    kind: str
    topology: str
    files: tuple[FileReport, ...]
    others: tuple[str, ...]
    read: int
    seconds: float
    faults: tuple[Fault, ...]
    fingerprint: dict[str, Any] = field(default_factory=dict)

    @property
    def whole(self) -> bool:
        """Nothing is wrong; warnings do not count."""
        return all(fault.warning for fault in self.faults)

    @property
    def unchecked(self) -> int:
        """Bytes of records whose writer stored no checksum."""
        return sum(file.unchecked for file in self.files)


def list_files(folder: str) -> tuple[dict[str, int], list[str]]:
    """Name → bytes of the files that hold state, and the names of all others, of a folder and what is in it.

    Raises:
        CheckpointError: the folder cannot be listed.
    """
    sizes: dict[str, int] = {}
    others: list[str] = []

    def refuse(error: OSError) -> None:
        raise CheckpointError(f"{error.filename}: cannot be listed ({error.strerror or error}).") from error

    for place, _, names in os.walk(folder, onerror=refuse):
        for name in names:
            path = os.path.join(place, name)
            told = os.path.relpath(path, folder)
            if name.endswith(".pt"):
                sizes[told] = os.stat(path).st_size if os.path.exists(path) else 0
            else:
                others.append(told)
    return dict(sorted(sizes.items())), sorted(others)


def verify_checkpoint(
    folder: str,
    comm: Comm | None = None,
    *,
    threads: int | None = None,
    window: int = 64 << 20,
    headers_only: bool = False,
    groups: Any = None,
    bar: Callable[[int], AbstractContextManager[Bar]] = no_bar,
) -> Verification:
    """Look at every file of a checkpoint; collective, the same result on every rank.

    Args:
        folder: a tag's folder, or an atomic checkpoint.
        comm: the ranks that share the files.
        threads: how many reads are under way at once on a rank; None: by its cores.
        window: bytes of memory for them.
        headers_only: leave the tensors' bytes alone.
        groups: parameter names of a stage-0 checkpoint's optimizer (see ``open_checkpoint``).
        bar: makes a progress bar of so many bytes.

    Raises:
        CheckpointError: the folder cannot be listed, or holds nothing that could be looked at.
        ConfigError: ``groups`` are of another form.
    """
    comm, begin = comm or Comm(), time.perf_counter()
    threads = threads or default_workers()
    with comm.together():
        sizes, others = list_files(folder)
        if not sizes:
            raise CheckpointError(f"{folder}: holds no checkpoint ({shorten(others) or 'nothing'}).")
    mine = share_files(sizes, comm.size)[comm.rank]
    listed, faults = _list_all(folder, mine, threads)
    scans: list[Scanned] = []
    if not headers_only:
        plan = _plan(folder, mine, sizes, listed)
        with bar(sum(file.size for file in plan)) as shown:
            scans = scan_files(plan, threads=threads, window=window, progress=shown.add)
    index, more = _look_at_whole(folder, comm, groups)
    manifest, told = _look_at_manifest(folder, comm, sizes, listed)
    faults += told
    for name, scan in zip(mine, scans, strict=False):
        faults += name_contents(folder, name, judge_file(name, listed.get(name), scan), index)
    reports = [_report(name, sizes[name], listed.get(name)) for name in mine]
    gathered = comm.gather((reports, faults, sum(scan.nbytes for scan in scans)))
    every = [fault for _, held, _ in gathered for fault in held] + more + _look_at_latest(folder)
    if index is not None and not headers_only and not any(not fault.warning for fault in every):
        every += _compare_samples(index, comm)
    return Verification(
        folder=folder,
        kind="atomic" if is_atomic(folder) else "normal",
        topology=index.topology.describe() if index else "",
        files=tuple(sorted((report for held, _, _ in gathered for report in held), key=lambda r: r.name)),
        others=tuple(others),
        read=sum(nbytes for _, _, nbytes in gathered),
        seconds=time.perf_counter() - begin,
        faults=_sort_faults(every),
        fingerprint=manifest.fingerprint if manifest else {},
    )


def share_files(sizes: Mapping[str, int], ranks: int) -> list[list[str]]:
    """Files per rank, about equal bytes each: the largest first, to whom has least; then in the order of names."""
    shares: list[list[str]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        rank = loads.index(min(loads))
        shares[rank].append(name)
        loads[rank] += sizes[name] + 1
    return [sorted(share) for share in shares]


def _list_all(folder: str, names: Sequence[str], threads: int) -> tuple[dict[str, FileRecords], list[Fault]]:
    """The directories of files, several at once."""

    def look(name: str) -> FileRecords | Fault:
        try:
            return list_records(os.path.join(folder, name))
        except UcpError as error:
            return Fault("header", name, str(error))

    with ThreadPoolExecutor(max_workers=max(threads, 1)) as pool:
        found = list(zip(names, pool.map(look, names), strict=True))
    listed = {name: each for name, each in found if isinstance(each, FileRecords)}
    return listed, [each for _, each in found if isinstance(each, Fault)]


def _plan(
    folder: str, names: Iterable[str], sizes: Mapping[str, int], listed: Mapping[str, FileRecords]
) -> list[ScanFile]:
    return [
        ScanFile(
            os.path.join(folder, name),
            listed[name].size if name in listed else sizes[name],
            tuple((r.offset, r.nbytes) for r in listed[name].records) if name in listed else (),
        )
        for name in names
    ]


def _look_at_whole(folder: str, comm: Comm, groups: Any) -> tuple[AtomicIndex | None, list[Fault]]:
    """The index, or everything that keeps it from being built; collective."""
    notes: list[Fault] = []
    try:
        try:
            index = open_checkpoint(folder, comm, groups=groups or "module")
        except MismatchError as error:
            index = open_checkpoint(folder, comm, weights_only=True)
            notes.append(_note_unnamed(error, groups))
    except UnsupportedError as error:
        text = f"{error} Checksums apart, whether it is whole was not looked at."
        return None, [Fault("unsupported", "", text)]
    except ConfigError:
        raise
    except UcpError as error:
        found = [] if is_atomic(folder) else survey_folder(folder, comm)
        faults = [Fault(f.kind, f.file, f.text, warning=f.kind == "leftover") for f in found]
        if not all(fault.warning for fault in faults):
            return None, faults
        return None, [*faults, *(Fault(_classify(text), "", text) for text in str(error).splitlines())]
    if index.topology.wrapper == "none":
        text = "holds the weights alone, no optimizer states: enough for load_optimizer_states=False."
        notes = [Fault("missing", "", f"{folder}: {text}", warning=True)]
    old = [] if is_atomic(folder) else find_old_files(folder, index)
    notes += [Fault("leftover", flaw.file, flaw.text, warning=True) for flaw in old]
    return index, notes


def _classify(text: str) -> str:
    return "missing" if " missing" in text else "inconsistent"


def _note_unnamed(error: MismatchError, groups: Any) -> Fault:
    """Stage 0 saves optimizer states without names."""
    if groups:
        return Fault("unnamed", "", str(error))
    text = (
        f"{error} Whether its optimizer states are those of its parameters was not looked at: give the parameters' "
        "names (--groups)."
    )
    return Fault("unnamed", "", text, warning=True)


def _look_at_manifest(
    folder: str, comm: Comm, sizes: Mapping[str, int], listed: Mapping[str, FileRecords]
) -> tuple[Manifest | None, list[Fault]]:
    """The manifest of an atomic checkpoint of ours, and what this rank's files have to do with it."""
    try:
        manifest = read_manifest(folder)
    except UcpError as error:
        return None, [Fault("manifest", MANIFEST, str(error))]
    if manifest is None:
        return None, []
    names = list(compare_names(manifest, sizes)) if comm.rank == 0 else []
    return manifest, [*names, *compare_contents(manifest, listed)]


def _look_at_latest(folder: str) -> list[Fault]:
    """The file beside the folder that says which one to load."""
    parent, _ = os.path.split(os.path.abspath(folder))
    name = "latest_universal" if is_atomic(folder) else "latest"
    try:
        with open(os.path.join(parent, name), encoding="utf-8") as stream:
            tag = stream.read().strip()
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        return [Fault("latest", name, f"{parent}/{name}: cannot be read ({error}).", warning=True)]
    if tag and os.path.isdir(os.path.join(parent, tag)):
        return []
    text = f"{parent}/{name}: leads to {tag!r}, which is not there; a load without a tag fails."
    return [Fault("latest", name, text, warning=True)]


def _compare_samples(index: AtomicIndex, comm: Comm) -> list[Fault]:
    """Whether masters and the model's own copies are of one step; collective."""
    try:
        check_samples(index, index.atoms.values(), comm)
    except UcpError as error:
        return [Fault("foreign", "", str(error))]
    return []


def _report(name: str, nbytes: int, listed: FileRecords | None) -> FileReport:
    if listed is None:
        return FileReport(name, nbytes, 0, nbytes)
    return FileReport(name, nbytes, len(listed.records), listed.unchecked)


def _sort_faults(faults: Iterable[Fault]) -> tuple[Fault, ...]:
    """By file, each cause once: damage is met by the listing, by the index and by the manifest."""
    unique: dict[tuple[str, ...], Fault] = {}
    for fault in faults:
        unique.setdefault((fault.file, fault.kind, "" if fault.kind == "header" else fault.text), fault)
    known = {
        kind: {f.file for f in unique.values() if f.kind == kind} for kind in ("crc", "header", "missing", "manifest")
    }
    named = set().union(*known.values())
    kept = [fault for fault in unique.values() if not _is_repeated(fault, known, named)]
    return tuple(sorted(kept, key=lambda fault: (fault.warning, fault.file, fault.kind, fault.text)))


def _is_repeated(fault: Fault, known: Mapping[str, set[str]], named: Iterable[str]) -> bool:
    """Whether a fault follows from a more telling one."""
    if fault.kind == "header":
        return fault.file in known["crc"] and "has CRC32" in fault.text
    if fault.kind == "manifest":
        return fault.file in known["header"]
    return fault.kind == "inconsistent" and any(name in fault.text for name in named)
