"""Write ``torch.save`` zips without torch: stored, with CRC32s, deterministic.

The layout is PyTorch's (caffe2/serialize/inline_container.cc): ``data.pkl``, ``byteorder``, ``version``, then the
storages as ``data/<key>``, aligned by padding in their local headers. A storage's CRC32 is behind its bytes (the zip's
data descriptor) and in the directory, so that the parts of a file can be written in any order.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from isal import isal_zlib
from numpy.typing import NDArray

from ..errors import CheckpointError
from ..model.storage import ITEMSIZE, count, make_strides
from .objects import STORAGES, Global, PickledObject, StorageRef, call, pack_scalar
from .repickle import write_pickle

PAGE: Final = 4096
"""Alignment of an atom's bytes, so that two atoms never share a page of the file."""

ROOT: Final = "archive"
"""Folder inside the zip that ``torch.save`` uses if it writes into a stream."""

ALIGNMENT: Final = 64
"""Alignment of a record's bytes."""

STREAMED: Final = 0x0008
"""Flag of a record whose bytes are followed by a descriptor."""

_PIECE = 1 << 18  # bytes that are checksummed and written at once, while they are in the CPU's cache
_FLAGS = 0x0800 | STREAMED  # names in UTF-8
_IN_ZIP64 = 0xFFFFFFFF  # marks a 32-bit field whose value is in the zip64 part
_ZIP64_LIMIT = _IN_ZIP64
_DATE = 0x21  # 1980-01-01

PICKLE: Final = "data.pkl"
BYTEORDER: Final = "byteorder"
VERSION: Final = "version"
DATA: Final = "data/"
"""Names of records in the archive's folder; storages are ``data/<key>``."""

LOCAL_MAGIC: Final = b"PK\x03\x04"
LOCAL: Final = struct.Struct("<4s5H3I2H")
"""Local header of a record. Its last two fields are the lengths of the name and the extra field that follow it."""


@dataclass(frozen=True, slots=True)
class Stream:
    """A storage's bytes in pieces, ``nbytes`` in total."""

    nbytes: int
    pieces: Iterable[bytes | memoryview]


@dataclass(frozen=True, slots=True)
class _Entry:
    """A record of the zip, whose local header starts at byte ``offset``."""

    name: str
    offset: int
    nbytes: int

    @property
    def is_zip64(self) -> bool:
        return self.nbytes >= _ZIP64_LIMIT

    def local_header(self, align: int = ALIGNMENT) -> bytes:
        """Return the local header, padded to start the bytes at a multiple of ``align``."""
        name, extra, size = self.name.encode(), b"", 0
        if self.is_zip64:
            extra, size = struct.pack("<2H2Q", 1, 16, 0, 0), _IN_ZIP64
        padding = -(self.offset + LOCAL.size + len(name) + len(extra) + 4) % align
        extra += struct.pack("<2s H", b"FB", padding) + b"Z" * padding
        version = 45 if self.is_zip64 else 20
        fixed = (version, _FLAGS, 0, 0, _DATE, 0, size, size, len(name), len(extra))
        return LOCAL.pack(LOCAL_MAGIC, *fixed) + name + extra

    def descriptor(self, crc: int) -> bytes:
        """Return the data descriptor behind the bytes."""
        return struct.pack("<4sI2Q" if self.is_zip64 else "<4s3I", b"PK\x07\x08", crc, self.nbytes, self.nbytes)

    def directory_entry(self, crc: int) -> bytes:
        """Return the record's entry in the directory at the end of the zip."""
        name, extra, size, offset = self.name.encode(), b"", self.nbytes, self.offset
        if self.is_zip64:
            extra, size = struct.pack("<2Q", self.nbytes, self.nbytes), _IN_ZIP64
        if self.offset >= _ZIP64_LIMIT:
            extra, offset = extra + struct.pack("<Q", self.offset), _IN_ZIP64
        if extra:
            extra = struct.pack("<2H", 1, len(extra)) + extra
        version = 45 if extra else 20
        fixed = (version, version, _FLAGS, 0, 0, _DATE, crc, size, size, len(name), len(extra))
        return struct.pack("<4s6H3I2H", b"PK\x01\x02", *fixed) + struct.pack("<3H2I", 0, 0, 0, 0, offset) + name + extra


def _make_end(entries: Sequence[_Entry], crcs: Iterable[int], offset: int) -> bytes:
    """Return the bytes behind the records: the directory at ``offset``, and the end."""
    directory = b"".join(entry.directory_entry(crc) for entry, crc in zip(entries, crcs, strict=True))
    number, size, wide = len(entries), len(directory), b""
    if offset >= _ZIP64_LIMIT or number >= 0xFFFF:
        fixed = (44, 45, 45, 0, 0, number, number, size, offset)
        wide = struct.pack("<4sQ2H2I4Q", b"PK\x06\x06", *fixed)
        wide += struct.pack("<4sIQI", b"PK\x06\x07", 0, offset + size, 1)
    number, size, offset = min(number, 0xFFFF), min(size, _IN_ZIP64), min(offset, _IN_ZIP64)
    return directory + wide + struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, number, number, size, offset, 0)


@dataclass(frozen=True, slots=True)
class ZipImage:
    """A ``torch.save`` file with one storage, whose bytes others write.

    Attributes:
        head: bytes in front of the storage, a multiple of ``PAGE``.
        nbytes: bytes of the storage; :meth:`tail` follows them.
        crcs: of the other records.
    """

    head: bytes
    nbytes: int
    entries: tuple[_Entry, ...]
    crcs: tuple[int, ...]

    @property
    def data_offset(self) -> int:
        return len(self.head)

    def tail(self, crc: int) -> bytes:
        """Return the bytes behind the storage, whose bytes have CRC32 ``crc``."""
        descriptor = self.entries[-1].descriptor(crc)
        offset = self.data_offset + self.nbytes + len(descriptor)
        return descriptor + _make_end(self.entries, (*self.crcs, crc), offset)

    def checksum_directory(self, crc: int) -> int:
        """Return the CRC32 of the zip's directory for a storage with CRC32 ``crc``."""
        return int(isal_zlib.crc32(self.tail(crc)[len(self.entries[-1].descriptor(crc)) :]))

    @property
    def size(self) -> int:
        return self.data_offset + self.nbytes + len(self.tail(0))


def make_image(tree: Mapping[str, Any], dtype: str, storage_numel: int, shape: tuple[int, ...]) -> ZipImage:
    """Return ``torch.save({"param": tensor, **tree})`` without the tensor's bytes.

    Args:
        tree: further entries of the dictionary as inert data (:mod:`~.objects`).
        dtype: name of the element type, a key of ``ITEMSIZE``.
        shape: shape of the tensor, a view of the storage's first elements.
    """
    if dtype not in ITEMSIZE or count(shape) > storage_numel:
        raise CheckpointError(
            f"a tensor of dtype {dtype} and shape {shape} in a storage of {storage_numel} elements cannot be written; "
            f"dtypes: {', '.join(ITEMSIZE)}"
        )
    writer = _MemoryWriter()
    pickled = write_pickle({"param": make_tensor("0", dtype, storage_numel, shape), **tree})
    for name, data in ((PICKLE, pickled), (BYTEORDER, b"little"), (VERSION, b"3\n")):
        writer.write_record(name, data, len(data))
    entry = _Entry(f"{ROOT}/{DATA}0", len(writer.data), storage_numel * ITEMSIZE[dtype])
    return ZipImage(writer.data + entry.local_header(PAGE), entry.nbytes, (*writer.entries, entry), tuple(writer.crcs))


def make_tensor(key: str, dtype: str, storage_numel: int, shape: tuple[int, ...]) -> PickledObject:
    """Return the inert form of a row-major tensor at the start of storage ``key``."""
    numel = storage_numel if dtype in STORAGES else storage_numel * ITEMSIZE[dtype]
    kind = Global("torch", STORAGES[dtype]) if dtype in STORAGES else Global("torch.storage", "UntypedStorage")
    storage = StorageRef(key, kind, "cpu", numel)
    view = (storage, 0, tuple(shape), make_strides(shape), False, call("collections", "OrderedDict"))
    if dtype in STORAGES:
        return call("torch._utils", "_rebuild_tensor_v2", *view)
    return call("torch._utils", "_rebuild_tensor_v3", *view, Global("torch", dtype))


def dump_value(value: Any, dtype: str | None = None) -> tuple[bytes, int]:
    """Return the file of ``torch.save(value)``, and the CRC32 of its zip directory.

    Args:
        dtype: if given, the number is saved as a 0-dim tensor of this type.
    """
    writer = _MemoryWriter()
    storages = {} if dtype is None else {"0": pack_scalar(dtype, value)}
    root = value if dtype is None else make_tensor("0", dtype, 1, ())
    _, crc = writer.write_all(write_pickle(root), storages)
    return writer.data, crc


class RecordWriter:
    """Writer of a ``torch.save`` file, record by record into an open file; no fsync.

    ``torch.serialization`` can use it as its writer. Each byte is read once for both the copy and the checksum.

    Args:
        fd: descriptor of a file open for writing; the caller truncates the file to the size returned by :meth:`close`.
        memory: memory map of the file's first bytes, which are written through it.
    """

    def __init__(self, fd: int, memory: NDArray[np.uint8] | None = None) -> None:
        self._fd, self._offset = fd, 0
        self._memory = np.empty(0, np.uint8) if memory is None else memory
        self.entries, self.crcs = list[_Entry](), list[int]()

    def write_all(self, pickled: bytes, storages: Mapping[str, bytes | Stream]) -> tuple[int, int]:
        """Write a whole file with storages by key; return the result of :meth:`close`."""
        self.write_record(PICKLE, pickled, len(pickled))
        self.write_record(BYTEORDER, b"little", 6)
        for key, data in storages.items():
            stream = data if isinstance(data, Stream) else Stream(len(data), (data,))
            self.write_pieces(f"{DATA}{key}", map(memoryview, stream.pieces), stream.nbytes)
        return self.close()

    def write_record(self, name: str, data: bytes | memoryview, nbytes: int) -> None:
        self.write_pieces(name, [memoryview(data).cast("B")[:nbytes]], nbytes)

    def write_pieces(self, name: str, pieces: Iterable[memoryview], nbytes: int) -> None:
        """Write a record in pieces; CheckpointError if their total is not ``nbytes``."""
        entry, crc = _Entry(f"{ROOT}/{name}", self._offset, nbytes), 0
        offset = start = self._put(entry.local_header(), self._offset)
        for view in pieces:
            for low in range(0, view.nbytes, _PIECE):
                piece = view[low : low + _PIECE]
                crc = isal_zlib.crc32(piece, crc)
                offset = self._put(piece, offset)
        if offset != start + nbytes:
            raise CheckpointError(f"record {entry.name} has {offset - start} bytes instead of {nbytes}.")
        self._offset = self._put(entry.descriptor(crc), offset)
        self.entries.append(entry)
        self.crcs.append(crc)

    def close(self) -> tuple[int, int]:
        """Write the rest of the file; return its size and the directory's CRC32."""
        self.write_record(VERSION, b"3\n", 2)
        closing = _make_end(self.entries, self.crcs, self._offset)
        return self._put(closing, self._offset), int(isal_zlib.crc32(closing))

    def _put(self, data: bytes | memoryview, offset: int) -> int:
        view = memoryview(data)
        if 0 < view.nbytes <= self._memory.nbytes - offset:
            self._memory[offset : offset + view.nbytes] = np.frombuffer(view, np.uint8)
            return offset + view.nbytes
        while view.nbytes:
            written = os.pwrite(self._fd, view, offset)
            offset, view = offset + written, view[written:]
        return offset


class _MemoryWriter(RecordWriter):
    """Writer of a small file into memory."""

    def __init__(self) -> None:
        super().__init__(-1)
        self.data = b""

    def _put(self, data: bytes | memoryview, offset: int) -> int:
        self.data += data
        return len(self.data)
