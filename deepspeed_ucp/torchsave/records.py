"""The records of a ``torch.save`` file as its directory lists them: all of them, with the pickle and the small ones."""

from __future__ import annotations

import os
import zipfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from isal import isal_zlib

from ..errors import CheckpointError
from ..io.regular import open_regular
from .torchfile import ScalarRef, _has_checksums, _locate, read_header
from .unpickle import Opaque, TensorRef

LEGACY = "legacy"
"""Name for the pickles in front of the storages of a file in the legacy format."""


@dataclass(frozen=True, slots=True)
class RecordEntry:
    """One record: name without the archive's folder, where it lies, CRC32 (None: the writer stored none)."""

    name: str
    offset: int
    nbytes: int
    crc: int | None


@dataclass(frozen=True, slots=True)
class FileRecords:
    """All records of a file, by offset.

    Attributes:
        header_crc: CRC32 of the zip's directory, as :class:`~.torchfile.TorchFile` has it.
        saved_as: folder in the zip: the name that the file was saved under, or ``archive``.
    """

    path: str
    size: int
    records: tuple[RecordEntry, ...]
    header_crc: int
    saved_as: str

    @property
    def unchecked(self) -> int:
        """Bytes of records without a checksum; of all of the file where there is none at all."""
        unchecked = [record.nbytes for record in self.records if record.crc is None]
        return self.size if len(unchecked) == len(self.records) else sum(unchecked)


def list_records(path: str) -> FileRecords:
    """Read a file's directory once; the pickle is not looked into.

    Raises:
        CheckpointError: the file is missing, unreadable, truncated or damaged.
        UnsupportedError: a record is compressed.
    """
    try:
        with open_regular(path) as stream:
            size = os.fstat(stream.fileno()).st_size
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # records' headers lie far apart
            if stream.read(2) == b"PK":
                return _list_zip(path, zipfile.ZipFile(stream), size)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror or error}).") from error
    except (zipfile.BadZipFile, UnicodeDecodeError, NotImplementedError, ValueError, OverflowError) as error:
        raise CheckpointError(
            f"{path}: no zip directory at its end ({error}); the file is truncated or damaged."
        ) from None
    return _list_legacy(path)


def _list_zip(path: str, archive: zipfile.ZipFile, size: int) -> FileRecords:
    stream = archive.fp
    if stream is None:
        raise CheckpointError(f"{path}: cannot be read.")
    entries = {info.filename: info for info in archive.infolist()}
    checked = _has_checksums(entries)
    found = []
    for name, info in entries.items():
        blob = _locate(path, stream, info, size, checked)  # type: ignore[arg-type]
        if blob.nbytes:
            found.append(RecordEntry(name.partition("/")[2] or name, blob.offset, blob.nbytes, blob.crc))
    found.sort(key=lambda record: record.offset)
    _check_apart(path, found)
    stream.seek(archive.start_dir)
    root = next(iter(entries), "").partition("/")[0]
    return FileRecords(path, size, tuple(found), isal_zlib.crc32(stream.read()), root)


def _check_apart(path: str, records: list[RecordEntry]) -> None:
    """Records of a whole file do not overlap."""
    for first, second in pairwise(records):
        if first.offset + first.nbytes > second.offset:
            raise CheckpointError(f"{path}: records {first.name} and {second.name} overlap; its directory is damaged.")


def _list_legacy(path: str) -> FileRecords:
    file = read_header(path)
    found = [RecordEntry(f"data/{key}", blob.offset, blob.nbytes, None) for key, blob in file.blobs.items()]
    found.sort(key=lambda record: record.offset)
    front = min((record.offset for record in found), default=file.size)
    found.insert(0, RecordEntry(LEGACY, 0, front, None))
    return FileRecords(path, file.size, tuple(record for record in found if record.nbytes), file.crc, "archive")


def name_storages(path: str) -> dict[str, list[str]]:
    """Where the pickle refers to each storage: record name → places, as ``optimizer.state.0.exp_avg``.

    Raises:
        CheckpointError: the header cannot be read.
    """
    found: dict[str, list[str]] = defaultdict(list)
    for place, ref in _walk(read_header(path).tree, "", set()):
        found[f"data/{ref.storage.key}"].append(place)
    return dict(found)


def _walk(tree: Any, place: str, seen: set[int]) -> Iterator[tuple[str, TensorRef]]:
    if isinstance(tree, ScalarRef):
        yield place, tree.ref
    elif isinstance(tree, TensorRef):
        yield place, tree
    elif isinstance(tree, (dict, list, tuple, Opaque)) and id(tree) not in seen:
        seen.add(id(tree))
        for key, value in _list_parts(tree):
            yield from _walk(value, f"{place}.{key}" if place else str(key), seen)


def _list_parts(tree: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(tree, dict):
        return iter(tree.items())
    if isinstance(tree, Opaque):
        return iter((("args", tree.args), ("state", tree.state), ("items", tree.items)))
    return iter(enumerate(tree))
