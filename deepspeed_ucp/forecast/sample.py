"""One rank's reads among any number of ranks, exactly, without the other ranks' plans.

What a rank reads is decided block by block: by the claims on the blocks that it wants something of, and by the claims
on those that it owns. So these blocks are followed back to the elements of target shards that lie in them, and only
those elements are located, of whichever ranks hold them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from ..atoms import ITEMSIZE, MASTER, Atom, AtomicIndex, AtomKey, Fragment, ParamKey
from ..flat import FlatBuffer
from ..patterns import Run, copy_runs
from ..plan import OwnerPlan, ReadSizes, Request, Round, decide
from ..plan.claims import GRANTED, Blocks, Claim, address_claims, list_claims, make_claims
from ..plan.locate import Extent, Want, cut_blocks, find_shards, locate
from ..plan.wants import Wants, view_shards
from .estimate import measure_scratch
from .target import ForecastTarget

LIVE, FRESH = 0, 1
"""Numbers that stand for all buffers of the engine, and for all memory that is not part of it yet."""

Block = tuple[int, int]
"""(record, number of the block in it)."""


_ENDLESS = 1 << 62
"""Bytes of a round where everything goes into one."""


class Sampler:
    """Works out what single ranks of a target do.

    Args:
        index: the checkpoint.
        target: of any number of ranks.
    """

    def __init__(self, index: AtomicIndex, target: ForecastTarget, sizes: ReadSizes) -> None:
        self.index, self.target, self.sizes, self.block = index, target, sizes, sizes.block
        self.blocks = Blocks.of(index.stored.records, sizes.block, target.ranks)
        self.homes = self._find_homes()
        self.held = self._list_fragments()
        self.touched = np.array(sorted(self.held), np.int64)

    def _find_homes(self) -> dict[ParamKey, list[tuple[int, FlatBuffer, int]]]:
        """Per parameter where it is held: (model-parallel rank, buffer, place in it)."""
        homes: dict[ParamKey, list[tuple[int, FlatBuffer, int]]] = defaultdict(list)
        for number, held in enumerate(self.target.model_ranks):
            for each in held.buffers:
                for place, name in enumerate(each.buffer.names):
                    homes[held.match.params[name]].append((number, each.buffer, place))
        return homes

    def _list_fragments(self) -> dict[int, list[tuple[int, int, Atom, int, Fragment, int]]]:
        """Per record (first byte, behind the last, atom, shard, fragment, buffer), of what some rank wants."""
        held: dict[int, list[tuple[int, int, Atom, int, Fragment, int]]] = defaultdict(list)
        for param in self.homes:
            for number, atom in enumerate(self.target.atoms[param]):
                at_once = atom.state == MASTER and self.target.fills_in_place
                for shard in self._find_shards(atom):
                    for fragment in atom.shards[shard].fragments:
                        if self._is_dropped(atom, shard, fragment):
                            continue
                        end = fragment.offset + fragment.numel * ITEMSIZE[atom.dtype]
                        entry = (fragment.offset, end, atom, shard, fragment, FRESH if number or at_once else LIVE)
                        held[fragment.record].append(entry)
        for entries in held.values():
            entries.sort(key=lambda entry: entry[:2])
        return held

    def _is_dropped(self, atom: Atom, shard: int, fragment: Fragment) -> bool:
        """Nobody wants any of it: rows of a vocabulary's padding that the target does not have."""
        layouts = self.target.layouts.get(atom.name)
        if layouts is None or layouts[0].shape[:1] <= layouts[1].shape[:1]:
            return False
        end = fragment.start + fragment.numel
        return next(self._trace(atom, shard, fragment.start, end), None) is None

    def _find_shards(self, atom: Atom) -> list[int]:
        """Source shards of which some target shard takes something."""
        layouts = self.target.layouts.get(atom.name)
        if layouts is None:
            return [0]
        if layouts[0].mean:
            return list(range(len(atom.shards)))
        return sorted({shard for rank in range(self.target.degrees.tp) for shard in find_shards(*layouts, rank)})

    def count_bytes(self) -> int:
        """Bytes that all ranks together read: those of every record of which some rank wants something."""
        return int(self.blocks.nbytes[self.touched].sum())

    def measure(self, rank: int, wants: Wants, threads: int) -> dict[str, int]:
        """Figures of a rank as of :func:`~.estimate.measure_plan`: exact, but for rounds and memory, which are bounds.

        Args:
            wants: of the rank.
            threads: reading threads.
        """
        mine = list_claims(wants.wants, wants.is_fresh, self.block)
        owned = list(self.blocks.owned(rank, self.touched))
        granted, own, serving, kept = self._decide(owned, rank)
        granted += self._decide(self._choose_others(mine, set(owned), rank), rank)[0]
        reads = [Request(claim.record, claim.offset, claim.nbytes, claim.parts) for claim in granted]
        reads += own.unclaimed + serving.reads
        sent = serving.sent - kept
        received = sum(claim.nbytes for claim in mine) - sum(claim.nbytes for claim in granted) - kept
        moved, share = (serving.staged, sent, received), self.sizes.share
        return {
            "read": sum(request.nbytes for request in reads),
            "requests": len(reads),
            "files": len({self.index.stored.records[request.record].file for request in reads}),
            "received": received,
            "sent": sent,
            "rounds": -(-max(moved) // share),
            "peak": max(measure_scratch(reads, threads), sum(min(nbytes, share) for nbytes in moved)),
        }

    def _choose_others(self, mine: Iterable[Claim], owned: set[Block], rank: int) -> list[Block]:
        """Other owners' blocks of which something may be granted: of short claims only where nobody else claims."""
        long: dict[Block, bool] = {}
        for claim in mine:
            key = claim.record, claim.offset // self.block
            direct = claim.count == 1 and claim.run >= self.sizes.min_direct
            long[key] = long.get(key, False) or direct
        blocks = (block for block in sorted(long) if block not in owned)
        return [each for each in blocks if long[each] or all(other == rank for other, _ in self._find_pieces({each}))]

    def _decide(self, chosen: list[Block], rank: int) -> tuple[list[Claim], OwnerPlan, Round, int]:
        """What the owners of some blocks, as if they were one rank, decide.

        Returns:
            A rank's claims that are granted; the whole plan; its one round; the bytes that the rank gets in that.
        """
        claims = self._claim(chosen)
        claims.setdefault(rank, [])
        one = Blocks(self.blocks.first, self.blocks.nbytes, self.block, 1)
        tables = [address_claims(held, one)[0][0] for held in claims.values()]
        plan = decide(tables, self.blocks, chosen, replace(self.sizes, share=_ENDLESS))
        at = list(claims).index(rank)
        told = plan.answers[at][:, 0].tolist()
        granted = [claim for claim, answer in zip(claims[rank], told, strict=True) if answer == GRANTED]
        serving = plan.rounds[0] if plan.rounds else Round.idle(len(claims))
        return granted, plan, serving, sum(send.nbytes for send in serving.sends[at])

    def _claim(self, chosen: Iterable[Block]) -> dict[int, list[Claim]]:
        """All ranks' claims on some blocks."""
        pieces: dict[int, list[Extent]] = defaultdict(list)
        for rank, piece in self._find_pieces(set(chosen)):
            pieces[rank].append(piece)
        return {rank: make_claims(held, lambda buffer: buffer == FRESH, self.block) for rank, held in pieces.items()}

    def _find_pieces(self, wanted: set[Block]) -> Iterator[tuple[int, Extent]]:
        """What each rank wants of some blocks."""
        for rank, want in self._find_wants(wanted):
            for whole in locate(want):
                for piece in cut_blocks(whole, self.block):
                    if (piece.record, piece.run.src * piece.itemsize // self.block) in wanted:
                        yield rank, piece

    def _find_wants(self, wanted: set[Block]) -> Iterator[tuple[int, Want]]:
        """Parts of ranks' wants among which are all that these blocks hold, each element once."""
        spans: dict[tuple[AtomKey, int, int], list[tuple[int, int]]] = defaultdict(list)
        atoms: dict[AtomKey, tuple[Atom, int]] = {}
        for record, number in wanted:
            low = number * self.block
            for atom, shard, first, last, buffer in self._cut_fragments(record, low, low + self.block):
                atoms[atom.key] = atom, buffer
                for tp_rank, span in self._trace(atom, shard, first, last):
                    spans[atom.key, shard, tp_rank].append(span)
        for (key, shard, tp_rank), found in spans.items():
            for low, high in join_spans(found):
                for rank, want in self._assign(*atoms[key], tp_rank, low, high):
                    if want.view is None:
                        yield rank, want
                    elif shard in want.view.shards:  # what other shards hold lies in other blocks
                        yield rank, replace(want, view=replace(want.view, shards=(shard,)))

    def _cut_fragments(self, record: int, low: int, high: int) -> Iterator[tuple[Atom, int, int, int, int]]:
        """(atom, shard, first element, behind the last, buffer) of what lies in bytes [low, high) of a record."""
        entries = self.held[record]
        at = bisect_left(entries, low, key=lambda entry: entry[1])
        for first, last, atom, shard, fragment, buffer in entries[at:]:
            if first >= high:
                return
            itemsize = ITEMSIZE[atom.dtype]
            begin = (max(first, low) - first) // itemsize + fragment.start
            end = -(-(min(last, high) - first) // itemsize) + fragment.start
            if begin < end:
                yield atom, shard, begin, end, buffer

    def _trace(self, atom: Atom, shard: int, low: int, high: int) -> Iterator[tuple[int, tuple[int, int]]]:
        """(target shard, span of its elements) that elements [low, high) of a source shard go to."""
        layouts = self.target.layouts.get(atom.name)
        if layouts is None:
            yield 0, (low, high)
            return
        source, target = layouts[0], replace(layouts[1], claims=None)
        for tp_rank in range(self.target.degrees.tp):
            if not source.mean and shard not in find_shards(source, target, tp_rank):
                continue
            runs = copy_runs(target, tp_rank, source, shard, low, high)
            if runs:
                yield tp_rank, (min(run.src for run in runs), max(map(_end, runs)))

    def _assign(self, atom: Atom, buffer: int, tp_rank: int, low: int, high: int) -> Iterator[tuple[int, Want]]:
        """The wants of every rank that holds some of elements [low, high) of a target shard."""
        tp, shards = self.target.degrees.tp, self.target.degrees.shards
        layouts = self.target.layouts.get(atom.name)
        views = view_shards(layouts, tp_rank)
        if layouts is not None and layouts[0].mean:  # replicas are read into memory of their own
            buffer = FRESH
        for number, held, place in self.homes[atom.param]:
            if number % tp != tp_rank:
                continue
            for part, cut in held.find_holders(place, low, high):
                for dp_rank in held.find_ranks(part, shards):
                    rank = (number // tp * shards + dp_rank) * tp + tp_rank
                    yield from ((rank, Want(atom, cut.start, cut.numel, buffer, 0, view)) for view in views)


def _end(run: Run) -> int:
    return run.src + (run.count - 1) * run.src_step + run.width


def join_spans(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Spans in order, joined where they meet."""
    joined: list[tuple[int, int]] = []
    for low, high in sorted(spans):
        if joined and low <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(high, joined[-1][1])
        else:
            joined.append((low, high))
    return joined
