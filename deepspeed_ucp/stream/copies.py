"""A checkpoint's files where several places have them: each copy is held against what the index knows of it."""

from __future__ import annotations

from typing import Any

from ..atoms import AtomicIndex, FileRef, StoredAtoms
from ..errors import CheckpointError, UnsupportedError
from ..io.opened import Stored
from ..io.read import RecordReader
from ..torchsave.records import sum_directory


def refuse_scattered(index: AtomicIndex, why: str) -> None:
    """Refuse a checkpoint of which this rank does not find all files, for what takes them all.

    Args:
        why: what takes them.

    Raises:
        UnsupportedError: some lie on other machines alone.
    """
    if index.stored.access.is_partial and not all(file.places for file in index.stored.files):
        raise UnsupportedError(
            f"ranks see different files of this checkpoint, and {why}. Copy all files to where "
            'every rank sees them, or name a further place that has them all ("also", --also).',
            path=index.run.state_file,
        )


class CopyReader(RecordReader):
    """A reader of a checkpoint's records.

    Where a file has several places, each is made sure of when it is first used: its directory has to have the CRC32
    that the index knows.

    Args:
        stored: the checkpoint.
        options: further ones of :class:`~..io.read.RecordReader`.
    """

    def __init__(self, stored: StoredAtoms, **options: Any) -> None:
        super().__init__(stored.records, stored.files, failed=stored.failed, **options)

    def open_copy(self, path: str, file: FileRef) -> Stored:
        if file.places:
            check_copy(path, file)
        return super().open_copy(path, file)


def check_copy(path: str, file: FileRef) -> None:
    """Hold a copy of a file against what the index knows of it.

    What has no directory passes where nothing else could be taken for it, or its records' checksums tell.

    Raises:
        CheckpointError: it is another file, or cannot be read.
    """
    if file.header_crc is None:
        return
    found = sum_directory(path)
    if found is None and len(file.places) > 1:
        raise CheckpointError("has no directory with checksums, as the save's has; it is another file.", path=path)
    if found not in (None, file.header_crc):
        raise CheckpointError(
            f"its directory has CRC32 {found:08x}, the save's {file.header_crc:08x}; it is another file.", path=path
        )
