"""Reads a checkpoint's files in the nearest of the places where this rank finds them, and in the next on failure."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any, TypeVar

from ..atoms import AtomicIndex, FileRef, StoredAtoms
from ..errors import CheckpointError, UnsupportedError
from ..io.memory import Scratch
from ..io.opened import Stored
from ..io.read import Fetched, RecordReader, Sink
from ..io.store import open_stored
from ..plan.claims import Request
from ..torchsave.records import sum_directory

logger = logging.getLogger("deepspeed_ucp")

T = TypeVar("T")

_ENOUGH = 3
"""Files that a place does not give, until it is taken for one that gives none: each may take minutes to fail."""


def refuse_scattered(index: AtomicIndex, why: str) -> None:
    """Refuse a checkpoint of which this rank does not find all files, for what takes them all.

    Args:
        why: what takes them.

    Raises:
        UnsupportedError: some lie on other machines alone.
    """
    if index.stored.access is not None and not all(file.places for file in index.stored.files):
        raise UnsupportedError(
            f"{index.run.state_file}: ranks see different files of this checkpoint, and {why}. Copy all files to where "
            'every rank sees them, or name a further place that has them all ("also", --also).'
        )


class CopyReader(RecordReader):
    """A reader of a checkpoint's records.

    Where a file has several places, each is made sure of when it is first used: its directory has to have the CRC32
    that the index knows. A place in which something fails is passed over for that file from then on, with a warning;
    the last one's error is raised.

    Args:
        stored: the checkpoint.
        checksum: form the CRC32 of what is read. Without, what nothing but that tells from another file (sealed swap
            files, atoms of an atomic checkpoint) is read in the first place alone.
        options: further ones of :class:`~..io.read.RecordReader`.
    """

    def __init__(self, stored: StoredAtoms, *, checksum: bool = True, **options: Any) -> None:
        super().__init__(stored.records, stored.files, checksum=checksum, **options)
        self.failed = stored.failed
        self._lost = Counter[str]()  # files by place, that could not be read there

    def open_file(self, number: int) -> Stored:
        """Open a file in the nearest place where that succeeds.

        Raises:
            CheckpointError: it does in none; the last one's error.
        """
        file = self.files[number]
        *nearer, last = self._list_left(file)
        for path in nearer:
            try:
                return _open_copy(path, file)
            except CheckpointError as error:
                self._pass_over(path, file, error)
        try:
            return _open_copy(last, file)
        except CheckpointError:
            self.failed.add(last)
            raise

    def _list_left(self, file: FileRef) -> Sequence[str]:
        """Places that have not failed; the last one whatever it did: its error is what is told."""
        if file.header_crc is None and not self.checksum:
            return (file.path,)
        copies = list_copies(file)
        left = [path for path in copies if path not in self.failed] or copies[-1:]
        return sorted(left, key=lambda path: self._lost[_find_place(path, copies)] >= _ENOUGH)

    def _pass_over(self, path: str, file: FileRef, error: CheckpointError) -> None:
        with self.lock:
            if path in self.failed:
                return
            self.failed.add(path)
            self._lost[_find_place(path, list_copies(file))] += isinstance(error.__cause__, OSError)
        logger.warning("%s The file is taken from another place.", error)

    def fetch(
        self, number: int, group: Sequence[Request], sinks: Sequence[Sink | None], scratch: Scratch
    ) -> list[Fetched]:
        """Read requests that follow each other in a record of file ``number``, from another place where one fails.

        Raises:
            CheckpointError: no place of it can be read; the last one's error.
        """
        return self.read_with_failover(number, lambda file: self.fetch_from(file, group, sinks, scratch))

    def read_with_failover(self, number: int, work: Callable[[Stored], T]) -> T:
        """Read something of a file, from another place where that fails.

        Raises:
            CheckpointError: no place of it can be read; the last one's error.
        """
        while True:
            file = self.take_file(number)
            try:
                return work(file)
            except CheckpointError as error:
                if set(self._list_left(self.files[number])) <= {file.path}:
                    self.failed.add(file.path)
                    raise
                self._pass_over(file.path, self.files[number], error)
                self.drop_file(number, file)


def list_copies(file: FileRef) -> tuple[str, ...]:
    """Paths of a file, the one that is read first in front."""
    return file.places or (file.path,)


def _find_place(path: str, copies: Sequence[str]) -> str:
    """What tells the place of a copy: the front of its path, which those of the others do not end in."""
    ends = zip(*(reversed(each.split("/")) for each in copies), strict=False)
    shared = sum(1 for _ in takewhile(lambda parts: len(set(parts)) == 1, ends))
    return path.rsplit("/", shared)[0]


def _open_copy(path: str, file: FileRef) -> Stored:
    if file.places:
        check_copy(path, file)
    return open_stored(path, size=file.size)


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
        raise CheckpointError(f"{path}: has no directory with checksums, as the save's has; it is another file.")
    if found not in (None, file.header_crc):
        raise CheckpointError(
            f"{path}: its directory has CRC32 {found:08x}, the save's {file.header_crc:08x}; it is another file."
        )
