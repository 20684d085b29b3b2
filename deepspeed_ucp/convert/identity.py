"""The identity of a conversion's source: its files, and the view of them."""

from __future__ import annotations

import hashlib
import json
import os

from ..formats.universal.index import Fingerprint, SourceFile, keep_plain
from ..io.store import find_change_time
from ..model.index import AtomicIndex
from ..model.records import Record


def identify(index: AtomicIndex) -> tuple[Fingerprint, str]:
    """Return the fingerprint of a checkpoint's files, and the digest of its index."""
    return fingerprint(index), digest_view(index)


def fingerprint(index: AtomicIndex) -> Fingerprint:
    """Identify a checkpoint by its files' names, sizes and header CRCs.

    A header's CRC covers the CRCs of all records. Without it the records' CRCs are used, and for bytes without a
    checksum the file's time of change. Names are relative to the state file's folder, so a moved checkpoint keeps its
    fingerprint.
    """
    folder = os.path.dirname(index.state_file) or "."
    records: dict[int, list[Record]] = {}
    for file_number, record in zip(index.records.files, index.records, strict=True):
        records.setdefault(file_number, []).append(record)
    files = []
    for number, file in enumerate(index.files):
        name = os.path.relpath(file.path, folder)
        if name.startswith(os.pardir):  # in another place
            name = os.path.basename(file.path)
        entry: SourceFile = {"name": name, "size": file.size, "header_crc": file.header_crc}
        ordered = sorted(records.get(number, ()), key=lambda record: record.offset)
        if file.header_crc is None:
            entry["records"] = [[*record] for record in ordered]
        if any(record.crc is None for record in ordered):
            entry["changed"] = find_change_time(file.path)
        files.append(entry)
    files.sort(key=lambda entry: entry["name"])
    return {"files": files, "digest": hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()}


def digest_view(index: AtomicIndex) -> str:
    """Return the SHA-256 of an index: places of elements, scalars, counters, groups.

    One set of files can have several indexes: the user names the parameters of a stage-0 checkpoint.
    """
    digest = hashlib.sha256()
    for key, atom in sorted(index.atoms.items()):
        digest.update(repr((tuple(key), atom.dtype)).encode())
        for shard in atom.shards:
            fragments = shard.list_fragments(key.state)
            places = [(f.start, f.numel, *_find_place(index, f.record), f.offset) for f in fragments]
            digest.update(repr((shard.shape, places)).encode())
    for mapping in (index.scalars, index.aliases, index.instances):
        digest.update(repr(sorted(mapping.items())).encode())
    values = index.counters, index.scaler, index.clip_grad
    digest.update(repr((values, [(group.members, keep_plain(group.hyper)) for group in index.groups])).encode())
    return digest.hexdigest()


def _find_place(index: AtomicIndex, number: int) -> tuple[str, int]:
    """Return the file name and the offset of a record."""
    return os.path.basename(index.files[index.records.files[number]].path), index.records.offsets[number]
