"""Checksums of records from the checksums of their parts, wherever these were read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from isal import isal_zlib

from ..atoms import FileRef, Record
from ..comm import Comm
from ..errors import CheckpointError
from ..plan.requests import Request
from .read import read_whole_crc

Buffer = bytes | bytearray | memoryview


def crc32(data: Buffer, crc: int = 0) -> int:
    """CRC32 of ``data``, going on from ``crc``."""
    return int(isal_zlib.crc32(data, crc))


def combine_crc32(first: int, second: int, nbytes: int) -> int:
    """CRC32 of two parts one behind the other; ``nbytes`` are the second's."""
    return int(isal_zlib.crc32_combine(first, second, nbytes))


@dataclass(frozen=True, slots=True)
class Checked:
    """CRC32 of bytes [offset, offset + nbytes) of a record."""

    record: int
    offset: int
    nbytes: int
    crc: int


def join_checks(requests: Sequence[Request], crcs: Sequence[int]) -> list[Checked]:
    """One rank's checks, neighbours joined."""
    return merge_checks(Checked(r.record, r.offset, r.nbytes, crc) for r, crc in zip(requests, crcs, strict=True))


def merge_checks(checks: Iterable[Checked]) -> list[Checked]:
    """Checks in order, neighbours in a record joined into one."""
    merged: list[Checked] = []
    for check in sorted(checks, key=lambda c: (c.record, c.offset)):
        last = merged[-1] if merged else None
        if last and last.record == check.record and last.offset + last.nbytes == check.offset:
            crc = isal_zlib.crc32_combine(last.crc, check.crc, check.nbytes)
            merged[-1] = Checked(last.record, last.offset, last.nbytes + check.nbytes, crc)
        else:
            merged.append(check)
    return merged


def send_checks(checks: Sequence[Checked], comm: Comm) -> list[Checked]:
    """The checks of the records that this rank answers for (every ``size``-th), from all ranks; collective."""
    rows = np.array([(c.record, c.offset, c.nbytes, c.crc) for c in checks], np.int64).reshape(-1, 4)
    tables = comm.swap_tables([rows[rows[:, 0] % comm.size == rank] for rank in range(comm.size)])
    return [Checked(*row) for table in tables for row in table.tolist()]


def verify_records(
    gathered: Iterable[Checked], records: Sequence[Record], files: Sequence[FileRef], rank: int, size: int
) -> None:
    """Hold the records that ``rank`` answers for (every ``size``-th) against the CRC32 that training wrote.

    Args:
        gathered: all ranks' checks.

    Raises:
        CheckpointError: a record's bytes are not what was saved.
    """
    by_record: dict[int, list[Checked]] = defaultdict(list)
    for check in gathered:
        if check.record % size == rank and records[check.record].crc is not None:
            by_record[check.record].append(check)
    for number, checks in sorted(by_record.items()):
        record = records[number]
        merged = merge_checks(checks)
        whole = len(merged) == 1 and merged[0].offset == 0 and merged[0].nbytes == record.nbytes
        # Bytes that two tensors share are read twice and do not add up to the record: read it once more then.
        crc = merged[0].crc if whole else read_whole_crc(files[record.file].path, record)
        _compare(record, files[record.file].path, crc)


def verify_whole(numbers: Iterable[int], records: Sequence[Record], files: Sequence[FileRef]) -> None:
    """Read records and hold them against their CRC32.

    Raises:
        CheckpointError: a record's bytes are not what was saved.
    """
    for number in numbers:
        record = records[number]
        if record.crc is not None:
            _compare(record, files[record.file].path, read_whole_crc(files[record.file].path, record))


def _compare(record: Record, path: str, crc: int) -> None:
    if crc != record.crc:
        raise CheckpointError(
            f"{path}: the {record.nbytes} bytes at {record.offset} have CRC32 {crc:08x}, the writer stored "
            f"{record.crc:08x}; the file is damaged. Nothing was loaded. Restore the file from a copy or load another "
            'tag (load_checkpoint(..., tag="…")).'
        )
