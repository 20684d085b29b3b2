"""The direct load against a stand-in engine: several ranks, memory and files."""

from __future__ import annotations

import shutil
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed_ucp.comm import Comm
from deepspeed_ucp.config import UniversalConfig
from deepspeed_ucp.errors import CheckpointError, MismatchError, RemoteError, StorageError
from deepspeed_ucp.formats import open_checkpoint
from deepspeed_ucp.formats.deepspeed.naming import Naming
from deepspeed_ucp.io.threads import count_threads
from deepspeed_ucp.load import direct, transfer
from deepspeed_ucp.load.destinations import Buffer, Work
from deepspeed_ucp.load.transfer import Transfer
from deepspeed_ucp.plan.rounds import BLOCK
from tests.support.cases import AWKWARD, KINDS
from tests.support.covering import cover, params
from tests.support.damage import flip, flip_bit
from tests.support.direct import (
    PLAIN,
    STATES,
    ZERO1,
    check_loaded,
    run_load,
    run_refused,
    start,
    write,
)
from tests.support.ranks import run_ranks
from tests.support.reshard import FakeTarget, groups_of, make_targets, open_for
from tests.synth import Model, Param, Run, Topology

LIVE = [Topology(0), Topology(0, 1, "bf16", "fused"), Topology(3, 2), Topology(2, 3), Topology(3, 5), Topology(0, 3)]


@pytest.mark.parametrize(
    ("source", "target", "verify"),
    params(
        cover(KINDS, LIVE, ["crc", "off"], strength=1),
        product(KINDS, LIVE, ["crc", "off"]),
        lambda row: f"{row[0].label}→{row[1].label}-{row[2]}",
    ),
)
def test_a_whole_load(source: Topology, target: Topology, verify: str, tmp_path: Path) -> None:
    path, state = write(tmp_path, source, AWKWARD)
    targets = make_targets(AWKWARD, target)
    index, config = open_for(path, targets[0]), UniversalConfig(verify=verify, threads=1)  # type: ignore[arg-type]
    results = run_ranks(target.dp, lambda rank, comm: run_load(index, targets[rank], comm, config))
    check_loaded(targets, replace(state, groups=()) if source.keeps_lean_states else state)
    read = sum(report.bytes_read for _, report, _ in results)
    atoms = [atom for atom in index.atoms.values() if atom.state != "copy"]
    touched = {fragment.record for atom in atoms for fragment in atom.shards[0].list_fragments(atom.state)}
    total = sum(index.records[record].nbytes for record in touched)
    restored = results[0][1].state_bytes
    assert read == total if verify == "crc" else restored <= read <= total  # padding is read for the checksums alone
    assert len({repr(client) for _, _, client in results}) == 1 or source.stage == 3  # whose ranks have a file each


def test_a_damaged_record_ends_all_ranks_with_one_error(tmp_path: Path) -> None:
    path, _ = write(tmp_path, ZERO1)
    targets = make_targets(PLAIN, Topology(3, 4))
    index = open_for(path, targets[0])
    flip_bit(index, "b", "exp_avg")
    kind, text = run_refused(index, targets)
    assert kind is CheckpointError and "damaged" in text


@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_one_ranks_mismatch_ends_all_ranks(culprit: int, tmp_path: Path) -> None:
    path, _ = write(tmp_path, ZERO1)
    targets = make_targets(PLAIN, Topology(3, 3))
    targets[culprit] = FakeTarget(Model((Param("a", (13, 7)), *PLAIN.params[1:])), Topology(3, 3), culprit)
    kind, text = run_refused(open_for(path, targets[0]), targets)
    assert kind is MismatchError and f"[rank {culprit}]" in text


def first_of(owner: Any, *_: object) -> torch.Tensor:
    return owner.flats[0].data  # type: ignore[no-any-return]


OWNER = {
    "looks at its buffers": (Buffer, "allow_in_place", lambda buffer: buffer.tensor),
    "looks for its state file": (direct, "_find_own_file", lambda _index, target: first_of(target)),
    "prepares its reads": (transfer, "choose_uploads", lambda sinks, _threads: sinks[0].buffer.tensor),
    "reads": (Transfer, "_work", lambda one, *_: one.work.sinks[0].buffer.tensor),
    "fills its buffers": (Work, "commit", lambda work: work.buffers[0].tensor),
    "makes its copies": (FakeTarget, "refresh_copies", first_of),
}
"""A function of a load, and the tensor among its arguments by which a rank is recognised."""
COLLECTIVE = {"fills its buffers": "refresh_copies", "makes its copies": "gather_copies"}
"""After the engine has changed: the next collective call of DeepSpeed."""


@pytest.mark.parametrize("culprit", [0, 2])
@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (MemoryError(), RemoteError, "out of memory"),
        (OSError(5, "Input/output error"), StorageError, "a file: Input/output error (EIO)"),
    ],
    ids=["memory", "storage"],
)
@pytest.mark.parametrize("where", OWNER)
def test_one_rank_that_fails_ends_all_ranks(
    where: str,
    error: Exception,
    kind: type[Exception],
    text: str,
    culprit: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (owner, name, find_tensor), collective = OWNER[where], COLLECTIVE.get(where, "")
    path, _ = write(tmp_path, ZERO1)
    targets = make_targets(PLAIN, Topology(3, 3))
    index, work, reached = open_for(path, targets[0]), getattr(owner, name), list[int]()

    def fail(*args: Any) -> Any:
        if find_tensor(*args).data_ptr() == first_of(targets[culprit]).data_ptr():
            raise error
        return work(*args)

    monkeypatch.setattr(owner, name, fail)
    if collective:
        monkeypatch.setattr(FakeTarget, collective, lambda _: reached.append(1))
    raised, message = run_refused(index, targets, changed=bool(collective))
    assert (raised is kind or collective) and f"[rank {culprit}] {text}" in message and not reached
    assert ("must not be used" in message) is bool(collective)


# -- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window_mb", [16, 64, 256])
@pytest.mark.parametrize("threads", [0, 1, 200])
def test_scratch_memory_stays_within_the_window(window_mb: int, threads: int, tmp_path: Path) -> None:
    """Rounds stage, send and receive a quarter of the window each."""
    path, _, rank = start(tmp_path)
    config = UniversalConfig(window_mb=window_mb, threads=threads)
    made = Transfer(Work(open_for(path, rank)), Comm(), config)
    assert 1 <= made.threads <= (threads or count_threads())
    assert made.threads * BLOCK <= (window_mb << 20) // 4


def test_memory_that_is_filled_for_the_first_time_gets_large_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(transfer.LargePages, "add", lambda self, address, nbytes: asked.append((address, nbytes)))
    path, _, rank = start(tmp_path)
    live, apart, states = (Buffer(torch.ones(6), uncommitted=each) for each in (False, False, True))
    apart.use_separate()
    Transfer(Work(open_for(path, rank), buffers=[live, apart, states]), Comm(), UniversalConfig())
    assert asked == [(apart.memory.data_ptr(), 24), (states.tensor.data_ptr(), 24)]


def test_a_state_file_whose_pickle_is_damaged_is_read_in_the_next_place(tmp_path: Path) -> None:
    """Its header was read in the first place; its objects are read in the nearest."""
    run = Run(client_state={"rng": torch.arange(100), "mine": "a long text of the client"})
    path, state, rank = start(tmp_path / "first", run=run)
    near = tmp_path / "near"
    shutil.copytree(path, near)
    index = open_checkpoint(str(path), Comm(), Naming(*groups_of(rank, Comm())[:1]), also=[str(near)])
    index = replace(index, files=tuple(replace(file, places=file.places[::-1]) for file in index.files))
    flip(near / STATES, (near / STATES).read_bytes().index(b"a long text"))
    _, _, client = run_load(index, rank)
    assert client["mine"] == "a long text of the client" and client["rng"].equal(torch.arange(100))
    check_loaded([rank], state)
