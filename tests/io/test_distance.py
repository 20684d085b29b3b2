"""How far paths lead, and how many reads of what is there are under way at once."""

from __future__ import annotations

import pytest

from deepspeed_ucp.io import distance
from deepspeed_ucp.io.distance import choose_map, count_readers, measure_distance
from deepspeed_ucp.io.filesystems import DISK, MEMORY, NETWORK, find_kind


@pytest.mark.parametrize(("kind", "far"), [(DISK, 0), (MEMORY, 0), ("", 0), (NETWORK, 1)])
def test_what_lies_over_a_network_is_read_by_more_readers(kind: str, far: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distance, "find_kind", lambda path: kind)
    assert measure_distance("/folder") == far
    monkeypatch.setattr(distance, "count_threads", lambda: 8)
    assert count_readers("/folder") == (16 if far else 8)
    monkeypatch.setattr(distance, "count_threads", lambda: 32)
    assert count_readers("/folder") == 32
    assert (choose_map("/folder") is map) == (not far)


def test_stores_are_farthest() -> None:
    assert measure_distance("s3://bucket/run") == 2
    assert count_readers("s3://bucket/run") >= 16


def test_the_system_tells_kinds() -> None:
    assert find_kind("/proc") == NETWORK  # of no kind that is listed
    assert find_kind("/dev/shm") == MEMORY
    assert find_kind("/nowhere") == ""
