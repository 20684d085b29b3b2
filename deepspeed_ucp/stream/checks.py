"""Holds what a whole conversion has read against the checksums that training wrote."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from ..atoms import AtomicIndex, Record
from ..comm import Comm
from ..io.checksum import Checked, merge_checks, send_checks, verify_records
from ..io.memory import allocate
from ..io.read import read_requests
from ..plan.requests import DISCARD, Part, Request

CHUNK = 4 << 20


def verify_source(index: AtomicIndex, checks: Iterable[Checked], comm: Comm, *, threads: int = 4) -> int:
    """Read what the records hold besides the atoms (padding), and compare every record's CRC32; collective.

    Args:
        checks: of the source bytes that this rank has read.
        threads: how many read at once.

    Returns:
        Bytes that this rank has read in addition.

    Raises:
        CheckpointError: a record's bytes are not what was saved; the same on every rank.
    """
    mine = send_checks(merge_checks(checks), comm)
    nbytes = 0
    with comm.together():
        rest = list(find_gaps(mine, index.records))
        stats = read_requests(
            rest,
            index.records,
            index.files,
            (),
            threads=min(threads, max(len(rest), 1)),
            make_scratch=lambda size: memoryview(allocate(max(size, 1))),
            checksum=True,
        )
        nbytes = stats.nbytes
        mine += [Checked(r.record, r.offset, r.nbytes, crc) for r, crc in zip(rest, stats.crcs, strict=True)]
        verify_records(mine, index.records, index.files, comm.rank, comm.size)
    return nbytes


def find_gaps(checks: Iterable[Checked], records: Sequence[Record]) -> Iterator[Request]:
    """Reads of what no check covers of the records that some check belongs to, where their CRC32 is known."""
    by_record: dict[int, list[Checked]] = defaultdict(list)
    for check in checks:
        by_record[check.record].append(check)
    for number, held in sorted(by_record.items()):
        if records[number].crc is None:
            continue
        position = 0
        for check in [*merge_checks(held), Checked(number, records[number].nbytes, 0, 0)]:
            for low in range(position, check.offset, CHUNK):
                size = min(CHUNK, check.offset - low)
                yield Request(number, low, size, (Part(size, DISCARD, 0),))
            position = max(position, check.offset + check.nbytes)
