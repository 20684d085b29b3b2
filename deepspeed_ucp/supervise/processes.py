"""A launch as processes: started in a session of its own, ended with everything that has come of it."""

from __future__ import annotations

import ctypes
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence

import psutil

_SET_CHILD_SUBREAPER = 36
"""Of Linux's ``prctl``."""

_SHORTEST_WORD = 16

Spared = Callable[[], Collection[int]]
"""Descendants that are no part of a launch, by their pid; asked for when all have been listed."""


def _spare_none() -> Collection[int]:
    return ()


def adopt_orphans() -> None:
    """Become the parent of whatever this process's descendants leave behind, where the system can (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def start(command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a launch; no signal of this terminal reaches it by itself.

    Raises:
        OSError: the program is not there, or cannot be run.
    """
    return subprocess.Popen(command, env=environment, start_new_session=True)


def list_descendants() -> list[psutil.Process]:
    """Everything that runs because of this process."""
    return [each for each in psutil.Process().children(recursive=True) if each.is_running()]


def kill_descendants(pids: Collection[int]) -> int:
    """End those of some processes with SIGKILL that are descendants; how many were."""
    found = [each for each in list_descendants() if each.pid in pids]
    _signal(found, signal.SIGKILL)
    return len(found)


def make_sweep(word: str) -> str:
    """A shell command that ends every process of a machine that was started with a word in its environment, and those
    that it has forked (Linux); it ends well, found or not.

    Raises:
        ValueError: the word is so short that others may have it.
    """
    if len(word) < _SHORTEST_WORD:
        raise ValueError(f"{word!r} is too short")
    pids = f"$(grep -lsF {shlex.quote(word)} /proc/[0-9]*/environ | cut -d/ -f3)"
    return "sh -c " + shlex.quote(f"kill -9 {pids} 2>/dev/null; true")


def end_everything(process: subprocess.Popen[bytes], *, grace: float, spared: Spared = _spare_none) -> int:
    """End a launch and whatever it has left; how many processes were left when the launch itself had ended.

    Args:
        grace: seconds that they are given after SIGTERM, before SIGKILL; 0: no SIGTERM.
        spared: those that stay.
    """
    if grace:
        _signal(_list_alive(spared), signal.SIGTERM)
        wait_for_all(process, grace, spared)
    left = 0
    while alive := _list_alive(spared):
        left = max(left, len(alive))
        _signal(alive, signal.SIGKILL)
        reap(process)
        time.sleep(0.02)
    process.wait()
    return left


def wait_for_all(process: subprocess.Popen[bytes], seconds: float, spared: Spared = _spare_none) -> None:
    """Give a launch and whatever it has left some time to end."""
    until = time.monotonic() + seconds
    while _list_alive(spared) and time.monotonic() < until:
        reap(process)
        time.sleep(0.05)


def reap(process: subprocess.Popen[bytes]) -> None:
    """Take leave of adopted processes that have ended, all but the launch itself, whose exit code is its own."""
    process.poll()
    while (ended := _peek()) is not None and ended != process.pid:
        os.waitpid(ended, 0)


def _peek() -> int | None:
    """A child that has ended and that nobody has taken leave of; elsewhere than in Linux none is adopted."""
    if sys.platform != "linux":
        return None
    try:
        found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return found.si_pid if found else None


def _list_alive(spared: Spared) -> list[psutil.Process]:
    alive = [each for each in list_descendants() if not _is_zombie(each)]
    kept = spared()
    return [each for each in alive if each.pid not in kept]


def _is_zombie(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def _signal(processes: Sequence[psutil.Process], number: int) -> None:
    for process in processes:
        try:
            process.send_signal(number)
        except psutil.NoSuchProcess:
            continue
