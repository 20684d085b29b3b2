"""What a load reports."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from deepspeed_ucp.cli.report import list_loads, read_load
from deepspeed_ucp.comm import Comm
from deepspeed_ucp.config import UniversalConfig
from deepspeed_ucp.load.context import LoadArguments, LoadContext, LoadReport
from deepspeed_ucp.load.report import write_report


def test_phases_add_up_also_when_they_fail() -> None:
    report = LoadReport(direct=True, reason="test")
    with report.phase("read"):
        pass
    first = report.phases["read"]
    with pytest.raises(ValueError, match="oh"), report.phase("read"):
        raise ValueError("oh")
    assert report.phases["read"] > first >= 0
    assert (report.bytes_read, report.bytes_again, report.requests, report.state_bytes) == (0, 0, 0, 0)


def test_a_file_of_a_load_tells_no_password(tmp_path: Path) -> None:
    report = LoadReport(direct=True, reason="test", files={"https://me:hunter2@host/run/a\udcff.pt": (9, 0.1)})
    config = UniversalConfig(report=str(tmp_path))
    write_report(
        LoadContext(SimpleNamespace(global_steps=3), Comm(), config, LoadArguments(), report), "https://me@host/run"
    )
    (path,) = list_loads(str(tmp_path))
    told, _ = read_load(path)
    assert told["loaded"] == "https://…@host/run"
    assert told["ranks"][0]["files"] == {"https://…@host/run/a\udcff.pt": [9, 0.1]}
