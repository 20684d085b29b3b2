"""Planning alone, for the paper's model of 10^12 parameters: what one rank of many computes, without files or peers.

    python bench/plan.py --case zero3 --script FILE --make     works out what the rank is told
    python bench/plan.py --case zero3 --script FILE            plans, and prints measurements as JSON

The headers that would lie in the checkpoint are made in memory (`synthetic`), and what the other ranks would say in
each collective is worked out beforehand. Timed is all that the rank itself computes from there on, with the plugin's
own functions: the index, the patterns, its wants, its claims, its judgement of the others' claims, and its plan.
"""

from __future__ import annotations

import argparse
import json
import pickle
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from meters import peak_resident_bytes, reset_peak, resident_bytes
from ranks import release_free_memory
from synthetic import TIED, Parameter, Sizes, Source, pad_flat, split_groups

from deepspeed_ucp.atoms import COPY, ITEMSIZE, AtomicIndex, AtomKey, count
from deepspeed_ucp.comm import Comm
from deepspeed_ucp.flat import FlatBuffer, join_parameters, join_reserved
from deepspeed_ucp.forecast.sample import join_spans
from deepspeed_ucp.forecast.target import cut_sub_groups
from deepspeed_ucp.io.memory import pause_collection
from deepspeed_ucp.load.census import check_alike, settle_layouts, take_census
from deepspeed_ucp.load.prepare import make_work
from deepspeed_ucp.load.states import OptimizerMatch
from deepspeed_ucp.load.transfer import negotiate
from deepspeed_ucp.patterns import copy_runs, from_config, list_renames
from deepspeed_ucp.plan import Blocks, ReadSizes, Want, address_claims, locate, make_claims
from deepspeed_ucp.plan.claims import GRANTED
from deepspeed_ucp.plan.feeds import feed
from deepspeed_ucp.plan.match import Match, match_groups, match_parameters, pick_instance
from deepspeed_ucp.plan.rounds import BLOCK, MIN_DIRECT, Near
from deepspeed_ucp.sources.files import sort_files
from deepspeed_ucp.sources.index import build_index
from deepspeed_ucp.sources.naming import Naming
from deepspeed_ucp.sources.save import arrange
from deepspeed_ucp.targets.base import Target
from deepspeed_ucp.targets.parallel import Instance, Place

if TYPE_CHECKING:
    from deepspeed_ucp.patterns import Layout, Run
    from deepspeed_ucp.sources.headers import FileHeader

FOLDER = "/checkpoints/global_step1000"
WINDOW = 256 << 20
SUB_GROUP = 1_000_000_000  # ZeRO 3's default sub_group_size
PER_NODE = 8
Layouts = dict[str, tuple["Layout", "Layout"]]
Answer = Callable[[Any], list[Any]]


@dataclass(frozen=True)
class Grid:
    """A target: `tp` × `pp` × `dp` ranks, numbered stage first, then data, then tensor; ZeRO 1, or 3 without pp."""

    sizes: Sizes
    tp: int
    pp: int
    dp: int
    stage: int
    sub_group: int = SUB_GROUP

    @property
    def title(self) -> str:
        grid = f"TP{self.tp} PP{self.pp} DP{self.dp}, ZeRO-1"
        return f"ZeRO-3 on {self.ranks} ranks" if self.stage == 3 else grid

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.dp

    def place(self, rank: int) -> Place:
        rest, tp_rank = divmod(rank, self.tp)
        pp_rank, dp_rank = divmod(rest, self.dp)
        return Place(tp_rank, self.tp, pp_rank, self.pp, dp_rank, self.dp)

    @property
    def patterns(self) -> dict[str, Any]:
        """The user's rules: a family, and at ZeRO 3 the names of the model that is no pipeline."""
        rules: dict[str, Any] = {"family": FAMILY}
        return {**rules, "rename": self._renames()} if self.stage == 3 else rules

    def _renames(self) -> list[dict[str, str]]:
        model = "language_model"
        return [
            {"from": r"tied_modules\.embed\.(?P<rest>.*)", "to": f"{model}.embedding.{{rest}}"},
            {"from": r"(?P<n>\d+)\.(?P<rest>.*\..*)", "to": f"{model}.encoder.layers.{{n-2}}.{{rest}}"},
            {"from": r"\d+\.(?P<rest>\w+)", "to": f"{model}.encoder.final_layernorm.{{rest}}"},
        ]

    def live_name(self, parameter: Parameter) -> str:
        """The parameter's name in the target's model."""
        if self.stage != 3:
            return parameter.name
        if parameter.name.startswith(TIED):
            return f"language_model.embedding.{parameter.name.removeprefix(TIED)}"
        rest = parameter.name.partition(".")[2]
        if parameter.layer == self.sizes.layers + 2:
            return f"language_model.encoder.final_layernorm.{rest}"
        return f"language_model.encoder.layers.{parameter.layer - 2}.{rest}"


FAMILY = "megatron-gpt"


class FakeTarget(Target):
    """One rank of a live engine as the planner sees it: names, shapes and flat buffers, on the meta device."""

    def __init__(self, grid: Grid, rank: int, held: Sequence[Parameter]) -> None:
        self.grid, self.place = grid, grid.place(rank)
        self.aliases, self.flats, self.layout = {}, [], []
        self.shapes = {grid.live_name(p): p.local_shape(grid.tp) for p in held}
        self.held = {grid.live_name(p): p for p in held}
        parameters = [(name, _mark(p)) for name, p in self.held.items()]
        self.engine = SimpleNamespace(module=SimpleNamespace(named_parameters=lambda: parameters))
        self.collect()
        groups = defaultdict(list)
        for flat in self.flats:
            groups[flat.group].append(flat.holder)
        self.wrapped = torch.optim.AdamW([{"params": groups[group]} for group in sorted(groups)], lr=1e-4)

    @property
    def dp(self) -> int:
        return self.place.dp

    def refresh_copies(self) -> None:
        """Nothing is loaded."""

    def owned_shapes(self) -> dict[str, tuple[int, ...]]:
        return self.shapes

    def instances(self) -> dict[str, Instance]:
        if self.place.pp == 1 or self.place.pp_rank not in (0, self.place.pp - 1):
            return {}
        last = int(self.place.pp_rank > 0)
        return {name: Instance(last, 2, "word" in name) for name in self.shapes if name.startswith(TIED)}

    def collect(self) -> None:
        for group, held in enumerate(split_groups(self.held.values())):
            names = [self.grid.live_name(p) for p in held]
            shapes = [p.local_shape(self.place.tp) for p in held]
            numels = [count(shape) for shape in shapes]
            if self.grid.stage == 3:
                for some in cut_sub_groups(numels, self.dp, self.grid.sub_group):
                    self._add(join_reserved(group, names[some], shapes[some], self.dp))
            else:
                partition = pad_flat(sum(numels), self.dp) // self.dp
                self._add(join_parameters(group, names, shapes, parts=self.dp, partition=partition))

    def _add(self, buffer: FlatBuffer) -> None:
        self.add_flat(buffer, self.place.dp_rank, torch.empty(buffer.partition, device="meta"))


def _mark(parameter: Parameter) -> SimpleNamespace:
    """A live parameter with Megatron's attributes."""
    dim = -1 if parameter.dim is None else parameter.dim
    stride = 3 if ".query_key_value." in parameter.name else 1
    return SimpleNamespace(tensor_model_parallel=dim >= 0, partition_dim=dim, partition_stride=stride)


class ScriptedComm(Comm):
    """A rank among peers whose answers are known beforehand.

    Args:
        told: what is gathered, in order; where nothing is known the others say what this rank says.
        swapped: what comes back from each exchange of tables, by what this rank sends.
        mask: what some rank says yes to.
    """

    def __init__(
        self, rank: int, size: int, told: Sequence[Answer] = (), swapped: Sequence[Answer] = (), mask: Any = None
    ) -> None:
        self.rank, self.size, self.mask = rank, size, mask
        self._told, self._swapped = iter(told), iter(swapped)

    def run(self, work: Any) -> Any:
        return work()

    def once(self, work: Any) -> Any:
        return work()

    def each(self, work: Any) -> list[Any]:
        return self.gather(work())

    def gather(self, value: Any) -> list[Any]:
        answer = next(self._told, None)
        return [value] * self.size if answer is None else answer(value)

    def swap_tables(self, tables: list[Any]) -> list[Any]:
        return next(self._swapped)(tables)

    def any_of(self, mask: Any) -> Any:
        return self.mask


@dataclass
class Script:
    """What one rank receives, as pickled by each rank, and the claims on its blocks.

    Attributes:
        headers: the two that rank 0 reads to find out what the folder holds, then each rank's share of the others.
        returns: of the census.
        mask: which records some rank claims something of.
        tables: by rank.
    """

    grid: Grid
    rank: int
    headers: list[bytes]
    returns: list[bytes] = field(default_factory=list)
    mask: Any = None
    tables: list[Any] = field(default_factory=list)


@dataclass
class Planned:
    """What one rank computed: seconds by phase, bytes it holds at most beyond what it began with, and its plan."""

    phases: dict[str, float]
    cpu_seconds: float
    peak_bytes: int
    gathered_bytes: int
    headers: int
    most_headers: int
    wanted_bytes: int
    read_bytes: int
    requests: int
    rounds: int
    claims: int
    judged: int


class Planner:
    """The steps of `load.direct` up to the plan, each with the plugin's own functions."""

    def __init__(self, grid: Grid, rank: int) -> None:
        self.grid, self.rank = grid, rank
        self.phases: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.phases[name] = self.phases.get(name, 0.0) + time.perf_counter() - began

    def build(self, headers: Sequence[FileHeader]) -> AtomicIndex:
        listing = sort_files(FOLDER, {header.name: header.size for header in headers})
        by_name = {header.name: header for header in headers}
        first = by_name.pop(listing.model[0])
        return build_index(arrange(listing, [first, *by_name.values()]), Naming())

    def relate(self, index: AtomicIndex, target: Target, comm: Comm) -> tuple[Match, Layouts]:
        census = take_census(target, [], comm)
        rules = from_config(self.grid.patterns)
        made = feed(index, census.shapes, list_renames(rules), census.aliases)
        live = replace(census, renamed=made.renamed)
        match = match_parameters(index, live, strict=True, with_states=True).require()
        check_alike(live, target, [])
        match_groups(index, target.group_members(), match)
        return match, settle_layouts(index, live, match, rules, tell=False)


def find_near(rank: int, ranks: int) -> Near:
    """The ranks of one rank's machine, which see its staging memory."""
    return np.arange(ranks) // PER_NODE == rank // PER_NODE


def list_targets(grid: Grid, kind: type[FakeTarget] = FakeTarget) -> Callable[[int], FakeTarget]:
    stages = grid.sizes.stages(grid.pp)
    return lambda rank: kind(grid, rank, stages[grid.place(rank).pp_rank])


def find_heaviest(grid: Grid) -> int:
    """The first rank of the pipeline stage whose ranks hold the most."""
    make_target = list_targets(grid)

    def measure(rank: int) -> int:
        return sum(cut.numel for flat in make_target(rank).flats for cut in flat.buffer.cuts(flat.part))

    return max(range(0, grid.ranks, grid.tp * grid.dp), key=measure)


def make_script(source: Source, grid: Grid, rank: int) -> Script:
    """What rank `rank` of the target is told by the others."""
    headers, make_target = source.headers(), list_targets(grid)
    first = [headers[0], next(header for header in headers if header.optim)]
    rest = [header for header in headers if header not in first]
    blobs = [pickle.dumps(first), *(pickle.dumps(rest[each :: grid.ranks]) for each in range(grid.ranks))]
    script = Script(grid, rank, blobs)
    script.returns = [_ask_census(make_target(each), each, grid) for each in range(grid.ranks)]
    planner = Planner(grid, rank)
    index = planner.build(headers)
    comm = ScriptedComm(rank, grid.ranks, [lambda _: _load(script.returns)])
    match, layouts = planner.relate(index, make_target(rank), comm)
    script.mask = np.zeros(len(index.stored.records), np.bool_)
    script.mask[
        [f.record for a in index.stored.atoms.values() if a.state != COPY for s in a.shards for f in s.fragments]
    ] = True
    peers = Peers(index, match, layouts, grid, rank, script.mask)
    script.tables = [peers.claims_of(make_target(each)) for each in range(grid.ranks)]
    return script


class _Told(Exception):
    """Ends a function that has told what was asked."""


def _ask_census(target: FakeTarget, rank: int, grid: Grid) -> bytes:
    """What a rank tells in the census."""
    told: list[Any] = [None]

    def note(value: Any) -> list[Any]:
        told.append(value)
        raise _Told

    if not target.place.dp_rank:
        with suppress(_Told):
            take_census(target, [], ScriptedComm(rank, grid.ranks, [note]))
    return pickle.dumps(told[-1])


def _load(blobs: Sequence[bytes]) -> list[Any]:
    return [pickle.loads(blob) for blob in blobs]  # noqa: S301 (of this program)


class Peers:
    """The claims that other ranks make on the blocks that one rank owns.

    Their whole plans would take long. So the blocks are followed back to the elements of target shards that lie in
    them, and of every rank's wants only those elements are located.
    """

    def __init__(
        self, index: AtomicIndex, match: Match, layouts: Layouts, grid: Grid, owner: int, touched: Any
    ) -> None:
        self.index, self.match, self.layouts, self.grid, self.owner = index, match, layouts, grid, owner
        self.blocks = Blocks.of(index.stored.records, BLOCK, grid.ranks)
        self.mine: dict[int, list[int]] = defaultdict(list)
        for record, number in self.blocks.owned(owner, np.flatnonzero(touched)):
            self.mine[record].append(number * BLOCK)
        self._spans: dict[tuple[AtomKey, int], list[tuple[int, int]]] = {}

    def claims_of(self, target: FakeTarget) -> Any:
        """Claims of a rank on these blocks, as a table."""
        optimizer = OptimizerMatch(self.index, target, self.match_for(target))
        wants = make_work(optimizer, [], self.layouts, with_states=True).wants
        pieces = [piece for want in wants.wants for part in self._narrow(want) for piece in locate(part)]
        claims = make_claims(pieces, lambda _: True, BLOCK)
        return address_claims(claims, self.blocks)[0][self.owner]

    def match_for(self, target: FakeTarget) -> Match:
        """A rank's match: it differs in what several stages hold."""
        instances = target.instances().items()
        saved = self.match.params
        own = {n: pick_instance(self.index, saved[n].name, each.ordinal, each.count) for n, each in instances}
        return replace(self.match, params={**saved, **own})

    def _narrow(self, want: Want) -> Iterator[Want]:
        """The parts of a want that the blocks may hold."""
        end = want.start + want.numel
        for low, high in self._find_spans(want):
            first, last = max(low, want.start), min(high, end)
            if first < last:
                yield replace(want, start=first, numel=last - first, offset=want.offset + first - want.start)

    def _find_spans(self, want: Want) -> list[tuple[int, int]]:
        """Elements of the target shard, as ranges, among which are all that the blocks hold."""
        key = want.atom.key, 0 if want.view is None else want.view.rank
        if key not in self._spans:
            self._spans[key] = join_spans(self._trace(want))
        return self._spans[key]

    def _trace(self, want: Want) -> Iterator[tuple[int, int]]:
        view, itemsize = want.view, ITEMSIZE[want.atom.dtype]
        for shard in (0,) if view is None else view.shards:
            for fragment in want.atom.shards[shard].fragments:
                for offset in self.mine.get(fragment.record, ()):
                    low, high = ((byte - fragment.offset) // itemsize for byte in (offset, offset + BLOCK))
                    low, high = max(low, 0) + fragment.start, min(high, fragment.numel) + fragment.start
                    if low >= high:
                        continue
                    if view is None:
                        yield low, high
                        continue
                    runs = copy_runs(view.target, view.rank, view.source, shard, low, high)
                    if runs:
                        yield min(run.src for run in runs), max(_last(run) for run in runs)


def _last(run: Run) -> int:
    return run.src + (run.count - 1) * run.src_step + run.width


def plan_one(script: Script) -> Planned:
    """Plan for one rank, in a process that has done nothing else before."""
    grid, rank = script.grid, script.rank
    target = list_targets(grid)(rank)
    planner, answers = Planner(grid, rank), Answers(script)
    release_free_memory()
    before = resident_bytes()
    reset_peak()
    began = time.process_time()
    with pause_collection():  # as the hook does
        with planner.phase("headers unpickled"):
            parts = _load(script.headers)
        with planner.phase("index"):
            index = planner.build([header for part in parts for header in part])
        with planner.phase("census, names, patterns"):
            comm = ScriptedComm(rank, grid.ranks, [lambda _: _load(script.returns)])
            match, layouts = planner.relate(index, target, comm)
        with planner.phase("wants"):
            work = make_work(OptimizerMatch(index, target, match), [], layouts, with_states=True)
        with planner.phase("claims, judgement, plan"):
            fresh = [True] * len(work.into.sinks)  # a fresh engine's masters are what their copies make
            near = find_near(rank, grid.ranks)
            plan = negotiate(work.wants, fresh, index, answers.comm(), ReadSizes.within(WINDOW), near)
    peak, busy = peak_resident_bytes() - before, time.process_time() - began
    gathered = sum(map(len, script.headers)) + sum(map(len, script.returns))
    return Planned(
        phases=planner.phases,
        cpu_seconds=busy,
        peak_bytes=peak + gathered,
        gathered_bytes=gathered,
        headers=sum(map(len, parts)),
        most_headers=max(map(len, parts[1:])),
        wanted_bytes=sum(want.numel * ITEMSIZE[want.atom.dtype] for want in work.wants.wants),
        read_bytes=plan.nbytes,
        requests=len(plan.requests),
        rounds=len(plan.rounds),
        claims=answers.claims,
        judged=sum(map(len, script.tables)),
    )


class Answers:
    """What the owners of other blocks answer, by a rule that needs only the rank's own claims.

    Long contiguous claims are granted and the others come in the first round, which is what nearly all of the owners
    would say.
    """

    def __init__(self, script: Script) -> None:
        self.script, self.claims = script, 0
        self.granted: list[Any] = []

    def comm(self) -> ScriptedComm:
        size = self.script.grid.ranks
        swapped = [self._take_tables, self._answer]
        return ScriptedComm(self.script.rank, size, swapped=swapped, mask=self.script.mask)

    def _take_tables(self, tables: list[Any]) -> list[Any]:
        self.claims = sum(map(len, tables))
        self.granted = [(table[:, 4] == 1) & (table[:, 2] >= MIN_DIRECT) for table in tables]
        return self.script.tables

    def _answer(self, answers: list[Any]) -> list[Any]:
        own = self.script.rank
        told = [
            np.stack([np.where(each, GRANTED, 0), np.zeros_like(each)], 1).astype(np.int64) for each in self.granted
        ]
        return [answers[own] if rank == own else each for rank, each in enumerate(told)]


def choose_case(name: str, quick: bool) -> tuple[Source, Grid]:
    """The paper's model on 1024 ranks and a target of 768; or a tiny one on 32 and 24."""
    if quick:
        sizes, tp, pp, dp = Sizes(8, 256, 16, 1024, 128), 4, 4, 2
    else:
        sizes, tp, pp, dp = Sizes(128, 25600, 160), 8, 64, 2
    ranks, sub_group = tp * pp * dp * 3 // 4, 100_000 if quick else SUB_GROUP
    grid = Grid(sizes, 1, 1, ranks, 3, sub_group) if name == "zero3" else Grid(sizes, tp, pp * 3 // 4, dp, 1)
    return Source(sizes, tp, pp, dp), grid


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=("zero1", "zero3"), required=True)
    parser.add_argument("--script", type=Path, required=True)
    parser.add_argument("--rank", type=int, help="which rank plans (default: one that wants the most)")
    parser.add_argument("--make", action="store_true")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    source, grid = choose_case(args.case, args.quick)
    if args.make:
        rank = find_heaviest(grid) if args.rank is None else args.rank
        args.script.write_bytes(pickle.dumps(make_script(source, grid, rank)))
        return
    planned = plan_one(pickle.loads(args.script.read_bytes()))  # noqa: S301 (of this program)
    told = {"title": grid.title, "source": asdict(source), "parameters": source.sizes.parameters, "ranks": grid.ranks}
    print(json.dumps({**told, **asdict(planned)}))


if __name__ == "__main__":
    main()
