"""State files put together again from parts of one that was read: the storages that remain are copied."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final

from isal import isal_zlib

from ..errors import CheckpointError
from ..io.store import read_bytes
from .objects import StorageRef, walk
from .records import FileRecord, check_crc
from .repickle import PROTOCOL, write_pickle
from .torchfile import TorchFile
from .zipframe import DATA, Stream, write_torch_file

CHUNK: Final = 4 << 20
"""Bytes of a storage that are in memory at a time."""

NOTHING: Final[Mapping[str, bytes]] = MappingProxyType({})


def list_storages(root: Any) -> dict[str, StorageRef]:
    """Storages that a part of a file's tree refers to, by key, in the order in which it does."""
    return {value.key: value for value in walk(root) if isinstance(value, StorageRef)}


def count_bytes(file: TorchFile, root: Any) -> int:
    """Bytes of the storages that a part of a file's tree refers to."""
    return sum(file.storages[key].nbytes for key in list_storages(root) if key in file.storages)


def save_parts(file: TorchFile, root: Any, path: str, added: Mapping[str, bytes] = NOTHING) -> tuple[int, int]:
    """Write a tree made of a file's parts as a ``torch.save`` file, with the storages that it refers to.

    Args:
        added: storages that are not the file's, by key.

    Returns:
        Size of the new file, and CRC32 of its directory.

    Raises:
        CheckpointError: a storage is missing, or its bytes are not what was saved.
        OSError: the new file cannot be written.
    """
    storages: dict[str, bytes | Stream] = {
        key: added[key] if key in added else open_storage(file, key, ref.numel)
        for key, ref in list_storages(root).items()
    }
    crc = write_torch_file(path, write_pickle(root, max(file.protocol, PROTOCOL)), storages)
    return os.stat(path).st_size, crc


def open_storage(file: TorchFile, key: str, numel: int) -> Stream:
    """A storage's bytes, held against their checksum while they are taken.

    Args:
        numel: how many elements the pickle says that it has; an empty storage may have no record.

    Raises:
        CheckpointError: it is missing; later, that its bytes are not what was saved.
    """
    record = file.storages.get(key) if numel else FileRecord(f"{DATA}{key}", 0, 0, None)
    if record is None:
        raise CheckpointError(f"storage {key} of a tensor is missing; the file is damaged.", path=file.path)
    return Stream(record.nbytes, _read_storage(file.path, record))


def _read_storage(path: str, record: FileRecord) -> Iterator[bytes]:
    crc = 0
    for low in range(0, record.nbytes, CHUNK):
        data = read_bytes(path, record.offset + low, min(CHUNK, record.nbytes - low))
        crc = isal_zlib.crc32(data, crc)
        yield data
    check_crc(path, record, crc)
