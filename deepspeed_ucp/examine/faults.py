"""What is wrong with a checkpoint, and what lies in its damaged bytes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace

from ..atoms import AtomicIndex
from ..errors import UcpError, shorten
from ..io.scan import Scanned
from ..sources.findings import Finding
from ..torchsave.records import FileRecord, FileRecords
from ..torchsave.torchfile import name_storages

NAMED = 8
"""Atoms of a damaged record that a fault's text names; ``Finding.names`` has all."""


def judge_file(name: str, listed: FileRecords | None, scan: Scanned) -> list[tuple[Finding, FileRecord | None]]:
    """Faults of one file's bytes, with the record that each is about."""
    return list(_judge(name, listed, scan))


def _judge(name: str, listed: FileRecords | None, scan: Scanned) -> Iterator[tuple[Finding, FileRecord | None]]:
    records = listed.records if listed else ()
    for offset, text in scan.errors[:1]:
        inside = next((r for r in records if r.offset <= offset < r.offset + r.nbytes), None)
        more = f", nor at {len(scan.errors) - 1} other places" if len(scan.errors) > 1 else ""
        yield Finding("read", name, f"{name}: {text}{more}."), inside
    for record, crc in zip(records, scan.crcs, strict=True):
        if crc is not None and record.crc is not None and crc != record.crc:
            text = (
                f"{name}: record {record.name}, bytes [{record.offset}, {record.offset + record.nbytes}), has CRC32 "
                f"{crc:08x}, the writer stored {record.crc:08x}"
            )
            yield Finding("crc", name, text), record


def name_contents(
    folder: str, name: str, found: Sequence[tuple[Finding, FileRecord | None]], index: AtomicIndex | None
) -> Iterator[Finding]:
    """The same faults with what lies in the damaged records."""
    if not found:
        return
    offsets = {record.offset for _, record in found if record}
    inside = _find_atoms(index, os.path.join(folder, name), offsets) if index else {}
    places = _find_places(os.path.join(folder, name)) if len(inside) < len(offsets) else {}
    for fault, record in found:
        held = (inside.get(record.offset) or places.get(record.name, [])) if record else []
        text = f"{fault.text.removesuffix('.')}{_tell_contents(held, record)}."
        yield replace(fault, text=text, names=tuple(held))


def _tell_contents(held: Sequence[str], record: FileRecord | None) -> str:
    if held:
        return f"; it holds {shorten(held, NAMED)}"
    return "; it holds the object tree of the file" if record and record.name == "data.pkl" else ""


def _find_atoms(index: AtomicIndex, path: str, offsets: set[int]) -> dict[int, list[str]]:
    """Record offset → atoms with fragments in it."""
    files = {number for number, file in enumerate(index.stored.files) if os.path.samefile(file.path, path)}
    records = {n: r.offset for n, r in enumerate(index.stored.records) if r.file in files and r.offset in offsets}
    found: dict[int, dict[str, None]] = {}
    for atom in index.stored.atoms.values():
        for shard in atom.shards:
            for fragment in shard.fragments:
                if fragment.record in records:
                    found.setdefault(records[fragment.record], {})[f"{atom.param} ({atom.state})"] = None
    return {offset: list(held) for offset, held in found.items()}


def _find_places(path: str) -> dict[str, list[str]]:
    try:
        return name_storages(path)
    except UcpError:
        return {}
