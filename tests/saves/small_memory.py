"""Saves into a small memory that is full before a save ends: ``-m tests.saves.small_memory FOLDER``.

It mounts a tmpfs, so it needs a private mount namespace (``unshare --map-root-user --mount``).
"""

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from unittest import mock

from deepspeed_ucp.config import SaveOptions, UniversalConfig
from deepspeed_ucp.engine_state import find_state
from deepspeed_ucp.saves import saver as savers
from deepspeed_ucp.saves.memory import Snapshot
from deepspeed_ucp.saves.saver import finish_saves, save_into_memory
from deepspeed_ucp.saves.writer import list_late
from tests.convert.conversions import write_source
from tests.saves.saving import PATIENCE, find_writer, is_whole
from tests.saves.training import Engine
from tests.support.until import wait_until

folder = Path(sys.argv[1])
memory, place = folder / "memory", folder / "place"
memory.mkdir()
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "small", str(memory)], check=True)
savers.STARTING = PATIENCE
engine = Engine()
config = UniversalConfig(save=SaveOptions(memory=str(memory), wait_s=PATIENCE))


def fill() -> None:
    """Leave no byte of the memory free."""
    with suppress(OSError), open(memory / "ballast", "ab", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    assert os.statvfs(memory).f_bavail == 0


def save(tag: str, *, fills: bool) -> None:
    """Save under a tag, with the memory full both before and after its record is written if it ``fills`` it."""

    def write(made: str) -> None:
        write_source(Path(made)).rename(Path(made) / tag)
        if fills:
            fill()

    def write_record(made: Snapshot) -> None:
        own(made)
        if fills:
            fill()

    own = Snapshot.write_record
    with mock.patch.object(Snapshot, "write_record", write_record):
        assert save_into_memory(engine, config, str(place), tag, write, latest=True)[1]


def is_running() -> bool:
    with suppress(AssertionError):
        return bool(find_writer(find_state(engine).saver.job))
    return False


save("first", fills=False)
saver = find_state(engine).saver
finish_saves(engine, required=True)
wait_until(is_running)
save("second", fills=True)
wait_until(lambda: not list_late(saver.job.list_saves()))
assert is_whole(str(place / "second")) and (place / "latest").read_text() == "second"
assert "not written" not in Path(saver.job.folder, "log").read_text()
os.unlink(memory / "ballast")
save("third", fills=False)
finish_saves(engine, required=True)
assert list(saver.job.read("written")[str(place)]) == ["first", "second", "third"]
saver.close()
