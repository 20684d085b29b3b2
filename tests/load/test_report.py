"""What a load reports."""

from __future__ import annotations

import pytest

from deepspeed_ucp.load.context import LoadReport


def test_phases_add_up_also_when_they_fail() -> None:
    report = LoadReport(direct=True, reason="test")
    with report.phase("read"):
        pass
    first = report.phases["read"]
    with pytest.raises(ValueError, match="oh"), report.phase("read"):
        raise ValueError("oh")
    assert report.phases["read"] > first >= 0
    assert (report.bytes_read, report.bytes_again, report.requests, report.state_bytes) == (0, 0, 0, 0)
