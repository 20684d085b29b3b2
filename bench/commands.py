"""Commands as a user runs them, measured from outside: time with the interpreter's start, bytes, memory."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meters import Io, Peak, read_fields


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
        with Peak(lambda: read_session(process.pid), 0.05) as memory:
            output, _ = process.communicate()
        return CommandResult(process.returncode, output, time.perf_counter() - start, Io.now() - io, memory.peak)


def read_session(session: int) -> int:
    """Return the peak resident size of a session's only process, or the sum of proportional sizes of several."""
    members = list_members(session)
    file, key = ("smaps_rollup", "Pss") if len(members) > 1 else ("status", "VmHWM")
    return sum(read_bytes(pid, file, key) for pid in members)


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
