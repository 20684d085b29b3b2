"""What a rank tells of its steps and their phases, without an engine."""

from __future__ import annotations

from typing import Any

import pytest

from deepspeed_ucp import beacon, heartbeat


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the watcher is sent."""
    lines: list[dict[str, Any]] = []
    monkeypatch.setattr(heartbeat, "_say", lambda **fields: lines.append(fields))
    return lines


def test_a_phase_ends_in_the_one_around_it(told: list[dict[str, Any]]) -> None:
    with beacon.phase("train_batch"):
        with beacon.phase("forward"):
            pass
        with pytest.raises(MemoryError), beacon.phase("backward"):
            raise MemoryError
    beacon.report_step(3)
    names = ["train_batch", "forward", "train_batch", "backward", "train_batch", None]
    assert told == [*({"phase": name} for name in names), {"step": 3}]
