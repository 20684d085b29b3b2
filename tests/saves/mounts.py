"""Saves into a memory that is full, mounted in a private mount namespace."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from unittest import mock

import pytest

from deepspeed_ucp.saves.memory import SavePart, list_late
from deepspeed_ucp.saves.saver import finish_saves
from tests.saves.saving import find_writer, is_whole
from tests.saves.training import Training, write_tag
from tests.support.crash import run_child
from tests.support.until import wait_until

_NEWNS, _NEWUSER = 0x00020000, 0x10000000


def run_in_namespace(work: Callable[[], object]) -> None:
    """Run work in a forked child with a private mount namespace; skip the test if the system does not allow it.

    Raises:
        AssertionError: the work raised an error.
    """
    mount = ["unshare", "--map-root-user", "--mount", "mount", "-t", "tmpfs", "x", "/mnt"]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this system does not let a process mount file systems")
    user, group = os.getuid(), os.getgid()

    def run() -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.unshare(_NEWNS | _NEWUSER) == 0, os.strerror(ctypes.get_errno())
        for name, text in {"setgroups": "deny", "uid_map": f"0 {user} 1", "gid_map": f"0 {group} 1"}.items():
            Path("/proc/self", name).write_text(text)
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
        work()

    assert run_child(run) == 0


def save_into_small_memory(folder: Path) -> None:
    training = Training(folder)
    memory, destination = training.memory, training.destination
    memory.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "small", str(memory)], check=True)

    def fill() -> None:
        with suppress(OSError), open(memory / "ballast", "ab", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
        assert os.statvfs(memory).f_bavail == 0

    def save_and_fill(tag: str) -> None:
        """Save under a tag, with the memory full both before and after its record is written."""

        def write(folder: str, tag: str) -> None:
            write_tag(folder, tag)
            fill()

        def write_record(save: SavePart) -> None:
            write_original(save)
            fill()

        write_original = SavePart.write_record
        with mock.patch.object(SavePart, "write_record", write_record):
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
    assert is_whole(str(destination / "second")) and (destination / "latest").read_text() == "second"
    assert "not written" not in training.log
    os.unlink(memory / "ballast")
    assert training.save("third")
    finish_saves(training.engine, required=True)
    wait_until(lambda: list(training.job.read("written")[str(destination)]) == ["first", "second", "third"])
    training.saver.close()
