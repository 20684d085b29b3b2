"""Never more bytes than the rate allows, whoever writes them."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from deepspeed_ucp.io.pace import Pace, find_pace, keep_pace
from deepspeed_ucp.io.threads import map_threads


def test_threads_share_a_pace() -> None:
    pace, begin = Pace(1 << 20), time.monotonic()
    map_threads(pace.wait, [16 << 10] * 16, 4)
    assert time.monotonic() - begin >= 0.25


def test_nothing_is_saved_up_while_nothing_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [7.0]
    monkeypatch.setattr("deepspeed_ucp.io.pace.time", SimpleNamespace(monotonic=lambda: now[0]))
    pace = Pace(1000)
    assert pace.reserve(100) == pytest.approx(0.1)
    now[0] += 0.3
    assert pace.reserve(100) == pytest.approx(0.1)
    assert pace.reserve(100) == pytest.approx(0.2)


def test_pieces_are_small_where_the_pace_is_slow() -> None:
    assert Pace().cut(64 << 20) == 64 << 20
    assert Pace(16 << 20).cut(64 << 20) == 1 << 20
    assert Pace(10).cut(64 << 20) == 64 << 10
    assert Pace().reserve(1 << 40) == 0


def test_a_pace_is_a_threads_own() -> None:
    with keep_pace(Pace(1.0)) as _:
        assert find_pace().rate == 1
        assert map_threads(lambda _: find_pace().rate, [0], 1) == [None]
    assert find_pace().rate is None
