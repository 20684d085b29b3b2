"""The process that takes a node's saves from memory to their places; it goes on when the ranks are gone.

``python -m deepspeed_ucp.saves.writer FOLDER``. The first line on standard input has its settings as JSON; each further
one says that there is a new save, the end that no more will come: what is pending is finished then, and it ends.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import select
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO, cast

from ..errors import UcpError, escape
from ..io.store import set_storage_options
from .memory import LOCK, Destination, Job, Snapshot, drop_unwanted, is_held
from .places import end_save, is_replaced, prune_place, write_save

logger = logging.getLogger("deepspeed_ucp")

_AGAIN = 10.0
"""Seconds until a place that failed is tried again, where no new save comes before."""

_AGAIN_AT_END = 1.0
"""The same when no new save can come."""


def main(folder: str) -> int:
    """Write until nothing is pending and nobody will save any more; the exit code is 1 where something is left."""
    logging.basicConfig(format=f"[%(asctime)s] [%(levelname)s] [deepspeed_ucp] writer of {folder}: %(message)s")
    os.nice(10)  # training comes first
    settings, job = json.loads(sys.stdin.readline()), Job(folder)
    if settings["storage_options"] is not None:
        set_storage_options(settings["storage_options"])
    with open(os.path.join(folder, LOCK), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one that is gone on with after its ranks' end may be at work still
        return SaveWriter(job, settings["keep"], settings["wait_s"]).run()


def start_writer(job: Job, settings: Mapping[str, Any]) -> BinaryIO:
    """Start the process that writes a job's saves, and is no child of this one; what to tell it by.

    Args:
        settings: ``keep``, ``wait_s`` and ``storage_options``, which may hold secrets and are told by a pipe alone.
    """
    command = [sys.executable, "-m", __name__, job.folder]
    with open(os.path.join(job.folder, "log"), "ab") as log:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True)
    lines = cast("BinaryIO", process.stdin)
    lines.write(json.dumps(dict(settings)).encode() + b"\n")
    lines.flush()
    return lines


def is_locked(job: Job) -> bool:
    """Whether a job's writer lives."""
    return is_held(os.path.join(job.folder, LOCK))


class SaveWriter:
    """Writes the saves of one job's folder.

    Args:
        keep: whole saves that stay in memory.
        wait: seconds that other nodes may take longer, and for which a place that fails is tried again at the end.
    """

    def __init__(self, job: Job, keep: int, wait: float) -> None:
        self.job, self.keep, self.wait = job, keep, wait
        self._told = dict[str, str]()

    def run(self) -> int:
        """Until standard input ends, and for what is pending then."""
        while True:
            is_clean = self.write_pending()
            ready, *_ = select.select([sys.stdin], [], [], None if is_clean else _AGAIN)
            if ready and not os.read(sys.stdin.fileno(), 4096):
                return self._finish()

    def _finish(self) -> int:
        end = time.monotonic() + self.wait
        while not self.write_pending():
            if time.monotonic() > end:
                return 1
            time.sleep(_AGAIN_AT_END)
        return 0

    def write_pending(self) -> bool:
        """Write the newest save that each place lacks, and drop older ones there; whether none failed.

        Of those that ``latest`` is to name, and of the others, each the newest: one is not in the other's place.
        """
        while True:
            saves = self.job.list_saves()
            pending = [(save, place) for save in reversed(saves) for place in save.list_pending()]
            newest = {(place.folder, save.latest): (save, place) for save, place in reversed(pending)}
            wanted = [(save, place) for save, place in newest.values() if not is_replaced(save)]
            kept = {(save.number, place.folder) for save, place in wanted}
            spare = [(save, place) for save, place in pending if (save.number, place.folder) not in kept]
            is_clean = all([self._drop(*each) for each in spare] + [self._write(*each) for each in wanted])
            for save in drop_unwanted(self.job.list_saves(), self.keep):
                save.spare()
            if not is_clean or not pending:
                return is_clean

    def _drop(self, save: Snapshot, place: Destination) -> bool:
        try:
            save.note_done(place, "")
        except (UcpError, OSError) as error:  # memory is full
            self._warn(place.folder, str(error))
            return False
        logger.warning("%s is too slow: %s is dropped for a newer save", place.folder, save.tag)
        return True

    def _write(self, save: Snapshot, place: Destination) -> bool:
        try:
            digest = write_save(save, place, self.wait)
            save.note_done(place, digest)
            if save.node == 0:  # what the others have written is no whole save yet
                self._note_written(save, place, digest)
        except (UcpError, OSError) as error:
            self._warn(place.folder, str(error))
            return False
        self._told.pop(place.folder, None)
        return True

    def _note_written(self, save: Snapshot, place: Destination, digest: str) -> None:
        end_save(save, place)
        written = self.job.read_written()
        held = {tag: each for tag, each in written.get(place.folder, {}).items() if tag != save.tag}
        held[save.tag] = digest
        self.job.note_written({**written, place.folder: held})
        self.job.note_written({**written, place.folder: prune_place(place, held)})

    def _warn(self, place: str, why: str) -> None:
        """Once for each fault of a place."""
        if self._told.get(place) != why:
            self._told[place] = why
            logger.warning("%s: not written, to be tried again: %s", place, escape(why))


def list_late(saves: Sequence[Snapshot]) -> dict[str, int]:
    """By place how many of a job's saves it does not have yet."""
    found: dict[str, int] = defaultdict(int)
    for save in saves:
        for place in save.list_pending():
            found[place.folder] += 1
    return dict(found)


if __name__ == "__main__":
    if os.fork():  # no child of a rank's: a launcher that ends it would end this process too
        os._exit(0)
    sys.exit(main(*sys.argv[1:]))
