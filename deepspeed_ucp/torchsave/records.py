"""Records of a ``torch.save`` zip (caffe2/serialize/inline_container.cc)."""

from __future__ import annotations

import struct
import zipfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Final

from isal import isal_zlib

from ..errors import CheckpointError, ChecksumError, UnsupportedError
from ..io.interface import ReadStream, explain_failure
from ..io.store import open_stream
from ..model.records import Record
from .objects import RESTORE, make_damage_error
from .zipframe import ALIGNMENT, BYTEORDER, DATA, LOCAL, LOCAL_MAGIC, PICKLE, ROOT, STREAMED

LEGACY: Final = "legacy"
"""Name for the pickles in front of the storages of a file in the legacy format."""


@dataclass(frozen=True)
class FileRecords:
    """All non-empty records of a file, by offset.

    Attributes:
        records: by name without the archive's folder, such as ``data/0``.
        header_crc: CRC32 of the zip's directory, which contains every record's checksum (legacy: of the pickles).
        saved_as: folder in the zip: the name under which the file was saved, or ``archive``.
    """

    path: str
    size: int
    records: dict[str, Record]
    header_crc: int
    saved_as: str

    @property
    def unchecked(self) -> int:
        """Bytes in records without a checksum; the file's size if no record has one."""
        unchecked = [record.nbytes for record in self.records.values() if record.crc is None]
        return self.size if len(unchecked) == len(self.records) else sum(unchecked)

    @property
    def writer(self) -> str:
        """Mark of the writing release, from the names of its records and its archive."""
        others = sorted(name for name in self.records if not name.startswith(DATA))
        return " ".join([*others, "archive" if self.saved_as == ROOT else "named"])

    @cached_property
    def storages(self) -> dict[str, Record]:
        return {name[len(DATA) :]: record for name, record in self.records.items() if name.startswith(DATA)}


@contextmanager
def open_file(path: str) -> Iterator[ReadStream]:
    """Open a file for reading; CheckpointError if it is missing or unreadable."""
    try:
        with open_stream(path) as stream:
            yield stream
    except OSError as error:
        raise explain_failure(path, "read", error) from error


def starts_zip(stream: ReadStream) -> bool:
    """Return True if an open file has the zip format, False for the legacy format."""
    return stream.read_at(2, 0) == LOCAL_MAGIC[:2]


def list_zip(path: str, stream: ReadStream) -> FileRecords:
    """Read a zip's directory and its records' local headers."""
    front, archive = _open_zip(path, stream)
    entries = archive.infolist()
    filled = [info for info in entries if info.file_size]
    predicted = _predict_offsets(entries, archive.start_dir) if stream.is_remote else {}
    offsets = {info.header_offset for info in filled} - predicted.keys()
    stream.read_ahead([(offset, LOCAL.size) for offset in offsets if 0 <= offset < stream.size])
    is_checked = any(info.CRC for info in entries)  # torch.serialization.set_crc32_options(False) writes zeros
    located = []
    for info in filled:
        offset = _locate(path, stream, info, predicted.get(info.header_offset))
        record = Record(offset, info.file_size, info.CRC if is_checked else None)
        located.append((info.filename.partition("/")[2], record))
    located.sort(key=lambda named: named[1].offset)
    root = entries[0].filename.partition("/")[0] if entries else ""
    _check_names(path, [info.filename.partition("/")[2] for info in entries])
    for (one, first), (other, second) in pairwise(located):
        if first.offset + first.nbytes > second.offset:
            raise make_damage_error(path, f"records {one} and {other} overlap; its directory is damaged.")
    return FileRecords(path, stream.size, dict(located), _checksum_directory(front, archive), root)


def _open_zip(path: str, stream: ReadStream) -> tuple[FilePart, zipfile.ZipFile]:
    front = FilePart(stream, 0, _find_end(stream))
    try:
        return front, zipfile.ZipFile(front)
    except (zipfile.BadZipFile, NotImplementedError, ValueError, OverflowError, EOFError) as error:
        raise make_damage_error(
            path, f"no zip directory at its end ({error}; {stream.size} bytes); the file is truncated or damaged."
        ) from None


def _checksum_directory(front: FilePart, archive: zipfile.ZipFile) -> int:
    return isal_zlib.crc32(front.read_at(front.size, archive.start_dir))


def checksum_directory(path: str) -> int | None:
    """Return the CRC32 of a zip directory with checksums; None without one."""
    with open_file(path) as stream:
        if not starts_zip(stream):
            return None
        front, archive = _open_zip(path, stream)
        return _checksum_directory(front, archive) if any(info.CRC for info in archive.infolist()) else None


_END, _LOCATOR = struct.Struct("<4s4H2IH"), struct.Struct("<4sIQI")
_END_MAGIC, _LOCATOR_MAGIC = b"PK\x05\x06", b"PK\x06\x07"
_WIDE_END = 56
_DESCRIPTOR, _WIDE_DESCRIPTOR = 16, 24
_MOST_EXTRA = 4096  # limit of padding bytes in front of a record; the plugin's own files align records to pages
_MOST_REPEATED = 1 << 26


def _find_end(file: ReadStream) -> int:
    """Return the byte offset of a zip's end, ignoring repetitions of its last bytes.

    DeepSpeed's fast writer leaves repetitions if several ranks write one file at once: they write the same bytes to
    the same offsets, and each appends the rest behind the last whole block.
    """
    size = file.size
    last = file.read_at(_END.size, max(size - _END.size, 0))
    if len(last) < _END.size or last[:4] != _END_MAGIC:
        return size
    *_, directory, start, _ = _END.unpack(last)
    end = start + directory + _END.size
    locator = file.read_at(_LOCATOR.size, max(size - _END.size - _LOCATOR.size, 0))
    if locator[:4] == _LOCATOR_MAGIC:  # in large files; some torch releases always write it
        end = _LOCATOR.unpack(locator)[2] + _WIDE_END + _LOCATOR.size + _END.size
    if not 0 < size - end <= _MOST_REPEATED:
        return size
    rest = file.read_at(size - end, end)
    unit = rest.find(last) + len(last)
    before = file.read_at(unit, max(end - unit, 0))
    return end if rest == before * (len(rest) // unit) else size


class FilePart(ReadStream):
    """File-like view of ``size`` bytes of an open file from byte ``start``."""

    def __init__(self, file: ReadStream, start: int, size: int) -> None:
        super().__init__(size)
        self._file, self._start = file, start

    def read_at(self, nbytes: int, offset: int) -> bytes:
        return self._file.read_at(min(nbytes, max(self.size - offset, 0)), self._start + offset)


def _predict_offsets(entries: list[zipfile.ZipInfo], end: int) -> dict[int, int]:
    """Return header offset → offset of a record's bytes, from the directory alone.

    Records with an ambiguous offset are omitted. A record ends at the next header, or at the directory (byte ``end``).
    A descriptor of one of two lengths follows its bytes if its flags say so; alignment of the bytes decides which.
    """
    entries = sorted(entries, key=lambda info: info.header_offset)
    offsets = {}
    ends = [*(info.header_offset for info in entries[1:]), end]
    for info, last in zip(entries, ends, strict=bool(entries)):
        begin = info.header_offset + LOCAL.size + len(info.filename)
        for descriptor in (_DESCRIPTOR, _WIDE_DESCRIPTOR) if info.flag_bits & STREAMED else (0,):
            offset = last - descriptor - info.file_size
            if offset % ALIGNMENT == 0 and begin <= offset <= begin + _MOST_EXTRA:
                offsets[info.header_offset] = offset
    return offsets


def _locate(path: str, stream: ReadStream, info: zipfile.ZipInfo, offset: int | None) -> int:
    """Return the offset of a record's bytes; refuse a compressed or truncated record.

    Args:
        offset: as the directory shows it; None if it does not.
    """
    if info.compress_type != zipfile.ZIP_STORED:
        raise UnsupportedError(
            f"record {info.filename} is compressed, which torch.save never does: another program rewrote "
            f"the file. {RESTORE}",
            path=path,
        )
    if offset is None:  # it is in the local header
        is_inside = 0 <= info.header_offset < stream.size  # a damaged directory has any value here
        header = stream.read_at(LOCAL.size, info.header_offset if is_inside else stream.size)
        if len(header) < LOCAL.size or header[:4] != LOCAL_MAGIC:
            raise make_damage_error(
                path, f"record {info.filename} has no header at byte {info.header_offset}; the file is damaged."
            )
        *_, name_length, extra_length = LOCAL.unpack(header)
        offset = int(info.header_offset + LOCAL.size + name_length + extra_length)
    if offset + info.file_size > stream.size:
        raise make_damage_error(
            path, f"record {info.filename} ends beyond the file ({stream.size} bytes); it is truncated."
        )
    return offset


def _check_names(path: str, names: list[str]) -> None:
    pickles = names.count(PICKLE)
    if not pickles and BYTEORDER in names and not any(name.startswith("data/") for name in names):
        raise CheckpointError(
            "contains no objects (data.pkl): torch.save failed to write them, for example because the client state "
            "contains an object that cannot be pickled (a torch.memory_format, a lock, a module). The error of that "
            "save names the object. Remove it from the client state for later saves, and load another tag.",
            path=path,
        )
    if pickles != 1:
        raise make_damage_error(
            path, f"a torch.save file has one data.pkl, this zip has {pickles}; it is damaged or not a torch.save file."
        )
    if len(set(names)) < len(names):  # readers differ in the record that they take
        twice = Counter(names).most_common(1)[0][0]
        raise make_damage_error(path, f"its directory lists record {twice} twice; the file is damaged.")


def read_record(stream: ReadStream, listed: FileRecords, name: str) -> bytes:
    """Read a small record; CheckpointError if its bytes do not match their checksum."""
    record = listed.records[name]
    data = stream.read_at(record.nbytes, record.offset)
    check_crc(listed.path, name, record, isal_zlib.crc32(data))
    return data


def check_crc(path: str, name: str, record: Record, crc: int) -> None:
    """Raise ChecksumError if a CRC32 differs from the one stored by the writer."""
    if record.crc is not None and crc != record.crc:
        raise ChecksumError(
            f"{name} has CRC32 {crc:08x}, the writer stored {record.crc:08x}; the file is damaged. {RESTORE}",
            path=path,
        )
