"""Saves into a small memory that is full before a save ends."""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress
from pathlib import Path
from unittest import mock

from deepspeed_ucp.saves.memory import Snapshot, list_late
from deepspeed_ucp.saves.saver import finish_saves
from tests.saves.saving import find_writer, is_whole
from tests.saves.training import Training, write_tag
from tests.support.until import wait_until


def save_into_small_memory(folder: Path) -> None:
    """Save while the memory is full; needs a mount namespace."""
    training = Training(folder)
    memory, place = training.memory, training.place
    memory.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "small", str(memory)], check=True)

    def fill() -> None:
        """Leave no byte of the memory free."""
        with suppress(OSError), open(memory / "ballast", "ab", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
        assert os.statvfs(memory).f_bavail == 0

    def save_and_fill(tag: str) -> None:
        """Save under a tag, with the memory full both before and after its record is written."""

        def write(folder: str, tag: str) -> None:
            write_tag(folder, tag)
            fill()

        def write_record(made: Snapshot) -> None:
            own(made)
            fill()

        own = Snapshot.write_record
        with mock.patch.object(Snapshot, "write_record", write_record):
            assert training.save(tag, write=write)

    def is_running() -> bool:
        with suppress(AssertionError):
            return bool(find_writer(training.job))
        return False

    assert training.save("first")
    finish_saves(training.engine, required=True)
    wait_until(is_running)
    save_and_fill("second")
    wait_until(lambda: not list_late(training.job.list_saves()))
    assert is_whole(str(place / "second")) and (place / "latest").read_text() == "second"
    assert "not written" not in training.log
    os.unlink(memory / "ballast")
    assert training.save("third")
    finish_saves(training.engine, required=True)
    wait_until(lambda: list(training.job.read("written")[str(place)]) == ["first", "second", "third"])
    training.saver.close()
