"""Write ``torch.save`` files from parts of a file that was read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from isal import isal_zlib

from ..errors import CheckpointError
from ..io.store import read_bytes
from ..model.records import Record
from .objects import StorageRef, walk
from .records import check_crc
from .repickle import PROTOCOL, write_pickle
from .torchfile import TorchFile
from .zipframe import DATA, RecordWriter, Stream

CHUNK: Final = 4 << 20
"""Bytes of a storage in memory at a time."""


def list_storages(root: Any) -> dict[str, StorageRef]:
    """List the storages that a part of a file's tree references, by key, in order."""
    return {value.key: value for value in walk(root) if isinstance(value, StorageRef)}


def count_bytes(file: TorchFile, root: Any) -> int:
    """Return the total bytes of the storages that a part of a file's tree references."""
    return sum(file.storages[key].nbytes for key in list_storages(root) if key in file.storages)


def save_parts(file: TorchFile, root: Any, path: str, added: Mapping[str, bytes]) -> tuple[int, int]:
    """Write parts of a file and their storages as a ``torch.save`` file; no fsync.

    Args:
        added: storages that are not in the file, by key.

    Returns:
        Size of the new file and CRC32 of its directory.
    """
    storages: dict[str, bytes | Stream] = {
        key: added[key] if key in added else open_storage(file, key, ref.numel)
        for key, ref in list_storages(root).items()
    }
    with open(path, "wb", buffering=0) as written:
        return RecordWriter(written.fileno()).write_all(write_pickle(root, max(file.protocol, PROTOCOL)), storages)


def open_storage(file: TorchFile, key: str, numel: int) -> Stream:
    """Return a storage's bytes as a stream that verifies their checksum at the end.

    Args:
        numel: the storage's elements according to the pickle; an empty storage may have no record.

    Raises:
        CheckpointError: the storage is missing; from the stream: its bytes do not match the checksum.
    """
    record = file.storages.get(key) if numel else Record(0, 0, None)
    if record is None:
        raise CheckpointError(f"storage {key} of a tensor is missing; the file is damaged.", path=file.path)
    return Stream(record.nbytes, _read_storage(file.path, f"{DATA}{key}", record))


def _read_storage(path: str, name: str, record: Record) -> Iterator[bytes]:
    crc = 0
    for low in range(0, record.nbytes, CHUNK):
        data = read_bytes(path, record.offset + low, min(CHUNK, record.nbytes - low))
        crc = isal_zlib.crc32(data, crc)
        yield data
    check_crc(path, name, record, crc)
