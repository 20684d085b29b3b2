"""Plans for dozens of ranks: the total work grows with the model, and that of a rank does not grow with the ranks."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise

import pytest

from deepspeed_ucp.model.flat import Cut, join_parameters, join_reserved
from deepspeed_ucp.model.records import Record
from deepspeed_ucp.model.storage import Atom, Fragment, Fragments, count
from deepspeed_ucp.plan.locate import View, Want
from deepspeed_ucp.tensor_parallel.kinds import Pattern, Replicate, ShardH, ShardNC, ShardV
from deepspeed_ucp.tensor_parallel.layout import Layout
from tests.plan.planning import Planned, plan_wants
from tests.support.covering import params

HIDDEN = 32
BLOCK, WINDOW, MIN_DIRECT = 4096, 1 << 16, 256


@dataclass(frozen=True)
class Grid:
    """Ranks numbered by stage, then tensor-parallel rank, then data-parallel rank; ZeRO 1 or, without pp, 3."""

    tp: int
    pp: int
    dp: int
    stage: int = 1

    @property
    def label(self) -> str:
        return f"tp{self.tp}pp{self.pp}dp{self.dp}zero{self.stage}"

    @property
    def ranks(self) -> list[tuple[int, int, int]]:
        return [(pp, tp, dp) for pp in range(self.pp) for tp in range(self.tp) for dp in range(self.dp)]


PARAMETERS: dict[str, tuple[tuple[int, ...], Pattern, int | None]] = {
    "qkv": ((3 * HIDDEN, HIDDEN), ShardNC(parts=(1, 1, 1)), 0),
    "dense": ((HIDDEN, HIDDEN), ShardH(), 1),
    "up": ((4 * HIDDEN, HIDDEN), ShardV(), 0),
    "down": ((HIDDEN, 4 * HIDDEN), ShardH(), 1),
    "norm": ((HIDDEN,), Replicate(), None),
}
"""Logical shape, pattern and cut dimension of each parameter of a layer."""


def local_shape(key: str, tp: int) -> tuple[int, ...]:
    shape, _, dim = PARAMETERS[key]
    return tuple(size // tp if axis == dim else size for axis, size in enumerate(shape))


def layout_of(key: str, tp: int) -> Layout:
    shape, pattern, _ = PARAMETERS[key]
    return pattern.cut(shape, [local_shape(key, tp)] * tp)


def cut_rank(grid: Grid, layers: int, pp: int, dp: int) -> tuple[list[Cut], int]:
    """Return the cuts of a rank's flat buffer, by names `layer.key`, and its number of elements."""
    bounds = [layers * stage // grid.pp for stage in range(grid.pp + 1)]
    names = [f"{layer}.{key}" for layer in range(bounds[pp], bounds[pp + 1]) for key in PARAMETERS]
    shapes = [local_shape(name.partition(".")[2], grid.tp) for name in names]
    buffer = join_reserved(0, names, shapes, grid.dp)
    if grid.stage != 3:
        buffer = join_parameters(0, names, shapes, parts=grid.dp, partition=-(-sum(map(count, shapes)) // grid.dp))
    return buffer.cuts(dp), buffer.partition


def save(grid: Grid, layers: int) -> tuple[dict[str, Atom], list[Record]]:
    """Return the atoms of a checkpoint with one record per rank, without its padding."""
    fragments: dict[str, list[list[Fragment]]] = defaultdict(lambda: [[] for _ in range(grid.tp)])
    records = []
    for number, (pp, tp, dp) in enumerate(grid.ranks):
        cuts, _ = cut_rank(grid, layers, pp, dp)
        for cut in cuts:
            fragments[cut.name][tp].append(Fragment(cut.start, cut.numel, number, 4 * cut.offset))
        records.append(Record(number, 64, 4 * max(cut.offset + cut.numel for cut in cuts), 0))
    atoms = {}
    for name, held in fragments.items():
        shape = local_shape(name.partition(".")[2], grid.tp)
        atoms[name] = Atom.of(name, "fp32", [(shape, Fragments("float32", parts)) for parts in held])
    return atoms, records


def want_all(source: Grid, target: Grid, layers: int, atoms: dict[str, Atom]) -> list[list[Want]]:
    """List the wants of each rank of the target, in one buffer."""
    views = {}
    for key, (_, pattern, _) in PARAMETERS.items():
        shards = (0,) if isinstance(pattern, Replicate) else tuple(range(source.tp))
        for tp in range(target.tp):
            views[key, tp] = View(layout_of(key, source.tp), layout_of(key, target.tp), tp, shards)
    return [
        [
            Want(atoms[cut.name], cut.start, cut.numel, 0, cut.offset, views[cut.name.partition(".")[2], tp])
            for cut in cut_rank(target, layers, pp, dp)[0]
        ]
        for pp, tp, dp in target.ranks
    ]


def plan_case(source: Grid, target: Grid, layers: int) -> Planned:
    atoms, records = save(source, layers)
    wants = want_all(source, target, layers, atoms)
    return plan_wants(wants, records, block=BLOCK, window=WINDOW, min_direct=MIN_DIRECT)


def measure_work(planned: Planned) -> int:
    """Count the rows that all ranks handle: claims, reads, sends and receives."""
    work = sum(map(len, planned.claims)) + sum(len(plan.reads) for plan in planned.plans)
    rounds = [each for plan in planned.plans for each in plan.rounds]
    return work + sum(len(items) for each in rounds for items in (*each.sends, *each.receives))


SOURCE = Grid(4, 8, 2)
TARGETS = (Grid(1, 1, 24, stage=3), Grid(2, 4, 3), Grid(4, 6, 2), Grid(8, 2, 1))


@pytest.mark.parametrize("target", params(TARGETS[:2], TARGETS, lambda grid: grid.label))
def test_the_work_grows_no_faster_than_the_model(target: Grid) -> None:
    first, second, third = (measure_work(plan_case(SOURCE, target, layers)) for layers in (16, 32, 64))
    assert third - second <= 1.1 * 2 * (second - first)  # as much for each layer more


@pytest.mark.parametrize("stage", [1, 3])
def test_the_work_of_one_rank_does_not_grow_with_the_number_of_ranks(stage: int) -> None:
    """Twice the ranks want half as much each."""
    grids = [Grid(4, 1, dp, stage=1) if stage == 1 else Grid(1, 1, 4 * dp, stage=3) for dp in (2, 4, 8)]
    worst = []
    for grid in grids:
        planned = plan_case(SOURCE, grid, layers=16)
        pairs = zip(planned.claims, planned.plans, strict=True)
        worst.append(max(len(claims) + len(plan.reads) for claims, plan in pairs))
    assert all(second <= 1.1 * first for first, second in pairwise(worst))
