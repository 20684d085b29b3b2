"""The process that writes a node's saves from memory to their destinations.

It outlives the ranks, and runs as ``python -P -m deepspeed_ucp.saves.writer FOLDER``. The first line on standard input
has its settings as JSON; each further line announces a new save. At the end of the input it writes the pending saves
and exits. If the last line is :data:`FINISHED`, it also frees the memory of saves that every destination has.
"""

from __future__ import annotations

import fcntl
import json
import logging
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from ..errors import DiskFullError, StorageError, UcpError, escape
from ..io.paths import is_url
from ..io.store import set_storage_options
from .budget import is_safe, recycle_unneeded
from .copies import Replicator
from .destinations import (
    WrittenTag,
    delete_coordination_files,
    delete_old_tags,
    find_permanent_error,
    has_begun,
    has_sealed_part,
    is_replaced,
    wait_until,
    write_save,
)
from .memory import FINISHED, Job, SavePart, list_pending_tags

logger = logging.getLogger("deepspeed_ucp")

_AGAIN = 10.0
"""Seconds until a destination that failed is tried again."""


def main(folder: str) -> int:
    """Write saves until standard input ends; return 1 if a save could not be written."""
    logging.basicConfig(format=f"[%(asctime)s] [%(levelname)s] [deepspeed_ucp] writer of {folder}: %(message)s")
    os.nice(10)  # training comes first
    with open(sys.stdin.fileno(), "rb", buffering=0, closefd=False) as lines:  # leaves further lines unread
        settings, job = json.loads(lines.readline()), Job(folder)
    if settings["storage_options"] is not None:
        set_storage_options(settings["storage_options"])
    fcntl.flock(sys.stdout.fileno(), fcntl.LOCK_EX)  # the log; waits for an older writer of this job
    writer, copies = SaveWriter(job, settings["wait_s"]), settings.get("neighbours")
    if copies is None:
        code = writer.run()
    else:
        with socket.socket(fileno=copies["listener"]) as listener:
            replicator = Replicator(job, copies, listener, settings["wait_s"])
            replicator.start()
            code = writer.run(replicator.end)
            replicator.finish()
    writer.free_finished()
    # A child that the starter has forked meanwhile has the log as well.
    fcntl.flock(sys.stdout.fileno(), fcntl.LOCK_UN)
    return code


class SaveWriter:
    """Writes the saves of one job, to each destination in a separate thread.

    Args:
        wait: seconds to wait for other nodes, and to retry a failing destination after the end of the job.
    """

    def __init__(self, job: Job, wait: float) -> None:
        self.job, self.wait = job, wait
        self.lock = threading.RLock()  # guards the folders and records in memory
        self.end = math.inf  # time when retries end
        self._writers, self._is_finished = dict[str, DestinationWriter](), False
        for save in job.list_saves():
            for destination in save.destinations:
                if destination in save.read("done") and not is_url(destination):
                    with suppress(OSError):
                        delete_coordination_files(save, destination)  # a killed writer may have left coordination files

    def run(self, note_end: Callable[[], None] = lambda: None) -> int:
        """Write saves until standard input ends, then pending ones; return the exit code."""
        while True:
            with suppress(OSError):
                self.free()  # snapshots without a destination
            for writer in self.list_writers():
                if writer.ident is None:
                    writer.start()
            if self.end < math.inf:
                break
            if line := os.read(sys.stdin.fileno(), 4096):
                self._is_finished = line.endswith(FINISHED)
            else:
                self.end = time.monotonic() + self.wait
            for writer in self._writers.values():
                writer.wake.set()
        note_end()
        for writer in self._writers.values():
            writer.join()
        self.job.drop_spare()
        return 1 if list_pending_tags(self.job.list_saves()) else 0

    def list_writers(self) -> list[DestinationWriter]:
        """Return the writers of the destinations that lack saves."""
        with self.lock:
            late = list_pending_tags(self.job.list_saves())
            self._writers |= {folder: DestinationWriter(self, folder) for folder in late if folder not in self._writers}
            return [self._writers[folder] for folder in late]

    def free(self) -> None:
        with self.lock:
            recycle_unneeded(self.job, is_agreed=False)

    def free_finished(self) -> None:
        """Free the memory of a normally ended job if every destination has its saves.

        A node other than the first waits for the seal: a save without its part would not be complete in memory.
        """

        def look() -> bool | None:
            return all(map(is_safe, newest)) or None

        saves = self.job.list_saves()
        newest = [save for save in saves if not any(other.is_written() and other.supersedes(save) for other in saves)]
        if self._is_finished and newest and all(save.is_written() for save in newest):
            with suppress(StorageError):
                wait_until(look, self.wait, lambda: "the first node has not sealed the last save", self.job.folder)
                self.job.remove()


class DestinationWriter(threading.Thread):
    """Writes saves to one destination of a job."""

    def __init__(self, writer: SaveWriter, folder: str) -> None:
        super().__init__(name=f"ucp-{folder}")
        self.writer, self.job, self.folder, self.wake = writer, writer.job, folder, threading.Event()
        self._written = dict[str, WrittenTag]()  # in the order of writing
        self._logged = dict[str, str]()  # faults by tag
        self._refused = set[int]()  # numbers of those that are given up, also if memory was full for the record

    def run(self) -> None:
        """Write new saves until the job ends; retry failures after pauses."""
        while True:
            self.wake.clear()
            is_last = self.writer.end < math.inf
            is_written = self.write_all()
            left = self.writer.end - time.monotonic()
            if is_last and (is_written or left <= 0):
                return
            self.wake.wait(None if is_written else min(_AGAIN, left))

    def write_all(self) -> bool:
        """Write all pending saves in order; return True if none must be retried."""
        try:
            while True:
                begun = self._wait_for_first()
                with self.writer.lock:
                    chosen = self._choose(begun)
                if not chosen:
                    return True
                written = [self._write(save) for save in chosen]
                if not all(written):
                    return False
        except Exception as error:  # noqa: BLE001 - every fault of a destination is retried
            self._warn(str(error) or repr(error))
            return False

    def _list_pending(self) -> list[SavePart]:
        """Return the pending saves in order, without those that are refused."""
        with self.writer.lock:
            saves = [save for save in self.job.list_saves() if save.number not in self._refused]
            return [save for save in saves if self.folder in save.list_pending()]

    def _wait_for_first(self) -> set[int]:
        """Return the numbers of the pending saves that the first node has begun to write."""

        def look() -> set[int] | None:
            pending = self._list_pending()
            begun = {save.number for save in pending if save.node == 0 or has_begun(save, self.folder)}
            return begun if begun or not pending else None

        why = "the first node has begun none of the pending saves"
        try:
            return wait_until(look, self.writer.wait, lambda: why, self.folder)
        except StorageError:  # the first node may have finished one that is not recorded here
            if not (ended := {save.number for save in self._list_pending() if has_sealed_part(save, self.folder)}):
                raise
            return ended

    def _choose(self, begun: set[int]) -> list[SavePart]:
        """Return the saves to write next, in order; drop replaced ones."""
        pending = self._list_pending()
        newer = [save for save in pending if save.number in begun]
        spare = [
            save
            for save in pending
            if any(other.number > save.number and other.tag == save.tag for other in newer)
            or (save.number in begun and is_replaced(save))
        ]
        for save in spare:
            save.note("done", {self.folder: ""})
            logger.warning("%s: %s not written, a later save has the same tag", self.folder, save.tag)
        if spare:
            self.writer.free()
        return [save for save in newer if save not in spare]

    def _write(self, save: SavePart) -> bool:
        """Write a save; return True if it is written or given up, False to retry."""
        try:
            # `latest` of the destination may have named a later save.
            is_overtaken = any(entry.number > save.number for entry in self._list_written().values())
            named = replace(save, latest=save.latest and not is_overtaken)
            mark = write_save(named, self.folder, self.writer.wait)
            if save.node == 0:  # the save is complete when the first node has sealed it
                written = dict(self._list_written())
                former = written.pop(save.tag, WrittenTag("", 0))
                number = save.number if save.latest else former.number
                self._record_written({**written, save.tag: WrittenTag(mark, number)})
            with self.writer.lock:
                save.note("done", {self.folder: mark})
            if save.node == 0:
                with suppress(OSError):  # the save is complete: such files go with later saves, or with the tag
                    delete_coordination_files(save, self.folder)
                delete_old_tags(self.folder, save.destinations[self.folder], self._written, self._record_written)
        except Exception as error:  # noqa: BLE001 - other saves may still be written there
            why = str(error) or repr(error)
            fault = find_permanent_error(save, error, is_repeated=self._logged.get(save.tag) == why)
            why = str(fault or why)
            if fault is None:
                self._warn(why, save.tag)
            else:  # the save stays in memory
                self._refused.add(save.number)
                logger.warning("%s: %s is not written, and no retry can mend this: %s", self.folder, save.tag, why)
            with self.writer.lock, suppress(OSError, UcpError):  # memory is full
                save.note("failed" if fault is None else "refused", {self.folder: escape(why)})
            return fault is not None
        self.writer.free()
        self._logged.clear()
        return True

    def _list_written(self) -> dict[str, WrittenTag]:
        """Return the tags that this job has written, in the order of writing."""
        if not self._written:
            recorded = self.job.read("written").get(self.folder, {})
            self._written = {tag: WrittenTag(*entry) for tag, entry in recorded.items()}
        return self._written

    def _record_written(self, written: dict[str, WrittenTag]) -> None:
        self._written = written
        with self.writer.lock, suppress(DiskFullError):  # it is recorded with the next save
            self.job.note("written", {**self.job.read("written"), self.folder: written})

    def _warn(self, why: str, tag: str = "a save") -> None:
        if self._logged.get(tag) != why:
            self._logged[tag] = why
            logger.warning("%s: %s not written, to be tried again: %s", self.folder, tag, escape(why))


if __name__ == "__main__":
    if os.fork():  # not a child of the rank: a launcher that ends the rank's children would end the writer too
        os._exit(0)
    sys.exit(main(*sys.argv[1:]))
