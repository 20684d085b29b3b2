"""Compare the bytes read of a checkpoint with the checksums that training wrote."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from ..comm import Comm
from ..errors import CheckpointError, shorten
from ..io.read import Checked, merge_checks
from ..model import AtomicIndex, Read, Record, StoredAtoms
from ..model.flat import find_gaps
from .reader import CopyReader

CHUNK = 4 << 20


class Checks:
    """Thread-safe collection of the CRC32s of this rank's reads."""

    def __init__(self) -> None:
        self.read: list[Checked] = []

    def add(self, checks: Iterable[Checked]) -> None:
        """Add the checks of a read."""
        self.read.extend(checks)

    @property
    def nbytes(self) -> int:
        """Number of bytes read."""
        return sum(check.nbytes for check in self.read)

    def verify(self, index: AtomicIndex, comm: Comm, *, threads: int = 4) -> int:
        """Read the unread parts of all records that any rank has read, and compare each CRC32; collective.

        Each rank is responsible for every ``size``-th record among those that it can read.

        Returns:
            Number of bytes that this rank has read in addition.

        Raises:
            CheckpointError: a record is damaged; equal on all ranks.
        """
        stored = index.stored
        mine = _group(send_checks(merge_checks(self.read), find_answering(stored, comm), comm), stored.records)
        return comm.run(lambda: _complete(mine, index, threads))


def verify_records(index: AtomicIndex, records: Iterable[int], comm: Comm) -> int:
    """Read whole records, each on one rank, and compare their checksums; collective.

    Returns:
        Number of bytes that this rank has read.

    Raises:
        CheckpointError: a record is damaged; equal on all ranks.
    """
    checks = Checks()
    checks.add(Checked(record, 0, 0, 0) for record in (records if comm.rank == 0 else ()))
    return checks.verify(index, comm)


def find_answering(stored: StoredAtoms, comm: Comm) -> npt.NDArray[np.int64]:
    """Return the responsible rank of each record, which can read its file."""
    return stored.access.take_turns(stored.records.files, comm.size)


def send_checks(checks: Sequence[Checked], answering: npt.NDArray[np.int64], comm: Comm) -> list[Checked]:
    """Send checks to the responsible ranks; return those from all ranks for this rank; collective.

    Args:
        answering: responsible rank by record.
    """
    rows = np.array([(c.record, c.offset, c.nbytes, c.crc) for c in checks], np.int64).reshape(-1, 4)
    owners = answering[rows[:, 0]]
    tables = comm.swap_tables([rows[owners == rank] for rank in range(comm.size)])
    return [Checked(*row) for table in tables for row in table.tolist()]


def _group(checks: Iterable[Checked], records: Sequence[Record]) -> dict[int, list[Checked]]:
    """Merge the checks of each record.

    A record whose checks overlap (bytes shared by two tensors) gets an empty list and is read again.
    """
    by_record: dict[int, list[Checked]] = defaultdict(list)
    for check in checks:
        if records[check.record].crc is not None:
            by_record[check.record].append(check)
    joined = {number: merge_checks(parts) for number, parts in sorted(by_record.items())}
    overlap = {
        number
        for number, parts in joined.items()
        if any(one.offset + one.nbytes > two.offset for one, two in pairwise(parts))
    }
    return {number: [] if number in overlap else parts for number, parts in joined.items()}


def _complete(by_record: dict[int, list[Checked]], index: AtomicIndex, threads: int) -> int:
    records = index.stored.records
    gaps = [gap for number, checks in by_record.items() for gap in _list_gaps(number, checks, records[number].nbytes)]
    with CopyReader(index.stored) as reader:
        for check in reader.read_parallel(gaps, (), threads):
            by_record[check.record].append(check)
    empty = Checked(0, 0, 0, 0)  # a record without bytes has no checks
    sums = {number: next(iter(merge_checks(checks)), empty).crc for number, checks in by_record.items()}
    damaged = {number: crc for number, crc in sums.items() if crc != records[number].crc}
    if damaged:
        raise _describe_damage(index, damaged)
    return sum(gap.nbytes for gap in gaps)


def _list_gaps(record: int, checks: Iterable[Checked], nbytes: int) -> Iterator[Read]:
    """Yield reads of the parts of a record without checks."""
    spans = [(check.offset, check.offset + check.nbytes) for check in checks]
    for low, high in find_gaps(spans, nbytes):
        for begin in range(low, high, CHUNK):
            yield Read.of(record, begin, min(begin + CHUNK, high))


def _describe_damage(index: AtomicIndex, damaged: Mapping[int, int]) -> CheckpointError:
    """Describe the first damaged record.

    Args:
        damaged: record number -> the CRC32 that was found.
    """
    number, crc = next(iter(damaged.items()))
    record = index.stored.records[number]
    file = index.stored.files[record.file]
    fact = f"the {record.nbytes} bytes at {record.offset} have CRC32 {crc:08x}, the writer stored {record.crc:08x}"
    if len(file.copies) > 1:  # each rank reads the nearest copy
        text = (
            f"{fact}; one of the copies {shorten(file.copies)} is damaged. Nothing was changed. `ds_ucp verify --also "
            "PLACE` names it: remove it, and another copy is read."
        )
    else:
        text = f"{fact}; the file is damaged. Nothing was changed. Restore the file from a copy, or load another tag."
    return CheckpointError(text, path=file.path)
