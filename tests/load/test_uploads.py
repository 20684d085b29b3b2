"""Copies to a GPU go on in the background: a stand-in of streams, whose copies happen as late as they can."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed_ucp.errors import CheckpointError
from deepspeed_ucp.io.memory import ScratchPool
from deepspeed_ucp.load import destinations, exchange
from deepspeed_ucp.load.destinations import TensorSink
from deepspeed_ucp.load.uploads import Uploads
from tests.ranks import run_ranks
from tests.reshard import check_content, load, make_targets, open_for
from tests.synth import Model, Param, Topology, random_state, write_checkpoint

MODEL = Model((Param("a", (300, 20)), Param("b", (37,), group=1)), {"buffer": torch.arange(50)})

_current = threading.local()


class LateStream:
    """Does what it is told when somebody waits for it."""

    def __init__(self) -> None:
        self.jobs: list[Callable[[], Any]] = []

    def catch_up(self, count: int) -> None:
        for job in self.jobs[:count]:
            job()
        del self.jobs[:count]


class LateEvent:
    """Never done by itself."""

    def __init__(self, stream: LateStream) -> None:
        self.stream, self.end = stream, len(stream.jobs)

    def query(self) -> bool:
        return not self.stream.jobs

    def synchronize(self) -> None:
        self.stream.catch_up(len(self.stream.jobs))


class LateUploads(Uploads):
    go_on = True
    made: list[LateUploads] = []  # noqa: RUF012

    def __init__(self, most: int) -> None:
        self.pieces = 0
        self.pool = ScratchPool(self._allocate, lambda: LateEvent(_current.stream), most)
        self.made.append(self)

    def _allocate(self, nbytes: int) -> memoryview:
        self.pieces += 1
        return memoryview(bytearray(nbytes))

    @contextmanager
    def open_stream(self) -> Iterator[None]:
        _current.stream = LateStream()
        yield


@pytest.fixture(params=[0, 1, 3, 16])
def late(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """All destinations are a GPU's; as many pieces of page-locked memory as the parameter says, where need be more."""
    LateUploads.made = []
    monkeypatch.setattr(exchange, "choose_uploads", lambda sinks, threads: LateUploads(request.param))
    monkeypatch.setattr(TensorSink, "view", lambda self, position, nbytes: None)

    def copy(into: torch.Tensor, values: torch.Tensor) -> None:
        _current.stream.jobs.append(lambda: into.copy_(values))

    monkeypatch.setattr(destinations, "_copy", copy)
    return request.param  # type: ignore[no-any-return]


@pytest.mark.parametrize("target", [Topology(1, 2), Topology(0, 2), Topology(3, 3)], ids=lambda each: each.label)
def test_memory_is_lent_again_when_its_bytes_have_arrived(late: int, target: Topology, tmp_path: Path) -> None:
    """Direct reads and staged ones, by several threads."""
    state = random_state(MODEL, 0)
    path = write_checkpoint(tmp_path, MODEL, state, Topology(1, 3))
    targets = make_targets(MODEL, target)
    ranks = load(open_for(path, targets[0]), targets, window=1 << 12)
    check_content(ranks, state)
    threads = max(rank.transfer.reader.threads for rank in ranks if rank.transfer)
    assert all(made.pieces <= late + 2 * threads for made in LateUploads.made)


def test_an_error_waits_for_what_is_under_way(late: int, tmp_path: Path) -> None:
    state = random_state(MODEL, 0)
    path = write_checkpoint(tmp_path, MODEL, state, Topology(1, 3))
    targets = make_targets(MODEL, Topology(0, 2))
    index = open_for(path, targets[0])
    Path(index.stored.files[-1].path).write_bytes(b"")
    with pytest.raises(CheckpointError, match="ends at byte 0"):
        run_ranks(1, lambda rank, comm: load(index, targets))
