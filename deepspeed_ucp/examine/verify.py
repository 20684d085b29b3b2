"""Verifies a checkpoint: all checksums, and whether its files are one whole save."""

from __future__ import annotations

import logging
import os
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from ..comm import Comm
from ..errors import CheckpointError, UcpError, shorten
from ..formats.deepspeed.files import (
    MANIFEST,
    PUBLISHED,
    SEAL,
    find_foreign_format,
    is_state_file,
    list_entries,
    read_swap_name,
    scan_folder,
)
from ..formats.deepspeed.naming import UNUSED, Naming
from ..formats.findings import NOTE, WARNING, Finding, from_error, from_failure, sort_findings
from ..formats.foreign.names import has_zip_directory, is_foreign
from ..formats.latest import check_latest
from ..formats.locations import FileTable, find_files
from ..formats.open import FolderReport, survey_files
from ..io.paths import UPLOAD, Entry
from ..io.scan import ScanFile, Scanned, scan_files
from ..model.index import AtomicIndex
from ..model.records import Record
from ..stream.duplicates import check_samples
from ..stream.full_tensors import WorkOptions
from ..torchsave.records import FileRecords
from ..torchsave.torchfile import list_records, name_storages

logger = logging.getLogger("deepspeed_ucp")

DEFAULT = WorkOptions(window=64 << 20)


@dataclass(frozen=True, slots=True)
class FileReport:
    """A verified file; ``unchecked`` counts the bytes of records without a checksum."""

    name: str
    nbytes: int
    records: int = 0
    unchecked: int = 0
    checked: bool = False


@dataclass(frozen=True, slots=True)
class Verification:
    """The result of verifying a checkpoint.

    Attributes:
        kind: ``normal``, ``atomic`` or ``foreign``.
        topology: description of the saving topology; empty if unknown.
        others: further files, which are not read.
        faults: faults and warnings, sorted by file.
        fingerprint: fingerprint of an atomic checkpoint's source.
    """

    folder: str
    kind: str
    topology: str
    files: tuple[FileReport, ...]
    others: tuple[str, ...]
    read: int
    seconds: float
    faults: tuple[Finding, ...]
    fingerprint: dict[str, Any] = field(default_factory=dict)

    @property
    def whole(self) -> bool:
        """True if there are no faults; warnings do not count."""
        return all(not fault.is_fault for fault in self.faults)

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files)

    @property
    def unchecked(self) -> int:
        """Bytes of records whose writer stored no checksum."""
        return sum(file.unchecked for file in self.files)


def verify_checkpoint(
    folder: str,
    comm: Comm | None = None,
    options: WorkOptions = DEFAULT,
    *,
    headers_only: bool = False,
    groups: Any = None,
    against: str | None = None,
    also: Sequence[str] = (),
) -> Verification:
    """Verify every file of a checkpoint; collective, equal results on all ranks.

    Args:
        groups: parameter names of a stage-0 checkpoint's optimizer (``Naming.groups``).
        against: path of a seal or of an atomic checkpoint's manifest: the files must be the sealed, converted or
            written ones.
        also: the folder in further places. Each file is read in the nearest place. If it is damaged there, it is read
            in the next one, and the damage is a warning, since a load reads that copy too.
    """
    comm, begin, others = comm or Comm(), time.perf_counter(), set[str]()

    def look(folder: str) -> dict[str, Entry]:
        files, further = list_files(folder)
        others.update(further)
        return list_entries(folder) | files

    where = find_files([folder, *also], comm, look)
    report = survey_files(where.choose(_is_opened), comm, Naming(groups=groups or "module"))
    more, index = comm.once(lambda: list_findings(report, groups)), report.index
    if groups and index is not None and not index.topology.traits.is_positional and not comm.rank:
        logger.warning("%s", UNUSED)
    where = where.choose(_holds_state)
    examiner = _Examiner(index, options, headers_only=headers_only)
    seen = examiner.examine_all(where, share_files(where, comm))
    listed = {name: result.listed for name, result in seen.items() if result.listed is not None}
    file_faults = [fault for result in seen.values() for fault in result.faults]
    sizes = {name: max(nbytes, 0) for name, nbytes in where.sizes.items()}
    sizes |= {name: file.size for name, file in listed.items()}
    if against is not None or report.manifest is not None:
        from .proof import compare_proofs  # pydantic takes long to import

        file_faults += compare_proofs(against, report, sizes, listed, comm)
    reports = [_describe_file(name, sizes[name], listed.get(name)) for name in seen]
    gathered = comm.gather((reports, file_faults, examiner.read, others))
    leftovers = {finding.file for finding in more if finding.kind == "leftover"}
    file_faults = [fault for _, part, *_ in gathered for fault in part]
    faults = [*more, *(replace(fault, severity=WARNING) if fault.file in leftovers else fault for fault in file_faults)]
    if index is not None and not headers_only and all(not fault.is_fault for fault in faults):
        try:
            check_samples(index, index.atoms, comm)
        except UcpError as error:  # masters and the model's copies are of different steps
            faults += [replace(finding, kind="foreign") for finding in from_error(folder, error)]
    return Verification(
        folder=folder,
        kind="atomic" if report.atomic else "foreign" if find_foreign_format(where.entries) else "normal",
        topology=index.origin if index else "",
        files=tuple(sorted((report for reports, *_ in gathered for report in reports), key=lambda r: r.name)),
        others=tuple(sorted({name for *_, names in gathered for name in names})),
        read=sum(nbytes for *_, nbytes, _ in gathered),
        seconds=time.perf_counter() - begin,
        faults=_sort_faults(faults),
        fingerprint=dict(report.manifest.fingerprint) if report.manifest else {},
    )


# -- files ------------------------------------------------------------------------------------------------------------


def list_files(folder: str) -> tuple[dict[str, Entry], list[str]]:
    """List a folder's files with state, and the names of further files."""
    tree = {name: entry for name, entry in scan_folder(folder, deep=True).items() if not name.startswith(UPLOAD)}
    if PUBLISHED in tree:
        return {PUBLISHED: tree[PUBLISHED]}, []  # the files are in the folder that it names
    files = {name: entry for name, entry in sorted(tree.items()) if _holds_state(name)}
    others = sorted(tree.keys() - files.keys())
    if not files:
        raise CheckpointError(f"holds no checkpoint ({shorten(others) or 'nothing'}).", path=folder)
    return files, [name for name in others if name not in (SEAL, MANIFEST)]


def _holds_state(name: str) -> bool:
    return name.endswith(".pt") or is_state_file(name) or read_swap_name(name) is not None or is_foreign(name)


def _is_opened(name: str) -> bool:
    """Return True for files that opening a checkpoint reads."""
    is_main = "/" not in name and (is_state_file(name) or not _holds_state(name))
    return is_foreign(name) or read_swap_name(name) is not None or is_main


def share_files(where: FileTable, comm: Comm) -> list[str]:
    """Return this rank's share of the files, balanced by bytes."""
    loads, mine = [0] * comm.size, []
    sizes = [(-max(size, 0), name, number) for number, (name, size) in enumerate(where.sizes.items())]
    for size, name, number in sorted(sizes):
        rank = min(where.access.list_readers(number, comm.size).tolist(), key=loads.__getitem__)
        loads[rank] += 1 - size
        if rank == comm.rank:
            mine.append(name)
    return sorted(mine)


def _describe_file(name: str, nbytes: int, listed: FileRecords | None) -> FileReport:
    if listed is None:  # an unreadable directory is a fault already; a swap file has none
        return FileReport(name, nbytes, 0, nbytes if read_swap_name(name) else 0)
    checked = any(record.crc is not None for record in listed.records.values())
    return FileReport(name, nbytes, len(listed.records), listed.unchecked, checked)


class _Result(NamedTuple):
    listed: FileRecords | None
    faults: list[Finding]


class _Examiner:
    """Verifies files; ``index`` is None if the checkpoint could not be opened."""

    def __init__(self, index: AtomicIndex | None, options: WorkOptions, *, headers_only: bool) -> None:
        self.index, self.options, self.headers_only = index, options, headers_only
        self.known = {path: at for at, file in enumerate(index.files if index else ()) for path in file.copies}
        self.sealed = (
            dict(zip(index.records.files, (record.crc for record in index.records), strict=True)) if index else {}
        )
        self.read = 0
        """Bytes read."""

    def examine_all(self, where: FileTable, names: Iterable[str]) -> dict[str, _Result]:
        """Verify files, and other copies of damaged ones; return the results by name."""
        seen = dict[str, _Result]()
        left = {name: self._choose_copies(where, name) for name in names}
        while left := {name: copies for name, copies in left.items() if copies}:
            turn = {name: copies.pop(0) for name, copies in left.items()}
            for name, result in self._verify_copies(turn).items():
                path, before = turn[name].path, seen.setdefault(name, result)
                if not result.faults:
                    left[name].clear()
                    seen[name] = _Result(result.listed, [_soften_fault(fault, path) for fault in before.faults])
                elif self.index is not None:
                    self.index.failed.add(path)
        return seen

    def _choose_copies(self, where: FileTable, name: str) -> list[ScanFile]:
        """Choose the copies of a file that a load reads.

        Without a checksum only one copy counts; a copy of another size counts if the index was made of it.
        """
        copies, size = where.list_copies(name, near=True), where.entries[name].size
        number = next((self.known[path] for path in copies if path in self.known), None)
        read = self.index.files[number].copies if self.index and number is not None else ()
        same = [path for path, nbytes in copies.items() if nbytes == size]
        alone = [path for path in same if path in read] if len(read) == 1 else []
        others = [path for path, nbytes in copies.items() if nbytes != size and path in read]
        return [ScanFile(path, max(copies[path], 0)) for path in [*(alone or same), *others]]

    def _verify_copies(self, files: Mapping[str, ScanFile]) -> dict[str, _Result]:
        threads = max((self.options.count_threads(os.path.dirname(file.path)) for file in files.values()), default=1)
        swaps = {name for name in files if read_swap_name(name)}  # which have no directory
        named = [name for name in files if name not in swaps]
        with ThreadPoolExecutor(max_workers=threads) as pool:
            looks = dict(zip(named, pool.map(lambda name: self._read_directory(name, files[name]), named), strict=True))
        listed = {name: look for name, look in looks.items() if isinstance(look, FileRecords)}
        faults = [look for look in looks.values() if isinstance(look, Finding)]
        scans = {} if self.headers_only else self._scan(files, listed, swaps, threads)
        self.read += sum(scan.nbytes for scan in scans.values())
        for name in swaps & scans.keys():  # one record with its checksum in the seal; the directory's is that of all
            path, size, crc = files[name].path, files[name].size, scans[name].crcs[0] or 0
            record = Record(0, size, self.sealed.get(self.known.get(path, -1)))
            listed[name] = FileRecords(path, size, {"tensor": record}, crc, "")
        for name in listed.keys() & scans.keys():  # an unreadable directory is a fault already
            faults += _find_damage(files[name].path, name, listed[name], scans[name], self.index)
        for name, file in listed.items():
            number = self.known.get(path := files[name].path)
            known = self.index.files[number] if self.index and number is not None else None
            if known is not None and known.places and known.header_crc not in (None, file.header_crc):
                sums = f"{file.header_crc:08x}, the save's {known.header_crc:08x}"
                faults.append(Finding("foreign", name, f"{path}: its directory has CRC32 {sums}; it is another file."))
        return {name: _Result(listed.get(name), [fault for fault in faults if fault.file == name]) for name in files}

    def _read_directory(self, name: str, file: ScanFile) -> FileRecords | Finding:
        """Read a file's directory, or return the fault."""
        if not has_zip_directory(name):
            number = self.known.get(file.path)
            numbered = enumerate(zip(self.index.records.files, self.index.records, strict=True)) if self.index else ()
            records = {f"tensor {at}": record for at, (in_file, record) in numbered if in_file == number}
            return FileRecords(file.path, file.size, records, 0, "")
        try:
            return list_records(file.path)
        except UcpError as error:
            return from_failure("header", name, error)

    def _scan(
        self, files: Mapping[str, ScanFile], listed: Mapping[str, FileRecords], swaps: Set[str], threads: int
    ) -> dict[str, Scanned]:
        """Compute the CRC32s of files' records, except with an unreadable directory."""
        wanted = []
        for name, file in files.items():
            records = listed[name].records.values() if name in listed else ()
            ranges = ((0, file.size),) if name in swaps else tuple(record[:2] for record in records)
            size = listed[name].size if name in listed else file.size if name in swaps else 0
            wanted.append(ScanFile(file.path, size, ranges))
        with self.options.bar(sum(file.size for file in wanted)) as progress:
            scans = scan_files(wanted, threads=threads, window=self.options.window, progress=progress)
        return dict(zip(files, scans, strict=True))


# -- damaged bytes ----------------------------------------------------------------------------------------------------


def _find_damage(path: str, name: str, listed: FileRecords, scan: Scanned, index: AtomicIndex | None) -> list[Finding]:
    """Find faults of a file's bytes, with the known atoms of damaged records."""
    damaged = list(_compare_records(name, listed.records, scan))
    if not damaged:
        return []
    offsets = {listed.records[at].offset for *_, at in damaged if at}
    atoms, storages = _find_atoms(index, path, offsets) if index else {}, {}
    if len(atoms) < len(offsets):
        with suppress(UcpError):
            storages = name_storages(path)
    findings = []
    for kind, text, at in damaged:
        names = atoms.get(listed.records[at].offset) or storages.get(at, []) if at else []
        contents = f"; it holds {shorten(names)}" if names else ""
        if not names and at == "data.pkl":
            contents = "; it holds the object tree of the file"
        findings.append(Finding(kind, name, f"{text}{contents}.", names=tuple(names)))
    return findings


def _compare_records(name: str, records: Mapping[str, Record], scan: Scanned) -> Iterator[tuple[str, str, str | None]]:
    """Yield (kind, first part of the text, name of the record) of each fault."""
    for offset, text in scan.errors[:1]:
        inside = next((at for at, r in records.items() if r.offset <= offset < r.offset + r.nbytes), None)
        more = f", nor at {len(scan.errors) - 1} other places" if len(scan.errors) > 1 else ""
        yield "read", f"{name}: {text}{more}", inside
    for (at, record), crc in zip(records.items(), scan.crcs, strict=True):
        if crc is not None and record.crc is not None and crc != record.crc:
            text = (
                f"{name}: record {at}, bytes [{record.offset}, {record.offset + record.nbytes}), has CRC32 "
                f"{crc:08x}, the writer stored {record.crc:08x}"
            )
            yield "crc", text, at


def _find_atoms(index: AtomicIndex, path: str, offsets: Collection[int]) -> dict[int, list[str]]:
    """Map record offsets to the atoms with fragments in these records."""
    files = {number for number, file in enumerate(index.files) if path in file.copies}
    places = enumerate(zip(index.records.files, index.records.offsets, strict=True))
    records = {number: offset for number, (file, offset) in places if file in files and offset in offsets}
    atoms: dict[int, dict[str, None]] = {}
    for atom in index.atoms.values():
        fragments = (f for shard in atom.shards for f in shard.list_fragments(atom.state))
        for fragment in (f for f in fragments if f.record in records):
            atoms.setdefault(records[fragment.record], {})[f"{atom.param} ({atom.state})"] = None
    return {offset: list(names) for offset, names in atoms.items()}


def _soften_fault(fault: Finding, path: str) -> Finding:
    """Rewrite the fault of a file's copy for a file with another, intact copy.

    A load passes over a copy whose header is damaged or of another file. It refuses a damaged record, which it finds
    only after it has read the record.
    """
    if fault.kind == "crc":
        return replace(fault, text=f"{fault.text} {path} is right: remove this copy, and a load reads that one.")
    return replace(fault, severity=WARNING, text=f"{fault.text} {path} is right.")


# -- findings ---------------------------------------------------------------------------------------------------------


def list_findings(report: FolderReport, groups: Any = None) -> list[Finding]:
    """List the findings about a folder's headers and its ``latest``.

    Args:
        groups: parameter names that a stage-0 checkpoint was opened with; it saves optimizer states without names.
    """
    findings = []
    for finding in report.findings:
        if finding.kind == "unsupported":
            finding = replace(finding, text=f"{finding.text} Only checksums were verified.")
        elif finding.kind == "unnamed" and not groups:
            text = (
                f"{os.path.join(report.folder, finding.file)}: stage 0 saves no parameter names, so the order of its "
                "optimizer states was not verified. Give the names with --groups."
            )
            finding = replace(finding, text=text, severity=WARNING)
        findings.append(finding)
    if report.index is not None and report.index.stateless:
        findings.append(Finding("missing", "", report.index.stateless, WARNING))
    if report.index is not None and report.index.format:
        return findings  # `latest` does not name it
    return [*findings, *check_latest(report.folder, atomic=report.atomic)]


def _sort_faults(faults: Iterable[Finding]) -> tuple[Finding, ...]:
    """Sort faults by file without notes, and without repeated reports of one cause."""
    unique: dict[tuple[str, ...], Finding] = {}
    files: dict[str, set[str]] = defaultdict(set)
    for fault in faults:
        if fault.severity != NOTE:
            unique.setdefault((fault.file, fault.kind, "" if fault.kind in ("header", "read") else fault.text), fault)
            files[fault.kind].add(fault.file)

    def is_repeated(fault: Finding) -> bool:
        causes = (fault.cause,) if fault.cause else _CAUSES.get(fault.kind, ())
        return any(name in files[kind] for kind in causes for name in (fault.file, *fault.names))

    return sort_findings(fault for fault in unique.values() if not is_repeated(fault))


_CAUSES = {"seal": ("header",), "inconsistent": ("crc", "header", "missing", "seal")}
"""Kind of a fault → kinds of more specific faults that may cause it."""
