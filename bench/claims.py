"""The claims of all ranks of a job on some blocks, without a plan of each rank.

Each tensor of a model-parallel rank is located once, for all its data-parallel ranks together. For the tensors in the
chosen blocks the parts of single ranks are then claimed by the loader's functions.
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
from deepspeed_ucp.model.flat import FlatBuffer
from deepspeed_ucp.model.index import AtomicIndex
from deepspeed_ucp.model.records import Read
from deepspeed_ucp.model.storage import MASTER
from deepspeed_ucp.plan.derive import rename_all
from deepspeed_ucp.plan.locate import Want, list_claims, list_runs
from deepspeed_ucp.plan.match import Match, pick_instance
from deepspeed_ucp.plan.rounds import BLOCK, Blocks
from deepspeed_ucp.plan.settling import settle_index
from deepspeed_ucp.plan.wants import Layouts, join_states, view_shards
from deepspeed_ucp.tensor_parallel.layout import Run, restrict_source
from deepspeed_ucp.tensor_parallel.rules import from_config

Block = tuple[int, int]
"""A record and the number of a block in it."""


@dataclass(frozen=True, slots=True)
class ModelRank:
    """The buffers of a model-parallel rank, and its parameters in the checkpoint."""

    match: Match
    flats: tuple[FlatBuffer, ...]


@dataclass(frozen=True, slots=True)
class SharedWant:
    """A source shard's part of a parameter, for all data-parallel ranks together.

    Attributes:
        number: number of the model-parallel rank.
        index: position of the parameter in the buffer.
        want: all its elements.
    """

    number: int
    buffer: FlatBuffer
    index: int
    want: Want


class Claims:
    """The claims of all ranks of a job."""

    def __init__(self, index: AtomicIndex, job: Job) -> None:
        targets = [job.target.make_target(rank) for rank in job.reporters]
        self.tp, self.dp = targets[0].parallel.tp, targets[0].parallel.dp
        buffers: list[dict[FlatBuffer, None]] = [{} for _ in range(self.tp * targets[0].parallel.pp)]
        shapes: dict[str, dict[int, tuple[int, ...]]] = defaultdict(dict)
        stages: dict[str, dict[int, None]] = defaultdict(dict)
        for target in targets:
            parallel = target.parallel
            buffers[parallel.mp_rank] |= dict.fromkeys(flat.buffer for flat in target.flats)
            for name, shape in target.owned_shapes().items():
                shapes[name][parallel.tp_rank] = shape
                stages[name][parallel.pp_rank] = None
        self._settle(index, job, {name: tuple(each[rank] for rank in range(self.tp)) for name, each in shapes.items()})
        self.model_ranks = []
        for number, flats in enumerate(buffers):
            params = {}
            for name in {name for flat in flats for name in flat.names}:
                places = sorted(stages[name])
                params[name] = pick_instance(self.index, name, places.index(number // self.tp), len(places))
            self.model_ranks.append(ModelRank(Match(params), tuple(flats)))
        self.blocks = Blocks.of(self.index.records, BLOCK, job.ranks)
        self.wants = list(self._list_wants())
        self.pieces: dict[int, list[tuple[int, int, int, Run]]] = defaultdict(list)
        for number, each in enumerate(self.wants):
            size = each.want.itemsize
            for record, run in list_runs(each.want):
                self.pieces[record].append((run.src * size, run.src_end * size, number, run))
        for pieces in self.pieces.values():
            pieces.sort(key=itemgetter(0))
        # The furthest end of the pieces up to each one: strided pieces overlap.
        self.ends = {
            record: list(accumulate((each[1] for each in pieces), max)) for record, pieces in self.pieces.items()
        }
        self.touched = np.array(sorted(self.pieces), np.int64)

    def _settle(self, index: AtomicIndex, job: Job, live: dict[str, tuple[tuple[int, ...], ...]]) -> None:
        """Apply the job's rules: rename the parameters of the index, and find the layouts."""
        rules = from_config(job.target.patterns)
        renamed = apply_renames(index, live, rules)
        self.index = rename_all(index, renamed)
        self.layouts: Layouts = {}
        if not index.topology.tp == self.tp == 1:
            saved = {name: renamed.get(name, name) for name in live}
            settled = settle_index(index, rules, {old: live[name] for name, old in saved.items()}).require()
            self.layouts = {name: settled.pairs[old] for name, old in saved.items()}

    def _list_wants(self) -> Iterator[SharedWant]:
        """List all states of all parameters by source shard."""
        for number, rank in enumerate(self.model_ranks):
            for buffer in rank.flats:
                states = [MASTER, *join_states(self.index, buffer, rank.match)]
                for index, (name, numel) in enumerate(zip(buffer.names, buffer.numels, strict=True)):
                    param = rank.match.params[name]
                    views = view_shards(self.layouts.get(param.name), number % self.tp)
                    for state in states:
                        atom = self.index.find(param.name, state, param.instance)
                        for view in views if atom else ():
                            single = [view] if view is None else [replace(view, shards=(s,)) for s in view.shards]
                            for each in single:
                                yield SharedWant(number, buffer, index, Want(atom, 0, numel, 0, 0, each))

    def list_claims(self, chosen: set[Block]) -> dict[int, list[Read]]:
        """Return the claims of all ranks on some blocks."""
        wants: dict[int, list[Want]] = defaultdict(list)
        for number, spans in self._find_spans(chosen).items():
            for low, high in _join_spans(spans):
                for rank, want in self._divide(self.wants[number], low, high):
                    wants[rank].append(want)
        claims = {rank: list_claims(each, self.blocks.block) for rank, each in wants.items()}
        return {
            rank: [claim for claim in each if (claim.record, claim.offset // self.blocks.block) in chosen]
            for rank, each in claims.items()
        }

    def _find_spans(self, chosen: Iterable[Block]) -> dict[int, list[tuple[int, int]]]:
        """Return spans of target elements that contain all in some blocks, by the number of the want."""
        spans: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for record, number in chosen:
            first = bisect_right(self.ends[record], number * self.blocks.block)
            for low, _, want, run in islice(self.pieces[record], first, None):
                if low >= (number + 1) * self.blocks.block:
                    break
                step = self.blocks.block // self.wants[want].want.itemsize
                parts = restrict_source(run, number * step, (number + 1) * step)
                spans[want] += [(part.dst, part.dst + (part.count - 1) * part.dst_step + part.width) for part in parts]
        return spans

    def _divide(self, shared: SharedWant, low: int, high: int) -> Iterator[tuple[int, Want]]:
        """Yield the wants of single ranks among elements [low, high) of a target shard."""
        stage, tp_rank = divmod(shared.number, self.tp)
        buffer = shared.buffer
        for part, cut in buffer.find_holders(shared.index, low, high):
            replicas = range(self.dp) if buffer.ranks is None else buffer.ranks
            for dp_rank in replicas[part :: buffer.parts]:
                rank = (stage * self.dp + dp_rank) * self.tp + tp_rank
                yield rank, replace(shared.want, start=cut.start, numel=cut.numel)


def _join_spans(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for low, high in sorted(spans):
        if joined and low <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(high, joined[-1][1])
        else:
            joined.append((low, high))
    return joined
