"""Faults around real writer processes: full disks, stores that are down, two jobs for one tag."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from deepspeed_ucp.io.store import read_small
from deepspeed_ucp.saves.launch import WriterPipe
from deepspeed_ucp.saves.memory import Job, is_locked
from tests.saves.namespace import run_in_namespace
from tests.saves.saving import SETTINGS, is_whole, make_save
from tests.saves.small_disk import write_to_small_disk
from tests.stores.server import BUCKET, Server
from tests.support.covering import params
from tests.support.until import wait_until


@pytest.mark.parametrize(("fault", "message"), [("full", "disk full"), ("ro", "Read-only file system")])
def test_a_repaired_disk_gets_all_saves(fault: str, message: str, tmp_path: Path) -> None:
    run_in_namespace(lambda: write_to_small_disk(tmp_path, fault, message))


@pytest.mark.parametrize("kind", params(["folder"], ["store"]))
def test_two_jobs_at_once_with_the_same_tags(kind: str, tmp_path: Path, server: Server) -> None:
    """Their writers do not share memory, as on different machines."""
    place = str(tmp_path / "place") if kind == "folder" else f"s3://{BUCKET}/both"
    jobs = [Job(str(tmp_path / f"memory{number}" / "job")) for number in range(2)]
    for job in jobs:
        job.own()
    settings = {**SETTINGS, "storage_options": server.options}
    writers, drawn = [WriterPipe(job, settings) for job in jobs], random.Random(1)
    for number in range(6):
        for writer in writers:
            make_save(writer.job, place, tag=f"step{number // 3}", step=number // 3)
            writer.notify()
        time.sleep(drawn.uniform(0, 0.3))
    for writer in writers:
        writer.close()
    wait_until(lambda: not any(map(is_locked, jobs)))
    logs = [Path(job.folder, "log").read_text() for job in jobs]
    assert read_small(f"{place}/latest") == b"step1" and is_whole(f"{place}/step1"), logs
