"""The records of a ``torch.save`` zip as its directory lists them (caffe2/serialize/inline_container.cc)."""

from __future__ import annotations

import struct
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import BinaryIO, Final, NamedTuple

from isal import isal_zlib

from ..errors import CheckpointError, ChecksumError, UnsupportedError
from ..io.opened import Positioned, explain_failure, is_remote, measure, read_ahead, read_at
from ..io.store import open_regular
from .objects import RESTORE
from .zipframe import ALIGNMENT, BYTEORDER, DATA, LOCAL, LOCAL_MAGIC, PICKLE, ROOT, STREAMED

LEGACY: Final = "legacy"
"""Name for the pickles in front of the storages of a file in the legacy format."""


class FileRecord(NamedTuple):
    """Bytes of a file with a name: a storage's, or another record's.

    Attributes:
        name: without the archive's folder, as ``data/0``.
        offset, nbytes: byte offset and byte count.
        crc: CRC32 that the writer stored; None where it stored none.
    """

    name: str
    offset: int
    nbytes: int
    crc: int | None


@dataclass(frozen=True, slots=True)
class FileRecords:
    """All records of a file that are not empty, by offset.

    Attributes:
        header_crc: CRC32 of the zip's directory, which holds every record's checksum (legacy: of the pickles).
        saved_as: folder in the zip: the name that the file was saved under, or ``archive``.
    """

    path: str
    size: int
    records: tuple[FileRecord, ...]
    header_crc: int
    saved_as: str

    @property
    def unchecked(self) -> int:
        """Bytes of records without a checksum; of all of the file where there is none at all."""
        unchecked = [record.nbytes for record in self.records if record.crc is None]
        return self.size if len(unchecked) == len(self.records) else sum(unchecked)

    @property
    def writer(self) -> str:
        """What tells releases apart: names of the records beside the storages, and whether the archive has one."""
        others = sorted(record.name for record in self.records if not record.name.startswith(DATA))
        return " ".join([*others, "archive" if self.saved_as == ROOT else "named"])

    @property
    def storages(self) -> dict[str, FileRecord]:
        """Records of storages by key."""
        return {r.name[len(DATA) :]: r for r in self.records if r.name.startswith(DATA)}


@contextmanager
def open_file(path: str) -> Iterator[BinaryIO]:
    """A file for reading.

    Raises:
        CheckpointError: it is missing, or cannot be read.
    """
    try:
        with open_regular(path) as stream:
            yield stream
    except OSError as error:
        raise explain_failure(path, "read", error) from error


def starts_zip(stream: BinaryIO) -> bool:
    """Whether an open file is in the zip format, not the legacy one."""
    stream.seek(0)
    return stream.read(2) == LOCAL_MAGIC[:2]


def list_zip(path: str, stream: BinaryIO) -> FileRecords:
    """Read a zip's directory; of the records only their headers are read.

    Raises:
        CheckpointError: it is truncated or damaged.
        UnsupportedError: a record is compressed.
    """
    size = measure(stream)
    front, archive = _open_zip(path, stream, size)
    entries = archive.infolist()
    checked = _is_checked(entries)
    held = [info for info in entries if info.file_size]
    foreseen = _foresee(entries, archive.start_dir) if is_remote(stream) else {}
    read_ahead(stream, [(info.header_offset, LOCAL.size) for info in held if info.header_offset not in foreseen])
    found = [_locate(path, stream, info, size, foreseen.get(info.header_offset)) for info in held]
    if not checked:
        found = [record._replace(crc=None) for record in found]
    found.sort(key=lambda record: record.offset)
    roots = list(dict.fromkeys(info.filename.partition("/")[0] for info in entries))
    _check_names(path, [info.filename.partition("/")[2] for info in entries])
    _check_apart(path, found)
    return FileRecords(path, size, tuple(found), _sum_directory(front, archive), roots[0] if roots else "")


def _open_zip(path: str, stream: BinaryIO, size: int) -> tuple[FilePart, zipfile.ZipFile]:
    front = FilePart(stream, 0, _find_end(stream, size))
    try:
        return front, zipfile.ZipFile(front)
    except (zipfile.BadZipFile, NotImplementedError, ValueError, OverflowError, EOFError) as error:
        raise CheckpointError(
            f"no zip directory at its end ({error}; {size} bytes); the file is truncated or damaged. {RESTORE}",
            path=path,
        ) from None


def _sum_directory(front: FilePart, archive: zipfile.ZipFile) -> int:
    front.seek(archive.start_dir)
    return isal_zlib.crc32(front.read())


def _is_checked(entries: Iterable[zipfile.ZipInfo]) -> bool:
    """Whether the writer stored checksums: with torch.serialization.set_crc32_options(False) all are 0."""
    return any(info.CRC for info in entries)


def sum_directory(path: str) -> int | None:
    """CRC32 of a zip's directory, which holds the checksums of all its records; None of a file that has none.

    Raises:
        CheckpointError: it is missing, unreadable, truncated or damaged.
    """
    with open_file(path) as stream:
        if not starts_zip(stream):
            return None
        front, archive = _open_zip(path, stream, measure(stream))
        return _sum_directory(front, archive) if _is_checked(archive.infolist()) else None


_END, _LOCATOR = struct.Struct("<4s4H2IH"), struct.Struct("<4sIQI")
_END_MAGIC, _LOCATOR_MAGIC = b"PK\x05\x06", b"PK\x06\x07"
_WIDE_END = 56
_DESCRIPTOR, _WIDE_DESCRIPTOR = 16, 24
_MOST_EXTRA = 4096
"""Bytes of the longest padding in front of a record: ours are aligned to pages."""
_MOST_REPEATED = 1 << 26


def _find_end(file: BinaryIO, size: int) -> int:
    """Where a zip ends: behind it may stand its last bytes again, any number of times.

    DeepSpeed's fast writer leaves that where ranks write one file at once (all do that are not its writers): all write
    the same bytes to the same places, and each appends what is left of the last block.
    """
    last = read_at(file, _END.size, max(size - _END.size, 0))
    if len(last) < _END.size or last[:4] != _END_MAGIC:
        return size
    *_, directory, start, _ = _END.unpack(last)
    end = start + directory + _END.size
    told = read_at(file, _LOCATOR.size, max(size - _END.size - _LOCATOR.size, 0))
    if told[:4] == _LOCATOR_MAGIC:  # of a large file, or a torch that writes them of every file
        end = _LOCATOR.unpack(told)[2] + _WIDE_END + _LOCATOR.size + _END.size
    if not 0 < size - end <= _MOST_REPEATED:
        return size
    rest = read_at(file, size - end, end)
    unit = rest.find(last) + len(last)
    before = read_at(file, unit, max(end - unit, 0))
    return end if rest == before * (len(rest) // unit) else size


class FilePart(Positioned):
    """The ``size`` bytes from ``start`` on of a file that is open for reading, as a file of their own."""

    def __init__(self, file: BinaryIO, start: int, size: int) -> None:
        super().__init__(size)
        self._file, self._start = file, start

    def read_at(self, nbytes: int, offset: int) -> bytes:
        """As the file's, and nothing behind the end."""
        return read_at(self._file, min(nbytes, max(self.size - offset, 0)), self._start + offset)


def _foresee(entries: list[zipfile.ZipInfo], end: int) -> dict[int, int]:
    """Where records' bytes begin, by the offset of their headers, as far as the directory tells that.

    A record ends where the next one begins, or the directory, at byte ``end``; behind its bytes lies a descriptor of
    one of two lengths where its flags say so. Of these one alone may be right: writers align the bytes.
    """
    entries = sorted(entries, key=lambda info: info.header_offset)
    found = {}
    ends = [*(info.header_offset for info in entries[1:]), end]
    for info, last in zip(entries, ends, strict=bool(entries)):
        begin = info.header_offset + LOCAL.size + len(info.filename)
        for descriptor in (_DESCRIPTOR, _WIDE_DESCRIPTOR) if info.flag_bits & STREAMED else (0,):
            offset = last - descriptor - info.file_size
            if offset % ALIGNMENT == 0 and begin <= offset <= begin + _MOST_EXTRA:
                found[info.header_offset] = offset
    return found


def _locate(path: str, stream: BinaryIO, info: zipfile.ZipInfo, size: int, offset: int | None) -> FileRecord:
    if info.compress_type != zipfile.ZIP_STORED:
        raise UnsupportedError(
            f"record {info.filename} is compressed, which torch.save never does: another program has packed "
            f"the file anew. {RESTORE}",
            path=path,
        )
    if offset is None:
        offset = _read_place(path, stream, info, size)
    if offset + info.file_size > size:
        raise CheckpointError(
            f"record {info.filename} ends beyond the file ({size} bytes); it is truncated. {RESTORE}", path=path
        )
    name = info.filename.partition("/")[2] or info.filename
    return FileRecord(name, offset, info.file_size, info.CRC)


def _read_place(path: str, stream: BinaryIO, info: zipfile.ZipInfo, size: int) -> int:
    """Where a record's bytes begin, as its header tells."""
    at = info.header_offset if 0 <= info.header_offset < size else size  # a directory may say anything
    header = read_at(stream, LOCAL.size, at)
    if len(header) < LOCAL.size or header[:4] != LOCAL_MAGIC:
        raise CheckpointError(
            f"record {info.filename} has no header at byte {info.header_offset}; the file is damaged. {RESTORE}",
            path=path,
        )
    *_, name_length, extra_length = LOCAL.unpack(header)
    return int(info.header_offset + LOCAL.size + name_length + extra_length)


def _check_names(path: str, names: list[str]) -> None:
    """A file has one pickle, and no record twice: readers differ in which of two they take."""
    pickles = names.count(PICKLE)
    if not pickles and BYTEORDER in names and not any(name.startswith("data/") for name in names):
        raise CheckpointError(
            "holds no objects (data.pkl): torch.save failed when it was to write them, as it does where a "
            "client state holds what cannot be pickled (a torch.memory_format, a lock, a module). That save raised an "
            "error, which names it. Take it out of the client state for later saves, and load another tag.",
            path=path,
        )
    if pickles != 1:
        raise CheckpointError(
            f"a torch.save file has one data.pkl, this zip has {pickles}; it is damaged or no torch.save "
            f"file. {RESTORE}",
            path=path,
        )
    if len(set(names)) < len(names):
        twice = Counter(names).most_common(1)[0][0]
        raise CheckpointError(f"its directory lists record {twice} twice; the file is damaged. {RESTORE}", path=path)


def _check_apart(path: str, records: list[FileRecord]) -> None:
    """Records of a whole file do not overlap."""
    for first, second in pairwise(records):
        if first.offset + first.nbytes > second.offset:
            raise CheckpointError(
                f"records {first.name} and {second.name} overlap; its directory is damaged. {RESTORE}", path=path
            )


def read_record(stream: BinaryIO, path: str, record: FileRecord) -> bytes:
    """The bytes of a small record, held against their checksum.

    Raises:
        CheckpointError: they are damaged.
    """
    stream.seek(record.offset)
    data = stream.read(record.nbytes)
    check_crc(path, record, isal_zlib.crc32(data))
    return data


def check_crc(path: str, record: FileRecord, found: int) -> None:
    """Compare a CRC32 with the one that the writer stored.

    Raises:
        ChecksumError: they differ.
    """
    if record.crc is not None and found != record.crc:
        raise ChecksumError(
            f"{record.name} has CRC32 {found:08x}, the writer stored {record.crc:08x}; the file is damaged. {RESTORE}",
            path=path,
        )
