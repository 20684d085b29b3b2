"""Find faults of a file's bytes, and the tensors in damaged records."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from ..errors import UcpError, shorten
from ..formats.findings import Finding
from ..io.scan import Scanned
from ..model import AtomicIndex
from ..torchsave.records import FileRecord, FileRecords
from ..torchsave.torchfile import name_storages

NAMED = 8
"""Maximum number of atoms in a fault's text; ``Finding.names`` has all."""


def find_damage(path: str, name: str, listed: FileRecords, scan: Scanned, index: AtomicIndex | None) -> list[Finding]:
    """Find faults of a file's bytes, with the known atoms of damaged records.

    Args:
        listed: the file's directory.
        scan: checksums and errors of reading the records.
    """
    damaged = list(_compare_records(name, listed.records, scan))
    if not damaged:
        return []
    offsets = {record.offset for *_, record in damaged if record}
    atoms = _find_atoms(index, path, offsets) if index else {}
    storages = _name_storages(path) if len(atoms) < len(offsets) else {}
    findings = []
    for kind, text, record in damaged:
        contents = (atoms.get(record.offset) or storages.get(record.name, [])) if record else []
        findings.append(Finding(kind, name, f"{text}{_describe_contents(contents, record)}.", names=tuple(contents)))
    return findings


def _compare_records(
    name: str, records: Sequence[FileRecord], scan: Scanned
) -> Iterator[tuple[str, str, FileRecord | None]]:
    """Yield (kind, first part of the text, record) of each fault."""
    for offset, text in scan.errors[:1]:
        inside = next((r for r in records if r.offset <= offset < r.offset + r.nbytes), None)
        more = f", nor at {len(scan.errors) - 1} other places" if len(scan.errors) > 1 else ""
        yield "read", f"{name}: {text}{more}", inside
    for record, crc in zip(records, scan.crcs, strict=True):
        if crc is not None and record.crc is not None and crc != record.crc:
            text = (
                f"{name}: record {record.name}, bytes [{record.offset}, {record.offset + record.nbytes}), has CRC32 "
                f"{crc:08x}, the writer stored {record.crc:08x}"
            )
            yield "crc", text, record


def _describe_contents(contents: Sequence[str], record: FileRecord | None) -> str:
    if contents:
        return f"; it holds {shorten(contents, NAMED)}"
    return "; it holds the object tree of the file" if record and record.name == "data.pkl" else ""


def _find_atoms(index: AtomicIndex, path: str, offsets: Collection[int]) -> dict[int, list[str]]:
    """Map record offsets to the atoms with fragments in these records."""
    files = {number for number, file in enumerate(index.files) if path in file.copies}
    records = {n: r.offset for n, r in enumerate(index.records) if r.file in files and r.offset in offsets}
    atoms: dict[int, dict[str, None]] = {}
    for atom in index.atoms.values():
        fragments = (f for shard in atom.shards for f in shard.list_fragments(atom.state))
        for fragment in (f for f in fragments if f.record in records):
            atoms.setdefault(records[fragment.record], {})[f"{atom.param} ({atom.state})"] = None
    return {offset: list(names) for offset, names in atoms.items()}


def _name_storages(path: str) -> dict[str, list[str]]:
    try:
        return name_storages(path)
    except UcpError:
        return {}
