"""Holds an atomic checkpoint's files against its manifest."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from ..sources.findings import Finding
from ..torchsave.records import FileRecords

if TYPE_CHECKING:
    from ..sources.atomic.manifest import AtomRecord, Manifest

STEP = "step.pt"
"""A parameter's scalar, which the manifest has itself; the file is there for upstream."""


def find_extra(manifest: Manifest, sizes: Mapping[str, int]) -> Iterator[Finding]:
    """Files that the manifest does not list; what it lists is looked for as the checkpoint is opened."""
    expected = {atom.file for atom in manifest.atoms} | {state.name for state in manifest.states}
    for name in sorted(set(sizes) - expected):
        if name.rpartition("/")[2] != STEP:
            text = f"{name}: the manifest does not list it; DeepSpeed would load it all the same. Remove it."
            yield Finding("extra", name, text)


def compare_contents(manifest: Manifest, listed: Mapping[str, FileRecords]) -> Iterator[Finding]:
    """Files whose records are not those that were written; their bytes are held against the records by scanning."""
    by_file: dict[str, list[AtomRecord]] = defaultdict(list)
    for atom in manifest.atoms:
        by_file[atom.file].append(atom)
    for name, file in listed.items():
        yield from _compare_atoms(by_file.get(name, ()), file)
    for state in manifest.states:
        found = listed.get(state.name)
        if found is not None and found.header_crc != state.crc:
            text = (
                f"{state.name}: its directory has CRC32 {found.header_crc:08x}, the manifest says {state.crc:08x}; it "
                "is not the file that was written."
            )
            yield Finding("manifest", state.name, text)


def _compare_atoms(atoms: Iterable[AtomRecord], file: FileRecords) -> Iterator[Finding]:
    records = {(record.offset, record.nbytes): record for record in file.records}
    for atom in atoms:
        record = records.get((atom.offset, atom.nbytes))
        told = f"{atom.file}: {atom.name} ({atom.state})"
        if record is None and atom.nbytes:
            text = f"{told} has to be {atom.nbytes} bytes at byte {atom.offset}; the file has no such record."
            yield Finding("manifest", atom.file, text, names=(f"{atom.name} ({atom.state})",))
        elif record is not None and record.crc is not None and record.crc != atom.crc:
            text = (
                f"{told} has CRC32 {record.crc:08x}, the manifest says {atom.crc:08x}; it is not what was written "
                "(another parameter's or another checkpoint's file)."
            )
            yield Finding("manifest", atom.file, text, names=(f"{atom.name} ({atom.state})",))
