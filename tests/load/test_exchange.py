"""The exchange of a round: between ranks of a machine by shared memory, between machines by messages."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from deepspeed_ucp.comm import Comm
from deepspeed_ucp.engine.engines import _pass_around
from deepspeed_ucp.errors import RemoteError
from deepspeed_ucp.io import memory
from deepspeed_ucp.io.memory import share_memory
from deepspeed_ucp.load import transfer
from deepspeed_ucp.load.transfer import Transfer
from deepspeed_ucp.model.records import STAGING, Read
from deepspeed_ucp.plan.rounds import LoadPlan, Round
from tests.support.contents import check_load
from tests.support.covering import all_turns
from tests.support.descriptors import list_open
from tests.support.direct import write
from tests.support.ranks import current_rank, run_ranks
from tests.support.reads import item, read_of
from tests.synth import Model, Param, Topology


def make_round(sent: Sequence[int], received: Sequence[int]) -> Round:
    served, claims = ([[Read.of(0, 0, n)] if n else [] for n in nbytes] for nbytes in (sent, received))
    return Round(served, claims, sent_remote=sum(sent))


@pytest.mark.parametrize(
    ("sent", "received", "exchanges"),
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
def test_a_round_is_split_into_exchanges_of_the_share(sent: list[int], received: list[int], exchanges: int) -> None:
    """The number of exchanges never exceeds the number of ranks."""
    assert make_round(sent, received).count_exchanges(100, np.zeros(4, np.bool_)) == exchanges


@pytest.mark.parametrize(
    ("one_machine", "shares"), [(True, [[1, 2], [3, 4], [5, 6]]), (False, [[], [], [1, 2, 3, 4, 5, 6]])]
)
def test_direct_reads_do_not_block_exchanges_between_machines(one_machine: bool, shares: list[list[int]]) -> None:
    one: Any = SimpleNamespace(is_one_machine=one_machine)
    assert transfer.Transfer._distribute(one, [1, 2, 3, 4, 5, 6], 3) == shares  # type: ignore[list-item]


def test_only_reads_with_sends_are_kept() -> None:
    """Three blocks of 10 bytes: one for the first pass, one for the second, one for both."""
    reads = [read_of(item(0, low, 10, STAGING, low)) for low in (0, 10, 20)]
    sends = [[Read.of(STAGING, 2, 5), Read(STAGING, 12, 2, 4, 2)], [Read.of(STAGING, 20, 25), Read.of(STAGING, 25, 30)]]
    plan, first = LoadPlan([], [Round(sends, [[], []], reads, 30)], np.zeros(2, np.bool_)), np.array([True, False])
    assert plan.filter_for_sinks([], [first, first]).reads == [reads[0], reads[2]]
    assert plan.filter_for_sinks([], [~first, ~first]).reads == [reads[1], reads[2]]
    assert plan.filter_for_sinks([], [first, first], keep_reads=True).reads == reads
    assert plan.filter_for_sinks([], [first & ~first] * 2).reads == []


MODEL = Model((Param("a", (30, 20)), Param("b", (37,), group=1)), {"buffer": torch.arange(50)})


HOSTS = ["ab", "abcde", "abcdefgh", "aaaa", "abab", "aabc"]
"""The machine of each rank."""


@pytest.mark.parametrize(("hosts", "share"), all_turns(HOSTS, [64, 128, 256, 1 << 20], 2))
def test_replicas_are_sent_in_parts_to_other_machines(
    hosts: str, share: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every rank of stage 0 wants everything, and a block of 64 bytes for all of them exceeds the smallest share.

    In an exchange two ranks' parts may be sent together, each at most as large as the share. Staging memory is reused
    two rounds later.
    """
    sizes, sent, swap = list[int](), set[tuple[int, int]](), Transfer._swap

    def note(self: Any, packed: Any, sends: Any, claims: Any, into: Any) -> Any:
        sizes.extend((packed.nbytes, into.nbytes))
        sent.update((self.comm.rank, peer) for peer, one in enumerate(sends) if one)
        return swap(self, packed, sends, claims, into)

    monkeypatch.setattr(Transfer, "_swap", note)
    monkeypatch.setattr(memory, "identify_host", lambda: hosts[current_rank()])
    path, state = write(tmp_path, Topology(1, 3), MODEL)
    _, ranks = check_load(path, MODEL, Topology(0, len(hosts)), state, window=4 * share)
    assert {(hosts[one], hosts[two]) for one, two in sent} == {(x, y) for x in hosts for y in hosts if x != y}
    plans = [[each.exchanges for each in rank.plan.rounds] for rank in ranks if rank.plan]
    assert plans == [plans[0]] * len(hosts)
    if len({*hosts}) == len(hosts):
        assert 0 < max(sizes) <= 2 * share
        assert max(plans[0]) == {64: max(len(hosts) - 1, 1), 1 << 20: 1}.get(share, max(plans[0]))


# -- memory of neighbours ----------------------------------------------------------------------------------------------


def place(monkeypatch: pytest.MonkeyPatch, *hosts: str) -> Callable[[int, Comm], Any]:
    """Place ranks on machines; each writes its number into its last byte and returns the bytes of its peers."""
    monkeypatch.setattr(memory, "identify_host", lambda: hosts[current_rank()])

    def work(rank: int, comm: Comm) -> list[int | None]:
        memory = share_memory(100, rank, comm.gather)
        local = memory[rank]
        assert local is not None and local.nbytes == 100
        local[99] = rank + 1
        comm.gather(None)
        return [None if each is None else each[99] for each in memory]

    return work


def test_ranks_of_a_machine_map_each_others_memory_and_close_it(monkeypatch: pytest.MonkeyPatch) -> None:
    before = list_open("memfd:deepspeed_ucp")
    assert run_ranks(3, place(monkeypatch, "a", "b", "a")) == [[1, None, 3], [None, 2, None], [1, None, 3]]
    assert {*list_open("memfd:deepspeed_ucp")} <= {*before}


@pytest.mark.parametrize("fault", ["no memfd", "no room", "not seen", "another process's"])
def test_no_rank_of_a_machine_shares_memory_if_one_fails(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    see = memory._attach

    def fail_to_see(path: str, token: bytes, nbytes: int) -> Any:
        return see(path, token if calls.append(path) or len(calls) > 1 else bytes(16), nbytes)

    calls: list[str] = []
    work = place(monkeypatch, "a", "a", "b", "b")
    if fault == "no memfd":
        monkeypatch.delattr(os, "memfd_create")
    elif fault == "no room":
        monkeypatch.setattr(os, "ftruncate", lambda *_: (_ for _ in ()).throw(OSError(28, "no room")))
    else:
        monkeypatch.setattr(memory, "_attach", fail_to_see if fault == "not seen" else lambda p, t, n: see(p, b"x", n))
    result = run_ranks(4, work)
    alone = [rank for rank, row in enumerate(result) if row == [rank + 1 if at == rank else None for at in range(4)]]
    assert len(alone) == (2 if fault == "not seen" else 4)


def test_a_rank_out_of_memory_is_an_error_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fallback for a shared memory file may be too large, too."""
    make = mmap.mmap

    def fail(fileno: int, length: int, **more: Any) -> Any:
        if current_rank() == 1:
            raise OSError(12, "Cannot allocate memory")
        return make(fileno, length, **more)

    def work(rank: int, comm: Comm) -> Any:
        try:
            share_memory(3 << 20, rank, comm.gather)
        except RemoteError as error:
            return str(error), error.shared, error.echo

    monkeypatch.setattr("mmap.mmap", fail)
    start = "[rank 1] out of memory: 3 MiB to exchange bytes in cannot be allocated. Use a smaller window, or fewer"
    results = run_ranks(3, work)
    assert [(shared, echo) for _, shared, echo in results] == [(True, False), (True, True), (True, True)]
    assert all(text.startswith(start) for text, *_ in results)


@pytest.mark.parametrize("width", [0, 1, 7, 8, 50])
def test_partitions_are_passed_around_in_slices(width: int) -> None:
    ranks = 3
    shared_memory = [memoryview(bytearray(16)) for _ in range(ranks)]
    whole = np.arange(ranks * width, dtype=np.uint8).reshape(ranks, width)

    def work(rank: int, comm: Comm) -> np.ndarray:
        parts = np.full((ranks, width), 255, np.uint8)
        parts[rank] = whole[rank]
        _pass_around(parts, rank, shared_memory, lambda: comm.gather(None))
        return parts

    for parts in run_ranks(ranks, work):
        assert (parts == whole).all()
