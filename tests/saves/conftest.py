"""Jobs, and the release of savers and jobs after each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deepspeed_ucp.saves.memory import Job
from deepspeed_ucp.saves.saver import Saver
from tests.saves.saving import Run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


@pytest.fixture(autouse=True)
def _leave(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Release the savers and jobs of a test, so that their writers exit."""
    used: dict[type, list[Any]] = {Job: [], Saver: []}

    def note(kind: type, name: str) -> None:
        begin = getattr(kind, name)
        monkeypatch.setattr(kind, name, lambda each: (used[kind].append(each), begin(each))[1])

    note(Job, "create")
    note(Saver, "open")
    yield
    for saver in used[Saver]:
        saver.release()
    for job in used[Job]:
        job.unlock()
