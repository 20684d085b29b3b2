"""The S3 server of a module, jobs, and the release of savers and jobs after each test."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deepspeed_ucp.saves.memory import Job, find_root, name_job
from deepspeed_ucp.saves.saver import Saver
from tests.saves.saving import Run
from tests.stores.server import Server, serve_bucket


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """An S3 server with a bucket, which the stores of this process use."""
    pytest.importorskip("moto", reason="the store of these tests is S3")
    with serve_bucket() as found:
        yield found


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """A job of this process, so that no writer writes its pending saves."""
    made = Job(os.path.join(find_root(str(tmp_path / "memory")), name_job()))
    made.own()
    return made


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A job that saves to a folder."""
    return Run(tmp_path)


@pytest.fixture(autouse=True)
def _leave(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Release the savers and jobs of a test, so that their writers exit."""
    used: dict[type, list[Any]] = {Job: [], Saver: []}

    def note(kind: type, name: str) -> None:
        begin = getattr(kind, name)
        monkeypatch.setattr(kind, name, lambda each: (used[kind].append(each), begin(each))[1])

    note(Job, "own")
    note(Saver, "open")
    yield
    for saver in used[Saver]:
        saver.release()
    for job in used[Job]:
        job.disown()
