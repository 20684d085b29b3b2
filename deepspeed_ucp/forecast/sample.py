"""One rank's reads among any number of ranks, exactly, without the other ranks' plans.

What a rank reads is decided block by block: by the claims on the blocks that it wants something of, and by the claims
on those that it owns. So every tensor of a model-parallel rank is located once, as all of its ranks hold it together;
of what lies in these blocks the parts that single ranks hold are claimed as the loader claims them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, islice
from operator import itemgetter

import numpy as np

from ..atoms import ITEMSIZE, AtomicIndex, ParamKey
from ..flat import FlatBuffer, Span, join_spans
from ..patterns import Run, restrict_source
from ..plan import OwnerPlan, ReadSizes, Request, Round, decide
from ..plan.claims import SELF_READ, Blocks, Claim, address_claims, list_claims
from ..plan.locate import Want, locate
from ..plan.wants import Wants, view_shards
from .estimate import measure_scratch
from .target import ForecastTarget

Block = tuple[int, int]
"""(record, number of the block in it)."""

_ENDLESS = 1 << 62
"""Bytes of a round where everything goes into one."""


@dataclass(frozen=True, slots=True)
class SharedWant:
    """What the ranks of a model-parallel rank want together: a source shard's part of a parameter in a buffer.

    Attributes:
        number: the model-parallel rank.
        place: of the parameter in the buffer.
        want: all elements of it.
    """

    number: int
    buffer: FlatBuffer
    place: int
    want: Want


class Sampler:
    """Works out what single ranks of a target do.

    Args:
        index: the checkpoint.
        target: of any number of ranks.
    """

    def __init__(self, index: AtomicIndex, target: ForecastTarget, sizes: ReadSizes) -> None:
        self.index, self.target, self.sizes, self.block = index, target, sizes, sizes.block
        self.blocks = Blocks.of(index.stored.records, sizes.block, target.ranks)
        self.wants = list(self._list_wants())
        self.pieces: dict[int, list[tuple[int, int, int, Run]]] = defaultdict(list)
        for number, each in enumerate(self.wants):
            for extent in locate(each.want):
                run, size = extent.run, extent.itemsize
                self.pieces[extent.record].append((run.src * size, run.src_end * size, number, run))
        for held in self.pieces.values():
            held.sort(key=itemgetter(0))
        # How far those up to each one reach: strided ones lie in each other.
        self.reach = {record: list(accumulate((each[1] for each in held), max)) for record, held in self.pieces.items()}
        self.touched = np.array(sorted(self.pieces), np.int64)

    def _list_wants(self) -> Iterator[SharedWant]:
        for number, held in enumerate(self.target.model_ranks):
            for buffer in (each.buffer for each in held.buffers):
                for place, (name, numel) in enumerate(zip(buffer.names, buffer.numels, strict=True)):
                    for want in self._want_whole(held.match.params[name], numel, number % self.target.degrees.tp):
                        yield SharedWant(number, buffer, place, want)

    def _want_whole(self, param: ParamKey, numel: int, tp_rank: int) -> Iterator[Want]:
        """All of a target shard of a parameter with its states, source shard by source shard."""
        layouts = self.target.layouts.get(param.name)
        for atom in self.target.atoms[param]:
            for view in view_shards(layouts, tp_rank):
                one = [view] if view is None else [replace(view, shards=(shard,)) for shard in view.shards]
                yield from (Want(atom, 0, numel, 0, 0, each) for each in one)

    def count_bytes(self) -> int:
        """Bytes that all ranks together read: those of every record of which some rank wants something."""
        return int(self.blocks.nbytes[self.touched].sum())

    def measure(self, rank: int, wants: Wants, threads: int) -> dict[str, int]:
        """Figures of a rank as of :func:`~.estimate.measure_plan`: exact, but for rounds and memory, which are bounds.

        Args:
            wants: of the rank.
            threads: reading threads.
        """
        mine = list_claims(wants.wants, self.block)
        owned = list(self.blocks.owned(rank, self.touched))
        self_read, own, serving, kept = self._decide(owned, rank)
        self_read += self._decide(self._choose_others(mine, set(owned), rank), rank)[0]
        reads = [Request(claim.record, claim.offset, claim.nbytes, claim.parts) for claim in self_read]
        reads += own.unclaimed + serving.reads
        sent = serving.sent - kept
        received = sum(claim.nbytes for claim in mine) - sum(claim.nbytes for claim in self_read) - kept
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
        """Other owners' blocks of which the rank may read some itself: of short claims, where nobody else claims."""
        long: dict[Block, bool] = {}
        for claim in mine:
            key = claim.record, claim.offset // self.block
            long[key] = long.get(key, False) or (claim.count == 1 and claim.run >= self.sizes.min_direct)
        return [each for each in sorted(long) if each not in owned and (long[each] or self._is_alone(rank, each))]

    def _is_alone(self, rank: int, block: Block) -> bool:
        """Whether no other rank claims any of a block."""
        return not any(other != rank and self._claim([want], {block}) for other, want in self._find_wants({block}))

    def _decide(self, chosen: list[Block], rank: int) -> tuple[list[Claim], OwnerPlan, Round, int]:
        """What the owners of some blocks, as if they were one rank, decide.

        Returns:
            A rank's claims that it reads itself; the whole plan; its one round; the bytes that the rank gets in that.
        """
        claims = self.list_claims(set(chosen))
        claims.setdefault(rank, [])
        one = Blocks(self.blocks.first, self.blocks.nbytes, self.block, 1)
        tables = [address_claims(held, one)[0][0] for held in claims.values()]
        plan = decide(tables, self.blocks, chosen, replace(self.sizes, share=_ENDLESS))
        at = list(claims).index(rank)
        answers = plan.answers[at][:, 0].tolist()
        self_read = [claim for claim, answer in zip(claims[rank], answers, strict=True) if answer == SELF_READ]
        serving = plan.rounds[0] if plan.rounds else Round.idle(len(claims))
        return self_read, plan, serving, sum(send.nbytes for send in serving.sends[at])

    def list_claims(self, chosen: set[Block]) -> dict[int, list[Claim]]:
        """All ranks' claims on some blocks."""
        wants: dict[int, list[Want]] = defaultdict(list)
        for rank, want in self._find_wants(chosen):
            wants[rank].append(want)
        return {rank: self._claim(held, chosen) for rank, held in wants.items()}

    def _claim(self, wants: Iterable[Want], chosen: set[Block]) -> list[Claim]:
        claims = list_claims(wants, self.block)
        return [claim for claim in claims if (claim.record, claim.offset // self.block) in chosen]

    def _find_wants(self, chosen: set[Block]) -> Iterator[tuple[int, Want]]:
        """Parts of ranks' wants among which are all that these blocks hold, each element once."""
        for number, spans in self._find_spans(chosen).items():
            for low, high in join_spans(spans):
                yield from self._divide(self.wants[number], low, high)

    def _find_spans(self, chosen: Iterable[Block]) -> dict[int, list[Span]]:
        """Elements of target shards among which are all that lie in some blocks, by the number of what wants them."""
        spans: dict[int, list[Span]] = defaultdict(list)
        for record, number in chosen:
            first = bisect_right(self.reach[record], number * self.block)
            for low, _, want, run in islice(self.pieces[record], first, None):
                if low >= (number + 1) * self.block:
                    break
                step = self.block // ITEMSIZE[self.wants[want].want.atom.dtype]
                spans[want] += [
                    (part.dst, part.dst_end) for part in restrict_source(run, number * step, (number + 1) * step)
                ]
        return spans

    def _divide(self, shared: SharedWant, low: int, high: int) -> Iterator[tuple[int, Want]]:
        """What single ranks want of elements [low, high) of a target shard."""
        stage, tp_rank = divmod(shared.number, self.target.degrees.tp)
        shards = self.target.degrees.shards
        for part, cut in shared.buffer.find_holders(shared.place, low, high):
            for dp_rank in shared.buffer.find_ranks(part, shards):
                rank = (stage * shards + dp_rank) * self.target.degrees.tp + tp_rank
                yield rank, replace(shared.want, start=cut.start, numel=cut.numel)
