"""Commands as a user runs them, measured from outside: time with the interpreter's start, bytes, memory."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meters import Io, read_fields

_PERIOD = 0.05  # seconds between two samples of a command's memory


@dataclass(frozen=True)
class CommandResult:
    """Exit code, output and resource use of a command."""

    code: int
    output: str
    seconds: float
    io: Io
    peak_bytes: int


def run_command(command: Sequence[str], log: Path, **options: Any) -> CommandResult:
    """Run a command to its end and append its errors to `log`; `options` are those of `subprocess.Popen`."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as errors:
        io, start = Io.now(), time.perf_counter()
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True, **options
        )
        with PeakMemory(process.pid) as memory:
            output, _ = process.communicate()
        return CommandResult(process.returncode, output, time.perf_counter() - start, Io.now() - io, memory.peak_bytes)


class PeakMemory:
    """Context manager that samples the memory of a session's processes.

    Attributes:
        peak_bytes: peak resident size of a single process, or the highest sum of proportional sizes of several.
    """

    def __init__(self, session: int) -> None:
        self._session, self._stop, self.peak_bytes = session, threading.Event(), 0
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._stop.wait(_PERIOD):
            members = list_members(self._session)
            file, key = ("smaps_rollup", "Pss") if len(members) > 1 else ("status", "VmHWM")
            self.peak_bytes = max(self.peak_bytes, sum(read_bytes(pid, file, key) for pid in members))


def list_members(session: int) -> list[int]:
    """List the processes of a session."""
    members = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(ProcessLookupError):
            if os.getsid(int(folder.name)) == session:
                members.append(int(folder.name))
    return members


def read_bytes(pid: int, file: str, key: str) -> int:
    """Read a size of a process in bytes; 0 if it has ended."""
    with suppress(OSError):
        return read_fields(Path("/proc", str(pid), file)).get(key, 0) << 10
    return 0
