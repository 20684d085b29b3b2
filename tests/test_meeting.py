"""Ranks wait for slow peers outside of collectives, whose timeouts would expire, but not for dead ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from torch.distributed import HashStore

from deepspeed_ucp import meeting
from deepspeed_ucp.engine.finish import wait_behind_reads
from deepspeed_ucp.errors import RemoteError
from tests.convert.conversions import convert, read_bytes, write_source
from tests.support.mpi import run_torch

WAITING = str(Path(__file__).parent / "support" / "waiting.py")


def test_a_slow_rank_does_not_expire_the_timeout_of_a_collective(tmp_path: Path) -> None:
    source = write_source(tmp_path)
    convert(source, tmp_path / "alone")
    for code, _, err in run_torch(2, [WAITING, "late", str(source)]):
        assert code == 0, err
    assert read_bytes(Path(f"{source}_universal")) == read_bytes(tmp_path / "alone")


@pytest.mark.parametrize(
    ("end", "words"),
    [
        ("killed", "RemoteError: [rank 1] no heartbeat for 2 s"),
        ("interrupted", "RemoteError: [rank 1] KeyboardInterrupt: oh"),
    ],
    ids=str,
)
def test_ranks_do_not_wait_for_a_dead_rank(end: str, words: str) -> None:
    (code, _, err), (other, _, _) = run_torch(2, [WAITING, "gone", end])
    assert other != 0
    assert code == 1
    assert words in err


def pass_time(monkeypatch: pytest.MonkeyPatch, look: Callable[[float], object]) -> None:
    monkeypatch.setattr(meeting, "time", SimpleNamespace(sleep=look))


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> HashStore:
    """Store of rank 0 while rank 1 does not arrive; pauses take no time."""
    monkeypatch.setattr(meeting, "_state", meeting._MeetingState())
    pass_time(monkeypatch, lambda _seconds: None)
    return HashStore()


def become(monkeypatch: pytest.MonkeyPatch, left: int) -> None:
    monkeypatch.setattr(meeting, "_state", meeting._MeetingState(left))


def test_an_error_of_only_one_rank_ends_its_peers(here: HashStore, monkeypatch: pytest.MonkeyPatch) -> None:
    meeting.report_failure(here, 1, MemoryError("oh\nno"))
    become(monkeypatch, left=0)
    with pytest.raises(RemoteError, match=r"^\[rank 1\] MemoryError: oh\s+no$") as error:
        meeting.meet(here, 0, 2)
    meeting.report_failure(here, 0, error.value)  # a third rank gets the first error
    become(monkeypatch, left=0)
    with pytest.raises(RemoteError, match=r"^\[rank 1\] MemoryError"):
        meeting.meet(here, 2, 3)


def test_an_error_of_every_rank_does_not_affect_later_barriers(
    here: HashStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank raises it, and the script may continue."""
    meeting.report_failure(here, 1, ValueError("tag"))
    become(monkeypatch, left=0)
    meeting.report_failure(here, 0, ValueError("tag"))
    looks = iter(range(200))
    pass_time(monkeypatch, lambda _seconds: here.add(meeting._ARRIVALS, next(looks) == 150))
    meeting.meet(here, 0, 2)
    become(monkeypatch, left=1)
    meeting.report_failure(here, 1, ValueError("alone"))
    become(monkeypatch, left=1)
    with pytest.raises(RemoteError, match="alone"):
        meeting.meet(here, 0, 2)


def test_ranks_wait_for_a_peer_with_heartbeats(here: HashStore, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter(range(10000))

    def sleep(_seconds: float) -> None:
        here.add(meeting._HEARTBEATS.format(1), 1)
        here.add(meeting._ARRIVALS, next(looks) == 5000)  # after some minutes

    pass_time(monkeypatch, sleep)
    meeting.meet(here, 0, 2)
    pass_time(monkeypatch, lambda _seconds: None)
    with pytest.raises(RemoteError, match="no heartbeat for 60 s"):
        meeting.meet(here, 0, 2)


@pytest.mark.usefixtures("here")
def test_an_unreachable_store_is_an_error() -> None:
    store = mock.Mock(**{"add.return_value": 1, "get.side_effect": RuntimeError("Connection reset by peer")})
    with pytest.raises(RemoteError, match="Connection reset by peer.*rank 0 or the launcher"):
        meeting.meet(store, 0, 2)


def test_ranks_wait_for_each_other_before_reads_of_deepspeeds_load() -> None:
    calls: list[str] = []
    comm: Any = SimpleNamespace(wait=lambda: calls.append("wait"))

    class Loading:
        """An engine, which is its own optimizer."""

        def load_module_state_dict(self, *, checkpoint: Any) -> None:
            calls.append(checkpoint)

        def load_state_dict(self, state: str) -> str:
            calls.append("collective")
            return state

    Loading.optimizer = engine = Loading()
    with wait_behind_reads(engine, comm):
        engine.load_module_state_dict(checkpoint="module")
        assert engine.load_state_dict("x") == "x"
    assert calls == ["wait", "module", "wait", "collective"]
    assert vars(engine) == {}
    with wait_behind_reads(SimpleNamespace(), comm):
        pass
