"""Plans of all ranks without ranks: messages are passed on directly, and bytes are numpy arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from deepspeed_ucp.model import Atom, AtomicIndex, Fragment, Record, RunState, Shard, StoredAtoms
from deepspeed_ucp.model.access import READ_ALL, ReadAccess
from deepspeed_ucp.model.topology import Topology
from deepspeed_ucp.plan import DISCARD, Blocks, Claim, Extent, LoadPlan, Part, ReadSizes, Want, locate, make_claims
from deepspeed_ucp.plan.claims import STAGE, address_claims
from deepspeed_ucp.plan.rounds import make_owner_plan, make_plan


def make_atom(name: str, numel: int, *fragments: tuple[int, int, int, int], dtype: str = "float32") -> Atom:
    """Build an atom with one shard; fragments as (start, numel, record, byte offset)."""
    return Atom(name, "fp32", dtype, (Shard((numel,), tuple(Fragment(*fragment) for fragment in fragments)),))


def make_index(atoms: Iterable[Atom], records: Sequence[Record] = (), tp: int = 1, **fields: Any) -> AtomicIndex:
    """Build an index of these atoms; `fields` are fields of any of its parts."""
    run = RunState(Topology(1, "zero12", "float32", tp=tp), "tag/mp_rank_00_model_states.pt")
    stored = StoredAtoms.of((), records, atoms)
    return AtomicIndex(stored, run).change(**fields)


@dataclass(frozen=True)
class Planned:
    """Every rank's plan, and its input."""

    records: Sequence[Record]
    blocks: Blocks
    claims: Sequence[Sequence[Claim]]
    plans: Sequence[LoadPlan]


def plan_pieces(
    pieces: Sequence[Sequence[Extent]],
    records: Sequence[Record],
    *,
    block: int = 1 << 20,
    window: int = 1 << 20,
    min_direct: int = 1,
    access: ReadAccess = READ_ALL,
) -> Planned:
    """Plan for as many ranks as there are lists of pieces."""
    claims = [make_claims(mine, block) for mine in pieces]
    plans = plan_ranks(claims, records, ReadSizes(window, block, min_direct), access)
    return Planned(records, Blocks.of(records, block, len(claims), access), claims, plans)


def plan_ranks(
    claims: Sequence[Sequence[Claim]], records: Sequence[Record], sizes: ReadSizes, access: ReadAccess = READ_ALL
) -> list[LoadPlan]:
    """Plan for as many ranks as there are lists of claims, each on a machine of its own."""
    ranks = range(len(claims))
    touched = np.array(sorted({claim.record for mine in claims for claim in mine}), np.int64)
    blocks = Blocks.of(records, sizes.block, len(claims), access)
    files = [record.file for record in records]
    sent = [address_claims(mine, blocks) for mine in claims]
    decisions = [
        make_owner_plan(
            [tables[owner] for tables, _ in sent],
            blocks,
            blocks.owned(owner, touched),
            sizes,
            np.arange(len(claims)) == owner,
            owner,
        )
        for owner in ranks
    ]
    plans = [
        make_plan(sent[rank][1], [each.answers[rank] for each in decisions], decisions[rank], rank, files)
        for rank in ranks
    ]
    counts = [plan.count_exchanges(sizes.share) for plan in plans]
    return [plan.align(counts) for plan in plans]


def plan_wants(
    wants: Sequence[Sequence[Want]],
    records: Sequence[Record],
    *,
    block: int = 1 << 20,
    window: int = 1 << 20,
    min_direct: int = 1,
) -> Planned:
    """Like `plan_pieces`, for wants."""
    pieces = [[piece for want in mine for piece in locate(want)] for mine in wants]
    return plan_pieces(pieces, records, block=block, window=window, min_direct=min_direct)


def divide(planned: Planned, is_first: Callable[[int], bool], most: int) -> tuple[Planned, Planned]:
    """Split plans into two passes: the first reads everything and fills some sinks, the second fills the others.

    Args:
        is_first: whether the first pass fills a sink.
        most: number of sinks of a rank at most.
    """
    first = [is_first(sink) for sink in range(most)]
    passes, plans = (first, [not each for each in first]), planned.plans
    needs = [plan.list_needs(*passes) for plan in plans]
    narrowed = (
        [
            plan.filter_for_sinks(sinks, [each[rank][:, number] for each in needs if each], whole=not number)
            for rank, plan in enumerate(plans)
        ]
        for number, sinks in enumerate(passes)
    )
    one, two = (replace(planned, plans=each) for each in narrowed)
    return one, two


def carry_out(
    planned: Planned,
    data: Sequence[np.ndarray],
    itemsize: int,
    buffers: Sequence[np.ndarray],
    fills: Callable[[int], bool] = lambda buffer: True,
) -> np.ndarray:
    """Read and exchange by the plans; returns how often each byte of the records was read, end to end.

    Args:
        data: the records' bytes.
        itemsize: bytes per element of the buffers.
        buffers: per rank one array of bytes that all its buffers are views of; buffer b begins at element b.
        fills: whether a buffer is filled.
    """
    counts = [np.zeros(record.nbytes, np.int64) for record in planned.records]
    for rank, plan in enumerate(planned.plans):
        for request in plan.direct:
            found = _read(request, data, counts)
            for part, values in zip(request.parts, _split(request.parts, found), strict=True):
                if part.buffer != DISCARD and fills(part.buffer):
                    _store(part, values, itemsize, buffers[rank])
    for number in range(len(planned.plans[0].rounds)):
        stages = [_stage(plan.rounds[number], data, counts) for plan in planned.plans]
        for rank, plan in enumerate(planned.plans):
            for owner, claims in enumerate(plan.rounds[number].receives):
                sends = planned.plans[owner].rounds[number].sends[rank]
                received = np.concatenate([_gather(stages[owner], send) for send in sends] or [np.zeros(0, np.uint8)])
                assert [claim.nbytes for claim in claims] == [send.nbytes for send in sends]
                parts = [part for claim in claims for part in claim.parts]
                for part, values in zip(parts, _split(parts, received), strict=True):
                    if fills(part.buffer):
                        _store(part, values, itemsize, buffers[rank])
    return np.concatenate([*counts, np.zeros(0, np.int64)])


def _read(request, data, counts):  # type: ignore[no-untyped-def]
    counts[request.record][request.offset : request.offset + request.nbytes] += 1
    return data[request.record][request.offset : request.offset + request.nbytes]


def _stage(each, data, counts):  # type: ignore[no-untyped-def]
    stage = np.zeros(each.staged, np.uint8)
    for request in each.reads:
        (part,) = request.parts
        assert part.buffer == STAGE
        assert not part.run
        stage[part.position : part.position + part.nbytes] = _read(request, data, counts)
    return stage


def _gather(stage, send):  # type: ignore[no-untyped-def]
    lows = [send.position + index * send.step for index in range(send.count)]
    return np.concatenate([stage[low : low + send.run] for low in lows])


def _split(parts: Sequence[Part], values: np.ndarray) -> list[np.ndarray]:
    assert sum(part.nbytes for part in parts) == len(values)
    ends = np.cumsum([part.nbytes for part in parts])
    return np.split(values, ends[:-1]) if len(parts) else []


def _store(part: Part, values: np.ndarray, itemsize: int, buffer: np.ndarray) -> None:
    run, stride = part.run or part.nbytes, part.stride
    for row in range(part.nbytes // run):
        low = (part.buffer + part.position + row * stride) * itemsize
        buffer[low : low + run] = values[row * run : (row + 1) * run]
