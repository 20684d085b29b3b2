"""Plans of all ranks in one process: messages are passed on directly, and bytes are numpy arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st

from deepspeed_ucp.model.access import READ_ALL, ReadAccess
from deepspeed_ucp.model.index import AtomicIndex
from deepspeed_ucp.model.records import STAGING, CopyItem, Read, Records
from deepspeed_ucp.model.storage import MASTER, Atom, Fragment, Fragments
from deepspeed_ucp.model.topology import Topology
from deepspeed_ucp.plan.locate import join_items, make_items
from deepspeed_ucp.plan.rounds import Blocks, LoadPlan, make_owner_plan, make_plan, split_claims_by_owner
from deepspeed_ucp.tensor_parallel.layout import Run


def make_atom(
    name: str, numel: int, *fragments: tuple[int, int, int, int], dtype: str = "float32", state: str = MASTER
) -> Atom:
    """Build an atom with one shard; fragments as (start, numel, record, byte offset)."""
    return Atom.of(name, state, [((numel,), Fragments(dtype, [Fragment(*fragment) for fragment in fragments]))])


ITEM = 4
"""Bytes of each element of a piece."""


def make_index(atoms: Iterable[Atom], records: Records | None = None, tp: int = 1, **fields: Any) -> AtomicIndex:
    """Build an index of these atoms; `fields` are its further fields."""
    topology = Topology(1, "zero12", "float32", tp=tp)
    return AtomicIndex.of((), records or Records(), atoms, topology, "tag/mp_rank_00_model_states.pt", **fields)


@dataclass(frozen=True)
class Planned:
    records: Records
    blocks: Blocks
    claims: Sequence[Sequence[Read]]
    plans: Sequence[LoadPlan]


class Piece(NamedTuple):
    """Elements of a record and their destination."""

    record: int
    destination: int
    run: Run


def plan_pieces(
    pieces: Sequence[Sequence[Piece]],
    records: Records,
    *,
    block: int = 1 << 20,
    window: int = 1 << 20,
    min_direct: int = 1,
    access: ReadAccess = READ_ALL,
) -> Planned:
    """Plan for one rank per list of pieces, each on a separate machine."""
    claims = [
        join_items(
            (each for piece in mine for each in make_items(piece.record, piece.run, ITEM, piece.destination, block)),
            block,
        )
        for mine in pieces
    ]
    ranks = range(len(claims))
    touched = np.array(sorted({claim.record for mine in claims for claim in mine}), np.int64)
    blocks = Blocks.of(records, block, len(claims), access)
    sent = [split_claims_by_owner(mine, blocks) for mine in claims]
    decisions = [
        make_owner_plan(
            [tables[owner] for tables, _ in sent],
            blocks,
            blocks.owned(owner, touched),
            window,
            np.arange(len(claims)) == owner,
            owner,
            min_direct=min_direct,
        )
        for owner in ranks
    ]
    plans = [
        make_plan(sent[rank][1], [answers[rank] for _, answers in decisions], decisions[rank][0], rank, records.files)
        for rank in ranks
    ]
    counts = [plan.count_exchanges(window) for plan in plans]
    return Planned(records, blocks, claims, [plan.align(counts) for plan in plans])


def divide(planned: Planned, is_first: Callable[[int], bool], most: int) -> tuple[Planned, Planned]:
    first = [is_first(sink) for sink in range(most)]
    passes, plans = (first, [not each for each in first]), planned.plans
    needs = [plan.list_needs(*passes) for plan in plans]
    narrowed = (
        [
            plan.filter_for_sinks(sinks, [each[rank][:, number] for each in needs if each], keep_reads=not number)
            for rank, plan in enumerate(plans)
        ]
        for number, sinks in enumerate(passes)
    )
    one, two = (replace(planned, plans=each) for each in narrowed)
    return one, two


def execute(
    planned: Planned,
    data: Sequence[np.ndarray],
    itemsize: int,
    buffers: Sequence[np.ndarray],
    fills: Callable[[int], bool] = lambda buffer: True,
) -> np.ndarray:
    counts = [np.zeros(record.nbytes, np.int64) for record in planned.records]
    for rank, plan in enumerate(planned.plans):
        for read in plan.own_reads:
            values = _read(read, data, counts)
            _store_all(read.items, values[: sum(each.nbytes for each in read.items)], itemsize, buffers[rank], fills)
    for number in range(len(planned.plans[0].rounds)):
        stages = [_stage(plan.rounds[number], data, counts) for plan in planned.plans]
        for rank, plan in enumerate(planned.plans):
            for owner, claims in enumerate(plan.rounds[number].claims):
                sends = planned.plans[owner].rounds[number].served[rank]
                received = np.concatenate([_gather(stages[owner], send) for send in sends] or [np.zeros(0, np.uint8)])
                assert [claim.nbytes for claim in claims] == [send.nbytes for send in sends]
                items = [each for claim in claims for each in claim.items]
                _store_all(items, received, itemsize, buffers[rank], fills)
    return np.concatenate([*counts, np.zeros(0, np.int64)])


def _read(read, data, counts):  # type: ignore[no-untyped-def]
    assert read.count == 1
    counts[read.record][read.offset : read.end] += 1
    return data[read.record][read.offset : read.end]


def _stage(each, data, counts):  # type: ignore[no-untyped-def]
    stage = np.zeros(each.staged, np.uint8)
    for read in each.reads:
        (one,) = read.items
        assert (one.destination, one.nbytes, one.stride) == (STAGING, read.nbytes, 0)
        stage[one.position : one.position + one.nbytes] = _read(read, data, counts)
    return stage


def _gather(stage, send):  # type: ignore[no-untyped-def]
    assert send.record == STAGING and not send.items
    lows = [send.offset + index * send.step for index in range(send.count)]
    return np.concatenate([stage[low : low + send.run] for low in lows])


def _store_all(
    items: Sequence[CopyItem],
    values: np.ndarray,
    itemsize: int,
    buffer: np.ndarray,
    fills: Callable[[int], bool],
) -> None:
    assert sum(each.nbytes for each in items) == len(values)
    for each in items:
        for row in range(each.count if fills(each.destination) else 0):
            low = (each.destination + each.position) * itemsize + row * (each.stride * itemsize or each.run)
            buffer[low : low + each.run] = values[row * each.run : (row + 1) * each.run]
        values = values[each.nbytes :]


# -- random claims, checked byte by byte ------------------------------------------------------------------------------

BLOCK = 32

Demand = tuple[Records, list[list[Piece]], list[int]]


@st.composite
def runs(draw: st.DrawFn, numel: int) -> Run:
    """Draw runs inside a record of so many elements, with disjoint destinations (`place` follows)."""
    width = draw(st.integers(1, numel))
    low = draw(st.integers(0, numel - width))
    most = (numel - low - width) // width + 1
    count = draw(st.integers(1, most)) if draw(st.booleans()) else 1
    if count == 1:
        return Run(low, 0, width)
    step = draw(st.integers(width, (numel - low - width) // (count - 1)))
    stride = width + draw(st.integers(0, 2))
    return Run(low, 0, width, count, step, stride)


@st.composite
def demands(draw: st.DrawFn) -> Demand:
    """Draw records, each rank's pieces with a buffer each, and the elements of each rank's memory."""
    numels = draw(st.lists(st.integers(1, 40), min_size=1, max_size=4))
    records = Records.of([(draw(st.integers(0, 2)), 64, ITEM * numel, 0) for numel in numels])
    pieces, sizes = [], []
    for _ in range(draw(st.integers(1, 5))):
        mine, place = [], 0
        for _ in range(draw(st.integers(0, 6))):
            record = draw(st.integers(0, len(records) - 1))
            run = draw(runs(numels[record]))
            mine.append(Piece(record, place, run))
            place += (run.count - 1) * max(run.dst_step, run.width) + run.width
        pieces.append(mine)
        sizes.append(place)
    return records, pieces, sizes


def check_plan(planned: Planned, demand: Demand, window: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Execute a plan and check every byte; return the bytes of the records and each rank's memory."""
    records, pieces, sizes = demand
    draw = np.random.default_rng(0)
    data = [draw.integers(1, 256, record.nbytes, dtype=np.uint8) for record in records]
    buffers = [np.zeros(ITEM * size, np.uint8) for size in sizes]
    counts = execute(planned, data, ITEM, buffers)
    touched = {piece.record for mine in pieces for piece in mine}
    wanted = [np.full(record.nbytes, number in touched) for number, record in enumerate(records)]
    assert (counts == np.concatenate(wanted)).all(), "every byte of every touched record once, no byte of others"
    for mine, buffer in zip(pieces, buffers, strict=True):
        assert (buffer == expect(mine, data, len(buffer))).all()
    check_bounds(planned, window)
    return data, buffers


def expect(pieces: Sequence[Piece], data: Sequence[np.ndarray], nbytes: int) -> np.ndarray:
    """Return the final memory of a rank, element by element."""
    memory = np.zeros(nbytes // ITEM, np.uint32)
    for piece in pieces:
        values, run = data[piece.record].view(np.uint32), piece.run
        for row in range(run.count):
            low, high = piece.destination + run.dst + row * run.dst_step, run.src + row * run.src_step
            memory[low : low + run.width] = values[high : high + run.width]
    return memory.view(np.uint8)


def check_bounds(planned: Planned, window: int) -> None:
    """Check that reads stay inside blocks, and that a round stages and sends at most a window or one block."""
    for rank, plan in enumerate(planned.plans):
        for read in plan.reads:
            assert 0 < read.nbytes <= BLOCK and read.count == 1
            assert read.offset // BLOCK == (read.end - 1) // BLOCK
            assert sum(each.nbytes for each in read.items) in (0, read.nbytes)
        for each in plan.rounds:
            sent = sum(send.nbytes for peer, one in enumerate(each.served) for send in one if peer != rank)
            blocks = {(read.record, read.offset // BLOCK) for read in each.reads}
            assert len(blocks) <= 1 or (each.staged <= window and sent <= window)
            assert sum(read.nbytes for read in each.reads) <= each.staged
