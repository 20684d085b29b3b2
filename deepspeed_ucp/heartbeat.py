"""A rank's connection to what watches over its launch: tells of every step, and ends the rank with the watcher.

``ds_ucp supervise`` and ``ds_ucp torchrun`` name the watcher in the environment; without one nothing here happens.
Importing the package notes it and opens nothing: the connection opens when DeepSpeed has been imported, or with the
first thing to be told. It is one TCP connection: the launch's key, then JSON lines. The rank tells who it is, its
steps and their phases, the seconds of a step that it took by itself, what ended it; the watcher tells signals, and asks
where the rank is. A connection that ends, or that nobody answers for half a minute, ends the rank with SIGKILL: no rank
trains on for a launch that has been given up.

Where the environment has the package imported (``DEEPSPEED_UCP=1``), launchers import it too, since they import
DeepSpeed: a process without a rank then leaves the watcher to those that it starts, unless it makes an engine.
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
import time
import traceback
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any

from .warm import learning
from .whereabouts import CollectiveCounter, find_whereabouts

VARIABLE = "DEEPSPEED_UCP_LIFELINE"
"""Environment: ``host:port:key`` of the watcher; the key is that of one launch, with the network that it is in."""

_IDLE, _EVERY, _TIMES = 10, 5, 4
"""Seconds without data after which the other side's machine is asked, seconds between questions, and questions."""

_OWN_RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")
_RANKS = (*_OWN_RANKS, "SLURM_PROCID")
"""Variables with a rank; Slurm's is one of a launcher where ``srun`` starts a launcher on each node."""

_SIZES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMIX_SIZE", "PMI_SIZE", "SLURM_NTASKS")
_ERROR_CHARACTERS, _LINE_CHARACTERS = 8000, 300

STARTED = 19
"""Of what :func:`read_stat` tells: when a process was started, in the system's ticks since it began."""


class _Watcher:
    """What watches over this process; a forked one has none.

    Attributes:
        address: where it is to be reached; empty where none is, or it is being reached.
        connection: to it, once there is something to tell.
        passed_on: signals that it has passed on.
        code: what ``sys.exit`` was called with.
    """

    def __init__(self) -> None:
        self.address, self.code, self.passed_on = "", 0, set[int]()
        self.connection: socket.socket | None = None


class _OwnTime:
    """The seconds of a step that this rank takes by itself: those outside of a step's phases, and in forward passes.

    All ranks take the same time for a step, because they wait for each other. Here no stretch counts in which the rank
    has begun a collective: it may have waited. Of a GPU these are the host's seconds, not the device's.

    Attributes:
        step: the last one that has ended.
        phase: that the rank is in.
    """

    def __init__(self) -> None:
        self.step: int | None = None
        self.phase: str | None = None
        self._began = self._since = time.monotonic()
        self._own, self._collectives, self._counter = 0.0, 0, CollectiveCounter()

    def turn(self, phase: str | None) -> None:
        """Another phase begins."""
        now, collectives = time.monotonic(), self._counter.count()
        if self.phase in _ALONE and collectives == self._collectives:
            self._own += now - self._since
        self.phase, self._since, self._collectives = phase, now, collectives

    def end_step(self, step: int) -> dict[str, float]:
        """A step has ended: its seconds, ``work`` those by itself; empty for the first one, which has the start in it,
        and where it is the one that was told before."""
        if step == self.step:
            return {}
        self.turn(self.phase)
        told = {"work": round(self._own, 6), "seconds": round(self._since - self._began, 6)}
        self.step, is_first, self._began, self._own = step, self.step is None, self._since, 0.0
        return {} if is_first else told


_ALONE = (None, "forward")
"""Phases in which a rank may be by itself."""

_watcher, _own_time = _Watcher(), _OwnTime()


def note_watcher(*, by_itself: bool = False) -> None:
    """Take the watcher from the environment, so that what this process starts has none, and let it be told of this
    process's end. Opens nothing.

    Args:
        by_itself: nothing says yet that this is a rank, as no script asks for it: its variables are to.
    """
    if by_itself and not any(name in os.environ for name in _OWN_RANKS):
        return
    told = os.environ.pop(VARIABLE, None)
    if told is None or _watcher.address or _watcher.connection:
        return
    _watcher.address = told
    os.register_at_fork(after_in_child=_let_go)
    atexit.register(_say_end)
    vars(os)["_exit"] = partial(_leave, os._exit)
    vars(sys)["exit"] = partial(_exit, sys.exit)
    sys.excepthook = partial(_say_error, sys.excepthook)


def connect() -> None:
    """Connect to the watcher, if there is one: once, and where it cannot be reached never, with a word on stderr.

    Where it has ended, this process does: nothing listens at an address of the machine that both are on.
    """
    told, _watcher.address = _watcher.address, ""
    if not told:
        return
    host, port, key = told.rsplit(":", 2)
    try:
        connection = socket.create_connection((host, int(port)), timeout=15)
    except OSError as error:
        if isinstance(error, ConnectionRefusedError) and key.endswith(f"@{find_network()}"):
            _end(f"the watcher at {host}:{port} has ended before")
        sys.stderr.write(
            f"deepspeed_ucp: the watcher at {host}:{port} cannot be reached ({error}): going on without.\n"
        )
        return
    connection.settimeout(None)
    keep_alive(connection)
    with contextlib.suppress(OSError):
        connection.sendall(f"{key}\n".encode())
    _watcher.connection = connection
    pid = os.getpid()
    started = (read_stat(pid) or [0] * (STARTED + 1))[STARTED]
    world = next((int(os.environ[name]) for name in _SIZES if os.environ.get(name, "").isdigit()), 0)
    whose = {"rank": find_rank(), "world": world, "pid": pid, "host": socket.gethostname()}
    _say(hello={**whose, "started": started})
    threading.Thread(target=_listen, args=(connection, f"{host}:{port}"), daemon=True, name="heartbeat").start()


def report_step(step: int) -> None:
    """Tell the watcher that this rank has got as far as ``step``."""
    _say(step=step, **(_own_time.end_step(step) if is_watched() else {}))
    learning.tell()


def report_phase(name: str | None) -> None:
    """Tell the watcher in which phase of a step this rank is (:mod:`deepspeed_ucp.beacon`); None for none."""
    if is_watched():
        _own_time.turn(name)
    _say(phase=name)


def is_watched() -> bool:
    """Whether something watches over this process."""
    return bool(_watcher.address or _watcher.connection)


def has_passed_on(number: int) -> bool:
    """Whether the watcher has passed a signal on, which was sent to it: to all that it watches over."""
    return number in _watcher.passed_on


def read_stat(pid: int) -> list[Any] | None:
    """What the system tells of a process behind its name, its state first, then numbers (Linux); None where it is not
    there any more."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as stream:
            state, *numbers = stream.read().rpartition(")")[2].split()
    except (OSError, ValueError):
        return None
    return [state, *map(int, numbers)]


def find_rank() -> int:
    """This process's rank as its launcher says; -1 without one."""
    return next((int(os.environ[name]) for name in _RANKS if os.environ.get(name, "").isdigit()), -1)


def find_network() -> str:
    """The machine, as long as it runs, and its network in which this process is: a container's is another (Linux)."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as stream:
            return f"{stream.read(8)}-{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return f"of {os.getpid()}"  # nobody else's


def keep_alive(connection: socket.socket) -> None:
    """Let a connection fail when the other side's machine answers nothing any more, within half a minute."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    options = {"KEEPIDLE": _IDLE, "KEEPINTVL": _EVERY, "KEEPCNT": _TIMES, "USER_TIMEOUT": 30_000}
    for name, value in options.items():
        if hasattr(socket, f"TCP_{name}"):  # Linux
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_{name}"), value)


def _say(**fields: Any) -> None:
    """Send a JSON line, unless that would wait: training does not stop for a watcher that is slow."""
    connect()
    if _watcher.connection is not None:
        with contextlib.suppress(OSError):
            _watcher.connection.send(json.dumps(fields).encode() + b"\n", socket.MSG_DONTWAIT)


def _say_error(
    former: Callable[..., Any], kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    module = "" if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}."
    line = f"{module}{kind.__qualname__}: {str(error).strip().partition(chr(10))[0]}"[:_LINE_CHARACTERS]
    _say(error="".join(traceback.format_exception(kind, error, trace))[-_ERROR_CHARACTERS:], line=line)
    former(kind, error, trace)


def _leave(leave: Callable[[int], None], status: int) -> None:
    """``os._exit``, by which scripts end whose teardown would hang: with 0 as they should."""
    if status:
        _say(code=status)
    elif _watcher.connection is not None:
        _say(end=True)
    leave(status)


def _exit(leave: Callable[..., Any], *given: Any) -> None:
    """``sys.exit``, of which nothing is left to be seen when the interpreter ends."""
    _watcher.code = given[0] if given and isinstance(given[0], int) else int(given[:1] not in ((), (None,)))
    leave(*given)


def _say_end() -> None:
    """Of a process that has told nothing and has not failed, there is nothing to tell."""
    if _watcher.code or _watcher.connection is not None:
        _say(end=True, **({"code": _watcher.code} if _watcher.code else {}))


def _tell_where() -> None:
    try:
        where = find_whereabouts()
    except Exception:  # noqa: BLE001 - frames change while they are looked at: the connection is worth more
        where = {"stack": [], "own": None, "waits": "what cannot be told", "collectives": {}}
    _say(where=where)


def _listen(connection: socket.socket, watcher: str) -> None:
    """Pass signals on, and tell where this rank is, until the connection ends, and then end this process."""
    try:
        for text in connection.makefile("rb"):
            told = json.loads(text)
            if "ask" in told:
                _tell_where()
                continue
            number = int(told["signal"])
            _watcher.passed_on.add(number)
            os.kill(os.getpid(), number)
        why = "has gone"
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = f"is lost ({error})"
    if connection is _watcher.connection:
        _end(f"the watcher at {watcher} {why}")


def _end(why: str) -> None:
    sys.stderr.write(f"deepspeed_ucp: rank {find_rank()}: {why}: this rank ends.\n")
    sys.stderr.flush()
    os.kill(os.getpid(), signal.SIGKILL)


def _let_go() -> None:
    """In a forked child: the connection is its parent's."""
    if _watcher.connection is not None:
        os.close(_watcher.connection.detach())  # its listener's file object would keep it open
    _watcher.address, _watcher.connection = "", None
