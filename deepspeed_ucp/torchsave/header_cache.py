"""Cache of ``torch.save`` headers that differ only in checksums, so that each form of header is parsed once.

A ``torch.distributed.checkpoint`` save has one file per tensor block: tens of thousands of files in a few forms. Two
files have the same form if all bytes in front of the tensor's data are equal, and all bytes of the zip's directory
except the checksums of the tensor and of the records behind it.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from isal import isal_zlib

from ..model import ITEMSIZE
from .objects import TensorRef
from .records import FileRecord, FileRecords, check_crc
from .zipframe import BYTEORDER, PICKLE

BEGINNING, ENDING = 2048, 1024
"""Bytes at a file's start that hold its pickle, and at its end that hold its directory, as torch writes them."""

_MOST_FORMS = 8
"""Limit of forms per file size, so that a hostile file cannot make the comparison slow."""

_ENTRY, _ENTRY_MAGIC = struct.Struct("<4s12xI8x3H12x"), b"PK\x01\x02"
_CRC, _CRC_BYTES = 16, 4


class Header(NamedTuple):
    """Object tree of a file with tensor references, and its storages' records by key."""

    tree: Any
    storages: dict[str, FileRecord]


@dataclass(frozen=True, slots=True)
class _Form:
    """The common part of files of one form.

    Attributes:
        tree: the tensor reference.
        record: record of the tensor's storage.
        begin: all bytes in front of the storage.
        compared: slices of the ending, joined they equal ``same``.
        crc: position of the storage's checksum in the ending.
    """

    tree: TensorRef
    record: FileRecord
    begin: bytes
    compared: tuple[slice, ...]
    same: bytes
    crc: slice


class HeaderCache:
    """Headers of the files inside one larger file."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._forms: dict[int, list[_Form]] = defaultdict(list)

    def find(self, nbytes: int, begin: bytes, end: bytes) -> Header | None:
        """Return the header of a file of a known form, else None.

        Args:
            nbytes: size of the file.
            begin, end: its first :data:`BEGINNING` and last :data:`ENDING` bytes.

        Raises:
            ChecksumError: the only element differs from its checksum.
        """
        for form in self._forms.get(nbytes, ()):
            if begin.startswith(form.begin) and b"".join([end[part] for part in form.compared]) == form.same:
                record = form.record._replace(crc=int.from_bytes(end[form.crc], "little"))
                tree = form.tree if form.tree.data is None else self._fill(form.tree, record, begin)
                return None if tree is None else Header(tree, {tree.storage.key: record})
        return None

    def _fill(self, tree: TensorRef, record: FileRecord, begin: bytes) -> TensorRef | None:
        """Add the only element, if the storage has no other and it lies in the beginning."""
        itemsize = ITEMSIZE[tree.dtype]
        data = begin[record.offset : record.offset + itemsize]
        if len(data) < itemsize or record.nbytes != itemsize:
            return None
        check_crc(self._path, record, isal_zlib.crc32(data))
        return replace(tree, data=data)

    def add(self, header: Header, records: FileRecords, begin: bytes, end: bytes) -> None:
        """Remember the form of a parsed header if it is one that torch writes for a single tensor."""
        forms, named = self._forms[records.size], {record.name: record for record in records.records}
        tree, storages = header
        if len(forms) == _MOST_FORMS or len(storages) != 1 or type(tree) is not TensorRef:
            return
        ((key, record),) = storages.items()
        front = [named[name] for name in (PICKLE, BYTEORDER) if name in named]
        if key != tree.storage.key or record.crc is None or not record.offset <= len(begin):
            return
        if any(other.offset > record.offset for other in front):
            return
        entries = _list_entries(end)
        if sorted(entries) != sorted(named):
            return
        cuts = sorted(entries[other.name] for other in named.values() if other.offset >= record.offset)
        starts = [min(entries.values()) - _CRC, *(cut + _CRC_BYTES for cut in cuts)]
        compared = tuple(slice(start, cut) for start, cut in zip(starts, [*cuts, None], strict=True))
        same = b"".join([end[part] for part in compared])
        crc = slice(entries[record.name], entries[record.name] + _CRC_BYTES)
        forms.append(_Form(tree, record, begin[: record.offset], compared, same, crc))


def _list_entries(end: bytes) -> dict[str, int]:
    """Record name → position of its checksum in the last bytes of a zip."""
    positions = {}
    at = end.find(_ENTRY_MAGIC)
    while at >= 0 and len(end) >= at + _ENTRY.size and end[at : at + 4] == _ENTRY_MAGIC:
        lengths = _ENTRY.unpack_from(end, at)[2:]
        name = end[at + _ENTRY.size : at + _ENTRY.size + lengths[0]]
        positions[name.partition(b"/")[2].decode(errors="replace")] = at + _CRC
        at += _ENTRY.size + sum(lengths)
    return positions
