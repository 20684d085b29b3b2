"""A rank's line to what watches over its launch: it tells of every step, and ends the rank when the watcher is gone.

``ds_ucp supervise`` and ``ds_ucp torchrun`` name the watcher in the environment; without one nothing here happens.
The line is one TCP connection: the launch's key, then JSON lines. The rank tells who it is, its steps, what ended it;
the watcher tells signals. A connection that ends, or that nobody answers for half a minute, ends the rank with SIGKILL:
no rank trains on for a launch that has been given up.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any

VARIABLE = "DEEPSPEED_UCP_LIFELINE"
"""Environment: ``host:port:key`` of the watcher; the key is that of one launch."""

_IDLE, _EVERY, _TIMES = 10, 5, 4
"""Seconds without data after which the other side's machine is asked, seconds between questions, and questions."""

_RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")
_ERROR_CHARACTERS = 8000

_lines: list[socket.socket] = []
"""The line of this process, if it has one."""


_codes: list[int] = []
"""What ``sys.exit`` was called with."""

_passed_on: set[int] = set()
"""Signals that the watcher has passed on."""


def connect() -> None:
    """Connect to the watcher that the environment names, once per launch; what this process starts inherits none."""
    told = os.environ.pop(VARIABLE, None)
    if told is None or _lines:
        return
    host, port, key = told.rsplit(":", 2)
    try:
        line = socket.create_connection((host, int(port)), timeout=15)
    except OSError as error:
        sys.stderr.write(
            f"deepspeed_ucp: the watcher at {host}:{port} cannot be reached ({error}): going on without.\n"
        )
        return
    line.settimeout(None)
    keep_alive(line)
    with contextlib.suppress(OSError):
        line.sendall(f"{key}\n".encode())
    _lines.append(line)
    _say(hello={"rank": find_rank(), "pid": os.getpid(), "host": socket.gethostname()})
    threading.Thread(target=_listen, args=(line, f"{host}:{port}"), daemon=True, name="heartbeat").start()
    os.register_at_fork(after_in_child=_let_go)
    atexit.register(_say_end)
    vars(os)["_exit"] = partial(_leave, os._exit)
    vars(sys)["exit"] = partial(_exit, sys.exit)
    former = sys.excepthook

    def tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        _say(error="".join(traceback.format_exception(kind, error, trace))[-_ERROR_CHARACTERS:])
        former(kind, error, trace)

    sys.excepthook = tell


def report_step(step: int) -> None:
    """Tell the watcher that this rank has got as far as ``step``."""
    if _lines:
        _say(step=step)


def is_connected() -> bool:
    """Whether something watches over this process."""
    return bool(_lines)


def has_passed_on(number: int) -> bool:
    """Whether the watcher has passed a signal on, which was sent to it: to all that it watches over."""
    return number in _passed_on


def find_rank() -> int:
    """This process's rank as its launcher says; -1 without one."""
    return next((int(os.environ[name]) for name in _RANKS if os.environ.get(name, "").isdigit()), -1)


def keep_alive(line: socket.socket) -> None:
    """Let a connection fail when the other side's machine answers nothing any more, within half a minute."""
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    options = {"KEEPIDLE": _IDLE, "KEEPINTVL": _EVERY, "KEEPCNT": _TIMES, "USER_TIMEOUT": 30_000}
    for name, value in options.items():
        if hasattr(socket, f"TCP_{name}"):  # Linux
            line.setsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_{name}"), value)


def _say(**fields: Any) -> None:
    """Send a line, unless that would wait: training does not stop for a watcher that is slow."""
    for line in _lines:
        try:
            line.send(json.dumps(fields).encode() + b"\n", socket.MSG_DONTWAIT)
        except OSError:
            return


def _leave(leave: Callable[[int], None], status: int) -> None:
    """``os._exit``, by which scripts end whose teardown would hang: with 0 as they should."""
    _say(**({"code": status} if status else {"end": True}))
    leave(status)


def _exit(leave: Callable[..., Any], *given: Any) -> None:
    """``sys.exit``, of which nothing is left to be seen when the interpreter ends."""
    _codes.append(given[0] if given and isinstance(given[0], int) else int(given[:1] not in ((), (None,))))
    leave(*given)


def _say_end() -> None:
    _say(end=True, **({"code": _codes[-1]} if _codes and _codes[-1] else {}))


def _listen(line: socket.socket, watcher: str) -> None:
    """Pass signals on until the line ends, and then end this process."""
    try:
        for text in line.makefile("rb"):
            number = int(json.loads(text)["signal"])
            _passed_on.add(number)
            os.kill(os.getpid(), number)
        why = "has gone"
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = f"is lost ({error})"
    if line in _lines:
        sys.stderr.write(f"deepspeed_ucp: rank {find_rank()}: the watcher at {watcher} {why}: this rank ends.\n")
        sys.stderr.flush()
        os.kill(os.getpid(), signal.SIGKILL)


def _let_go() -> None:
    """In a forked child: the line is its parent's."""
    for line in _lines:
        os.close(line.detach())  # its listener's file object would keep it open
    _lines.clear()
