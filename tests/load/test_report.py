"""What a load reports, and how pieces are packed for the exchange."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from deepspeed_ucp.load import LoadReport
from deepspeed_ucp.load.exchange import _batch


def test_phases_add_up_also_when_they_fail() -> None:
    report = LoadReport(direct=True, reason="test")
    with report.phase("read"):
        pass
    first = report.phases["read"]
    with pytest.raises(ValueError, match="oh"), report.phase("read"):
        raise ValueError("oh")
    assert report.phases["read"] > first >= 0
    assert (report.bytes_read, report.bytes_again, report.requests, report.state_bytes) == (0, 0, 0, 0)


def sizes(batches: list[list[torch.Tensor]]) -> list[list[int]]:
    return [[part.numel() * part.element_size() for part in batch] for batch in batches]


def test_small_pieces_are_packed_up_to_the_window() -> None:
    views = [torch.zeros(n) for n in (10, 20, 30, 5)]
    assert sizes(list(_batch(views, 130))) == [[40, 80], [120], [20]]
    assert sizes(list(_batch(views, 1 << 20))) == [[40, 80, 120, 20]]


def test_large_pieces_travel_alone_and_in_place() -> None:
    large = torch.zeros(1 << 20, dtype=torch.float32)
    batches = list(_batch([torch.zeros(3), large, torch.zeros(2)], 3 << 20))
    assert sizes(batches) == [[3 << 20], [1 << 20], [12, 8]]
    assert batches[1][0].data_ptr() == large.data_ptr() + (3 << 20)


def test_every_element_travels_once() -> None:
    views = [torch.zeros(n, dtype=torch.bfloat16) for n in (1, 700_000, 3, 1_300_001, 0, 9)]
    sent = [part for batch in _batch(views, 1 << 20) for part in batch]
    assert sum(part.numel() for part in sent) == sum(view.numel() for view in views)
    assert all(part.numel() * 2 <= 1 << 20 for part in sent)
    spans = sorted((part.data_ptr(), part.numel() * 2) for part in sent if part.numel())
    assert all(low + nbytes <= following for (low, nbytes), (following, _) in pairwise(spans))


def test_nothing_to_send() -> None:
    assert list(_batch([], 1 << 20)) == []
