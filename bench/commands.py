"""Commands as a user types them, measured from outside: time with the interpreter's start, bytes, memory."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meters import Io

_PERIOD = 0.05  # seconds between two looks at a command's memory


@dataclass(frozen=True)
class CommandResult:
    """Output, exit code and resource use of a command."""

    code: int
    output: str
    seconds: float
    io: Io
    peak_bytes: int

    def data(self) -> dict[str, Any]:
        """The JSON object that it printed last."""
        lines = self.output.strip().splitlines()
        starts = [number for number, line in enumerate(lines) if line.startswith("{")]
        return dict(json.loads("\n".join(lines[starts[-1] :]))) if starts else {}


def run_command(command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> CommandResult:
    """Run a command to its end; its errors go to the end of `log`."""
    log.parent.mkdir(parents=True, exist_ok=True)
    variables = {**os.environ, **(environment or {})}
    with tempfile.TemporaryFile() as output, log.open("ab") as errors:
        io, began = Io.now(), time.perf_counter()
        process = subprocess.Popen(command, stdout=output, stderr=errors, env=variables, start_new_session=True)
        with PeakWatch(process.pid) as watch:
            code = process.wait()
        seconds, io = time.perf_counter() - began, Io.now() - io
        output.seek(0)
        return CommandResult(code, output.read().decode(errors="replace"), seconds, io, watch.peak_bytes)


def sync_folder(folder: Path) -> float:
    """Make every file below a folder durable; seconds."""
    began = time.perf_counter()
    for path in [*sorted(folder.rglob("*")), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    return time.perf_counter() - began


class PeakWatch:
    """Watches the memory of a session's processes; a context manager."""

    def __init__(self, session: int) -> None:
        self._session, self._stop = session, threading.Event()
        self._sums, self._highest, self._seen = 0, 0, set[int]()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    @property
    def peak_bytes(self) -> int:
        """Peak memory: VmHWM of a single process, or the highest sum of private and shared pages of several."""
        return self._sums if len(self._seen) > 1 else self._highest

    def __enter__(self) -> PeakWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(_PERIOD):
            members = list_members(self._session)
            self._seen |= {*members}
            if len(members) > 1:
                self._sums = max(self._sums, sum(_read_kib(pid, "smaps_rollup", "Pss:") for pid in members) << 10)
            self._highest = max([self._highest, *(_read_kib(pid, "status", "VmHWM:") << 10 for pid in members)])


def list_members(session: int) -> list[int]:
    """The processes of a session."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[3]) == session:
                found.append(int(path.parent.name))
    return found


def _read_kib(pid: int, file: str, key: str) -> int:
    """0 where the process has ended meanwhile."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/{file}").read_text().splitlines():
            if line.startswith(key):
                return int(line.split()[1])
    return 0
