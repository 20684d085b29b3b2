"""Keep a rank's child processes alive when a signal goes to all processes.

Launchers and Slurm signal every process of a rank. A data-loader worker would die of the signal, and torch would raise
an error in the rank before the rank can save.

A protected child (of ``multiprocessing``) blocks the signals. A thread of it waits for them. A signal from the parent
(``Process.terminate``) has its usual effect; any other one takes effect after the parent has ended. A signal for which
the child sets a handler is no longer blocked. Programs (``subprocess``) and children of ``os.fork`` are not protected.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import util
from multiprocessing.process import BaseProcess
from typing import Any

_MARK = "_deepspeed_ucp_signals"
"""Attribute of a protected process's object. Unpickling it protects a child that is not forked."""

_EXIT_TIMEOUT = 5.0
"""Seconds to wait for each daemonic child at the parent's exit before SIGKILL is sent."""

_signals: set[int] = set()
"""The signals that children are protected from; empty if none is protected."""

_protected_pid = 0
"""This process, if it is protected itself."""

_thread_state = threading.local()
"""``starting``: this thread starts a protected child."""

_handled: set[int] = set()
"""The signals for which this protected process has set a handler."""

_programs: set[int] = set()
"""Process ids of the programs of ``multiprocessing`` itself that have the signals blocked, such as its fork server."""


@contextmanager
def block(signals: Iterable[int]) -> Iterator[None]:
    """Context that blocks signals in this thread, and in programs that it starts."""
    former = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)


def protect(signals: Iterable[int]) -> None:
    """Protect future processes of ``multiprocessing``; none inherits a handler."""
    if BaseProcess.start is not _start:
        BaseProcess.start = _start  # type: ignore[method-assign,assignment]
        util.spawnv_passfds = _start_program  # type: ignore[assignment]
        util.register_after_fork(_protect_this_process, lambda begin: begin(os.getppid(), _signals))
        util.Finalize(None, _end_daemons, exitpriority=0)
    _signals.update(signals)


def list_unprotected() -> list[str]:
    """Name the live children of ``multiprocessing`` that started without protection."""
    names = [child.name for child in multiprocessing.active_children() if not hasattr(child, _MARK)]
    module = sys.modules.get("multiprocessing.forkserver")
    server = module and module._forkserver._forkserver_pid
    return [*names, *(["multiprocessing's fork server"] if server and server not in _programs else [])]


class _Mark:
    """Protects the process that unpickles it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _protect_this_process, (os.getpid(), tuple(_signals))


_original_start = BaseProcess.start


@functools.wraps(_original_start)
def _start(process: BaseProcess) -> None:
    """Start a process with the signals blocked, so that they wait for its thread."""
    if not _signals:
        return _original_start(process)
    with block(_signals):
        setattr(process, _MARK, _Mark())
        _thread_state.starting = True
        try:
            _original_start(process)
        finally:
            _thread_state.starting = False
    return None


_original_spawnv_passfds = util.spawnv_passfds


def _start_program(*args: Any) -> int:
    """Start a program with the signals blocked; the tracker unblocks SIGTERM here."""
    with block(_signals):
        pid = _original_spawnv_passfds(*args)
    _programs.add(pid)
    return pid


def _protect_this_process(parent: int, signals: Iterable[int]) -> None:
    """Block signals here, in a process just started, and handle them in a thread."""
    global _protected_pid  # noqa: PLW0603 - one for the process
    _thread_state.starting = False
    if not signals or _protected_pid == os.getpid():
        return
    _protected_pid = os.getpid()
    _handled.clear()
    protect(signals)
    signal.pthread_sigmask(signal.SIG_BLOCK, _signals)
    for number in _signals:
        if signal.getsignal(number) != signal.SIG_IGN:
            _original_signal(number, signal.SIG_DFL)
    signal.signal = _set_handler  # type: ignore[assignment]
    subprocess.Popen._execute_child = _execute_child  # type: ignore[attr-defined]
    util.Finalize(None, _end_daemons, exitpriority=0)
    threading.Thread(target=_deliver_signals, args=(set(_signals), parent), name="held signals", daemon=True).start()


def _deliver_signals(signals: set[int], parent: int) -> None:
    """Deliver the parent's signals at once, others when the parent has ended."""
    forked_by, pending = os.getppid(), set[int]()

    def has_parent() -> bool:
        # Under a fork server getppid() does not change, and forked siblings keep the sentinel open: check both.
        process = multiprocessing.parent_process()
        return os.getppid() == forked_by and (process is None or process.is_alive())

    while True:
        received = signal.sigtimedwait(signals, 1.0) if pending else signal.sigwaitinfo(signals)
        alone = not has_parent()
        if alone:
            for number in pending:
                _deliver(number)
            pending.clear()
        if received is None:
            continue
        number = received.si_signo
        if number in _handled:  # the kernel may choose this thread, although the main thread does not block the signal
            signal.pthread_kill(threading.main_thread().ident or 0, number)
        elif alone or received.si_pid in (parent, os.getpid()):
            _deliver(number, from_parent=received.si_pid == parent)
        else:
            pending.add(number)


def _deliver(number: int, *, from_parent: bool = False) -> None:
    data = sys.modules.get("torch.utils.data")
    if from_parent and number == signal.SIGTERM and data is not None and data.get_worker_info() is not None:
        os._exit(0)  # a loader's worker, as torch's handler does: any other code would be an error in the rank
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    signal.raise_signal(number)
    signal.pthread_sigmask(signal.SIG_BLOCK, {number})


def _end_daemons() -> None:
    """End daemonic children: ``multiprocessing`` would wait without a timeout."""
    daemons = [child for child in multiprocessing.active_children() if child.daemon]
    for child in daemons:
        child.terminate()
    for child in daemons:
        with suppress(RuntimeError):  # torch's SIGCHLD handler raises if a worker exits with a non-zero code
            child.join(_EXIT_TIMEOUT)
        if child.is_alive():
            child.kill()


_original_signal = signal.signal


@functools.wraps(_original_signal)
def _set_handler(number: int, handler: Any) -> Any:
    """Set a handler in a protected child, and unblock its signal."""
    former = _original_signal(number, handler)
    if number in _signals:
        _handled.add(number)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    return former


_original_execute_child = subprocess.Popen._execute_child  # type: ignore[attr-defined]


def _execute_child(process: Any, *args: Any, **kwargs: Any) -> None:
    """Start a program with the signals unblocked, as without protection."""
    former = signal.pthread_sigmask(signal.SIG_UNBLOCK, _signals)
    try:
        _original_execute_child(process, *args, **kwargs)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)


def _leave_protection() -> None:
    """Unblock the signals in a child of a bare ``os.fork``, and end its protection."""
    if _signals and not getattr(_thread_state, "starting", False):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _signals)
        _signals.clear()


os.register_at_fork(after_in_child=_leave_protection)
