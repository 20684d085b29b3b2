"""Header of a ``torch.save`` file: its object tree with tensors as references, and where each storage's bytes lie.

Both formats are read: the zip (records stored uncompressed, a CRC32 each; caffe2/serialize/inline_container.cc)
and the legacy one (``torch.serialization._legacy_save``: pickles followed by raw storages, no checksum).
"""

from __future__ import annotations

import io
import os
import struct
import zipfile
from dataclasses import dataclass
from typing import Any, BinaryIO

from isal import isal_zlib

from ..atoms import ITEMSIZE
from ..errors import CheckpointError, UnsupportedError
from ..io.regular import open_regular
from .unpickle import StorageRef, TensorRef, load_skeleton

_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_LOCAL_HEADER = 30
_ARCHIVE_NAMES = ("archive",)


@dataclass(frozen=True, slots=True)
class Blob:
    """A storage's bytes in its file: byte offset, byte count, CRC32 (None where the format has none)."""

    offset: int
    nbytes: int
    crc: int | None


@dataclass(frozen=True, slots=True)
class TorchFile:
    """A file's header.

    Attributes:
        tree: its object tree.
        blobs: storages by key.
        saved_as: the name that it was saved under; None where that is not kept.
        crc: CRC32 of the zip's directory, which holds every record's checksum (legacy: of the pickles).
        writer: the form of the archive: which records it has beside the storages, and how it is named.
    """

    path: str
    size: int
    tree: Any
    blobs: dict[str, Blob]
    saved_as: str | None
    crc: int = 0
    writer: str = "legacy"


def read_header(path: str) -> TorchFile:
    """Read the header of a ``torch.save`` file; the storages' bytes are left alone, tensors of one element excepted.

    Raises:
        CheckpointError: the file is missing, unreadable, truncated or damaged.
    """
    try:
        with open_regular(path) as stream:
            size = os.fstat(stream.fileno()).st_size
            magic = stream.read(4)
            stream.seek(0)
            if magic[:2] == b"PK":
                return _read_zip(path, stream, size)
            return _read_legacy(path, stream, size)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror or error}).") from error


def is_zip(path: str) -> bool:
    """Whether a ``torch.save`` file is in the zip format (which can be memory-mapped), not the legacy one."""
    with open_regular(path) as stream:
        return stream.read(2) == b"PK"


def _read_zip(path: str, stream: BinaryIO, size: int) -> TorchFile:
    try:
        archive = zipfile.ZipFile(stream)
    except (zipfile.BadZipFile, ValueError, NotImplementedError, EOFError, struct.error) as error:
        raise CheckpointError(
            f"{path}: no zip directory at its end ({size} bytes); the file is truncated or damaged."
        ) from error
    entries = {info.filename: info for info in archive.infolist()}
    pickles = [name for name in entries if name.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise CheckpointError(f"{path}: a torch.save file has one data.pkl, this zip has {len(pickles)}.")
    root = pickles[0][: -len("data.pkl")]
    checked = _has_checksums(entries)
    pickle_bytes = _read_entry(path, stream, entries[pickles[0]], size, checked)
    order = entries.get(f"{root}byteorder")
    if order and _read_entry(path, stream, order, size, checked) != b"little":
        raise UnsupportedError(f"{path}: saved on a big-endian machine.")
    prefix = f"{root}data/"
    blobs = {}
    for name, info in entries.items():
        if name.startswith(prefix):
            blobs[name[len(prefix) :]] = _locate(path, stream, info, size, checked)
    tree = _ScalarFiller(path, stream, blobs).fill(load_skeleton(io.BytesIO(pickle_bytes), path))
    saved_as = root.rstrip("/")
    stream.seek(archive.start_dir)
    crc = isal_zlib.crc32(stream.read())
    named = None if saved_as in _ARCHIVE_NAMES else saved_as
    others = sorted(name.removeprefix(root) for name in entries if not name.startswith(prefix))
    return TorchFile(path, size, tree, blobs, named, crc, " ".join([*others, "named" if named else "archive"]))


def _has_checksums(entries: dict[str, zipfile.ZipInfo]) -> bool:
    """Whether the writer computed CRCs; with ``torch.serialization.set_crc32_options(False)`` all of them are 0."""
    return any(info.CRC for info in entries.values())


def _locate(path: str, stream: BinaryIO, info: zipfile.ZipInfo, size: int, checked: bool) -> Blob:
    if info.compress_type != zipfile.ZIP_STORED:
        raise UnsupportedError(f"{path}: record {info.filename} is compressed; torch.save never does that.")
    if not info.file_size:
        return Blob(0, 0, 0)
    stream.seek(info.header_offset)
    header = stream.read(_LOCAL_HEADER)
    if len(header) < _LOCAL_HEADER or header[:4] != b"PK\x03\x04":
        raise CheckpointError(f"{path}: record {info.filename} has no header at byte {info.header_offset}.")
    name_length, extra_length = struct.unpack("<HH", header[26:30])
    offset = info.header_offset + _LOCAL_HEADER + name_length + extra_length
    if offset + info.file_size > size:
        raise CheckpointError(f"{path}: record {info.filename} ends beyond the file ({size} bytes); it is truncated.")
    return Blob(offset, info.file_size, info.CRC if checked else None)


def _read_entry(path: str, stream: BinaryIO, info: zipfile.ZipInfo, size: int, checked: bool) -> bytes:
    blob = _locate(path, stream, info, size, checked)
    stream.seek(blob.offset)
    data = stream.read(blob.nbytes)
    check_crc(path, info.filename, isal_zlib.crc32(data), blob.crc)
    return data


def check_crc(path: str, record: str, found: int, expected: int | None) -> None:
    """Compare a CRC32 with the one that the writer stored.

    Raises:
        CheckpointError: they differ.
    """
    if expected is not None and found != expected:
        raise CheckpointError(
            f"{path}: {record} has CRC32 {found:08x}, the writer stored {expected:08x}; the file is damaged. "
            "Restore it from a copy or load another tag."
        )


def _read_legacy(path: str, stream: BinaryIO, size: int) -> TorchFile:
    if load_skeleton(stream, path) != _LEGACY_MAGIC:
        raise CheckpointError(f"{path}: neither a torch.save zip nor its legacy format; the file is damaged.")
    load_skeleton(stream, path)  # protocol version
    if load_skeleton(stream, path).get("little_endian") is False:
        raise UnsupportedError(f"{path}: saved on a big-endian machine.")
    storages: dict[str, StorageRef] = {}
    tree = load_skeleton(stream, path, storages)
    keys = load_skeleton(stream, path)
    crc = _sum_legacy_header(stream)
    blobs = {}
    for key in keys:
        count = stream.read(8)
        if len(count) < 8:
            raise CheckpointError(f"{path}: ends at byte {size} before storage {key}; the file is truncated.")
        nbytes = struct.unpack("<q", count)[0] * ITEMSIZE.get(storages[str(key)].dtype, 1)
        offset = stream.tell()
        if offset + nbytes > size:
            raise CheckpointError(f"{path}: storage {key} ends beyond the file ({size} bytes); it is truncated.")
        blobs[str(key)] = Blob(offset, nbytes, None)
        stream.seek(nbytes, os.SEEK_CUR)
    return TorchFile(path, size, _ScalarFiller(path, stream, blobs).fill(tree), blobs, None, crc)


def _sum_legacy_header(stream: BinaryIO) -> int:
    """CRC32 of the pickles in front of the storages."""
    end = stream.tell()
    stream.seek(0)
    return isal_zlib.crc32(stream.read(end))


class _ScalarFiller:
    """Replaces 0-dim tensors (``step``) in an object tree by their bytes, which the index carries."""

    def __init__(self, path: str, stream: BinaryIO, blobs: dict[str, Blob]) -> None:
        self.path, self.stream, self.blobs = path, stream, blobs
        self.seen: set[int] = set()

    def fill(self, tree: Any) -> Any:
        if isinstance(tree, TensorRef):
            known = tree.shape == () and tree.dtype in ITEMSIZE
            return _read_scalar(tree, self.path, self.stream, self.blobs) if known else tree
        if type(tree) is tuple:
            return tuple(self.fill(value) for value in tree)
        if id(tree) in self.seen:  # shared parts, and client states with cycles
            return tree
        if isinstance(tree, dict):
            self.seen.add(id(tree))
            for key, value in tree.items():
                tree[key] = self.fill(value)
        elif isinstance(tree, list):
            self.seen.add(id(tree))
            tree[:] = [self.fill(value) for value in tree]
        return tree


@dataclass(frozen=True, slots=True)
class ScalarRef:
    """A 0-dim tensor: dtype and little-endian bytes. As a module tensor it is read like any other (``ref``)."""

    dtype: str
    data: bytes
    ref: TensorRef


def _read_scalar(ref: TensorRef, path: str, stream: BinaryIO, blobs: dict[str, Blob]) -> ScalarRef | TensorRef:
    blob = blobs.get(ref.storage.key)
    itemsize = ITEMSIZE[ref.dtype]
    if blob is None or (ref.offset + 1) * itemsize > blob.nbytes:
        raise CheckpointError(f"{path}: storage {ref.storage.key} of a 0-dim tensor is missing; the file is damaged.")
    stream.seek(blob.offset + ref.offset * itemsize)
    data = stream.read(itemsize)
    if blob.nbytes == itemsize:
        check_crc(path, f"data/{ref.storage.key}", isal_zlib.crc32(data), blob.crc)
    return ScalarRef(ref.dtype, data, ref)
