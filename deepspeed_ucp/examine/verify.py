"""Looks at every byte of a checkpoint: checksums of all records, and whether its files make up one whole save."""

from __future__ import annotations

import hashlib
import os
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ..atoms import AtomicIndex
from ..comm import Comm
from ..errors import CheckpointError, UcpError, shorten
from ..io.distance import measure_distance
from ..io.scan import ScanFile, Scanned, scan_files
from ..io.store import exists
from ..sources.files import MANIFEST, SEAL, is_state_file, read_swap_name, scan_folder
from ..sources.findings import NOTE, WARNING, Finding, from_error, from_failure, sort_findings
from ..sources.latest import check_latest
from ..sources.naming import Naming
from ..sources.open import FolderReport, survey_checkpoint
from ..stream.batches import WorkOptions
from ..stream.samples import check_samples
from ..torchsave.records import FileRecord, FileRecords
from ..torchsave.torchfile import list_records
from .faults import find_damage

if TYPE_CHECKING:
    from ..sources.atomic.manifest import Manifest

DEFAULT = WorkOptions(window=64 << 20)


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
    faults: tuple[Finding, ...]
    fingerprint: dict[str, Any] = field(default_factory=dict)

    @property
    def whole(self) -> bool:
        """Nothing is wrong; warnings do not count."""
        return all(fault.warning for fault in self.faults)

    @property
    def nbytes(self) -> int:
        """Bytes of all files that were looked at."""
        return sum(file.nbytes for file in self.files)

    @property
    def unchecked(self) -> int:
        """Bytes of records whose writer stored no checksum."""
        return sum(file.unchecked for file in self.files)


def list_files(folder: str) -> tuple[dict[str, int], list[str]]:
    """Name → bytes of the files that hold state, and the names of all others but seal and manifest, of a folder's tree.

    Raises:
        CheckpointError: the folder cannot be listed, or holds none that could be looked at.
    """
    sizes: dict[str, int] = {}
    others: list[str] = []
    for name, entry in scan_folder(folder, deep=True).items():
        if name.endswith(".pt") or is_state_file(name) or read_swap_name(name):
            sizes[name] = max(entry.size, 0)
        else:
            others.append(name)
    if not sizes:
        raise CheckpointError(f"{folder}: holds no checkpoint ({shorten(sorted(others)) or 'nothing'}).")
    return dict(sorted(sizes.items())), sorted(name for name in others if name not in (SEAL, MANIFEST))


@dataclass(frozen=True, slots=True)
class _Files:
    """The files of a checkpoint in all of its places.

    Attributes:
        sizes: their bytes, the same on every rank.
        mine: those that this rank looks at.
        copies: by name the tag's folders in which this rank finds it, with its bytes there; the nearest one first,
            those of other sizes last.
        others: further files that this rank sees.
    """

    sizes: dict[str, int]
    mine: list[str]
    copies: dict[str, dict[str, int]]
    others: list[str]


def _find_files(folders: Sequence[str], comm: Comm) -> _Files:
    """List a checkpoint's files in each place; collective.

    Raises:
        CheckpointError: no rank finds any; the first place's error.
    """
    looks = comm.run(lambda: [_look(folder) for folder in folders])
    own: dict[str, int] = {}
    for sizes, _ in reversed(looks):
        own |= sizes
    digests = comm.gather(hashlib.sha256(repr(sorted(own.items())).encode()).digest())
    every = comm.gather(own) if len(set(digests)) > 1 else [own]
    sizes = {name: nbytes for each in reversed(every) for name, nbytes in sorted(each.items())}
    if not sizes:
        comm.run(lambda: list_files(folders[0]))
    viewers = {name: [rank for rank, each in enumerate(every) if each.get(name) == sizes[name]] for name in sizes}
    mine = share_files(sizes, comm.size, viewers if len(every) > 1 else {})[comm.rank]
    near = sorted(zip(folders, looks, strict=True), key=lambda pair: measure_distance(pair[0]))
    held = {name: {folder: sizes[name] for folder, (sizes, _) in near if name in sizes} for name in mine}
    copies = {name: dict(sorted(each.items(), key=lambda it: it[1] != sizes[name])) for name, each in held.items()}
    return _Files(dict(sorted(sizes.items())), mine, copies, sorted({name for _, others in looks for name in others}))


def _choose_places(files: _Files, index: AtomicIndex | None) -> _Files:
    """The places that a load reads: one alone of a file that nothing tells from another place's; of another size those
    alone that the index was made of."""
    stored = index.stored.files if index else ()
    alone = {file.places[0] for file in stored if len(file.places) == 1}
    known = {path for file in stored for path in (file.path, *file.places)}

    def choose(name: str, held: Mapping[str, int]) -> dict[str, int]:
        paths = {folder: os.path.join(folder, name) for folder in held}
        same = [folder for folder, size in held.items() if size == files.sizes[name]]
        others = [folder for folder in held if folder not in same and paths[folder] in known]
        return {each: held[each] for each in [*([each for each in same if paths[each] in alone] or same), *others]}

    return replace(files, copies={name: choose(name, held) for name, held in files.copies.items()})


def _look(folder: str) -> tuple[dict[str, int], list[str]]:
    try:
        return list_files(folder)
    except CheckpointError:
        return {}, []


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
    """Look at every file of a checkpoint; collective, the same result on every rank.

    Args:
        folder: a tag's folder, or an atomic checkpoint.
        comm: the ranks that share the files.
        options: a rank's means: so many reads are under way at once.
        headers_only: leave the tensors' bytes alone.
        groups: parameter names of a stage-0 checkpoint's optimizer (see ``open_checkpoint``).
        against: path of a seal, or of an atomic checkpoint's manifest, that the files are held against: it proves that
            they are the ones that were sealed, converted, or written.
        also: the same folder in further places. Each file is looked at in the nearest one, and in the next where it is
            damaged, which is a warning then, as a load reads it.

    Raises:
        CheckpointError: the folder cannot be listed, or holds nothing that could be looked at.
        ConfigError: ``groups`` are of another form, or ``against`` is neither a seal nor a manifest.
    """
    comm, begin = comm or Comm(), time.perf_counter()
    files = _find_files([folder, *also], comm)
    report = survey_checkpoint(folder, comm, Naming(groups=groups or "module"), also=also)
    more, index = comm.once(lambda: list_findings(report, groups)), report.index
    files = _choose_places(files, index)
    seen, read = _examine_all(files, index, options, headers_only=headers_only)
    listed = {name: each.listed for name, each in seen.items() if each.listed is not None}
    faults = [fault for each in seen.values() for fault in each.faults]
    sizes = {**files.sizes, **{name: each.size for name, each in listed.items()}}
    manifest, told = comm.run(lambda: _compare_own_manifest(folder, sizes, listed, first=comm.rank == 0))
    faults += told
    if against is not None:
        from .proof import compare_proof, read_proof

        proof = comm.once(lambda: read_proof(against))
        faults += compare_proof(proof, report, sizes, listed, first=comm.rank == 0)
    reports = [_describe_file(name, sizes[name], listed.get(name)) for name in files.mine]
    gathered = comm.gather((reports, faults, read))
    left = {finding.file for finding in more if finding.kind == "leftover"}
    every = [*more, *(_excuse(fault, left) for _, held, _ in gathered for fault in held)]
    if index is not None and not headers_only and all(fault.warning for fault in every):
        every += _compare_samples(folder, index, comm)
    return Verification(
        folder=folder,
        kind="atomic" if report.atomic else "normal",
        topology=index.run.topology.describe() if index else "",
        files=tuple(sorted((report for held, *_ in gathered for report in held), key=lambda r: r.name)),
        others=tuple(files.others),
        read=sum(nbytes for *_, nbytes in gathered),
        seconds=time.perf_counter() - begin,
        faults=_sort_faults(every),
        fingerprint=dict(manifest.fingerprint) if manifest else {},
    )


@dataclass(frozen=True, slots=True)
class _Seen:
    """What looking at a file has told: its directory, and what is wrong with it."""

    listed: FileRecords | None
    faults: list[Finding]


def _examine_all(
    files: _Files, index: AtomicIndex | None, options: WorkOptions, *, headers_only: bool
) -> tuple[dict[str, _Seen], int]:
    """Look at this rank's files, at further copies of those that are not right; by name, and the bytes that were read.

    Args:
        index: the checkpoint, as far as it could be opened.
    """
    seen: dict[str, _Seen] = {}
    left, turn, read = files.mine, 0, 0
    while left:
        copies = {name: [*files.copies[name].items()][turn] for name in left}
        paths = {name: os.path.join(folder, name) for name, (folder, _) in copies.items()}
        sizes = {name: size for name, (_, size) in copies.items()}
        found, nbytes = _examine(paths, sizes, index, options, headers_only=headers_only)
        for name, each in found.items():
            before = seen.get(name)
            if before is None:
                seen[name] = each
            elif not each.faults:
                warnings = [_tell_copy(fault, paths[name]) for fault in before.faults]
                seen[name] = _Seen(each.listed, warnings)
        if index is not None:
            index.stored.failed.update(paths[name] for name, each in found.items() if each.faults)
        read, turn = read + nbytes, turn + 1
        left = [name for name, each in found.items() if each.faults and turn < len(files.copies[name])]
    return seen, read


def _tell_copy(fault: Finding, path: str) -> Finding:
    """A fault that a right copy of the file makes up for."""
    return replace(fault, severity=WARNING, text=f"{fault.text} {path} is right.")


def _examine(
    paths: Mapping[str, str],
    sizes: Mapping[str, int],
    index: AtomicIndex | None,
    options: WorkOptions,
    *,
    headers_only: bool,
) -> tuple[dict[str, _Seen], int]:
    """Look at one copy of each of some files; what was found by name, and the bytes that were read."""
    listed, faults = _list_all(paths, options)
    scans = [] if headers_only else _scan(paths, sizes, listed, options)
    listed |= _list_swaps(paths, sizes, index, scans)
    for name, scan in zip(paths, scans, strict=False):
        if name in listed:  # else it is told why its directory cannot be read
            faults += find_damage(paths[name], name, listed[name], scan, index)
    faults += _find_other_copies(paths, listed, index)
    seen = {name: _Seen(listed.get(name), [fault for fault in faults if fault.file == name]) for name in paths}
    return seen, sum(scan.nbytes for scan in scans)


def _find_other_copies(
    paths: Mapping[str, str], listed: Mapping[str, FileRecords], index: AtomicIndex | None
) -> Iterator[Finding]:
    """Faults of files that are whole and not those which the index was made of."""
    known = {path: file.header_crc for file in index.stored.files for path in file.places} if index else {}
    for name, path in paths.items():
        crc, found = known.get(path), listed[name].header_crc if name in listed else None
        if None not in (crc, found) and crc != found:
            text = f"{path}: its directory has CRC32 {found:08x}, the save's {crc:08x}; it is another file."
            yield Finding("foreign", name, text)


def _excuse(fault: Finding, left: Set[str]) -> Finding:
    """Damage to a file of an earlier save keeps nothing from being loaded."""
    return replace(fault, severity=WARNING) if fault.file in left else fault


def share_files(
    sizes: Mapping[str, int], ranks: int, viewers: Mapping[str, Sequence[int]] | None = None
) -> list[list[str]]:
    """Files per rank, about equal bytes each: the largest first, to whom has least; then in the order of names.

    Args:
        viewers: by name the ranks that see a file; None where all do.
    """
    shares: list[list[str]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        rank = min(viewers[name] if viewers else range(ranks), key=loads.__getitem__)
        shares[rank].append(name)
        loads[rank] += sizes[name] + 1
    return [sorted(share) for share in shares]


def _list_all(paths: Mapping[str, str], options: WorkOptions) -> tuple[dict[str, FileRecords], list[Finding]]:
    """The directories of files, several at once; swap files have none."""

    def look(name: str) -> FileRecords | Finding:
        try:
            return list_records(paths[name])
        except UcpError as error:
            return from_failure("header", name, error)

    named = [name for name in paths if not read_swap_name(name)]
    with ThreadPoolExecutor(max_workers=_count_threads(paths, options)) as pool:
        found = list(zip(named, pool.map(look, named), strict=True))
    listed = {name: each for name, each in found if isinstance(each, FileRecords)}
    return listed, [each for _, each in found if isinstance(each, Finding)]


def _count_threads(paths: Mapping[str, str], options: WorkOptions) -> int:
    return max((options.count(path) for path in {os.path.dirname(path) for path in paths.values()}), default=1)


def _list_swaps(
    paths: Mapping[str, str], sizes: Mapping[str, int], index: AtomicIndex | None, scans: Sequence[Scanned]
) -> dict[str, FileRecords]:
    """Swap files that were read, as one record each, with the checksum that a seal has of it.

    In a directory's place is the checksum of all bytes, as in a seal.

    Args:
        scans: of these files, in order; empty where their bytes were not read.
    """
    files = index.stored.files if index else ()
    numbers = {path: number for number, file in enumerate(files) for path in (file.path, *file.places)}
    sealed = {record.file: record.crc for record in index.stored.records} if index else {}
    found = {}
    for (name, path), scan in zip(paths.items(), scans, strict=False):
        if read_swap_name(name):
            record = FileRecord("tensor", 0, sizes[name], sealed.get(numbers.get(path, -1)))
            found[name] = FileRecords(path, sizes[name], (record,), scan.crcs[0] or 0, "")
    return found


def _scan(
    paths: Mapping[str, str], sizes: Mapping[str, int], listed: Mapping[str, FileRecords], options: WorkOptions
) -> list[Scanned]:
    """Read files with the CRC32 of their records; nothing of those whose directory is not readable."""
    files = []
    for name, path in paths.items():
        file = listed.get(name)
        ranges = tuple((record.offset, record.nbytes) for record in file.records) if file else ()
        ranges = ((0, sizes[name]),) if read_swap_name(name) else ranges
        files.append(ScanFile(path, file.size if file else sizes[name] if ranges else 0, ranges))
    threads = _count_threads(paths, options)
    with options.bar(sum(file.size for file in files)) as progress:
        return scan_files(files, threads=threads, window=options.window, progress=progress)


def list_findings(report: FolderReport, groups: Any = None) -> list[Finding]:
    """What there is to tell of a folder's headers, and of ``latest`` beside it.

    Args:
        groups: parameter names that a stage-0 checkpoint was opened with; it saves optimizer states without names.
    """
    found = []
    for each in report.findings:
        if each.kind == "unsupported":
            each = replace(each, text=f"{each.text} Checksums apart, whether it is whole was not looked at.")
        elif each.kind == "unnamed" and not groups:
            text = (
                f"{each.text} Whether its optimizer states are those of its parameters was not looked at: give the "
                "parameters' names (--groups)."
            )
            each = replace(each, text=text, severity=WARNING)
        found.append(each)
    if report.index is not None and report.index.limits.stateless:
        found.append(Finding("missing", "", report.index.limits.stateless, WARNING))
    return [*found, *check_latest(report.folder, atomic=report.atomic)]


def _compare_own_manifest(
    folder: str, sizes: Mapping[str, int], listed: Mapping[str, FileRecords], *, first: bool
) -> tuple[Manifest | None, list[Finding]]:
    """The manifest of an atomic checkpoint of ours, and what this rank's files have to do with it."""
    if not exists(os.path.join(folder, MANIFEST)):
        return None, []
    from ..sources.atomic.manifest import read_manifest
    from .proof import compare_manifest

    try:
        manifest = read_manifest(folder)
    except UcpError as error:
        return None, [Finding("manifest", MANIFEST, str(error))]
    return manifest, compare_manifest(manifest, sizes, listed, first=first) if manifest else []


def _compare_samples(folder: str, index: AtomicIndex, comm: Comm) -> list[Finding]:
    """Whether masters and the model's own copies are of one step; collective."""
    try:
        check_samples(index, index.stored.atoms, comm)
    except UcpError as error:
        return [replace(each, kind="foreign") for each in from_error(folder, error)]
    return []


def _describe_file(name: str, nbytes: int, listed: FileRecords | None) -> FileReport:
    if listed is None:  # that its directory cannot be read is a fault; a swap file has none
        return FileReport(name, nbytes, 0, nbytes if read_swap_name(name) else 0)
    return FileReport(name, nbytes, len(listed.records), listed.unchecked)


def _sort_faults(faults: Iterable[Finding]) -> tuple[Finding, ...]:
    """By file, each cause once: damage is met by the listing, by the index and by the manifest; notes are left out."""
    unique: dict[tuple[str, ...], Finding] = {}
    files: dict[str, set[str]] = defaultdict(set)
    for fault in faults:
        if fault.severity != NOTE:
            unique.setdefault((fault.file, fault.kind, "" if fault.kind in ("header", "read") else fault.text), fault)
            files[fault.kind].add(fault.file)
    return sort_findings(fault for fault in unique.values() if not _is_repeated(fault, files))


def _is_repeated(fault: Finding, files: Mapping[str, Set[str]]) -> bool:
    """Whether a fault follows from a more telling one; ``files`` are those with faults, by kind."""
    if fault.kind == "header":
        return fault.file in files["crc"] and "has CRC32" in fault.text
    if fault.kind == "manifest":
        return fault.file in files["header"]
    causes = (name for kind in ("crc", "header", "missing", "manifest") for name in files[kind])
    return fault.kind == "inconsistent" and any(name in fault.text for name in causes)
