"""Goes on after damage: tells which copies of a file are right, where there are several, and has those read."""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import compress
from typing import NamedTuple, TypeVar

from ..atoms import AtomicIndex, StoredAtoms
from ..comm import Comm
from ..errors import CheckpointError, UcpError, let_go, shorten
from ..io.distance import Identity, identify_file
from ..io.read import sum_range
from ..io.store import open_stored
from .copies import check_copy

logger = logging.getLogger("deepspeed_ucp")

T = TypeVar("T")


class _Copy(NamedTuple):
    """A file by its number among the checkpoint's, and which of its copies."""

    file: int
    identity: Identity


class _Copies:
    """The copies of some files, the same on every rank.

    Args:
        seen: by rank the copies that it sees, and whether each has failed there.

    Attributes:
        failed: those of which it is known that they are not right.
    """

    def __init__(self, seen: Sequence[Mapping[_Copy, bool]]) -> None:
        self.seen = seen
        self.failed = {copy for copies in seen for copy, failed in copies.items() if failed}

    def list_left(self, file: int) -> set[_Copy]:
        """The copies of a file that may be right."""
        return {copy for copies in self.seen for copy in copies if copy.file == file} - self.failed

    def list_blind(self) -> list[frozenset[int]]:
        """By rank the files that it sees, and none of whose copies there may be right."""
        left = ({copy.file for copy in copies.keys() - self.failed} for copies in self.seen)
        return [frozenset(copy.file for copy in each) - right for each, right in zip(self.seen, left, strict=True)]

    def share(self, files: Iterable[int], rank: int) -> list[_Copy]:
        """This rank's part of the copies that may be right; the ranks that see one take turns."""
        wanted = sorted((copy for file in files for copy in self.list_left(file)), key=repr)  # of paths or of inodes
        viewers = [[rank for rank, copies in enumerate(self.seen) if copy in copies] for copy in wanted]
        return [copy for turn, copy in enumerate(wanted) if viewers[turn][turn % len(viewers[turn])] == rank]


def read_with_failover(index: AtomicIndex, work: Callable[[AtomicIndex], T], comm: Comm) -> T:
    """Carry ``work`` out; where files turn out damaged that have other copies, again with these; collective.

    Args:
        work: reads the checkpoint that it is given; what it raises is the same on every rank.

    Raises:
        CheckpointError: ``work``'s, where of a file no copy is left.
    """
    while True:
        try:
            return work(index)
        except CheckpointError as error:
            damaged = _list_damaged(error)
            let_go(error)  # what is read next has memory of its own
            left = pass_over_damaged(index, damaged, comm)
            if left is None:
                raise
            index = left


def _list_damaged(error: BaseException | None) -> tuple[int, ...]:
    """The records that this rank has found damaged, by the error or those that it was raised from."""
    while error is not None:
        if isinstance(error, CheckpointError) and error.damaged:
            return error.damaged
        error = error.__cause__
    return ()


def pass_over_damaged(index: AtomicIndex, damaged: Iterable[int], comm: Comm) -> AtomicIndex | None:
    """Leave out the copies of files that cannot be read, or whose bytes are not what was saved; collective.

    The damaged records of each copy are read by one of the ranks that see it: several copies may have been read of one
    record before, each in part.

    Args:
        damaged: records, as far as this rank knows.

    Returns:
        The checkpoint as read by ranks that see copies which may be right; None, the same on every rank, where of
        some file there is none, or where nothing was found that could be left out.
    """
    stored = index.stored
    told = comm.gather((set(damaged), _list_lost(stored, comm.rank)))
    records = set[int]().union(*(each for each, _ in told))
    doubted = {stored.records[number].file for number in records}
    files = doubted.union(*(lost for _, lost in told))
    here = _find_copies(stored, files, comm.rank)
    copies = _Copies(comm.gather({copy: not stored.failed.isdisjoint(paths) for copy, paths in here.items()}))
    if any(len(copies.list_left(file)) < 2 for file in doubted):
        return None
    tests = copies.share(doubted, comm.rank)
    found = comm.each(lambda: {copy: _find_fault(here[copy][0], stored, copy.file, records) for copy in tests})
    faults = {copy: text for part in found for copy, text in part.items() if text}
    copies.failed.update(faults)
    stored.failed.update(path for copy in faults for path in here.get(copy, ()))
    if faults and comm.rank == 0:
        logger.warning("files are taken from other places: %s", shorten(sorted(faults.values())))
    blind = copies.list_blind()
    if not (faults or any(blind)) or not all(map(copies.list_left, files)):
        return None
    access = stored.access.lose(blind, len(stored.files)) if any(blind) else stored.access
    return index.change(access=access)


def _list_lost(stored: StoredAtoms, rank: int) -> set[int]:
    """Files of which this rank has found no copy that it can read, although it sees some."""
    failed = [number for number, file in enumerate(stored.files) if stored.failed.issuperset(file.copies)]
    return set(compress(failed, stored.access.can_read(rank, failed)))


def _find_copies(stored: StoredAtoms, files: Iterable[int], rank: int) -> dict[_Copy, list[str]]:
    """The copies of some files that this rank sees, with the paths that lead there: hard links are one copy."""
    wanted, found = [*files], defaultdict[_Copy, list[str]](list)
    for number in compress(wanted, stored.access.can_read(rank, wanted)):
        for path in stored.files[number].copies:
            found[_Copy(number, identify_file(path))].append(path)
    return found


def _find_fault(path: str, stored: StoredAtoms, number: int, records: Iterable[int]) -> str:
    """What is wrong with those of some records that lie in a copy of a file; empty where nothing."""
    file = stored.files[number]
    try:
        check_copy(path, file)
        with open_stored(path, os.POSIX_FADV_SEQUENTIAL, size=file.size) as stream:
            for record in (stored.records[each] for each in sorted(records)):
                if record.file == number and sum_range(stream, record.offset, record.nbytes) != record.crc:
                    return f"{path}: is damaged at bytes {record.offset} to {record.offset + record.nbytes}"
    except UcpError as error:
        return str(error)
    return ""
