"""How processes of this machine ended that could not say it themselves: by which signal, and for want of memory or not.

The system tells it (Linux): a process that nobody has taken leave of yet has its exit status in ``/proc``, its cgroup
counts those that were killed for want of memory, and the kernel's log names them, to those who may read it.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..heartbeat import STARTED, read_stat

_CGROUPS, _LOG, _PIDS = Path("/sys/fs/cgroup"), "/dev/kmsg", "/proc/self/ns/pid"

_ALL_PIDS = 0xEFFFFFFC
"""The number of the namespace whose process ids are those of the kernel's log."""

_EXIT_STATUS = 49
"""Of what :func:`~deepspeed_ucp.heartbeat.read_stat` tells."""

_KINDS = {"": ("memory.events", "memory.max"), "memory": ("memory.oom_control", "memory.limit_in_bytes")}
"""By controller in ``/proc/PID/cgroup`` (version 2, version 1): the files with the count, and with the limit."""

_EVERY, _RECENT, _AGO, _UNLIMITED = 1.0, 60.0, 600, 1 << 60
"""Seconds between two looks at a count; those that a large process may take to end once it is killed; those after which
it was another one of that number; bytes from which on a limit is none."""

_KILLED = re.compile(rb"Killed process (\d+)")


def is_here(pid: int, started: int) -> bool:
    """Whether a process that says when it was started is one of this machine, and no other one of that number."""
    stat = read_stat(pid)
    return bool(started) and stat is not None and stat[STARTED] == started


@dataclass(slots=True)
class _Count:
    """How many processes a cgroup has lost for want of memory.

    Attributes:
        read: at that time.
        rose: when it was found to be higher than before.
    """

    path: Path
    limit: int | None
    killed: int
    read: float
    rose: float | None = None

    def look(self) -> None:
        """Count anew; a cgroup that is gone tells nothing more."""
        self.read = time.monotonic()
        killed = _read_count(self.path)
        if killed is not None and killed > self.killed:
            self.killed, self.rose = killed, self.read


class Deaths:
    """What the system says of the ends of this machine's processes; of one thread."""

    def __init__(self) -> None:
        self._here, self._killed = set[int](), set[int]()
        self._counts: dict[int, _Count] = {}
        self._log: int | None = None
        with contextlib.suppress(OSError):
            if os.stat(_PIDS).st_ino == _ALL_PIDS:
                self._log = os.open(_LOG, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                os.lseek(self._log, 0, os.SEEK_END)

    def close(self) -> None:
        if self._log is not None:
            os.close(self._log)
            self._log = None

    def forget(self) -> None:
        """Of the processes that are known none is there any more."""
        self._here.clear()
        self._killed.clear()
        self._counts.clear()

    def note(self, pid: int, started: int) -> None:
        """Count from now on what the cgroup of a process loses, if that is one of this machine."""
        if not is_here(pid, started):
            return
        self._here.add(pid)
        if found := _find_count(pid):
            path, limit = found
            others = [count for count in self._counts.values() if count.path == path]
            killed = _read_count(path) or 0
            self._counts[pid] = others[0] if others else _Count(path, limit, killed, time.monotonic())

    def look(self) -> None:
        """Count anew, where it is some time ago."""
        for count in self._counts.values():
            if time.monotonic() - count.read > _EVERY:
                count.look()

    def find_signal(self, pid: int, started: int) -> int | None:
        """The signal that has ended a process, whose files are closed by now; None where none did, or it is not known:
        it was another machine's, or its parent has taken leave of it."""
        if not is_here(pid, started):
            return None
        stat = read_stat(pid) or []
        return stat[_EXIT_STATUS] & 0x7F or None if len(stat) > _EXIT_STATUS else None

    def describe_memory(self, pid: int, signal: int | None) -> str:
        """What the system says of processes that it has killed for want of memory, in words: of this one, or of others
        of its cgroup in the last minute; empty where nothing."""
        self._read_log()
        count = self._counts.get(pid)
        limit = f" (its cgroup has {count.limit / (1 << 30):.2f} GiB)" if count and count.limit else ""
        if pid in self._here & self._killed:
            return f"out of memory, as the kernel says{limit}"
        if count is None:
            return ""
        count.look()
        if count.rose is None or time.monotonic() - count.rose > _RECENT:
            return ""
        if signal == 9:
            return f"out of memory, as its cgroup says{limit}"
        return f"its cgroup has lost a process for want of memory{limit}"

    def _read_log(self) -> None:
        """The kernel's log as far as it has come; a line a read."""
        while self._log is not None:
            try:
                line = os.read(self._log, 8192)
            except BrokenPipeError:  # lines were overwritten: it goes on with the next
                continue
            except OSError:  # there is no more, or it may not be read
                return
            if not line:
                return
            self._killed.update(map(int, _KILLED.findall(line)))


def ask_kernel(pid: int, ask: Callable[[str], str]) -> str:
    """Whether the kernel of another machine has killed a process for want of memory of late, in words; empty where it
    does not say so, or may not be asked.

    Args:
        ask: has a shell of that machine run a command; its last line, or anything else.
    """
    killed = f"Killed process {pid} "
    since = '-v now="$(cut -d. -f1 /proc/uptime)"'
    told = ask(f"""dmesg | awk {since} 'index($0, "{killed}") && substr($0, 2) + 0 > now - {_AGO} {{ print }}'""")
    return "out of memory, as the kernel says" if killed in told else ""


def describe_state(pid: int, started: int) -> str:
    """What a process of this machine is stuck in, in words; empty where that cannot be told."""
    if not is_here(pid, started):
        return ""
    state = (read_stat(pid) or [""])[0]
    if state in ("T", "t"):
        return "it is stopped (SIGSTOP, or a debugger)"
    if state == "D":
        with contextlib.suppress(OSError):
            return f"it is stuck in the kernel ({Path(f'/proc/{pid}/wchan').read_text()})"
    return "it is stuck outside of Python" if state in ("R", "S", "D") else ""


def _find_count(pid: int) -> tuple[Path, int | None] | None:
    """The file with the count of a process's cgroup, and the least limit in bytes of it and of those around it."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
            _, controllers, within = line.split(":", 2)
            kind = "memory" if "memory" in controllers.split(",") else controllers
            if kind not in _KINDS:
                continue
            for root in (_CGROUPS / kind, _CGROUPS / "unified"):
                count, limit = _KINDS[kind]
                own = root / within.lstrip("/")
                if found := next((folder / count for folder in (own, root) if (folder / count).is_file()), None):
                    around = [folder for folder in (found.parent, *found.parent.parents) if folder.is_relative_to(root)]
                    limits = [each for folder in around if (each := _read_limit(folder / limit)) is not None]
                    return found, min(limits, default=None)
    return None


def _read_count(path: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        for line in path.read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == "oom_kill":
                return int(value)
    return None


def _read_limit(path: Path) -> int | None:
    try:
        limit = int(path.read_text())
    except (OSError, ValueError):  # "max"
        return None
    return limit if limit < _UNLIMITED else None
