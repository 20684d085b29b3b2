"""End a torchrun rank together with its agent (``PR_SET_PDEATHSIG`` of Linux).

torchrun starts each rank in a new session. A rank would therefore survive an agent that gets SIGKILL, and continue
training while its replacement loads a checkpoint.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1

_RANK_PID = "DEEPSPEED_UCP_RANK_PID"
"""Variable that a rank sets: its child processes inherit it and are not bound to their parent."""


def end_with_agent(environment: MutableMapping[str, str] = os.environ) -> None:
    """Let the kernel kill this process when its torchrun agent ends.

    Only ranks of torchrun (``TORCHELASTIC_RUN_ID``) are bound, not their child processes. With ``--start-method
    forkserver`` the parent is the fork server, which lives as long as a rank: a thread waits for the end of the agent.
    Linux sends the signal when the *thread* that started the rank ends. torchrun starts ranks from its main thread.
    """
    if "TORCHELASTIC_RUN_ID" not in environment or environment.get(_RANK_PID, str(os.getpid())) != str(os.getpid()):
        return
    environment[_RANK_PID] = str(os.getpid())
    process = sys.modules.get("multiprocessing.process")
    if process is not None and (agent := process.parent_process()) is not None:
        threading.Thread(target=_kill_after, args=(agent,), name="agent's end", daemon=True).start()
    parent = os.getppid()
    # The agent may have ended before the kernel knew of the request:
    if die_with_parent() and (os.getppid() != parent or _is_orphan(parent)):
        os.kill(os.getpid(), signal.SIGKILL)


def die_with_parent() -> bool:
    """Let Linux kill this process when its parent ends; return False if it cannot."""
    return not ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _kill_after(agent: Any) -> None:
    agent.join()
    os.kill(os.getpid(), signal.SIGKILL)


def _is_orphan(parent: int) -> bool:
    """Return True if process 1 has adopted this process because the agent ended.

    In a container the agent itself can be process 1: it then runs this process's Python.
    """
    if parent != 1:
        return False
    try:
        return not Path("/proc/1/exe").resolve(strict=True).samefile("/proc/self/exe")
    except OSError:  # another user's process
        return True
