"""Timers for torch elastic's agent, which kills a rank that makes no progress.

An agent with ``TORCHELASTIC_ENABLE_FILE_TIMER=1`` reads timers from a named pipe. A rank sets its timer at the end of
its first step and renews it with each phase of a step. Loads and saves take as long as they take: the timer is off in
them, and at exit.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import time

from . import Listener

_SCOPE = "deepspeed_ucp"

_RENEWALS = 20
"""A timer is renewed at most this often in its length."""

_UNTIMED = ("load", "save")
"""Phases without a timer."""

_limit = 0.0  # seconds; 0 sets no timer


def set_limit(seconds: float) -> None:
    """Set the timer's limit; with several engines the longest limit applies."""
    global _limit  # noqa: PLW0603 - one timer for the process
    _limit = max(_limit, seconds)


class FileTimer(Listener):
    """The timer of one rank, in the named pipe of the agent's timer server."""

    def __init__(self, path: str) -> None:
        # Imported before any expiration is computed: the import of torch takes seconds.
        from torch.distributed.elastic.timer.file_based_local_timer import FileTimerRequest

        self.path, self.request = path, FileTimerRequest
        self.has_trained = False
        self.untimed = 0
        self.renewed: float | None = None
        atexit.register(self.end)

    def report_step(self, step: int, total: int | None) -> None:
        self._renew()

    def enter(self, phase: str) -> None:
        if phase in _UNTIMED:
            self.untimed += 1
            self._release()
        self._renew()

    def leave(self, phase: str) -> None:
        self.untimed -= phase in _UNTIMED
        self.has_trained |= phase == "step"
        self._renew()

    def end(self) -> None:
        self.has_trained = False
        with contextlib.suppress(OSError):  # the agent has ended
            self._release()

    def _renew(self) -> None:
        now = time.monotonic()
        if not self.has_trained or self.untimed or not _limit:
            return
        if self.renewed is None or now - self.renewed >= _limit / _RENEWALS:
            self._send(time.time() + _limit)
            self.renewed = now

    def _release(self) -> None:
        if self.renewed is not None:
            self.renewed = None
            self._send(-1)

    def _send(self, expiration: float) -> None:
        """Set both timers of this rank; a negative expiration releases them.

        The first timer has the agent kill the rank. After that the agent sends the signal of the last expired timer to
        itself. The second timer follows the first one in that order, so this signal is a harmless SIGCONT.
        """
        targets = {os.getpid(): signal.SIGKILL, -os.getpgrp(): signal.SIGCONT}
        requests = [self.request(pid, _SCOPE, expiration, number) for pid, number in targets.items()]
        pipe = os.open(self.path, os.O_WRONLY | os.O_NONBLOCK)
        try:
            with contextlib.suppress(BlockingIOError):  # a stalled agent has not read the last ones; later ones follow
                os.write(pipe, "".join(f"{request.to_json()}\n" for request in requests).encode())
        finally:
            os.close(pipe)


find = FileTimer
