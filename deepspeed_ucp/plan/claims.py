"""Two-phase reading: ranks claim bytes, each block's owner decides which rank reads them, and each byte is read once.

Records are cut into blocks; every block is owned by one of the ranks, which every rank computes by itself. A rank
sends its claims (the bytes that it wants) to the owners of their blocks. An owner lets a rank read a long run that only
that rank wants. The rest (bytes for several ranks, short interleaved runs, padding) it reads itself, once, and sends to
the ranks that claimed it. No rank needs to know the other ranks' layouts (cf. MPI-IO's collective buffering;
redundancy-bypassing loading in Lian et al., ATC'25, section 4).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..model import Record, Records
from ..model.access import READ_ALL, ReadAccess
from .locate import Extent, Want, cut_blocks, locate

DISCARD, STAGE = -1, -2
"""Buffer numbers of bytes that are read for their checksum alone (padding, replicas), and of an owner's staging memory.

They index a list of sinks from its end.
"""

MAX_PARTS = 512
"""Parts per request; the kernel takes 1024 buffers in one ``preadv``."""

Table = npt.NDArray[np.int64]
"""Claims as rows (record, offset, run, step, count)."""

COLUMNS = 5
_ENDLESS = 1 << 62
"""A block size larger than any record."""

SELF_READ = -1
"""Answer to a claim: read it yourself. Other answers are the round in which the owner sends the bytes."""


@dataclass(frozen=True, slots=True)
class Part:
    """``nbytes`` bytes go to ``buffer`` from element ``position`` on.

    With ``run`` they are rows of ``run`` bytes each, and the buffer's rows begin ``stride`` elements apart.
    """

    nbytes: int
    buffer: int
    position: int
    run: int = 0
    stride: int = 0


@dataclass(frozen=True, slots=True)
class Request:
    """One contiguous read: bytes [offset, offset + nbytes) of a record, scattered over parts in order."""

    record: int
    offset: int
    nbytes: int
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Claim:
    """``count`` runs of ``run`` bytes, ``step`` bytes apart, of one block of a record, and their destinations.

    Attributes:
        record: its number in the index.
        offset: byte of the record at which the first run begins.
        parts: destinations of the bytes in order.
    """

    record: int
    offset: int
    run: int
    step: int
    count: int
    parts: tuple[Part, ...]

    @property
    def nbytes(self) -> int:
        """Bytes claimed."""
        return self.run * self.count


def make_claims(pieces: Iterable[Extent], block: int) -> list[Claim]:
    """Return a rank's claims, ordered by record and offset; neighbouring pieces of a block are one claim.

    Args:
        pieces: wanted by the rank.
        block: bytes per block.
    """
    by_block: dict[tuple[int, int], list[Extent]] = defaultdict(list)
    for whole in pieces:
        for piece in cut_blocks(whole, block):
            by_block[piece.record, piece.run.src * piece.itemsize // block].append(piece)
    claims = [claim for (record, _), held in by_block.items() for claim in _join(record, held)]
    claims.sort(key=lambda claim: (claim.record, claim.offset))
    return claims


def list_claims(wants: Iterable[Want], block: int) -> list[Claim]:
    """Return the claims for a rank's wants, see :func:`make_claims`."""
    return make_claims((piece for want in wants for piece in locate(want)), block)


def list_requests(wants: Iterable[Want], block: int = _ENDLESS) -> list[Request]:
    """Return the reads for the wants of a single rank: neighbours in a block of a record are one request."""
    pieces = (part for want in wants for piece in locate(want) for part in piece.split())
    return [Request(claim.record, claim.offset, claim.nbytes, claim.parts) for claim in make_claims(pieces, block)]


def _join(record: int, pieces: list[Extent]) -> Iterable[Claim]:
    """Yield the claims of one block: contiguous pieces that follow each other are joined."""
    pieces.sort(key=lambda piece: piece.run.src)
    run, end = list[Extent](), 0
    for piece in pieces:
        if not piece.is_contiguous:
            yield _claim(record, [piece])
            continue
        if run and (end != piece.run.src * piece.itemsize or len(run) >= MAX_PARTS):
            yield _claim(record, run)
            run = []
        run.append(piece)
        end = piece.run.src * piece.itemsize + piece.nbytes
    if run:
        yield _claim(record, run)


def _claim(record: int, pieces: list[Extent]) -> Claim:
    offset, parts = pieces[0].run.src * pieces[0].itemsize, tuple(map(_part, pieces))
    nbytes = sum(part.nbytes for part in parts)
    if pieces[0].is_contiguous:
        return Claim(record, offset, nbytes, nbytes, 1, parts)
    run, itemsize = pieces[0].run, pieces[0].itemsize
    return Claim(record, offset, run.width * itemsize, run.src_step * itemsize, run.count, parts)


def _part(piece: Extent) -> Part:
    run = piece.run
    if run.count == 1 or run.dst_step == run.width:
        return Part(piece.nbytes, piece.buffer, run.dst)
    return Part(piece.nbytes, piece.buffer, run.dst, run.width * piece.itemsize, run.dst_step)


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
        nbytes, held = np.array(records.nbytes, np.int64), access.choose(records.files)
        return cls(held.number(np.arange(len(records)), -(-nbytes // block)), nbytes, block, size, held)

    def owners(self, records: npt.NDArray[np.int64], offsets: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the owner of each (record, byte offset)."""
        return self.access.assign(records, self.first[records] + offsets // self.block, self.size)

    def owned(self, rank: int, touched: npt.NDArray[np.int64]) -> Iterable[tuple[int, int]]:
        """Yield (record, block of it) for the blocks that ``rank`` owns in these records, which are ascending."""
        records, places, steps = self.access.find_places(rank, touched, self.size)
        begins = (places - self.first[records]) % steps
        some = begins * self.block < self.nbytes[records]
        for record, begin, step in zip(*(each[some].tolist() for each in (records, begins, steps)), strict=True):
            count = -(-int(self.nbytes[record]) // self.block)
            yield from ((record, number) for number in range(begin, count, step))


def address_claims(claims: Sequence[Claim], blocks: Blocks) -> tuple[list[Table], list[list[Claim]]]:
    """Group claims by the owner of their block, as tables and as they are, in the same order."""
    rows = [(c.record, c.offset, c.run, c.step, c.count) for c in claims]
    table = np.array(rows, np.int64).reshape(-1, COLUMNS)
    owners = blocks.owners(table[:, 0], table[:, 1])
    order = np.argsort(owners, kind="stable")
    shares = np.split(order, np.searchsorted(owners[order], np.arange(1, blocks.size)))
    return [table[rows] for rows in shares], [[claims[row] for row in rows.tolist()] for rows in shares]
