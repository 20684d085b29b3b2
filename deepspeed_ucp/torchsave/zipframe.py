"""Writing ``torch.save`` files without torch: the zip (records stored, a CRC32 each) around bytes that others write.

Layout as PyTorch writes it (caffe2/serialize/inline_container.cc): ``data.pkl``, ``byteorder``, ``version``, then the
storages as ``data/<key>``, aligned by padding in their local headers. A storage's CRC32 stands behind its bytes (the
zip's data descriptor) and in the directory, so that a file's parts can be written in any order.
Nothing in a file depends on when or where it was written.
"""

from __future__ import annotations

import io
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, Final

import numpy as np
from isal import isal_zlib
from numpy.typing import NDArray

from ..atoms import ITEMSIZE, count
from ..errors import CheckpointError
from .dtypes import STORAGES, pack_scalar
from .objects import Global, PickledObject, StorageRef, call
from .repickle import write_pickle

PAGE: Final = 4096
"""Alignment of an atom's bytes: ranges that start at multiples of it share no page of the file."""

ROOT: Final = "archive"
"""Folder inside the zip, as ``torch.save`` names it where it writes into a stream."""

ALIGNMENT: Final = 64
"""Of a record's bytes."""

STREAMED: Final = 0x0008
"""Flag of a record behind whose bytes a descriptor follows."""

_PIECE = 1 << 18
"""Bytes that are summed and written at once, while they are near."""

_UTF8 = 0x0800
_ELSEWHERE = 0xFFFFFFFF  # in a field of 32 bits: the value stands in the zip64 part
_ZIP64_LIMIT = _ELSEWHERE
_DATE = 0x21  # 1980-01-01

PICKLE: Final = "data.pkl"
BYTEORDER: Final = "byteorder"
VERSION: Final = "version"
DATA: Final = "data/"
"""Names of a file's records below the archive's folder; storages are ``data/<key>``."""

LOCAL_MAGIC: Final = b"PK\x03\x04"
LOCAL: Final = struct.Struct("<4s5H3I2H")
"""Header in front of a record; its name and extra field follow, whose lengths are its last two fields."""


@dataclass(frozen=True, slots=True)
class Stream:
    """A storage's bytes in pieces: ``nbytes`` in all."""

    nbytes: int
    pieces: Iterable[bytes | memoryview]


@dataclass(frozen=True, slots=True)
class _Entry:
    """A record of the zip: where its local header starts; ``crc`` None: told behind the bytes."""

    name: str
    offset: int
    nbytes: int
    crc: int | None = None

    @property
    def wide(self) -> bool:
        return self.nbytes >= _ZIP64_LIMIT

    def local(self, align: int = 1) -> bytes:
        """The local header, padded so that the bytes start at a multiple of ``align``."""
        name = self.name.encode()
        crc, size = (0, 0) if self.crc is None else (self.crc, self.nbytes)
        extra = b""
        if self.wide:
            extra, size = struct.pack("<2H2Q", 1, 16, size, size), _ELSEWHERE
        if align > 1:
            padding = -(self.offset + LOCAL.size + len(name) + len(extra) + 4) % align
            extra += struct.pack("<2s H", b"FB", padding) + b"Z" * padding
        fixed = (self._version(), self._flags(), 0, 0, _DATE, crc, size, size, len(name), len(extra))
        return LOCAL.pack(LOCAL_MAGIC, *fixed) + name + extra

    def describe(self, crc: int) -> bytes:
        """The data descriptor, which follows the bytes of a record whose local header does not tell the CRC32."""
        return struct.pack("<4sI2Q" if self.wide else "<4s3I", b"PK\x07\x08", crc, self.nbytes, self.nbytes)

    def directory(self, crc: int) -> bytes:
        """The record's entry in the directory at the end of the zip."""
        name, extra, size, offset = self.name.encode(), b"", self.nbytes, self.offset
        if self.wide:
            extra, size = struct.pack("<2Q", self.nbytes, self.nbytes), _ELSEWHERE
        if self.offset >= _ZIP64_LIMIT:
            extra, offset = extra + struct.pack("<Q", self.offset), _ELSEWHERE
        if extra:
            extra = struct.pack("<2H", 1, len(extra)) + extra
        version = 45 if extra else 20
        fixed = (version, version, self._flags(), 0, 0, _DATE, crc, size, size, len(name), len(extra))
        return struct.pack("<4s6H3I2H", b"PK\x01\x02", *fixed) + struct.pack("<3H2I", 0, 0, 0, 0, offset) + name + extra

    def _flags(self) -> int:
        return _UTF8 | (STREAMED if self.crc is None else 0)

    def _version(self) -> int:
        return 45 if self.wide else 20


def _close(entries: Sequence[_Entry], crcs: Iterable[int], offset: int) -> bytes:
    """What follows the records: the directory, which starts at byte ``offset``, and the zip's end."""
    directory = b"".join(entry.directory(crc) for entry, crc in zip(entries, crcs, strict=True))
    number, size, wide = len(entries), len(directory), b""
    if offset >= _ZIP64_LIMIT or number >= 0xFFFF:
        fixed = (44, 45, 45, 0, 0, number, number, size, offset)
        wide = struct.pack("<4sQ2H2I4Q", b"PK\x06\x06", *fixed)
        wide += struct.pack("<4sIQI", b"PK\x06\x07", 0, offset + size, 1)
    number, size, offset = min(number, 0xFFFF), min(size, _ELSEWHERE), min(offset, _ELSEWHERE)
    return directory + wide + struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, number, number, size, offset, 0)


@dataclass(frozen=True, slots=True)
class ZipImage:
    """A ``torch.save`` file with one large storage, as bytes around a hole.

    Attributes:
        head: bytes [0, data_offset) of the file.
        data_offset: where the storage's bytes start, a multiple of ``PAGE``.
        nbytes: how many they are; :meth:`tail` follows them.
    """

    head: bytes
    data_offset: int
    nbytes: int
    entries: tuple[_Entry, ...]

    def tail(self, crc: int) -> bytes:
        """What follows the storage's bytes, at ``data_offset + nbytes``; ``crc`` is the CRC32 of these."""
        descriptor = self.entries[-1].describe(crc)
        crcs = (crc if entry.crc is None else entry.crc for entry in self.entries)
        return descriptor + _close(self.entries, crcs, self.data_offset + self.nbytes + len(descriptor))

    @property
    def size(self) -> int:
        """Bytes of the whole file."""
        return self.data_offset + self.nbytes + len(self.tail(0))


def make_image(
    tree: Mapping[str, Any], dtype: str, storage_numel: int, shape: tuple[int, ...], *, root: str = ROOT
) -> ZipImage:
    """The file that ``torch.save({"param": tensor, **tree})`` makes, but for the tensor's bytes.

    Args:
        tree: further entries of the dictionary: inert data (:mod:`~.objects`).
        dtype: name of the element type, a key of ``ITEMSIZE``.
        storage_numel: elements of the storage.
        shape: of the tensor, a view of the storage's first elements.

    Raises:
        CheckpointError: the dtype is unknown, or the storage is too small.
    """
    if dtype not in ITEMSIZE or count(shape) > storage_numel:
        raise CheckpointError(
            f"a tensor of dtype {dtype} and shape {shape} in a storage of {storage_numel} elements cannot be written; "
            f"dtypes: {', '.join(ITEMSIZE)}"
        )
    tensor = make_tensor("0", dtype, storage_numel, shape)
    head, entries = _begin(write_pickle({"param": tensor, **tree}), root)
    data = _Entry(f"{root}/{DATA}0", len(head), storage_numel * ITEMSIZE[dtype])
    head += data.local(PAGE)
    return ZipImage(head, len(head), data.nbytes, (*entries, data))


def _begin(pickled: bytes, root: str) -> tuple[bytes, list[_Entry]]:
    """The records in front of the storages."""
    head, entries = b"", []
    for name, data in ((PICKLE, pickled), (BYTEORDER, b"little"), (VERSION, b"3\n")):
        entry = _Entry(f"{root}/{name}", len(head), len(data), isal_zlib.crc32(data))
        head += entry.local(ALIGNMENT) + data
        entries.append(entry)
    return head, entries


def make_tensor(key: str, dtype: str, storage_numel: int, shape: tuple[int, ...]) -> PickledObject:
    """A tensor in row-major order, at the start of storage ``key``, as ``torch.save`` pickles it."""
    numel = storage_numel if dtype in STORAGES else storage_numel * ITEMSIZE[dtype]
    kind = Global("torch", STORAGES[dtype]) if dtype in STORAGES else Global("torch.storage", "UntypedStorage")
    storage = StorageRef(key, kind, "cpu", numel)
    view = (storage, 0, tuple(shape), _make_strides(shape), False, call("collections", "OrderedDict"))
    if dtype in STORAGES:
        return call("torch._utils", "_rebuild_tensor_v2", *view)
    return call("torch._utils", "_rebuild_tensor_v3", *view, Global("torch", dtype))


def _make_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def dump_value(value: Any, dtype: str | None = None) -> tuple[bytes, int]:
    """The whole file that ``torch.save(value)`` makes, for ``step.pt``, and the CRC32 of its zip directory.

    Args:
        value: a number, or any plain value.
        dtype: the number's, where it is a 0-dim tensor.

    Raises:
        CheckpointError: the number is none of that dtype's.
    """
    stream = io.BytesIO()
    storages = {} if dtype is None else {"0": pack_scalar(dtype, value)}
    root = value if dtype is None else make_tensor("0", dtype, 1, ())
    crc = _write_file(stream, write_pickle(root), storages, ROOT, "")
    return stream.getvalue(), crc


def write_torch_file(path: str, pickled: bytes, storages: Mapping[str, bytes | Stream], *, root: str = ROOT) -> int:
    """Write a whole file, storages in the given order; not made durable, and not atomically.

    Args:
        pickled: ``data.pkl``.
        storages: by key; those of a :class:`Stream` are taken piece by piece.

    Returns:
        CRC32 of the zip's directory.

    Raises:
        CheckpointError: a stream had another length than it said.
        OSError: as the system tells it.
    """
    with open(path, "wb") as file:
        return _write_file(file, pickled, storages, root, path)


def _write_file(file: BinaryIO, pickled: bytes, storages: Mapping[str, bytes | Stream], root: str, path: str) -> int:
    head, entries = _begin(pickled, root)
    crcs = [entry.crc or 0 for entry in entries]
    file.write(head)
    for key, data in storages.items():
        stream = data if isinstance(data, Stream) else Stream(len(data), (data,))
        entry = _Entry(f"{root}/{DATA}{key}", file.tell(), stream.nbytes)
        crcs.append(_write_record(file, entry, stream, path))
        entries.append(entry)
    closing = _close(entries, crcs, file.tell())
    file.write(closing)
    return int(isal_zlib.crc32(closing))


def _write_record(file: BinaryIO, entry: _Entry, stream: Stream, path: str) -> int:
    file.write(entry.local(ALIGNMENT))
    crc, written = 0, 0
    for piece in stream.pieces:
        file.write(piece)
        crc = isal_zlib.crc32(piece, crc)
        written += memoryview(piece).nbytes
    if written != stream.nbytes:
        raise CheckpointError(f"record {entry.name} was to have {stream.nbytes} bytes, {written} came.", path=path)
    file.write(entry.describe(crc))
    return crc


class RecordWriter:
    """Writes a ``torch.save`` file record by record into an open file; does not make it durable.

    ``torch.serialization`` can write into it instead of its own writer. Each byte is read once, for its copy and its
    checksum.

    Args:
        fd: of a file open for writing; the caller truncates it to the size that :meth:`close` returns.
        memory: the file's first bytes, mapped: these are written there.
    """

    def __init__(self, fd: int, memory: NDArray[np.uint8] | None = None, *, root: str = ROOT) -> None:
        self._fd, self._root, self._offset = fd, root, 0
        self._memory = np.empty(0, np.uint8) if memory is None else memory
        self._entries, self._crcs = list[_Entry](), list[int]()

    def write_record(self, name: str, data: bytes | memoryview, nbytes: int) -> None:
        """Write a record of ``nbytes`` bytes.

        Raises:
            OSError: the file cannot be written.
        """
        self.write_pieces(name, [memoryview(data).cast("B")[:nbytes]], nbytes)

    def write_pieces(self, name: str, pieces: Iterable[memoryview], nbytes: int) -> None:
        """Write a record of ``nbytes`` bytes piece by piece.

        Raises:
            CheckpointError: the pieces have another total size.
            OSError: the file cannot be written.
        """
        entry, crc = _Entry(f"{self._root}/{name}", self._offset, nbytes), 0
        offset = start = self._put(entry.local(ALIGNMENT), self._offset)
        for view in pieces:
            for low in range(0, view.nbytes, _PIECE):
                piece = view[low : low + _PIECE]
                crc = isal_zlib.crc32(piece, crc)
                offset = self._put(piece, offset)
        if offset != start + nbytes:
            raise CheckpointError(f"record {entry.name} has {offset - start} bytes instead of {nbytes}.")
        self._offset = self._put(entry.describe(crc), offset)
        self._entries.append(entry)
        self._crcs.append(crc)

    def close(self) -> int:
        """Write the version record and the directory; return the size of the file in bytes.

        Raises:
            OSError: the file cannot be written.
        """
        self.write_record(VERSION, b"3\n", 2)
        return self._put(_close(self._entries, self._crcs, self._offset), self._offset)

    def _put(self, data: bytes | memoryview, offset: int) -> int:
        view = memoryview(data)
        if 0 < view.nbytes <= self._memory.nbytes - offset:
            self._memory[offset : offset + view.nbytes] = np.frombuffer(view, np.uint8)
            return offset + view.nbytes
        while view.nbytes:
            written = os.pwrite(self._fd, view, offset)
            offset, view = offset + written, view[written:]
        return offset
