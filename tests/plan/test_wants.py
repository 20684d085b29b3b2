"""What a rank wants of a checkpoint, from data alone."""

from __future__ import annotations

from dataclasses import replace

from deepspeed_ucp.atoms import MASTER, Atom, AtomicIndex, Fragment, ParamKey, Record, Shard
from deepspeed_ucp.flat import join_parameters
from deepspeed_ucp.patterns.layout import Layout, stack
from deepspeed_ucp.plan import Want, locate
from deepspeed_ucp.plan.match import Match
from deepspeed_ucp.plan.wants import HeldBuffer, TargetLayout, list_wants
from tests.plan import planning


def cut(lanes: int) -> Layout:
    """12 rows of two elements that are cut along the rows."""
    return stack([(12 // lanes, 2)] * lanes)


def make_index(**lanes: int) -> AtomicIndex:
    """Parameters of 12 rows of two elements, in so many shards; each shard is a record of its own."""
    records: list[Record] = []
    atoms = []
    for name, count in lanes.items():
        shards = []
        for _ in range(count):
            shards.append(Shard((12 // count, 2), (Fragment(0, 24 // count, len(records), 0),)))
            records.append(Record(0, 64, 96 // count, 0))
        atoms.append(Atom(name, MASTER, "float32", tuple(shards)))
    return planning.make_index(atoms, records)


def find_bytes(want: Want) -> list[tuple[int, int, int]]:
    """(record, first element, elements) of what is wanted."""
    return [(piece.record, piece.run.src, piece.run.width) for piece in locate(want)]


def test_buffers_of_one_rank_may_be_of_different_lanes_and_cut_over_different_ranks() -> None:
    """As experts beside dense parameters: rank 1 of 4, second of two lanes of `dense`, third of four of `experts`."""
    index = make_index(dense=1, experts=2)
    layouts = {"dense": (cut(1), cut(2)), "experts": (cut(2), cut(4))}
    dense = join_parameters(0, ("dense",), ((6, 2),), parts=4, partition=3)
    experts = replace(join_parameters(1, ("experts",), ((3, 2),), parts=2, partition=3), ranks=range(1, 4, 2))
    flats = [HeldBuffer(buffer, buffer.find_part(1), lane, "float32") for buffer, lane in ((dense, 1), (experts, 2))]
    match = Match({name: ParamKey(name) for name in layouts})
    found = list_wants(index, TargetLayout(flats, ()), match, layouts, with_states=True)
    assert [find_bytes(want) for want in found.wants] == [[(0, 15, 3)], [(2, 0, 3)]]


def test_folded_experts_have_one_lane_for_every_tensor_parallel_rank() -> None:
    """The second of two ranks wants the second half of `dense`, and a whole expert, which was cut in two."""
    index = make_index(dense=2, expert=2)
    layouts = {"dense": (cut(2), cut(2)), "expert": (cut(2), cut(1))}
    flats = [
        HeldBuffer(join_parameters(0, ("dense",), ((6, 2),)), 0, 1, "float32"),
        HeldBuffer(join_parameters(1, ("expert",), ((12, 2),)), 0, 1, "float32"),
    ]
    match = Match({name: ParamKey(name) for name in layouts})
    found = list_wants(index, TargetLayout(flats, ()), match, layouts, with_states=True)
    assert [find_bytes(want) for want in found.wants] == [[(1, 0, 12)], [(2, 0, 12), (3, 0, 12)]]
