"""Verify every byte of a checkpoint: checksums of all records, and whether its files form one complete save."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from ..comm import Comm
from ..errors import CheckpointError, UcpError, shorten
from ..formats.deepspeed.files import (
    MANIFEST,
    PUBLISHED,
    SEAL,
    find_foreign,
    is_state_file,
    list_entries,
    read_swap_name,
    scan_folder,
)
from ..formats.deepspeed.naming import Naming
from ..formats.findings import NOTE, WARNING, Finding, from_error, from_failure, sort_findings
from ..formats.foreign.names import has_directory, is_foreign
from ..formats.latest import check_latest
from ..formats.open import FolderReport, survey_files
from ..formats.places import FileTable, find_files
from ..io.paths import UPLOAD, Entry
from ..io.scan import ScanFile, Scanned, scan_files
from ..model import AtomicIndex
from ..stream.duplicates import check_samples
from ..stream.full_tensors import WorkOptions
from ..torchsave.records import FileRecord, FileRecords
from ..torchsave.torchfile import list_records
from .faults import find_damage

DEFAULT = WorkOptions(window=64 << 20)


@dataclass(frozen=True, slots=True)
class FileReport:
    """A verified file: bytes, records, bytes of records without a checksum, and whether any has one."""

    name: str
    nbytes: int
    records: int = 0
    unchecked: int = 0
    checked: bool = False


@dataclass(frozen=True, slots=True)
class Verification:
    """The result of verifying a checkpoint.

    Attributes:
        folder: the checkpoint.
        kind: ``normal``, ``atomic`` or ``foreign``.
        topology: description of the saving topology; empty if unknown.
        files: all files with tensors or state.
        others: further files, which are not read.
        read: bytes read.
        seconds: time from listing to result.
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
        """Whether there are no faults; warnings do not count."""
        return all(fault.warning for fault in self.faults)

    @property
    def nbytes(self) -> int:
        """Bytes of all verified files."""
        return sum(file.nbytes for file in self.files)

    @property
    def unchecked(self) -> int:
        """Bytes of records whose writer stored no checksum."""
        return sum(file.unchecked for file in self.files)


def list_files(folder: str) -> tuple[dict[str, Entry], list[str]]:
    """List the files with state in a folder's tree, and the names of other files except seal and manifest.

    Raises:
        CheckpointError: the folder cannot be listed, or holds no file with state.
    """
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
    if is_foreign(name):
        return True
    return read_swap_name(name) is not None or ("/" not in name and (is_state_file(name) or not _holds_state(name)))


def _find_files(folders: Sequence[str], comm: Comm) -> tuple[FileTable, list[str]]:
    """Find all files of a checkpoint, and the names of other files that this rank sees; collective."""
    further = set[str]()

    def look(folder: str) -> dict[str, Entry]:
        files, others = list_files(folder)
        further.update(others)
        return list_entries(folder) | files

    return find_files(folders, comm, look), sorted(further)


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
        folder: a tag's folder, or an atomic checkpoint.
        comm: the ranks that share the files.
        options: threads and memory of a rank.
        headers_only: do not read the tensors.
        groups: parameter names of a stage-0 checkpoint's optimizer (see ``open_checkpoint``).
        against: path of a seal or of an atomic checkpoint's manifest: the files must be the sealed, converted or
            written ones.
        also: the folder in further places. Each file is read in the nearest place. If it is damaged there, it is read
            in the next one, and the damage is a warning, since a load reads that copy too.

    Raises:
        CheckpointError: the folder cannot be listed, or holds no checkpoint.
        ConfigError: ``groups`` have an invalid form, or ``against`` is neither a seal nor a manifest.
    """
    comm, begin = comm or Comm(), time.perf_counter()
    where, others = _find_files([folder, *also], comm)
    report = survey_files(where.choose(_is_opened), comm, Naming(groups=groups or "module"))
    more, index = comm.once(lambda: list_findings(report, groups)), report.index
    where = where.choose(_holds_state)
    known = {path: number for number, file in enumerate(index.files if index else ()) for path in file.copies}
    mine = {name: _choose_copies(where, name, index, known) for name in _share(where, comm)}
    seen, read = _Examiner(index, known, options, headers_only=headers_only).examine_all(mine)
    listed = {name: result.listed for name, result in seen.items() if result.listed is not None}
    faults = [fault for result in seen.values() for fault in result.faults]
    sizes = {
        **{name: max(nbytes, 0) for name, nbytes in where.sizes.items()},
        **{name: result.size for name, result in listed.items()},
    }
    if against is not None or report.manifest is not None:
        from .proof import compare_proofs  # pydantic takes long to import

        faults += compare_proofs(against, report, sizes, listed, comm)
    reports = [_describe_file(name, sizes[name], listed.get(name)) for name in mine]
    gathered = comm.gather((reports, faults, read, others))
    left = {finding.file for finding in more if finding.kind == "leftover"}
    faults = [fault for _, own_faults, *_ in gathered for fault in own_faults]
    every = [  # damage to a file of an earlier save prevents no load
        *more,
        *(replace(fault, severity=WARNING) if fault.file in left else fault for fault in faults),
    ]
    if index is not None and not headers_only and all(fault.warning for fault in every):
        every += _compare_samples(folder, index, comm)
    return Verification(
        folder=folder,
        kind="atomic" if report.atomic else "foreign" if find_foreign(where.entries) else "normal",
        topology=index.written if index else "",
        files=tuple(sorted((report for reports, *_ in gathered for report in reports), key=lambda r: r.name)),
        others=tuple(sorted({name for *_, names in gathered for name in names})),
        read=sum(nbytes for *_, nbytes, _ in gathered),
        seconds=time.perf_counter() - begin,
        faults=_sort_faults(every),
        fingerprint=dict(report.manifest.fingerprint) if report.manifest else {},
    )


@dataclass(frozen=True, slots=True)
class _Result:
    """Zip directory and faults of a file."""

    listed: FileRecords | None
    faults: list[Finding]


def _choose_copies(where: FileTable, name: str, index: AtomicIndex | None, known: Mapping[str, int]) -> dict[str, int]:
    """Choose the copies of a file that a load reads, with their sizes.

    Without a checksum only one copy counts; a copy of another size counts if the index was made of it.
    """
    copies, size = where.list_copies(name, near=True), where.entries[name].size
    number = next((known[path] for path in copies if path in known), None)
    read = index.files[number].copies if index and number is not None else ()
    same = [path for path, nbytes in copies.items() if nbytes == size]
    alone = [path for path in same if path in read] if len(read) == 1 else []
    others = [path for path, nbytes in copies.items() if nbytes != size and path in read]
    return {path: max(copies[path], 0) for path in [*(alone or same), *others]}


class _Examiner:
    """Verifies files.

    Args:
        index: the checkpoint, if it could be opened.
        known: path → number of the file in the index.
        headers_only: do not read the tensors.
    """

    def __init__(
        self, index: AtomicIndex | None, known: Mapping[str, int], options: WorkOptions, *, headers_only: bool
    ) -> None:
        self.index, self.known, self.options, self.headers_only = index, known, options, headers_only
        self.sealed = {record.file: record.crc for record in index.records} if index else {}

    def examine_all(self, files: Mapping[str, Mapping[str, int]]) -> tuple[dict[str, _Result], int]:
        """Verify files, and further copies of damaged ones; return results by name, and the bytes read.

        Args:
            files: name → path and bytes of each copy.
        """
        seen, read = dict[str, _Result](), 0
        left = {name: [ScanFile(*copy) for copy in copies.items()] for name, copies in files.items()}
        while left := {name: copies for name, copies in left.items() if copies}:
            turn = {name: copies.pop(0) for name, copies in left.items()}
            results, nbytes = self._examine(turn)
            read += nbytes
            for name, result in results.items():
                path, before = turn[name].path, seen.setdefault(name, result)
                if not result.faults:
                    left[name].clear()
                    seen[name] = _Result(result.listed, [_excuse(fault, path) for fault in before.faults])
                elif self.index is not None:
                    self.index.failed.add(path)
        return seen, read

    def _examine(self, files: Mapping[str, ScanFile]) -> tuple[dict[str, _Result], int]:
        """Verify one copy of each file; return results by name, and the bytes read."""
        threads = max((self.options.count(os.path.dirname(file.path)) for file in files.values()), default=1)
        swaps = {name for name in files if read_swap_name(name)}  # which have no directory
        named = [name for name in files if name not in swaps]
        with ThreadPoolExecutor(max_workers=threads) as pool:
            looks = dict(zip(named, pool.map(lambda name: self._look_at(name, files[name]), named), strict=True))
        listed = {name: look for name, look in looks.items() if isinstance(look, FileRecords)}
        faults = [look for look in looks.values() if isinstance(look, Finding)]
        scans = {} if self.headers_only else self._scan(files, listed, swaps, threads)
        for name in swaps & scans.keys():
            listed[name] = self._list_swap(files[name], scans[name])
        for name in listed.keys() & scans.keys():  # an unreadable directory is a fault already
            faults += find_damage(files[name].path, name, listed[name], scans[name], self.index)
        faults += [fault for name in listed if (fault := self._compare_known(name, files[name].path, listed[name]))]
        seen = {name: _Result(listed.get(name), [fault for fault in faults if fault.file == name]) for name in files}
        return seen, sum(scan.nbytes for scan in scans.values())

    def _look_at(self, name: str, file: ScanFile) -> FileRecords | Finding:
        """Read a file's directory, or return the fault; the records of a foreign file come from the index."""
        if has_directory(name):
            return _look_at(name, file.path)
        number = self.known.get(file.path)
        in_file = [record for record in self.index.records if record.file == number] if self.index else []
        records = tuple(FileRecord("tensor", record.offset, record.nbytes, record.crc) for record in in_file)
        return FileRecords(file.path, file.size, records, 0, "")

    def _scan(
        self, files: Mapping[str, ScanFile], listed: Mapping[str, FileRecords], swaps: Set[str], threads: int
    ) -> dict[str, Scanned]:
        """Read files with the CRC32 of their records, except those with an unreadable directory."""
        wanted = []
        for name, file in files.items():
            records = listed[name].records if name in listed else ()
            ranges = ((0, file.size),) if name in swaps else tuple((record.offset, record.nbytes) for record in records)
            size = listed[name].size if name in listed else file.size if name in swaps else 0
            wanted.append(ScanFile(file.path, size, ranges))
        with self.options.bar(sum(file.size for file in wanted)) as progress:
            scans = scan_files(wanted, threads=threads, window=self.options.window, progress=progress)
        return dict(zip(files, scans, strict=True))

    def _list_swap(self, file: ScanFile, scan: Scanned) -> FileRecords:
        """Return a swap file as one record with its checksum in the seal; the directory's CRC is that of all bytes."""
        record = FileRecord("tensor", 0, file.size, self.sealed.get(self.known.get(file.path, -1)))
        return FileRecords(file.path, file.size, (record,), scan.crcs[0] or 0, "")

    def _compare_known(self, name: str, path: str, listed: FileRecords) -> Finding | None:
        """Return a fault for an intact file that is not the one in the index."""
        number, crc = self.known.get(path), listed.header_crc
        file = self.index.files[number] if self.index and number is not None else None
        if file is None or not file.places or None in (file.header_crc, crc) or file.header_crc == crc:
            return None
        text = f"{path}: its directory has CRC32 {crc:08x}, the save's {file.header_crc:08x}; it is another file."
        return Finding("foreign", name, text)


def _look_at(name: str, path: str) -> FileRecords | Finding:
    """Read a file's directory, or return the fault."""
    try:
        return list_records(path)
    except UcpError as error:
        return from_failure("header", name, error)


def _excuse(fault: Finding, path: str) -> Finding:
    """Adapt a fault of a file's copy if another copy is intact.

    A load passes over a copy whose header is damaged or of another file. It refuses a damaged record, which it finds
    only after it has read the record.
    """
    if fault.kind == "crc":
        return replace(fault, text=f"{fault.text} {path} is right: remove this copy, and a load reads that one.")
    return replace(fault, severity=WARNING, text=f"{fault.text} {path} is right.")


def _share(where: FileTable, comm: Comm) -> list[str]:
    """Return the files that this rank verifies."""
    sizes, access = {name: max(nbytes, 0) for name, nbytes in where.sizes.items()}, where.access
    if not access.is_partial:
        return share_files(sizes, comm.size)[comm.rank]
    readers = [access.list_readers(number, comm.size).tolist() for number in range(len(sizes))]
    return share_files(sizes, comm.size, dict(zip(sizes, readers, strict=True)))[comm.rank]


def share_files(
    sizes: Mapping[str, int], ranks: int, viewers: Mapping[str, Sequence[int]] | None = None
) -> list[list[str]]:
    """Distribute files to ranks by bytes: the largest first, to the rank with the fewest bytes.

    Args:
        viewers: name → ranks that see the file; None if all see all.
    """
    shares: list[list[str]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        rank = min(viewers[name] if viewers else range(ranks), key=loads.__getitem__)
        shares[rank].append(name)
        loads[rank] += sizes[name] + 1
    return [sorted(share) for share in shares]


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
                f"{finding.text} The order of its optimizer states was not verified: give the parameters' names "
                "(--groups)."
            )
            finding = replace(finding, text=text, severity=WARNING)
        findings.append(finding)
    if report.index is not None and report.index.stateless:
        findings.append(Finding("missing", "", report.index.stateless, WARNING))
    if report.index is not None and report.index.format:
        return findings  # `latest` does not name it
    return [*findings, *check_latest(report.folder, atomic=report.atomic)]


def _compare_samples(folder: str, index: AtomicIndex, comm: Comm) -> list[Finding]:
    """Return faults if masters and the model's copies are of different steps; collective."""
    try:
        check_samples(index, index.atoms, comm)
    except UcpError as error:
        return [replace(finding, kind="foreign") for finding in from_error(folder, error)]
    return []


def _describe_file(name: str, nbytes: int, listed: FileRecords | None) -> FileReport:
    if listed is None:  # an unreadable directory is a fault already; a swap file has none
        return FileReport(name, nbytes, 0, nbytes if read_swap_name(name) else 0)
    checked = any(record.crc is not None for record in listed.records)
    return FileReport(name, nbytes, len(listed.records), listed.unchecked, checked)


def _sort_faults(faults: Iterable[Finding]) -> tuple[Finding, ...]:
    """Sort faults by file without notes, and without repeated reports of one cause."""
    unique: dict[tuple[str, ...], Finding] = {}
    files: dict[str, set[str]] = defaultdict(set)
    for fault in faults:
        if fault.severity != NOTE:
            unique.setdefault((fault.file, fault.kind, "" if fault.kind in ("header", "read") else fault.text), fault)
            files[fault.kind].add(fault.file)
    return sort_findings(fault for fault in unique.values() if not _is_repeated(fault, files))


_CAUSES = {"seal": ("header",), "inconsistent": ("crc", "header", "missing", "seal")}
"""Kind of a fault → kinds of more specific faults that may cause it."""


def _is_repeated(fault: Finding, files: Mapping[str, Set[str]]) -> bool:
    """Return True if a fault follows from a more specific one; ``files`` are those with faults, by kind."""
    causes = (fault.cause,) if fault.cause else _CAUSES.get(fault.kind, ())
    return any(name in files[kind] for kind in causes for name in (fault.file, *fault.names))
