"""Two-phase reading: ranks claim bytes, each block's owner decides which rank reads them, and each byte is read once.

Records are cut into blocks; every block is owned by one of the ranks, which every rank computes by itself. A rank
sends its claims (the reads that it needs) to the owners of their blocks. No rank needs to know the other ranks' layouts
(cf. MPI-IO's collective buffering; redundancy-bypassing loading in Lian et al., ATC'25, section 4). All decisions are
data: each owner's answers to claims, and one rank's reads and rounds of exchange. An owner decides from the claims on
its blocks alone, in the order of the blocks: no rank is asked twice.

* A rank reads a claim itself if it is one run without overlap, the rank can read the file, and the run is long or the
  rank is alone in the block. Therefore no byte is read by two ranks, or read by one and also sent to it.
* The rest of a block from which something is sent is staged, padding included. Ranks that see the owner's memory (those
  of its machine, and itself) copy their bytes from there; the others receive them.
* A round stages and sends at most a share of the window, or one block. The steps in which its bytes travel bound the
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
from ..model.records import STAGE, CopyItem, Read, Record, Records

Table = npt.NDArray[np.int64]
"""Claims on the wire: rows (record, offset, run, step, count), the first columns of :class:`~..model.records.Read`."""

COLUMNS = 5

SELF_READ = -1
"""Answer to a claim: read it yourself. Other answers are the round in which the owner sends the bytes."""

Answers = npt.NDArray[np.int64]
"""For each claim (``SELF_READ``, 0), or the round in which the owner stages the bytes and their place in its memory."""

SameNode = npt.NDArray[np.bool_]
"""[ranks] the ranks that share staging memory with this one, itself included."""

BLOCK = 4 << 20
"""Bytes per block: the unit of ownership, and the largest read."""

SHARES = 16
"""Shares per window. A round of exchange stages or sends at most a share, or one block. The bytes of a share may exist
several times at once: staged, packed, sent, received, and in buffers of the backend.
"""

MIN_DIRECT = 256 << 10
"""Least bytes that a rank reads itself in a block shared with others: shorter reads waste the pages at their ends."""


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
        """Number the blocks of all records in order."""
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


@dataclass(slots=True)
class Round:
    """One rank's part in a round of exchange.

    Attributes:
        sends: reads of the staging memory for each rank, in the order of its claims.
        receives: for each rank, the claims that it serves, in order.
        places: the first bytes of these claims in that rank's staging memory.
        reads: to stage; the items' positions are bytes of the staging memory.
        staged, sent: bytes of staging memory, and of all sends to ranks that do not see it.
        steps: number of exchanges, each with a part of the other ranks; the same on every rank.
    """

    sends: list[list[Read]]
    receives: list[list[Read]]
    reads: list[Read] = field(default_factory=list)
    staged: int = 0
    sent: int = 0
    steps: int = 1
    places: list[list[int]] = field(default_factory=list)

    @classmethod
    def empty(cls, size: int) -> Round:
        """Return a round in which this rank stages, sends and receives nothing."""
        return cls([[] for _ in range(size)], [[] for _ in range(size)])

    def count_exchanges(self, share: int, same_node: SameNode) -> int:
        """Count the exchanges in which this rank sends and receives at most about ``share`` bytes each."""
        received = sum(claim.nbytes for peer in np.flatnonzero(~same_node).tolist() for claim in self.receives[peer])
        return min(max(-(-max(self.sent, received) // share), 1), len(self.sends))

    def select_exchange(self, rank: int, step: int, same_node: SameNode) -> tuple[list[list[Read]], list[list[Read]]]:
        """Return the sends to each rank and the claims on each rank in one of the exchanges, for ``rank``.

        Exchange k serves the peers with ``distance * steps // size == k``, except those on the same node.
        """
        size = len(self.sends)
        is_active = [distance * self.steps // size == step for distance in range(size)]
        far = (~same_node).tolist()
        to = [far[peer] and is_active[(peer - rank) % size] for peer in range(size)]
        by = [far[peer] and is_active[(rank - peer) % size] for peer in range(size)]
        return _keep(self.sends, to), _keep(self.receives, by)

    def list_local_copies(self, same_node: SameNode) -> list[tuple[int, int, Read]]:
        """List the claims that this rank copies from its node's staging memory: (rank, first byte there, claim)."""
        return [
            (peer, place, claim)
            for peer in np.flatnonzero(same_node).tolist()
            for place, claim in zip(self.places[peer] if self.places else (), self.receives[peer], strict=True)
        ]

    def filter_for_sinks(self, sinks: Sequence[bool], sends: list[list[Read]], *, whole: bool) -> Round:
        """Keep the claims of these sinks and the given sends; see :meth:`LoadPlan.filter_for_sinks`."""
        kept = [[_feeds(claim, sinks) for claim in claims] for claims in self.receives]
        receives = [list(compress(*pair)) for pair in zip(self.receives, kept, strict=True)]
        places = [list(compress(*pair)) for pair in zip(self.places, kept, strict=False)]
        reads = self.reads if whole else _pick_reads(self.reads, chain.from_iterable(sends))
        return replace(self, sends=sends, receives=receives, places=places, reads=reads)


def _keep(rows: Sequence[list[Read]], kept: Iterable[bool]) -> list[list[Read]]:
    """Replace the rows that are not kept by empty ones."""
    return [row if keep else [] for row, keep in zip(rows, kept, strict=True)]


def _feeds(read: Read, sinks: Sequence[bool]) -> bool:
    """Return True if some of the bytes go to one of these sinks."""
    return any(item.destination >= 0 and sinks[item.destination] for item in read.items)


def _pick_reads(reads: Iterable[Read], sends: Iterable[Read]) -> list[Read]:
    """Return the reads from which some bytes are sent."""
    lows, highs = np.array([(send.offset, send.end) for send in sends], np.int64).reshape(-1, 2).T
    staged = [(read, read.items[0].position) for read in reads]
    return [read for read, low in staged if ((lows < low + read.nbytes) & (highs > low)).any()]


def make_owner_plan(
    tables: Sequence[Table],
    blocks: Blocks,
    owned: Iterable[tuple[int, int]],
    share: int,
    same_node: SameNode,
    place: int = 0,
    min_direct: int = MIN_DIRECT,
) -> tuple[LoadPlan, list[Answers]]:
    """Decide about blocks.

    The owner guarantees: each byte of its blocks is read once, by the owner or by the one rank that it grants it to. A
    rank that cannot read a file is granted none of it. Staged bytes stay at their announced places until every rank has
    copied them, which all ranks confirm two rounds later.

    Args:
        tables: per rank its claims on them, ordered by record and offset; they are sent in this order.
        owned: (record, block of it) of these blocks, ascending.
        share: maximum bytes that a round stages or sends, if it has several blocks.
        same_node: of this owner.
        place: a number of the owner's machine, at which its rounds begin. Otherwise all machines would stage the same
            part of the files in a round and wait for the storage that holds it; ranks of one machine read neighbouring
            blocks.
        min_direct: as :data:`MIN_DIRECT`.

    Returns:
        The owner's part of its plan: the rounds in which it stages and sends, and the reads of unclaimed bytes for the
        checksums alone. Per rank, the answers to its claims.
    """
    answers = [np.full((len(table), 2), (SELF_READ, 0), np.int64) for table in tables]
    plan = LoadPlan([], [], same_node)
    claimed = _group(tables, blocks.block)
    for record, number in owned:
        low = number * blocks.block
        high = min(low + blocks.block, int(blocks.nbytes[record]))
        claims = claimed.get((record, number), [])
        blind = blocks.access.find_blind(record) if claims else None
        self_read, owner_read = _split(claims, low, min_direct, blind)
        gaps = find_gaps(self_read, high, low)
        if owner_read:
            plan.stage_block(record, gaps, owner_read, share, answers)
        else:
            plan.direct.extend(Read.of(record, low, high) for low, high in gaps)
    count = len(plan.rounds)
    first = _spread_start(count, place)
    plan.rounds[:] = plan.rounds[first:] + plan.rounds[:first]
    for each in answers:
        each[:, 0] = np.where(each[:, 0] == SELF_READ, SELF_READ, (each[:, 0] - first) % max(count, 1))
    return plan, answers


def _group(tables: Sequence[Table], block: int) -> dict[tuple[int, int], list[CopyItem]]:
    """Group claims by (record, block of it), as copies to the claim of a number in a rank's table."""
    claimed: dict[tuple[int, int], list[CopyItem]] = defaultdict(list)
    for rank, table in enumerate(tables):
        for number, (record, offset, run, step, count) in enumerate(table.tolist()):
            claimed[record, offset // block].append(CopyItem(record, offset, run, step, count, rank, number))
    return claimed


def _split(
    claims: Sequence[CopyItem], reach: int, min_direct: int, blind: npt.NDArray[np.bool_] | None
) -> tuple[list[Span], list[CopyItem]]:
    """Return the ranges of a block that their ranks read themselves, and the claims that the owner reads.

    Args:
        reach: the first byte of the block; then the end of the claims so far.
        blind: ranks that cannot read the block's file; None if all can.
    """
    alone = len({claim.destination for claim in claims}) == 1
    claims = sorted(claims, key=attrgetter("offset"))
    followers = [*(claim.offset for claim in claims[1:]), None]
    self_read, owner_read = [], []
    for claim, follower in zip(claims, followers, strict=bool(claims)):
        is_separate = claim.offset >= reach and (follower is None or follower >= claim.end)
        sees = blind is None or not blind[claim.destination]
        if sees and is_separate and claim.count == 1 and (alone or claim.run >= min_direct):
            self_read.append((claim.offset, claim.end))
        else:
            owner_read.append(claim)
        reach = max(reach, claim.end)
    return self_read, owner_read


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """The reads and exchanges of one rank.

    :func:`make_owner_plan` decides about the blocks that the rank owns, and :func:`make_plan` adds its own claims.

    Attributes:
        direct: reads for this rank's buffers, and of bytes for the checksums alone, in the order of reading.
        rounds: of exchange, as many on every rank.
        same_node: see :data:`SameNode`.
    """

    direct: list[Read]
    rounds: list[Round]
    same_node: SameNode = field(compare=False)

    @property
    def reads(self) -> list[Read]:
        """All reads."""
        return self.direct + [read for round_ in self.rounds for read in round_.reads]

    @property
    def nbytes(self) -> int:
        """Bytes that this rank reads, each once."""
        return sum(read.nbytes for read in self.reads)

    def stage_block(
        self, record: int, gaps: Sequence[Span], claims: Sequence[CopyItem], share: int, answers: Sequence[Answers]
    ) -> None:
        """Serve claims on a block in the last round, or in a new one if its share is used up; note the answers.

        Args:
            gaps: the bytes of the block that the owner reads. Each claim lies in one of them, because reads of the
                ranks themselves do not overlap with others.
        """
        staged = sum(high - low for low, high in gaps)
        far = [not self.same_node[claim.destination] for claim in claims]
        sent = sum(claim.nbytes for claim in compress(claims, far))
        if not self.rounds or max(self.rounds[-1].staged + staged, self.rounds[-1].sent + sent) > share:
            self.rounds.append(Round.empty(len(answers)))
        last, shifts = self.rounds[-1], []
        for low, high in gaps:
            shifts.append(last.staged - low)
            size = high - low
            item = CopyItem(record, low, size, size, 1, STAGE, last.staged)
            last.reads.append(Read.of(record, low, high, item))
            last.staged += size
        for claim in claims:
            place = claim.offset + shifts[bisect_right(gaps, claim.offset, key=itemgetter(0)) - 1]
            last.sends[claim.destination].append(Read(STAGE, place, claim.run, claim.step, claim.count))
            answers[claim.destination][claim.position] = len(self.rounds) - 1, place
        last.sent += sent

    def list_needs(self, *passes: Sequence[bool]) -> list[npt.NDArray[np.bool_]]:
        """Per owner [claims that it serves, in the order of the rounds; passes] whether a pass needs them.

        Args:
            passes: for each pass and sink, whether the pass fills the sink.
        """
        claims = [[claim for round_ in self.rounds for claim in round_.receives[owner]] for owner in range(self.size)]
        needs = ([[_feeds(claim, sinks) for sinks in passes] for claim in row] for row in claims)
        return [np.array(rows, np.bool_).reshape(-1, len(passes)) for rows in needs]

    def filter_for_sinks(
        self, sinks: Sequence[bool], needed: Sequence[npt.NDArray[np.bool_]] = (), *, whole: bool = False
    ) -> LoadPlan:
        """Return the plan that fills some sinks, with the same reads, rounds and steps.

        A second pass therefore reads the same ranges that the first one has verified, by the ranks whose nodes have
        them in their page cache.

        Args:
            sinks: by number, whether it is filled.
            needed: per rank, which of this rank's sends it needs, in order (its column of :meth:`list_needs`); default:
                all.
            whole: keep all reads, for the checksums.
        """
        is_needed = [iter(column.tolist()) for column in needed] or [repeat(True)] * self.size
        rounds = []
        for round_ in self.rounds:
            sends = [[send for send in row if next(is_needed[peer])] for peer, row in enumerate(round_.sends)]
            rounds.append(round_.filter_for_sinks(sinks, sends, whole=whole))
        direct = [read for read in self.direct if whole or _feeds(read, sinks)]
        return replace(self, direct=direct, rounds=rounds)

    @property
    def size(self) -> int:
        """Number of ranks in the exchange, 0 if there is none."""
        return len(self.rounds[0].sends) if self.rounds else 0

    def count_exchanges(self, share: int) -> list[int]:
        """Count the exchanges of each round for this rank."""
        return [round_.count_exchanges(share, self.same_node) for round_ in self.rounds]

    def align(self, counts: Sequence[Sequence[int]]) -> LoadPlan:
        """Extend the plan to the rounds and exchanges of the rank with the most.

        Args:
            counts: every rank's :meth:`count_exchanges`.
        """
        steps = list(zip_longest(*counts, fillvalue=1))
        idle = [Round.empty(len(counts)) for _ in steps[len(self.rounds) :]]
        pairs = zip([*self.rounds, *idle], steps, strict=True)
        return replace(self, rounds=[replace(round_, steps=max(needed)) for round_, needed in pairs])


def make_plan(
    addressed: Sequence[Sequence[Read]],
    answers: Sequence[Answers],
    owner_plan: LoadPlan,
    rank: int,
    files: Sequence[int],
) -> LoadPlan:
    """Add a rank's claims to its plan as an owner.

    Args:
        addressed: per owner, this rank's claims.
        answers: per owner, its answers to them.
    """
    rows = [answer.tolist() for answer in answers]
    count = max((number + 1 for row in rows for number, _ in row), default=0)
    idle = [Round.empty(len(rows)) for _ in range(count - len(owner_plan.rounds))]
    rounds = [
        replace(each, receives=[[] for _ in rows], places=[[] for _ in rows]) for each in owner_plan.rounds + idle
    ]
    granted = list[Read]()
    for owner, row in enumerate(rows):
        for claim, (number, place) in zip(addressed[owner], row, strict=True):
            if number == SELF_READ:
                granted.append(claim)
            else:
                rounds[number].receives[owner].append(claim)
                rounds[number].places[owner].append(place)
    return LoadPlan(order_reads([*granted, *owner_plan.direct], files, rank), rounds, owner_plan.same_node)


_GOLDEN = 2_654_435_769
"""Fraction of the golden ratio, times 2^32."""


def order_reads(reads: Iterable[Read], files: Sequence[int], rank: int) -> list[Read]:
    """Return the order in which a rank reads.

    It is the order of the files, rotated to a place of the rank: ranks that need neighbouring bytes do not all wait for
    the same part of the storage. Such ranks mostly have consecutive numbers; the golden ratio spreads them evenly.
    """
    ordered = sorted(reads, key=lambda read: (files[read.record], read.record, read.offset))
    ends = list(accumulate(read.nbytes for read in ordered))
    first = bisect_right(ends, _spread_start(ends[-1], rank)) if ends else 0
    return ordered[first:] + ordered[:first]


def _spread_start(total: int, place: int) -> int:
    """Return a place in [0, total), 0 for the first; any consecutive numbers are spread evenly."""
    return (total * (place * _GOLDEN % (1 << 32))) >> 32
