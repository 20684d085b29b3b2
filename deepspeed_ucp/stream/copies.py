"""Read files that have copies in several places: each copy is compared with the index."""

from __future__ import annotations

from typing import Any

from ..errors import CheckpointError, UnsupportedError
from ..io.opened import Stored
from ..io.read import RecordReader
from ..model import AtomicIndex, FileRef, StoredAtoms
from ..torchsave.records import sum_directory


def refuse_scattered(index: AtomicIndex, reason: str) -> None:
    """Refuse a checkpoint with files that only other machines have.

    Args:
        reason: why all files are needed.

    Raises:
        UnsupportedError: this rank does not find all files.
    """
    if index.stored.access.is_partial and not all(file.places for file in index.stored.files):
        raise UnsupportedError(
            f"ranks see different files of this checkpoint, and {reason}. Copy all files to a place that every rank "
            'sees, or name a further place that has them all ("also", --also).',
            path=index.run.state_file,
        )


class CopyReader(RecordReader):
    """Reader of a checkpoint's records.

    If a file has copies, each is checked when it is first used: its zip directory must have the CRC32 in the index.

    Args:
        stored: the checkpoint.
        options: further options of :class:`~..io.read.RecordReader`.
    """

    def __init__(self, stored: StoredAtoms, **options: Any) -> None:
        super().__init__(stored.records, stored.files, failed=stored.failed, **options)

    def open_copy(self, path: str, file: FileRef) -> Stored:
        if file.places:
            check_copy(path, file)
        return super().open_copy(path, file)


def check_copy(path: str, file: FileRef) -> None:
    """Compare a copy of a file with the index.

    A copy without a zip directory passes if it is the only one, or if the index has no CRC32 of the directory.

    Raises:
        CheckpointError: the copy is another file, or cannot be read.
    """
    if file.header_crc is None:
        return
    crc = sum_directory(path)
    if crc is None and len(file.places) > 1:
        raise CheckpointError("has no directory with checksums, as the save's has; it is another file.", path=path)
    if crc not in (None, file.header_crc):
        raise CheckpointError(
            f"its directory has CRC32 {crc:08x}, the save's {file.header_crc:08x}; it is another file.", path=path
        )
