"""Faults around real writer processes: full disks, stores that are down, writers that hang, two jobs for one tag."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from deepspeed_ucp.config import SaveOptions, UniversalConfig
from deepspeed_ucp.engine_state import find_state
from deepspeed_ucp.io.store import read_small
from deepspeed_ucp.saves import saver as savers
from deepspeed_ucp.saves.memory import Job
from deepspeed_ucp.saves.saving import save_into_memory
from deepspeed_ucp.saves.writer import is_locked, list_late, start_writer
from tests.convert.conversions import write_source
from tests.saves.namespace import run_in_namespace
from tests.saves.saving import PATIENCE, SETTINGS, find_writer, is_whole, make_save
from tests.stores.server import BUCKET, Server
from tests.support.until import wait_until


@pytest.mark.parametrize(("fault", "message"), [("full", "disk full"), ("ro", "Read-only file system")])
def test_a_repaired_disk_gets_all_saves(fault: str, message: str, tmp_path: Path) -> None:
    done = run_in_namespace("tests.saves.small_disk", str(tmp_path), fault)
    assert done.returncode == 0, done.stderr
    assert message in done.stdout


def test_a_hanging_writer_does_not_stop_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It delays the end of the job by at most ``wait_s``, and finishes its saves when it continues."""
    place, writer = tmp_path / "place", SimpleNamespace(is_decoupled=lambda: False)
    module = SimpleNamespace(parameters=list)
    engine = SimpleNamespace(
        global_steps=3, optimizer=None, module=module, save_non_zero_checkpoint=False, checkpoint_engine=writer,
        use_node_local_storage=lambda: False,
    )  # fmt: skip
    wait_s, slept = 0.5, list[float]()

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        time.sleep(seconds)

    config = UniversalConfig(save=SaveOptions(memory=str(tmp_path / "memory"), wait_s=wait_s))

    def save(tag: str) -> None:
        def write(folder: str) -> None:
            write_source(Path(folder)).rename(Path(folder) / tag)

        assert save_into_memory(engine, config, str(place), tag, write, latest=True)[1]

    save("a")
    saver = find_state(engine).saver
    assert saver.wait(PATIENCE)
    stopped = find_writer(saver.job)
    os.kill(stopped, signal.SIGSTOP)
    try:
        with mock.patch.object(savers, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep)):
            save("b")
            save("c")
            saver.close()
        assert sum(slept) < 2 * wait_s
        assert f"still to be written: b, c to {place}" in caplog.text and (place / "latest").read_text() == "a"
    finally:
        os.kill(stopped, signal.SIGCONT)
    wait_until(lambda: not is_locked(saver.job))
    assert (place / "latest").read_text() == "c" and is_whole(str(place / "b")) and is_whole(str(place / "c"))


@pytest.mark.parametrize("kind", ["folder", "store"])
def test_two_jobs_at_once_with_the_same_tags(kind: str, tmp_path: Path, server: Server) -> None:
    """Their writers do not share memory, as on different machines."""
    place = str(tmp_path / "place") if kind == "folder" else f"s3://{BUCKET}/both"
    jobs = [Job(str(tmp_path / f"memory{number}" / "job")) for number in range(2)]
    for job in jobs:
        job.own()
    settings = {**SETTINGS, "storage_options": server.options}
    lines, drawn = [start_writer(job, settings) for job in jobs], random.Random(1)
    for number in range(6):
        for job, line in zip(jobs, lines, strict=True):
            make_save(job, place, tag=f"step{number // 3}", step=number // 3)
            line.write(b"\n")
            line.flush()
        time.sleep(drawn.uniform(0, 0.3))
    wait_until(lambda: all(map(is_locked, jobs)))  # writers take some time to start
    for line in lines:
        line.close()
    for job in jobs:
        wait_until(lambda job=job: not is_locked(job))
    logs = [Path(job.folder, "log").read_text() for job in jobs]
    assert read_small(f"{place}/latest") == b"step1" and is_whole(f"{place}/step1"), logs


def test_a_store_that_is_down_does_not_delay_other_places(tmp_path: Path, server: Server) -> None:
    url, local = f"s3://{BUCKET}/away", str(tmp_path / "place")
    job = Job(str(tmp_path / "memory" / "job"))
    job.own()
    with server.failing(lambda _: "503"):
        lines = start_writer(job, {**SETTINGS, "storage_options": server.options})
        for tag in "abc":
            make_save(job, url, local, tag=tag)
            lines.write(b"\n")
            lines.flush()
            wait_until(lambda tag=tag: is_whole(f"{local}/{tag}"))
        wait_until(lambda: list(list_late(job.list_saves())) == [url])
    lines.close()
    wait_until(lambda: not is_locked(job))
    assert read_small(f"{url}/latest") == b"c" and is_whole(f"{url}/c")
