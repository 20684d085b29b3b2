"""Two-phase reading: ranks claim bytes, each block's owner decides which rank reads them, and each byte is read once.

Records are cut into blocks; every block is owned by one of the ranks, which every rank computes by itself. A rank
sends its claims (the reads that it needs) to the owners of their blocks. An owner lets a rank execute a long read that
only that rank needs. The rest (bytes for several ranks, short interleaved runs, padding) it reads itself, once, and
sends to the ranks that claimed it. No rank needs to know the other ranks' layouts (cf. MPI-IO's collective buffering;
redundancy-bypassing loading in Lian et al., ATC'25, section 4).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..model import Read, Record, Records
from ..model.access import READ_ALL, ReadAccess

Table = npt.NDArray[np.int64]
"""Claims on the wire: rows (record, offset, run, step, count), the first columns of :class:`~..model.Read`."""

COLUMNS = 5

SELF_READ = -1
"""Answer to a claim: read it yourself. Other answers are the round in which the owner sends the bytes."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """The blocks of all records and their owners: the ranks that can read a block's file, in turn.

    Attributes:
        first: number of each record's first block, among those that the same ranks can read.
        nbytes: of each record.
        block: bytes per block.
        size: number of ranks.
        access: the ranks that can read each record.
    """

    first: npt.NDArray[np.int64]
    nbytes: npt.NDArray[np.int64]
    block: int
    size: int
    access: ReadAccess = READ_ALL

    @classmethod
    def of(cls, records: Sequence[Record], block: int, size: int, access: ReadAccess = READ_ALL) -> Blocks:
        """Number the blocks of all records in order.

        Args:
            access: the ranks that can read each file.
        """
        records = Records.of(records)
        nbytes, chosen = np.array(records.nbytes, np.int64), access.choose(records.files)
        return cls(chosen.number(np.arange(len(records)), -(-nbytes // block)), nbytes, block, size, chosen)

    def owners(self, records: npt.NDArray[np.int64], offsets: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the owner of each (record, byte offset)."""
        return self.access.assign(records, self.first[records] + offsets // self.block, self.size)

    def owned(self, rank: int, touched: npt.NDArray[np.int64]) -> Iterable[tuple[int, int]]:
        """Yield (record, block of it) for the blocks that ``rank`` owns in these records, which are ascending."""
        records, places, steps = self.access.find_places(rank, touched, self.size)
        begins = (places - self.first[records]) % steps
        exists = begins * self.block < self.nbytes[records]
        columns = (column[exists].tolist() for column in (records, begins, steps))
        for record, begin, step in zip(*columns, strict=True):
            count = -(-int(self.nbytes[record]) // self.block)
            yield from ((record, number) for number in range(begin, count, step))


def address_claims(claims: Sequence[Read], blocks: Blocks) -> tuple[list[Table], list[list[Read]]]:
    """Group claims by the owner of their block: as tables for the wire, and the claims in the same order."""
    table = np.array([claim[:COLUMNS] for claim in claims], np.int64).reshape(-1, COLUMNS)
    owners = blocks.owners(table[:, 0], table[:, 1])
    order = np.argsort(owners, kind="stable")
    shares = np.split(order, np.searchsorted(owners[order], np.arange(1, blocks.size)))
    return [table[rows] for rows in shares], [[claims[row] for row in rows.tolist()] for rows in shares]
