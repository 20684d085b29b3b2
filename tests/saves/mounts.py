"""Saves to a disk that fails and in a memory that is full, both mounted in a private mount namespace."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from deepspeed_ucp.saves.memory import SavePart
from deepspeed_ucp.saves.writer import SaveWriter
from tests.convert.conversions import write_source
from tests.saves.saving import PATIENCE, TAG, Run, write_pending
from tests.support.crash import run_child

_NEWNS, _NEWUSER = 0x00020000, 0x10000000


def run_in_namespace(work: Callable[[], object]) -> None:
    """Run work in a forked child with a private mount namespace; skip the test if the system does not allow it."""
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


def mount(folder: str | Path, options: str) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "small", str(folder)], check=True)


def write_to_small_disk(folder: Path, fault: str, message: str, caplog: pytest.LogCaptureFixture) -> None:
    """Write saves while the disk fails (``full`` or ``ro``) and after it is repaired; needs a mount namespace."""
    run = Run(folder)
    os.mkdir(run.destination)
    mount(run.destination, "size=96k")
    run.write_save(tag="first")
    if fault == "ro":
        mount(run.destination, "remount,ro")
    run.save(tag="second")
    writer = SaveWriter(run.job, PATIENCE)
    assert not write_pending(writer)
    assert "not written, to be tried again" in caplog.text and message in caplog.text
    assert run.latest == "first" and run.is_whole("first")
    mount(run.destination, "remount,rw,size=4m")
    assert write_pending(writer) and run.list_late() == [] and run.latest == "second"
    assert run.is_whole("first") and run.is_whole("second") and not list(Path(run.destination).glob(".*"))


def write_from_full_memory(folder: Path) -> None:
    """Write a save that is recorded and written while the memory is full; needs a mount namespace."""
    memory = folder / "memory"
    memory.mkdir()
    mount(memory, "size=4m")
    run = Run(folder)
    run.job.reserve(1, 0)
    write_source(Path(run.job.find_folder(1)))
    with suppress(OSError), open(memory / "ballast", "ab", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    assert os.statvfs(memory).f_bavail == 0
    destinations = {run.destination: None}
    save = SavePart("job", 1, run.destination, TAG, 3, True, 0, 1, destinations, run.job.find_folder(1))
    save.write_record()
    writer = SaveWriter(run.job, PATIENCE)
    assert write_pending(writer) and run.list_late() == [] and run.is_whole() and run.latest == TAG
    os.unlink(memory / "ballast")
    run.save(tag="next")
    assert write_pending(writer)
    assert list(run.job.read("written")[run.destination]) == [TAG, "next"]
