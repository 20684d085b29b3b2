"""Starts the writer process of a job, and announces saves to it."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, BinaryIO, cast

from ..children import block
from ..config import SaveOptions, UniversalConfig
from .memory import LOG, Job, describe_pending, has_writer, list_dead, list_pending_tags
from .neighbours import Neighbours

logger = logging.getLogger("deepspeed_ucp")

POLLED = 0.05
"""Seconds between polls by a process that waits for a writer."""

_PYTHONPATH = "PYTHONPATH"
_SOURCE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
"""The folder with this package."""


class WriterPipe:
    """The pipe to the writer of this process's job; starts the writer when needed."""

    def __init__(self, job: Job, config: UniversalConfig) -> None:
        self.job, self.config = job, config
        self.neighbours: Neighbours | None = None
        self._pipe: BinaryIO | None = None

    def notify(self) -> None:
        """Notify the writer of a save; start it if needed; log a failed start."""
        try:
            if self._pipe is not None:
                self._pipe.write(b"\n")
                self._pipe.flush()
                return
        except OSError:  # it was killed
            self.close()
        try:
            self._pipe = start_writer(self.job, self.config, self.neighbours)
        except OSError as error:
            logger.warning("%s: saves stay in memory until a writer can be started: %s", self.job.folder, error)

    def close(self, last: bytes = b"") -> None:
        """Send a last line and close the pipe; the writer exits after all pending saves."""
        pipe, self._pipe = self._pipe, None
        if pipe is not None:
            with suppress(OSError):
                pipe.write(last)
            with suppress(OSError):
                pipe.close()


def start_writer(job: Job, config: UniversalConfig, neighbours: Neighbours | None = None) -> BinaryIO:
    """Start the process that writes a job's saves, detached from this one.

    It imports the same package as this process, and no file of the working directory, which other users may write to:
    ``-P``, and no relative entries of ``PYTHONPATH``. It inherits the lock of the log: :func:`has_writer` is True from
    here to its end. If an older writer has the lock, it waits for that one to end.

    Args:
        config: its ``storage_options`` may hold secrets and go through the pipe only.
        neighbours: nodes with copies of the saves; their secret goes through the pipe too.

    Returns:
        The pipe to its standard input.
    """
    command = [sys.executable, "-P", "-m", f"{__package__}.writer", job.folder]
    searched = [_SOURCE, *filter(os.path.isabs, os.environ.get(_PYTHONPATH, "").split(os.pathsep))]
    environment = {**os.environ, _PYTHONPATH: os.pathsep.join(searched)}
    wait, passed = (config.save or SaveOptions()).wait_s, list[int]()
    settings: dict[str, Any] = {"wait_s": wait, "storage_options": config.storage_options}
    if neighbours is not None and neighbours.listener is not None:
        passed = [neighbours.listener.fileno()]
        settings["neighbours"] = {**neighbours.settings, "listener": passed[0]}
    with open(os.path.join(job.folder, LOG), "ab") as log:
        with suppress(BlockingIOError):
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Slurm signals the writer too, but it must write the saves that the ranks make because of the signal.
        with block({signal.SIGTERM, signal.SIGUSR1}):
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment, start_new_session=True,
                pass_fds=passed,
            )  # fmt: skip
    lines = cast("BinaryIO", process.stdin)
    lines.write(json.dumps(settings).encode() + b"\n")
    lines.flush()
    return lines


def finish_dead_jobs(root: str, config: UniversalConfig) -> None:
    """Start writers for dead jobs' pending saves; remove jobs without a complete save."""
    for job in list_dead(root):
        job.drop_spare()
        if list_pending_tags(job.list_saves()):
            try:
                start_writer(job, config).close()
            except OSError as error:
                logger.warning("%s: not written on: %s", job.folder, error)
        elif job.is_empty() and not has_writer(job):
            job.remove()


def wait_until_written(
    list_jobs: Callable[[], list[Job]],
    seconds: float,
    *,
    is_wanted: Callable[[str], bool] = lambda _: True,
    is_enough: Callable[[], bool] | None = None,
) -> bool:
    """Wait at most ``seconds`` until jobs have no pending saves or no running writer.

    Args:
        is_wanted: returns True for a destination whose saves are waited for.
        is_enough: if given, ends the wait once it returns True, and each change of the pending saves restarts the
            ``seconds``.

    Returns:
        True if every destination has its saves.
    """
    end, before = time.monotonic() + seconds, ""
    while True:
        jobs = {job: has_writer(job) for job in list_jobs()}  # read first: a writer may write its last save and end
        late = {job: text for job in jobs if (text := describe_pending(job.list_saves(), is_wanted))}
        if not late:
            return True
        if is_enough is not None and is_enough():
            return False
        pending, now = "; ".join(late.values()), time.monotonic()
        if not before:
            logger.info("waiting for saves to be written, %.0f s at most: %s", seconds, pending)
        elif is_enough is not None and pending != before:
            end = now + seconds
        before = pending
        if now > end or not any(jobs[job] for job in late):
            logger.warning("still to be written: %s; see %s/log", pending, next(iter(late)).folder)
            return False
        time.sleep(POLLED)
