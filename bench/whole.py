"""All ranks' plans of a job as data: the reads of each rank in order, and the bytes that ranks exchange.

Wants, claims, owner plans and the order of the reads come from the planner; messages between ranks are passed directly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from grid import PER_NODE
from sample import JobTarget

from deepspeed_ucp.model import AtomicIndex
from deepspeed_ucp.model import Read as PlannedRead
from deepspeed_ucp.plan import Blocks, ReadSizes, list_claims, make_owner_plan
from deepspeed_ucp.plan.rounds import SELF_READ, order_reads

Ints = npt.NDArray[np.int64]
Read = tuple[int, int, int]
"""(file, byte of it, bytes)."""


@dataclass
class RankPlan:
    """What one rank does.

    Attributes:
        wanted: bytes that it wants.
        direct: its reads, in order.
        rounds: what it stages in each round of exchange.
        sent: by round, by rank the bytes that it sends there (itself included).
    """

    wanted: int = 0
    direct: list[Read] = field(default_factory=list)
    rounds: list[list[Read]] = field(default_factory=list)
    sent: list[dict[int, int]] = field(default_factory=list)

    @property
    def reads(self) -> list[Read]:
        return self.direct + [read for each in self.rounds for read in each]


def plan_all(index: AtomicIndex, target: JobTarget, sizes: ReadSizes, say: Callable[[str], None]) -> list[RankPlan]:
    """The plans of all ranks of a target."""
    records, size = index.stored.records, target.ranks
    blocks = Blocks.of(records, sizes.block, size)
    plans = [RankPlan() for _ in range(size)]
    claims = _claim_all(target, sizes, plans, say)
    owners = blocks.owners(claims[:, 1], claims[:, 2])
    touched = np.unique(claims[:, 1])
    granted: list[list[PlannedRead]] = [[] for _ in range(size)]
    order = np.argsort(owners, kind="stable")
    shares = np.split(claims[order], np.searchsorted(owners[order], np.arange(1, size)))
    for owner, (mine, owned) in enumerate(zip(shares, _own_all(blocks, touched), strict=True)):
        _decide_one(owner, mine, owned, blocks, sizes, plans, granted, index)
    files, places = [record.file for record in records], [record.offset for record in records]
    for rank, reads in enumerate(granted):
        ordered = order_reads(reads, files, rank)
        plans[rank].direct = [(files[each.record], places[each.record] + each.offset, each.nbytes) for each in ordered]
        reads.clear()
    return plans


def _claim_all(target: JobTarget, sizes: ReadSizes, plans: Sequence[RankPlan], say: Callable[[str], None]) -> Ints:
    """Rows (rank, record, offset, run, step, count)."""
    tables = []
    for rank in range(target.ranks):
        wants = target.wants(rank)
        rows = [(rank, *claim[:5]) for claim in list_claims(wants.wants, sizes.block)]
        tables.append(np.array(rows, np.int64).reshape(-1, 6))
        plans[rank].wanted = int((tables[-1][:, 3] * tables[-1][:, 5]).sum())
        if rank and not rank % 1024:
            say(f"  {rank} ranks have claimed")
    return np.concatenate(tables)


def _own_all(blocks: Blocks, touched: Ints) -> list[list[tuple[int, int]]]:
    """By rank (record, block of it) of the blocks of touched records that it owns, ascending."""
    counts = -(-blocks.nbytes[touched] // blocks.block)
    records = np.repeat(touched, counts)
    numbers = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    owners = blocks.owners(records, numbers * blocks.block)
    order = np.argsort(owners, kind="stable")
    pairs = np.stack([records, numbers], 1)[order]
    shares = np.split(pairs, np.searchsorted(owners[order], np.arange(1, blocks.size)))
    return [[(record, number) for record, number in share.tolist()] for share in shares]


def _decide_one(
    owner: int,
    claims: Ints,
    owned: Sequence[tuple[int, int]],
    blocks: Blocks,
    sizes: ReadSizes,
    plans: Sequence[RankPlan],
    granted: Sequence[list[PlannedRead]],
    index: AtomicIndex,
) -> None:
    """Make one owner's plan and give the answers to the ranks with claims."""
    ranks, begins = np.unique(claims[:, 0], return_index=True)
    tables = np.split(claims[:, 1:], begins[1:]) if len(ranks) else []
    near = ranks // PER_NODE == owner // PER_NODE
    decision = make_owner_plan(tables, blocks, owned, sizes, near, owner - owner % PER_NODE)
    for rank, table, told in zip(ranks.tolist(), tables, decision.answers, strict=True):
        for record, offset, run, *_ in table[told[:, 0] == SELF_READ].tolist():
            granted[rank].append(PlannedRead.of(record, offset, offset + run))
    granted[owner].extend(decision.unclaimed)
    for each in decision.rounds:
        records = index.stored.records
        reads = [(records[r.record].file, records[r.record].offset + r.offset, r.nbytes) for r in each.reads]
        plans[owner].rounds.append(reads)
        sums = {
            rank: sum(send.nbytes for send in sends) for rank, sends in zip(ranks.tolist(), each.sends, strict=True)
        }
        plans[owner].sent.append({rank: nbytes for rank, nbytes in sums.items() if nbytes})


def count_exchanged(plans: Sequence[RankPlan], per_node: int) -> tuple[int, int, int]:
    """Bytes that ranks send to themselves, to others of their node, and to other nodes."""
    own = inside = outside = 0
    for rank, plan in enumerate(plans):
        for sent in plan.sent:
            for to, nbytes in sent.items():
                if to == rank:
                    own += nbytes
                elif to // per_node == rank // per_node:
                    inside += nbytes
                else:
                    outside += nbytes
    return own, inside, outside


def sum_nodes(values: Sequence[int], per_node: int) -> list[int]:
    return [sum(values[low : low + per_node]) for low in range(0, len(values), per_node)]


def imbalance(values: Sequence[int]) -> float:
    """The largest over the mean."""
    return max(values) * len(values) / max(sum(values), 1)
