"""The exchange of a round: the bytes sent at once, and the reads that a pass needs."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from deepspeed_ucp.io import memory
from deepspeed_ucp.load import transfer
from deepspeed_ucp.model.records import STAGE, Read
from deepspeed_ucp.plan.rounds import LoadPlan, Round
from tests.support.contents import check_load
from tests.support.covering import all_turns
from tests.support.reads import item, read_of
from tests.synth import Model, Param, Topology, random_state, write_checkpoint


def make_round(sent: Sequence[int], received: Sequence[int]) -> Round:
    """Make a round that sends and receives so many bytes to and from each rank."""
    sends, receives = ([[Read.of(0, 0, n)] if n else [] for n in nbytes] for nbytes in (sent, received))
    return Round(sends, receives, sent=sum(sent))


@pytest.mark.parametrize(
    ("sent", "received", "steps"),
    [
        ([0, 0, 0, 0], [0, 0, 0, 0], 1),
        ([25, 25, 25, 25], [0, 0, 0, 0], 1),
        ([26, 25, 25, 25], [0, 0, 0, 0], 2),
        ([0, 0, 0, 0], [150, 0, 0, 151], 4),
        ([100, 100, 0, 0], [10, 20, 0, 0], 2),
        ([900, 900, 900, 900], [0, 0, 0, 0], 4),
    ],
    ids=str,
)
def test_a_round_takes_as_many_exchanges_as_its_bytes_need(sent: list[int], received: list[int], steps: int) -> None:
    """But never more than there are ranks."""
    assert make_round(sent, received).count_exchanges(100, np.zeros(4, np.bool_)) == steps


@pytest.mark.parametrize(
    ("one_machine", "shares"), [(True, [[1, 2], [3, 4], [5, 6]]), (False, [[], [], [1, 2, 3, 4, 5, 6]])]
)
def test_direct_reads_hold_up_no_exchange_between_machines(one_machine: bool, shares: list[list[int]]) -> None:
    one: Any = SimpleNamespace(is_one_machine=one_machine)
    assert transfer.Transfer._share_out(one, [1, 2, 3, 4, 5, 6], 3) == shares  # type: ignore[list-item]


@pytest.fixture(scope="module", autouse=True)
def machines() -> Iterator[None]:
    """Give every rank a separate machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "identify_host", lambda: str(threading.get_ident()))
        yield


MODEL = Model((Param("a", (30, 20)), Param("b", (37,), group=1)), {"buffer": torch.arange(50)})


@pytest.mark.parametrize(("size", "share"), all_turns([2, 5, 8], [64, 128, 256, 1 << 20], 1))
def test_bytes_for_many_replicas_are_sent_in_parts(
    size: int, share: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every rank of stage 0 wants everything, and a block of 64 bytes for all of them exceeds the smallest share.

    In a step two ranks' parts may be sent together, each at most as large as the share.
    """
    sizes: list[int] = []
    pack, scatter = transfer._pack, transfer._split_received

    def note_sent(*args: Any) -> Any:
        data = pack(*args)
        sizes.append(data.nbytes)
        return data

    def note_received(claims: Any, data: memoryview) -> Any:
        sizes.append(data.nbytes)
        return scatter(claims, data)

    monkeypatch.setattr(transfer, "_pack", note_sent)
    monkeypatch.setattr(transfer, "_split_received", note_received)
    state = random_state(MODEL, 0)
    path = write_checkpoint(tmp_path, MODEL, state, Topology(1, 3))
    _, ranks = check_load(path, MODEL, Topology(0, size), state, window=4 * share)
    assert 0 < max(sizes) <= 2 * share
    plans = [rank.plan.rounds for rank in ranks if rank.plan]
    assert len({tuple(each.steps for each in rounds) for rounds in plans}) == 1
    most = max(each.steps for each in plans[0])
    assert most == {64: max(size - 1, 1), 1 << 20: 1}.get(share, most)


def test_only_reads_with_sends_are_kept() -> None:
    """Three blocks of 10 bytes: one for the first pass, one for the second, one for both."""
    reads = [read_of(item(0, low, 10, STAGE, low)) for low in (0, 10, 20)]
    sends = [[Read.of(STAGE, 2, 5), Read(STAGE, 12, 2, 4, 2)], [Read.of(STAGE, 20, 25), Read.of(STAGE, 25, 30)]]
    plan, first = LoadPlan([], [Round(sends, [[], []], reads, 30)], np.zeros(2, np.bool_)), np.array([True, False])
    assert plan.filter_for_sinks([], [first, first]).reads == [reads[0], reads[2]]
    assert plan.filter_for_sinks([], [~first, ~first]).reads == [reads[1], reads[2]]
    assert plan.filter_for_sinks([], [first, first], whole=True).reads == reads
    assert plan.filter_for_sinks([]).reads == reads
    assert plan.filter_for_sinks([], [first & ~first] * 2).reads == []
