"""The process that takes a node's saves from memory to their places; it goes on when the ranks are gone.

``python -m deepspeed_ucp.saves.writer FOLDER``. The first line on standard input has its settings as JSON; each further
one says that there is a new save, the end that no more will come: what is pending is finished then, and it ends.
"""

from __future__ import annotations

import fcntl
import json
import logging
import math
import os
import socket
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, BinaryIO, cast

from ..errors import StorageError, UcpError, escape
from ..io.pace import Pace
from ..io.paths import is_url
from ..io.store import set_storage_options
from ..io.threads import map_threads
from ..io.urls import abort_uploads
from .copies import Replicator
from .memory import LOCK, Destination, Job, Snapshot, drop_unwanted, is_held
from .neighbours import Neighbours
from .places import end_save, find_fault, has_begun, is_replaced, is_sealed, prune_place, wait_until, write_save

logger = logging.getLogger("deepspeed_ucp")

Pending = tuple[Snapshot, Destination]
"""A save and a place that lacks it."""

_AGAIN, _AGAIN_AT_END = 10.0, 1.0
"""Seconds until a place that failed is tried again where no new save comes before, and the same when none can come."""

_BY_ITSELF = "\0by itself"
"""Behind a place, what it has of saves that no script has asked for: they do not count among the others."""

_DOUBLED = 5
"""How often they double, with each failure that follows."""


POLLED = 0.05
"""Seconds between looks of who waits for a writer whether it has done what is pending."""

STARTING = 20.0
"""Seconds that a writer may take to start."""


def main(folder: str) -> int:
    """Write until nothing is pending and nobody will save any more; the exit code is 1 where something is left."""
    logging.basicConfig(format=f"[%(asctime)s] [%(levelname)s] [deepspeed_ucp] writer of {folder}: %(message)s")
    os.nice(10)  # training comes first
    settings, job = json.loads(sys.stdin.readline()), Job(folder)
    if settings["storage_options"] is not None:
        set_storage_options(settings["storage_options"])
    with open(os.path.join(folder, LOCK), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one that is gone on with after its ranks' end may be at work still
        writer, told = SaveWriter(job, settings["keep"], settings["wait_s"]), settings.get("neighbours")
        if told is None:
            return writer.run()
        with socket.socket(fileno=told["listener"]) as listener:
            replicator = Replicator(job, told, listener, settings["keep"], settings["wait_s"])
            replicator.start()
            code = writer.run(replicator.end)
            replicator.finish()
        return code


def start_writer(job: Job, settings: Mapping[str, Any], neighbours: Neighbours | None = None) -> BinaryIO:
    """Start the process that writes a job's saves, and is no child of this one; what to tell it by.

    Args:
        settings: ``keep``, ``wait_s`` and ``storage_options``, which may hold secrets and are told by a pipe alone.
        neighbours: that have copies of them; their secret is told there too.
    """
    command, listeners = [sys.executable, "-m", __name__, job.folder], list[int]()
    if neighbours is not None and neighbours.listener is not None:
        listeners = [neighbours.listener.fileno()]
        settings = {**settings, "neighbours": {**neighbours.settings, "listener": listeners[0]}}
    with open(os.path.join(job.folder, "log"), "ab") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True, pass_fds=listeners
        )
    lines = cast("BinaryIO", process.stdin)
    lines.write(json.dumps(dict(settings)).encode() + b"\n")
    lines.flush()
    return lines


def is_locked(job: Job) -> bool:
    """Whether a job's writer lives."""
    return is_held(os.path.join(job.folder, LOCK))


class SaveWriter:
    """Writes the saves of one job's folder, to each place in a thread of its own: none waits for a slower one.

    Args:
        keep: whole saves that stay in memory.
        wait: seconds that other nodes may take longer, and for which a place that fails is tried again at the end.
    """

    def __init__(self, job: Job, keep: int, wait: float) -> None:
        self.job, self.keep, self.wait = job, keep, wait
        self._told = dict[str, str]()
        self._paces = dict[str, Pace]()
        self._refused = set[tuple[int, str]]()  # numbers of saves and places whose fault no retry can mend
        self._busy = defaultdict[str, set[int]](set)  # by place the numbers of the saves that are written
        self._begun = defaultdict[str, set[str]](set)  # by URL the files that another writer may have begun
        for save in job.list_saves():
            for place in filter(lambda each: is_url(each.folder), save.list_pending()):
                self._begun[place.folder].update(save.list_files())
        self._lock = threading.RLock()  # around what memory has and what is noted there
        self._changed, self._news, self._end = threading.Condition(), 0, math.inf

    def run(self, note_end: Callable[[], None] = lambda: None) -> int:
        """Until standard input ends, of which it notes that, and for what is pending then, told of or not."""
        threads, is_last = dict[str, threading.Thread](), False
        while True:
            with suppress(OSError):
                self._free()  # what has no place
            for folder in self._list_places():
                with suppress(OSError):  # memory is full: its thread tells
                    self._drop_older(folder)
                if folder not in threads:
                    threads[folder] = threading.Thread(target=self._serve, args=(folder,), name=f"ucp-{folder}")
                    threads[folder].start()
            if is_last:
                break
            is_last = not os.read(sys.stdin.fileno(), 4096)
            with self._changed:
                self._news += 1
                self._end = time.monotonic() + self.wait if is_last else math.inf
                self._changed.notify_all()
        note_end()
        for thread in threads.values():
            thread.join()
        self.job.drop_spare()
        return 1 if list_late(self.job.list_saves()) else 0

    def _serve(self, folder: str) -> None:
        """Write to a place whenever there is something new, and where that failed after pauses that grow."""
        failures, was_last = 0, False
        while True:
            with self._changed:
                news, is_last = self._news, self._end < math.inf
            failures = 0 if was_last != is_last else failures
            was_last = is_last
            failures = 0 if self._write_place(folder) else failures + 1
            with self._changed:
                left = self._end - time.monotonic()
                if is_last and (not failures or left <= 0):
                    return
                pause = (_AGAIN_AT_END if is_last else _AGAIN) * 2 ** min(failures - 1, _DOUBLED)
                self._changed.wait_for(partial(self._is_new, news), min(pause, left) if failures else None)

    def _is_new(self, news: int) -> bool:
        return self._news != news

    def write_pending(self) -> bool:
        """Write what is pending to all places; whether none failed."""
        places = self._list_places()
        return all(map_threads(self._write_place, places, len(places)))

    def _list_places(self) -> list[str]:
        with self._lock:
            return list(list_late(self.job.list_saves()))

    def _list_pending(self, folder: str) -> list[Pending]:
        """Return the pending saves of a place, the newest first, without those being written or refused."""
        with self._lock:
            without = self._busy[folder] | {number for number, place in self._refused if place == folder}
            saves = [save for save in reversed(self.job.list_saves()) if save.number not in without]
            return [(save, place) for save in saves for place in save.list_pending() if place.folder == folder]

    def _write_place(self, folder: str) -> bool:
        """Write the newest save that a place lacks, and drop older ones there, until it lacks none; whether it went.

        Of those that ``latest`` is to name, of the others, and of those that no script has asked for, each the newest:
        one is not in the other's place. Nor are those of one step, under several tags.
        """
        try:
            while True:
                begun = self._wait_for_first(folder)
                with self._lock:
                    chosen = self._choose(folder, begun)
                    self._busy[folder] = {save.number for save, _ in chosen}
                if not chosen:
                    return True
                try:
                    written = [self._write(*each) for each in chosen]
                finally:
                    self._busy[folder] = set()
                if not all(written):
                    return False
        except Exception as error:  # noqa: BLE001 - whatever a place or its library does, it is tried again
            self._warn(folder, str(error) or repr(error))
            return False

    def _wait_for_first(self, folder: str) -> set[int]:
        """The numbers of a place's pending saves that may be written: on all nodes those that the first one has begun.

        Raises:
            StorageError: it has begun none in time.
        """

        def look() -> set[int] | None:
            pending = self._list_pending(folder)
            begun = {save.number for save, place in pending if save.node == 0 or has_begun(save, place)}
            return begun if begun or not pending else None

        try:
            return wait_until(look, self.wait, lambda: "the first node has begun none of the pending saves", folder)
        except StorageError:  # it may have ended one that this node has not noted
            if not (ended := {save.number for save, place in self._list_pending(folder) if is_sealed(save, place)}):
                raise
            return ended

    def _drop_older(self, folder: str) -> None:
        """Let go of what a place is not to have any more while it is busy: memory is not to fill with it."""
        with self._lock:
            self._choose(folder, {save.number for save, _ in self._list_pending(folder) if save.node == 0})

    def _choose(self, folder: str, begun: set[int]) -> list[Pending]:
        """Those to be written next; older ones are dropped."""
        chosen, spare = list[Pending](), list[Pending]()
        for kind in (True, False), (True, True), (False, False):
            group = [each for each in self._list_pending(folder) if (each[0].latest, each[0].by_itself) == kind]
            first = next((number for number, (save, _) in enumerate(group) if save.number in begun), len(group))
            for save, place in group[first:]:
                if save is group[first][0] or _is_beside(save, group[first][0]):
                    chosen += [(save, place)] if save.number in begun else []
                else:
                    spare.append((save, place))
        spare += [each for each in chosen if is_replaced(each[0])]
        for save, place in spare:
            save.note_done(place, "")
            if not save.by_itself:
                logger.warning("%s is too slow: %s is dropped for a newer save", place.folder, save.tag)
        if spare:
            self._free()
        return sorted((each for each in chosen if each not in spare), key=lambda each: each[0].number)

    def _free(self) -> None:
        with self._lock:
            for save in drop_unwanted(self.job, self.keep):
                save.spare()

    def _write(self, save: Snapshot, place: Destination) -> bool:
        try:
            if names := self._begun.pop(place.folder, None):
                with suppress(OSError):  # who may write need not be let list this
                    abort_uploads(place.folder, names)
            named = save.latest and not self._is_overtaken(save, place)
            is_late = partial(self._gives_way, save, place)
            mark = write_save(replace(save, latest=named), place, self.wait, self._find_pace(place), is_late)
            with self._lock:
                save.note_done(place, mark)
            if save.node == 0:  # what the others have written is no whole save yet
                self._note_written(save, place, mark)
        except Exception as error:  # noqa: BLE001 - another save may go there all the same
            fault = find_fault(save, error)
            if fault is not None:
                self._refuse(save, place, fault)
                return True
            self._warn(place.folder, str(error) or repr(error))
            return False
        self._free()
        self._told.pop(place.folder, None)
        return True

    def _is_overtaken(self, save: Snapshot, place: Destination) -> bool:
        """Whether ``latest`` has named a later save there."""
        with self._lock:
            later = [other for other in self.job.list_saves() if other.latest and other.number > save.number]
            return any(other.read_done().get(place.folder) for other in later)

    def _gives_way(self, save: Snapshot, place: Destination) -> bool:
        """Whether a newer save waits for a place, the last one of which has not failed: each may come to its end."""
        pending = (other for other, _ in self._list_pending(place.folder) if place.folder not in self._told)
        kind = save.latest, save.by_itself
        return any((other.latest, other.by_itself) == kind and other.number > save.number for other in pending)

    def _find_pace(self, place: Destination) -> Pace:
        rate = None if place.limit_mb_s is None else place.limit_mb_s * (1 << 20)
        return self._paces.setdefault(place.folder, Pace(rate))

    def _note_written(self, save: Snapshot, place: Destination, mark: str) -> None:
        end_save(save, place)
        key = f"{place.folder}{_BY_ITSELF if save.by_itself else ''}"
        held = {tag: each for tag, each in self.job.read_written().get(key, {}).items() if tag != save.tag}
        held[save.tag] = mark
        self._note(key, held)
        self._note(key, prune_place(place, held))

    def _note(self, key: str, held: Mapping[str, str]) -> None:
        with self._lock:
            self.job.note_written({**self.job.read_written(), key: held})

    def _refuse(self, save: Snapshot, place: Destination, fault: UcpError) -> None:
        """Give up writing a save to a place; the save stays in memory."""
        self._refused.add((save.number, place.folder))
        logger.warning("%s: %s is not written, and no retry can mend this: %s", place.folder, save.tag, fault)
        with self._lock, suppress(OSError):
            save.note_refused(place, str(fault))

    def _warn(self, place: str, why: str) -> None:
        """Once for each fault of a place."""
        if self._told.get(place) != why:
            self._told[place] = why
            logger.warning("%s: not written, to be tried again: %s", place, escape(why))


def _is_beside(save: Snapshot, newer: Snapshot) -> bool:
    """Whether a script has asked for both, one after the other: as the best one, and as the last."""
    return save.step == newer.step and save.tag != newer.tag


def list_late(saves: Sequence[Snapshot]) -> dict[str, int]:
    """By place how many of a job's saves it does not have yet."""
    found: dict[str, int] = defaultdict(int)
    for save in saves:
        for place in save.list_pending():
            found[place.folder] += 1
    return dict(found)


def list_refused(saves: Sequence[Snapshot]) -> dict[str, str]:
    """Return by tag why the writer has given up a job's pending saves."""
    return {save.tag: "; ".join(refused.values()) for save in saves if (refused := save.list_refused())}


if __name__ == "__main__":
    if os.fork():  # no child of a rank's: a launcher that ends it would end this process too
        os._exit(0)
    sys.exit(main(*sys.argv[1:]))
