"""Headers of ``torch.save`` files of one tensor each that are alike but for checksums: each form of them is read once.

A checkpoint of ``torch.distributed.checkpoint`` has such a file for each block of a tensor, tens of thousands of a few
forms. All that a header tells lies in front of the tensor's bytes, which is compared whole, and in the zip's directory,
which is compared but for the checksums of the tensor and of what follows it.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from isal import isal_zlib

from ..atoms import ITEMSIZE
from .objects import TensorRef
from .records import FileRecord, FileRecords, check_crc
from .zipframe import BYTEORDER, PICKLE

BEGINNING, ENDING = 2048, 1024
"""Bytes at a file's begin that hold its pickle, and at its end that hold its directory, as torch writes them."""

_MOST_ALIKE = 8
"""Forms of one length that are tried: more are made to cost time."""

_ENTRY, _ENTRY_MAGIC = struct.Struct("<4s12xI8x3H12x"), b"PK\x01\x02"
_CRC, _CRC_BYTES = 16, 4


class Header(NamedTuple):
    """A file's object tree with its tensors as references, and the records of its storages by key."""

    tree: Any
    storages: dict[str, FileRecord]


@dataclass(frozen=True, slots=True)
class _Form:
    """What files of a form have in common.

    Attributes:
        tree: the tensor.
        record: of its storage.
        begin: bytes up to that.
        kept: pieces of a file's ending; of ``same`` bytes.
        crc: where in the ending the storage's checksum lies.
    """

    tree: TensorRef
    record: FileRecord
    begin: bytes
    kept: tuple[slice, ...]
    same: bytes
    crc: slice


class Alike:
    """The forms that were met in a file."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._forms: dict[int, list[_Form]] = defaultdict(list)

    def find(self, nbytes: int, begin: bytes, end: bytes) -> Header | None:
        """The header of a file of a form that is known, else None.

        Args:
            nbytes: of the file.
            begin, end: its first :data:`BEGINNING` and last :data:`ENDING` bytes.

        Raises:
            ChecksumError: its only element is another one than was written.
        """
        for form in self._forms.get(nbytes, ()):
            if begin.startswith(form.begin) and b"".join([end[each] for each in form.kept]) == form.same:
                record = form.record._replace(crc=int.from_bytes(end[form.crc], "little"))
                tree = form.tree if form.tree.data is None else self._fill(form.tree, record, begin)
                return None if tree is None else Header(tree, {tree.storage.key: record})
        return None

    def _fill(self, tree: TensorRef, record: FileRecord, begin: bytes) -> TensorRef | None:
        """A tensor with its own element, where that lies in the beginning and is all of its storage."""
        itemsize = ITEMSIZE[tree.dtype]
        data = begin[record.offset : record.offset + itemsize]
        if len(data) < itemsize or record.nbytes != itemsize:
            return None
        check_crc(self._path, record, isal_zlib.crc32(data))
        return replace(tree, data=data)

    def learn(self, header: Header, records: FileRecords, begin: bytes, end: bytes) -> None:
        """Remember the form of a file whose header has been read, where it is one that torch writes."""
        forms, named = self._forms[records.size], {record.name: record for record in records.records}
        tree, storages = header
        if len(forms) == _MOST_ALIKE or len(storages) != 1 or type(tree) is not TensorRef:
            return
        ((key, record),) = storages.items()
        front = [named[name] for name in (PICKLE, BYTEORDER) if name in named]
        if key != tree.storage.key or record.crc is None or not record.offset <= len(begin):
            return
        if any(each.offset > record.offset for each in front):
            return
        entries = _list_entries(end)
        if sorted(entries) != sorted(named):
            return
        cuts = sorted(entries[each.name] for each in named.values() if each.offset >= record.offset)
        starts = [min(entries.values()) - _CRC, *(cut + _CRC_BYTES for cut in cuts)]
        kept = tuple(slice(start, cut) for start, cut in zip(starts, [*cuts, None], strict=True))
        same = b"".join([end[each] for each in kept])
        crc = slice(entries[record.name], entries[record.name] + _CRC_BYTES)
        forms.append(_Form(tree, record, begin[: record.offset], kept, same, crc))


def _list_entries(end: bytes) -> dict[str, int]:
    """By name of a record where in a zip's last bytes its directory has the record's checksum."""
    found = {}
    at = end.find(_ENTRY_MAGIC)
    while at >= 0 and len(end) >= at + _ENTRY.size and end[at : at + 4] == _ENTRY_MAGIC:
        lengths = _ENTRY.unpack_from(end, at)[2:]
        name = end[at + _ENTRY.size : at + _ENTRY.size + lengths[0]]
        found[name.partition(b"/")[2].decode(errors="replace")] = at + _CRC
        at += _ENTRY.size + sum(lengths)
    return found
