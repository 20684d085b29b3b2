"""What all ranks of a job want of a checkpoint, and all claims on some blocks, without a plan of each rank.

Every tensor of a model-parallel rank is located once, as all of its ranks hold it together. Of the tensors that lie in
some blocks the parts of single ranks are claimed as the loader claims them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, islice
from operator import itemgetter

import numpy as np
from jobs import Job

from deepspeed_ucp.extensions.rename import apply_renames
from deepspeed_ucp.model import MASTER, AtomicIndex, Read
from deepspeed_ucp.model.flat import FlatBuffer
from deepspeed_ucp.model.view import EngineBuffer, EngineView
from deepspeed_ucp.plan import Blocks, ReadSizes, Want, list_claims
from deepspeed_ucp.plan.derive import rename_all
from deepspeed_ucp.plan.locate import list_runs
from deepspeed_ucp.plan.match import Match, pick_instance
from deepspeed_ucp.plan.settling import settle_index
from deepspeed_ucp.plan.wants import Layouts, Wants, join_states, list_wants, view_shards
from deepspeed_ucp.tensor_parallel import Run, from_config, restrict_source

Block = tuple[int, int]
"""(record, number of the block in it)."""


@dataclass(frozen=True, slots=True)
class ModelRank:
    """The buffers of a model-parallel rank, and its parameters in the checkpoint."""

    match: Match
    flats: tuple[FlatBuffer, ...]


class JobTarget:
    """The wants of every rank of a job.

    Args:
        index: the checkpoint.
    """

    def __init__(self, index: AtomicIndex, job: Job) -> None:
        rules = from_config(job.patterns)
        self.ranks = job.ranks
        targets = [job.make_target(rank) for rank in job.reporters]
        self.tp, self.pp, self.dp = targets[0].place.tp, targets[0].place.pp, targets[0].place.dp
        held: list[dict[FlatBuffer, None]] = [{} for _ in range(self.tp * self.pp)]
        shapes: dict[str, dict[int, tuple[int, ...]]] = defaultdict(dict)
        stages: dict[str, dict[int, None]] = defaultdict(dict)
        for target in targets:
            place = target.place
            held[place.pp_rank * self.tp + place.tp_rank] |= dict.fromkeys(flat.buffer for flat in target.flats)
            for flat in target.flats:
                for name, shape in zip(flat.buffer.names, flat.buffer.shapes, strict=True):
                    shapes[name][place.tp_rank] = shape
                    stages[name][place.pp_rank] = None
        live = {name: tuple(each[rank] for rank in range(self.tp)) for name, each in shapes.items()}
        renamed = apply_renames(index, live, rules)
        self.index = rename_all(index, renamed)
        self.layouts: Layouts = {}
        if not index.run.topology.tp == self.tp == 1:
            saved = {name: renamed.get(name, name) for name in shapes}
            settled = settle_index(index, rules, {old: live[name] for name, old in saved.items()}).require()
            self.layouts = {name: settled.pairs[old] for name, old in saved.items()}
        self.model_ranks = []
        for number, flats in enumerate(held):
            names = {name for flat in flats for name in flat.names}
            places = {name: sorted(stages[name]) for name in names}
            params = {
                name: pick_instance(self.index, name, each.index(number // self.tp), len(each))
                for name, each in places.items()
            }
            self.model_ranks.append(ModelRank(Match(params), tuple(flats)))

    def wants(self, rank: int) -> Wants:
        """Wants of one rank."""
        rest, tp_rank = divmod(rank, self.tp)
        stage, dp_rank = divmod(rest, self.dp)
        held = self.model_ranks[stage * self.tp + tp_rank]
        flats = []
        for flat in held.flats:
            if flat.ranks is None or dp_rank in flat.ranks:
                part = (flat.ranks.index(dp_rank) if flat.ranks else dp_rank) % flat.parts
                states = join_states(self.index, flat, held.match)
                flats.append(EngineBuffer(flat, part, tp_rank, "float32", states=states))
        return list_wants(self.index, EngineView(flats=flats), held.match, self.layouts, with_states=True)


@dataclass(frozen=True, slots=True)
class SharedWant:
    """A source shard's part of a parameter that the ranks of a model-parallel rank hold together.

    Attributes:
        number: of the model-parallel rank.
        place: of the parameter in the buffer.
        want: all elements of it.
    """

    number: int
    buffer: FlatBuffer
    place: int
    want: Want


class Sampler:
    """Lists the claims of all ranks of a target on some blocks."""

    def __init__(self, target: JobTarget, sizes: ReadSizes) -> None:
        self.target, self.block = target, sizes.block
        self.blocks = Blocks.of(target.index.stored.records, sizes.block, target.ranks)
        self.wants = list(self._list_wants())
        self.pieces: dict[int, list[tuple[int, int, int, Run]]] = defaultdict(list)
        for number, each in enumerate(self.wants):
            size = each.want.itemsize
            for record, run in list_runs(each.want):
                self.pieces[record].append((run.src * size, run.src_end * size, number, run))
        for held in self.pieces.values():
            held.sort(key=itemgetter(0))
        # How far those up to each one reach: strided ones lie in each other.
        self.reach = {record: list(accumulate((each[1] for each in held), max)) for record, held in self.pieces.items()}
        self.touched = np.array(sorted(self.pieces), np.int64)

    def _list_wants(self) -> Iterator[SharedWant]:
        """All of each parameter with its states, source shard by source shard."""
        index, tp = self.target.index, self.target.tp
        for number, held in enumerate(self.target.model_ranks):
            for buffer in held.flats:
                states = [MASTER, *join_states(index, buffer, held.match)]
                for place, (name, numel) in enumerate(zip(buffer.names, buffer.numels, strict=True)):
                    param = held.match.params[name]
                    views = view_shards(self.target.layouts.get(param.name), number % tp)
                    for state in states:
                        atom = index.find(param.name, state, param.instance)
                        for view in views if atom else ():
                            one = [view] if view is None else [replace(view, shards=(each,)) for each in view.shards]
                            for each in one:
                                yield SharedWant(number, buffer, place, Want(atom, 0, numel, 0, 0, each))

    def list_claims(self, chosen: set[Block]) -> dict[int, list[Read]]:
        """All ranks' claims on some blocks."""
        wants: dict[int, list[Want]] = defaultdict(list)
        for number, spans in self._find_spans(chosen).items():
            for low, high in _join_spans(spans):
                for rank, want in self._divide(self.wants[number], low, high):
                    wants[rank].append(want)
        claims = {rank: list_claims(held, self.block) for rank, held in wants.items()}
        return {
            rank: [claim for claim in held if (claim.record, claim.offset // self.block) in chosen]
            for rank, held in claims.items()
        }

    def _find_spans(self, chosen: Iterable[Block]) -> dict[int, list[tuple[int, int]]]:
        """Elements of target shards among which are all that lie in some blocks, by the number of what wants them."""
        spans: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for record, number in chosen:
            first = bisect_right(self.reach[record], number * self.block)
            for low, _, want, run in islice(self.pieces[record], first, None):
                if low >= (number + 1) * self.block:
                    break
                step = self.block // self.wants[want].want.itemsize
                parts = restrict_source(run, number * step, (number + 1) * step)
                spans[want] += [(part.dst, part.dst + (part.count - 1) * part.dst_step + part.width) for part in parts]
        return spans

    def _divide(self, shared: SharedWant, low: int, high: int) -> Iterator[tuple[int, Want]]:
        """What single ranks want of elements [low, high) of a target shard."""
        stage, tp_rank = divmod(shared.number, self.target.tp)
        buffer, dp = shared.buffer, self.target.dp
        for part, cut in buffer.find_holders(shared.place, low, high):
            for dp_rank in (range(dp) if buffer.ranks is None else buffer.ranks)[part :: buffer.parts]:
                rank = (stage * dp + dp_rank) * self.target.tp + tp_rank
                yield rank, replace(shared.want, start=cut.start, numel=cut.numel)


def _join_spans(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for low, high in sorted(spans):
        if joined and low <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(high, joined[-1][1])
        else:
            joined.append((low, high))
    return joined
