"""Writes saves to a small disk that fails and is repaired."""

from __future__ import annotations

import subprocess
from pathlib import Path

from deepspeed_ucp.saves.launch import WriterPipe
from deepspeed_ucp.saves.memory import Job, is_locked, list_late
from tests.saves.saving import SETTINGS, is_whole, make_save
from tests.support.until import wait_until


def write_to_small_disk(folder: Path, fault: str, message: str) -> None:
    """Write saves while the disk fails (``full`` or ``ro``) and after it is repaired; needs a mount namespace.

    Args:
        message: part of the writer's log.
    """
    place = folder / "place"

    def mount(options: str) -> None:
        """Mount the disk over the place."""
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "small", str(place)], check=True)

    place.mkdir()
    mount("size=96k")
    job = Job(str(folder / "memory" / "job"))
    job.own()
    writer = WriterPipe(job, SETTINGS)
    make_save(job, str(place), tag="first")
    writer.notify()
    # The writer has finished with the place.
    wait_until(lambda: not list_late(job.list_saves()) and job.read("written"))
    if fault == "ro":
        mount("remount,ro")
    make_save(job, str(place), tag="second")
    writer.notify()
    wait_until(lambda: "not written, to be tried again" in Path(job.folder, "log").read_text())
    assert (place / "latest").read_text() == "first"
    assert is_whole(str(place / "first"))
    mount("remount,rw,size=4m")
    writer.close()
    wait_until(lambda: not is_locked(job))
    assert (place / "latest").read_text() == "second"
    assert is_whole(str(place / "first")) and is_whole(str(place / "second"))
    assert not list(place.glob(".*"))
    assert message in Path(job.folder, "log").read_text()
