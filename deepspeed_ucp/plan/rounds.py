"""Two-phase reading: ranks claim bytes, owners of blocks let each be read once.

Records are cut into blocks; every block is owned by one of the ranks, which every rank computes by itself. A rank
sends its claims (the reads that it needs) to the owners of their blocks. No rank needs to know the other ranks' layouts
(cf. MPI-IO's collective buffering; redundancy-bypassing loading in Lian et al., ATC'25, section 4). All decisions are
data: each owner's answers to claims, and one rank's reads and rounds of exchange. An owner decides from the claims on
its blocks alone, in the order of the blocks: no rank is asked twice.

* A rank reads a claim itself if it is one run without overlap, the rank can read the file, and the run is long or the
  rank is alone in the block. Therefore no byte is read by two ranks, or read by one and also sent to it.
* The rest of a block from which something is sent is staged, padding included. Ranks that see the owner's memory (those
  of its machine, and itself) copy their bytes from there; the others receive them.
* A round stages and sends at most a part of the window, or one block. The exchanges in which its bytes travel bound the
  bytes that a rank receives at once.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, compress, repeat, zip_longest
from operator import attrgetter, itemgetter

import numpy as np
import numpy.typing as npt

from ..model.access import READ_ALL, ReadAccess
from ..model.flat import Span, find_gaps
from ..model.records import STAGING, CopyItem, Read, Records

Table = npt.NDArray[np.int64]
"""Claims on the wire: rows (record, offset, run, step, count), the first columns of :class:`~..model.records.Read`."""

COLUMNS = 5

SELF_READ = -1
"""Answer to a claim: read it yourself. Other answers are the round in which the owner sends the bytes."""

Answers = npt.NDArray[np.int64]
"""For each claim (``SELF_READ``, 0), or the round in which the owner stages the bytes, and their offset there."""

SameNode = npt.NDArray[np.bool_]
"""[ranks] the ranks that share staging memory with this one, itself included."""

BLOCK = 4 << 20
"""Bytes per block: the unit of ownership, and the largest read."""

WINDOW_PARTS = 16
"""Parts of a window. A round stages or sends at most one part, or one block. Its bytes may exist several times at once:
staged, packed, sent, received, and in buffers of the backend.
"""

MIN_DIRECT = 256 << 10
"""Least bytes that a rank reads itself in a block shared with others: shorter reads waste the pages at their ends."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """The blocks of all records and their owners.

    The owners are the ranks that can read a block's file, round-robin.

    Attributes:
        first: number of each record's first block, among those that the same ranks can read.
        block, size: bytes per block, and number of ranks.
        access: the ranks that can read each record.
    """

    first: npt.NDArray[np.int64]
    nbytes: npt.NDArray[np.int64]
    block: int
    size: int
    access: ReadAccess = READ_ALL

    @classmethod
    def of(cls, records: Records, block: int, size: int, access: ReadAccess = READ_ALL) -> Blocks:
        """Number the blocks of all records in order."""
        nbytes, chosen = np.array(records.nbytes, np.int64), access.select_files(records.files)
        return cls(chosen.sum_earlier(np.arange(len(records)), -(-nbytes // block)), nbytes, block, size, chosen)

    def owners(self, records: npt.NDArray[np.int64], offsets: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the owner of each (record, byte offset)."""
        return self.access.assign(records, self.first[records] + offsets // self.block, self.size)

    def owned(self, rank: int, touched: npt.NDArray[np.int64]) -> Iterable[tuple[int, int]]:
        """Yield (record, block of it) that ``rank`` owns in ``touched`` (ascending)."""
        records, indices, steps = self.access.find_indices(rank, touched, self.size)
        begins = (indices - self.first[records]) % steps
        exists = begins * self.block < self.nbytes[records]
        columns = (column[exists].tolist() for column in (records, begins, steps))
        for record, begin, step in zip(*columns, strict=True):
            count = -(-int(self.nbytes[record]) // self.block)
            yield from ((record, number) for number in range(begin, count, step))


def split_claims_by_owner(claims: Sequence[Read], blocks: Blocks) -> tuple[list[Table], list[list[Read]]]:
    """Split claims by the owner of their block.

    Returns:
        Per owner a table of its claims for the wire, and these claims in the same order.
    """
    table = np.array([claim[:COLUMNS] for claim in claims], np.int64).reshape(-1, COLUMNS)
    owners = blocks.owners(table[:, 0], table[:, 1])
    order = np.argsort(owners, kind="stable")
    shares = np.split(order, np.searchsorted(owners[order], np.arange(1, blocks.size)))
    return [table[rows] for rows in shares], [[claims[row] for row in rows.tolist()] for rows in shares]


@dataclass(slots=True)
class Round:
    """One rank's part in a round of exchange.

    Attributes:
        served: for each rank, the reads of this rank's staging memory that answer its claims, in their order.
        claims: for each rank, the claims of this rank that it serves, in the same order there.
        offsets: the first bytes of these claims in that rank's staging memory.
        reads: to stage; the items' positions are bytes of the staging memory.
        staged, sent_remote: bytes of staging memory, and of all that is served to ranks that do not see it.
        exchanges: their number, each with a part of the other ranks; the same on every rank.
    """

    served: list[list[Read]]
    claims: list[list[Read]]
    reads: list[Read] = field(default_factory=list)
    staged: int = 0
    sent_remote: int = 0
    exchanges: int = 1
    offsets: list[list[int]] = field(default_factory=list)

    @classmethod
    def empty(cls, size: int) -> Round:
        """Return a round without reads and claims of this rank."""
        return cls([[] for _ in range(size)], [[] for _ in range(size)])

    def count_exchanges(self, round_bytes: int, same_node: SameNode) -> int:
        """Count the exchanges that this rank needs.

        In each it sends and receives at most about ``round_bytes``.
        """
        received = sum(claim.nbytes for peer in np.flatnonzero(~same_node).tolist() for claim in self.claims[peer])
        return min(max(-(-max(self.sent_remote, received) // round_bytes), 1), len(self.served))

    def select_exchange(
        self, rank: int, exchange: int, same_node: SameNode
    ) -> tuple[list[list[Read]], list[list[Read]]]:
        """Return, for one exchange, the reads served to each rank and the claims on each.

        In exchange k a rank sends to the peers with ``distance * exchanges // size == k``, except those on its node.
        The distance of a peer is ``(peer - rank) % size``.
        """
        size = len(self.served)
        is_active = [distance * self.exchanges // size == exchange for distance in range(size)]
        is_remote = (~same_node).tolist()
        to = [is_remote[peer] and is_active[(peer - rank) % size] for peer in range(size)]
        by = [is_remote[peer] and is_active[(rank - peer) % size] for peer in range(size)]
        return _blank_others(self.served, to), _blank_others(self.claims, by)

    def list_local_copies(self, same_node: SameNode) -> list[tuple[int, int, Read]]:
        """List the claims that this rank copies from its node's staging memory.

        Returns:
            (rank, first byte in its staging memory, claim).
        """
        return [
            (peer, offset, claim)
            for peer in np.flatnonzero(same_node).tolist()
            for offset, claim in zip(self.offsets[peer] if self.offsets else (), self.claims[peer], strict=True)
        ]


def _blank_others(rows: Sequence[list[Read]], kept: Iterable[bool]) -> list[list[Read]]:
    """Replace the rows that are not ``kept`` by empty ones."""
    return [row if keep else [] for row, keep in zip(rows, kept, strict=True)]


def _feeds(read: Read, sinks: Sequence[bool]) -> bool:
    """Return True if some of the bytes go to one of these sinks."""
    return any(item.destination >= 0 and sinks[item.destination] for item in read.items)


def _pick_reads(reads: Iterable[Read], served: Iterable[Read]) -> list[Read]:
    """Return the staged reads of which some bytes are served."""
    lows, highs = np.array([(read.offset, read.end) for read in served], np.int64).reshape(-1, 2).T
    staged = [(read, read.items[0].position) for read in reads]
    return [read for read, low in staged if ((lows < low + read.nbytes) & (highs > low)).any()]


def make_owner_plan(
    tables: Sequence[Table],
    blocks: Blocks,
    owned: Iterable[tuple[int, int]],
    round_bytes: int,
    same_node: SameNode,
    machine: int = 0,
    min_direct: int = MIN_DIRECT,
) -> tuple[LoadPlan, list[Answers]]:
    """Assign each read of this rank's blocks to the claiming rank or to this rank.

    This rank, the owner, stages the bytes that it reads for claims. Each byte of its blocks is read once: by the owner,
    or by one claiming rank that can read the file.

    Args:
        tables: per rank its claims on the blocks, ordered by record and offset; they are sent in this order.
        owned: (record, block of it) of these blocks, ascending.
        round_bytes: maximum bytes that a round stages or sends, if it has several blocks.
        machine: number of the owner's machine, which shifts the order of its rounds. Otherwise all machines would stage
            the same part of the files in a round and wait for the storage that holds it; ranks of one machine read
            neighbouring blocks.

    Returns:
        The owner's part of its plan: the rounds in which it stages and sends, and the reads of unclaimed bytes for the
        checksums alone. Per rank, the answers to its claims.
    """
    answers = [np.full((len(table), 2), (SELF_READ, 0), np.int64) for table in tables]
    plan = LoadPlan([], [], same_node)
    claimed = _group_claims(tables, blocks.block)
    for record, number in owned:
        low = number * blocks.block
        high = min(low + blocks.block, int(blocks.nbytes[record]))
        claims = claimed.get((record, number), [])
        excluded = blocks.access.find_excluded(record) if claims else None
        self_read, owner_read = _split_by_reader(claims, low, min_direct, excluded)
        gaps = find_gaps(self_read, high, low)
        if owner_read:
            plan.serve_from_staging(record, gaps, owner_read, round_bytes, answers)
        else:
            plan.own_reads.extend(Read.of(record, low, high) for low, high in gaps)
    count = len(plan.rounds)
    first = _spread_start(count, machine)
    plan.rounds[:] = plan.rounds[first:] + plan.rounds[:first]
    for answer in answers:
        answer[:, 0] = np.where(answer[:, 0] == SELF_READ, SELF_READ, (answer[:, 0] - first) % max(count, 1))
    return plan, answers


def _group_claims(tables: Sequence[Table], block: int) -> dict[tuple[int, int], list[CopyItem]]:
    """Group claims by (record, block of it).

    The destination of an item is the rank that claims, and the position is the row in its table.
    """
    claimed: dict[tuple[int, int], list[CopyItem]] = defaultdict(list)
    for rank, table in enumerate(tables):
        for number, (record, offset, run, step, count) in enumerate(table.tolist()):
            claimed[record, offset // block].append(CopyItem(record, offset, run, step, count, rank, number))
    return claimed


def _split_by_reader(
    claims: Sequence[CopyItem], begin: int, min_direct: int, excluded: npt.NDArray[np.bool_] | None
) -> tuple[list[Span], list[CopyItem]]:
    """Split claims on a block by their reader.

    Args:
        begin: first byte of the block.
        excluded: ranks that cannot read the block's file; None if all can.

    Returns:
        The ranges that the claiming ranks read themselves, and the claims that the owner reads.
    """
    alone = len({claim.destination for claim in claims}) == 1
    claims = sorted(claims, key=attrgetter("offset"))
    followers = [*(claim.offset for claim in claims[1:]), None]
    self_read, owner_read, end = [], [], begin
    for claim, follower in zip(claims, followers, strict=bool(claims)):
        is_separate = claim.offset >= end and (follower is None or follower >= claim.end)
        sees = excluded is None or not excluded[claim.destination]
        if sees and is_separate and claim.count == 1 and (alone or claim.run >= min_direct):
            self_read.append((claim.offset, claim.end))
        else:
            owner_read.append(claim)
        end = max(end, claim.end)
    return self_read, owner_read


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """The reads and exchanges of one rank.

    :func:`make_owner_plan` decides about the blocks that the rank owns, and :func:`make_plan` adds its own claims.

    Attributes:
        own_reads: reads for this rank's buffers, and of bytes for the checksums alone, in the order of reading.
        rounds: of exchange, as many on every rank.
        same_node: see :data:`SameNode`.
    """

    own_reads: list[Read]
    rounds: list[Round]
    same_node: SameNode = field(compare=False)

    @property
    def reads(self) -> list[Read]:
        return self.own_reads + [read for round_ in self.rounds for read in round_.reads]

    def serve_from_staging(
        self,
        record: int,
        gaps: Sequence[Span],
        claims: Sequence[CopyItem],
        round_bytes: int,
        answers: Sequence[Answers],
    ) -> None:
        """Serve claims on a block in the last round, or in a new one if that is full.

        Args:
            gaps: the bytes of the block that the owner reads. Each claim lies in one of them, because reads of the
                ranks themselves do not overlap with others.
            answers: per rank, completed by this call.
        """
        staged = sum(high - low for low, high in gaps)
        is_remote = [not self.same_node[claim.destination] for claim in claims]
        sent = sum(claim.nbytes for claim in compress(claims, is_remote))
        if not self.rounds or max(self.rounds[-1].staged + staged, self.rounds[-1].sent_remote + sent) > round_bytes:
            self.rounds.append(Round.empty(len(answers)))
        last, shifts = self.rounds[-1], []
        for low, high in gaps:
            shifts.append(last.staged - low)
            size = high - low
            item = CopyItem(record, low, size, size, 1, STAGING, last.staged)
            last.reads.append(Read.of(record, low, high, item))
            last.staged += size
        for claim in claims:
            offset = claim.offset + shifts[bisect_right(gaps, claim.offset, key=itemgetter(0)) - 1]
            last.served[claim.destination].append(Read(STAGING, offset, claim.run, claim.step, claim.count))
            answers[claim.destination][claim.position] = len(self.rounds) - 1, offset
        last.sent_remote += sent

    def list_needs(self, *passes: Sequence[bool]) -> list[npt.NDArray[np.bool_]]:
        """Return per owner a table [claim, pass]: True if the pass needs the claim.

        The owner serves these claims, which are in the order of the rounds.

        Args:
            passes: for each pass and sink, whether the pass fills the sink.
        """
        claims = [[claim for round_ in self.rounds for claim in round_.claims[owner]] for owner in range(self.size)]
        needs = ([[_feeds(claim, sinks) for sinks in passes] for claim in row] for row in claims)
        return [np.array(rows, np.bool_).reshape(-1, len(passes)) for rows in needs]

    def filter_for_sinks(
        self, sinks: Sequence[bool], needed: Sequence[npt.NDArray[np.bool_]] = (), *, keep_reads: bool = False
    ) -> LoadPlan:
        """Return the plan that fills some sinks, with the same rounds and exchanges.

        Its reads are the same, too. A second pass therefore reads the ranges that the first one has verified, by the
        ranks whose nodes have them in their page cache.

        Args:
            sinks: by number, whether it is filled.
            needed: per rank, True for each read served to it that it needs, in order (its column of
                :meth:`list_needs`); default: all.
            keep_reads: keep all reads, for the checksums.
        """
        is_needed = [iter(column.tolist()) for column in needed] or [repeat(True)] * self.size
        rounds = []
        for round_ in self.rounds:
            served = [[read for read in row if next(is_needed[peer])] for peer, row in enumerate(round_.served)]
            kept = [[_feeds(claim, sinks) for claim in claims] for claims in round_.claims]
            claims = [list(compress(*pair)) for pair in zip(round_.claims, kept, strict=True)]
            offsets = [list(compress(*pair)) for pair in zip(round_.offsets, kept, strict=False)]
            reads = round_.reads if keep_reads else _pick_reads(round_.reads, chain.from_iterable(served))
            rounds.append(replace(round_, served=served, claims=claims, offsets=offsets, reads=reads))
        own_reads = [read for read in self.own_reads if keep_reads or _feeds(read, sinks)]
        return replace(self, own_reads=own_reads, rounds=rounds)

    @property
    def size(self) -> int:
        """Number of ranks in the exchange, 0 if there is none."""
        return len(self.rounds[0].served) if self.rounds else 0

    def count_exchanges(self, round_bytes: int) -> list[int]:
        """Count the exchanges of each round for this rank."""
        return [round_.count_exchanges(round_bytes, self.same_node) for round_ in self.rounds]

    def align(self, counts: Sequence[Sequence[int]]) -> LoadPlan:
        """Return the plan with as many rounds, and exchanges in each, as any rank needs."""
        exchanges = list(zip_longest(*counts, fillvalue=1))
        idle = [Round.empty(len(counts)) for _ in exchanges[len(self.rounds) :]]
        pairs = zip([*self.rounds, *idle], exchanges, strict=True)
        return replace(self, rounds=[replace(round_, exchanges=max(needed)) for round_, needed in pairs])


def make_plan(
    addressed: Sequence[Sequence[Read]],
    answers: Sequence[Answers],
    owner_plan: LoadPlan,
    rank: int,
    files: Sequence[int],
) -> LoadPlan:
    """Complete this rank's plan as an owner by its own claims and the owners' answers.

    Args:
        addressed: per owner, this rank's claims.
        answers: per owner, its answers to them.
        rank: number of this rank, the seed of the first read (:func:`order_reads`).
        files: the file of each record.
    """
    rows = [answer.tolist() for answer in answers]
    count = max((number + 1 for row in rows for number, _ in row), default=0)
    idle = [Round.empty(len(rows)) for _ in range(count - len(owner_plan.rounds))]
    rounds = [
        replace(round_, claims=[[] for _ in rows], offsets=[[] for _ in rows]) for round_ in owner_plan.rounds + idle
    ]
    granted = list[Read]()
    for owner, row in enumerate(rows):
        for claim, (number, offset) in zip(addressed[owner], row, strict=True):
            if number == SELF_READ:
                granted.append(claim)
            else:
                rounds[number].claims[owner].append(claim)
                rounds[number].offsets[owner].append(offset)
    return LoadPlan(order_reads([*granted, *owner_plan.own_reads], files, rank), rounds, owner_plan.same_node)


_GOLDEN = 2_654_435_769
"""Fraction of the golden ratio, times 2^32."""


def order_reads(reads: Iterable[Read], files: Sequence[int], rank: int) -> list[Read]:
    """Sort reads into the order in which a rank executes them.

    It is the order of the files, rotated by an offset that depends on the rank. So ranks that need neighbouring bytes
    do not all wait for the same part of the storage. Such ranks mostly have consecutive numbers; the golden ratio
    spreads them evenly.
    """
    ordered = sorted(reads, key=lambda read: (files[read.record], read.record, read.offset))
    ends = list(accumulate(read.nbytes for read in ordered))
    first = bisect_right(ends, _spread_start(ends[-1], rank)) if ends else 0
    return ordered[first:] + ordered[:first]


def _spread_start(total: int, seed: int) -> int:
    """Return the start in [0, total) for a seed, by golden-ratio hashing.

    It is 0 for seed 0. Consecutive seeds are spread evenly.
    """
    return (total * (seed * _GOLDEN % (1 << 32))) >> 32
