"""The state of one engine's saves on one rank (:mod:`.saving` makes the saves, collectively).

The first rank of each node owns the folder in memory, starts the writer process and announces saves to it.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any
from weakref import WeakSet

from ..comm import Comm
from ..config import SaveOptions, UniversalConfig
from ..errors import StorageError, pluralize
from ..io.deletion import delete_own
from ..io.filesystems import MEMORY, find_kind
from ..io.memory import identify_host
from .files import MappedFiles, save_over
from .memory import (
    Destination,
    Job,
    Snapshot,
    count_free,
    drop_unwanted,
    find_root,
    is_spare,
    list_jobs,
    locate,
    measure,
)
from .neighbours import Neighbours
from .writer import (
    FINISHED,
    POLLED,
    STARTING,
    describe_late,
    is_locked,
    is_safe,
    list_late,
    list_refused,
    start_writer,
)

logger = logging.getLogger("deepspeed_ucp")

SPARE = 1.05
"""Factor from the bytes of a save's tensors to the bytes of its files."""

ADVICE = 'Give the container more memory, or let "save": {"memory": …} name a folder of local NVMe'

_claimed = dict[tuple[str, str], tuple[str, str, int]]()
"""(destination, tag) → (folder that the script named, job, step)."""

_given, _shared = dict[tuple[str, str], tuple[str, int]](), set[str]()
"""(folder, tag) → (job of the last save, step); folders that two engines save to, already logged."""


class Saver:
    """One engine's saves on one rank.

    Args:
        owners: for each rank the first rank that shares its folder in memory, and owns it.
    """

    def __init__(self, config: UniversalConfig, name: str, rank: int, owners: Sequence[int]) -> None:
        options = config.save or SaveOptions()
        self.settings = list_settings(config)
        self.options, self.rank = options, rank
        nodes = list(dict.fromkeys(owners))
        self.is_owner, self.node, self.nodes = owners[rank] == rank, nodes.index(owners[rank]), len(nodes)
        self.root = find_root(options.memory)
        self.job = Job(os.path.join(self.root, name))
        self.neighbours: Neighbours | None = None
        self.number, self.failed = 0, ""
        self.needed: int | None = None  # bytes of a save on this node; None if unknown
        self.made = {False: 0, True: 0}  # numbers of saves of the script, and of snapshots
        self.keeps_memory = False  # after a normal exit, as the job is restarted
        self._requested, self.lost = dict[int, str](), dict[str, str]()
        self._stuck: dict[str, list[str]] | None = None  # pending saves when the last wait timed out
        self.mapped = MappedFiles(wanted=find_kind(self.root) == MEMORY)
        self._logged = set[str]()
        self._pipe: Any = None
        _savers.add(self)
        self._reached, self._logged_behind = dict[str, int](), dict[str, int]()  # by late destination

    def open(self) -> None:
        """Create this job's folder, and start writers for saves of dead jobs."""
        self.job.own()
        finish_dead(self.root, self.settings)
        atexit.register(self.close)

    def is_lost(self) -> bool:
        """Return True if this job's folder was deleted."""
        return self.is_owner and not self.job.is_there()

    def release(self) -> None:
        """Release a folder that was deleted; another saver replaces this one."""
        self.mapped.tidy(everything=True)
        self._end_writer()
        if self.neighbours is not None:
            self.neighbours.close()
        atexit.unregister(self.close)
        self.job.disown()

    @property
    def folder(self) -> str:
        """Folder of tags in memory for the current save."""
        return self.job.find_folder(self.number)

    def make_room(self) -> str:
        """Free memory for the next save.

        Keeps pending saves, and saves in memory alone that no later save supersedes.

        Returns:
            An error message if it still does not fit, else an empty string.
        """
        kept = list[Snapshot]()
        for job in list_jobs(self.root) if not self._has_room() else ():
            if job.name != self.job.name and not job.is_owned():
                spare, only = _split_dead(job)
                kept += only
                self._remove(spare)
        if self._free_own():
            return ""
        needed, free = self._count_needed(), count_free(self.root)
        why = f"a save takes {needed >> 20:,} MiB of {self.root}, where {free >> 20:,} MiB are free"
        for save in kept[-1:]:
            folder = os.path.dirname(save.folder)
            why += (
                f". It also holds perhaps the only copy of a run's newest save: {save.tag} (step {save.step}) of "
                f"{save.save_dir}. If that is not needed: rm -r {folder}"
            )
        return f"{why}. {ADVICE}"

    def _count_needed(self) -> int:
        """Return the bytes that must be free for the next save: if several are pending, some more for training."""
        pending = [save for save in self.job.list_saves() if save.list_pending()]
        return (self.needed or 0) * (2 if len(pending) > 1 else 1)

    def _has_room(self) -> bool:
        return count_free(self.root) >= self._count_needed()

    def _free_own(self) -> bool:
        """Remove saves of this job that are not needed until the next one fits; return True if it does."""
        safe, own = self.job.read_copying()[0], self.job.list_saves()
        older = [save for save in own[:-1] if is_spare(save, own)]
        self._remove(sorted(older, key=lambda save: save.number == safe))
        if not self._has_room():
            self.job.drop_spare()
        return self._has_room()

    def _remove(self, saves: Iterable[Snapshot]) -> None:
        """Remove saves, with a log line for each, until the next one fits."""
        for save in saves:
            if self._has_room():
                return
            save.remove()
            part = "another node's part of " if save.is_copy() else ""
            logger.info("%s: removed to make room, %s%s of %s", save.folder, part, save.tag, save.save_dir)

    def write_file(self, state_dict: Any, path: str) -> None:
        """Do what ``torch.save`` does, overwriting files that an older save has left.

        An error is kept until the end of the save: raised here, it would leave other ranks in DeepSpeed's barrier.
        """
        if self.failed:
            return
        try:
            self.job.reuse(path)
            save_over(state_dict, path, self.mapped)
        except OSError as error:
            self.failed = f"{path} cannot be written ({error})"

    def copy(self, work: Callable[..., Any], source: str, destination: str, **options: Any) -> Any:
        """Copy by a function of ``shutil``; an error is kept as in :meth:`write_file`."""
        try:
            return work(source, destination, **options)
        except OSError as error:
            if not destination.startswith(f"{self.folder}{os.sep}"):
                raise
            faults = error.args[0] if isinstance(error, shutil.Error) else [error]  # copytree raises a list
            self.failed = self.failed or f"{destination} cannot be written ({faults[0]})"
            return destination

    def claim(self, save_dir: str, tag: str, step: int) -> None:
        """Reserve a tag in the destinations of ``to`` for this engine and folder.

        Warns once if two engines save one step under one tag into one folder.

        Raises:
            StorageError: the destination has another save of this script under the same tag.
        """
        folder, given = locate(save_dir), (self.job.name, step)
        former, at = _given.get((folder, tag), given)
        _given[folder, tag] = given
        if former != self.job.name and at == step and folder not in _shared:
            _shared.add(folder)
            if self.rank == 0:
                logger.warning(
                    "%s: two engines save %r there, in each other's place: name a folder for each", folder, tag
                )
        for tier in self.options.to:
            place, own = locate(tier.place), (locate(save_dir), self.job.name, step)
            other = _claimed.setdefault((place, tag), own)
            if other[0] != own[0] and other[1:] != own[1:]:
                raise StorageError(
                    f"has {tag!r} of {other[0]}, which the save of {own[0]} would replace. Give each engine another "
                    'place in "save": {"to": …}, or each save another tag.',
                    path=place,
                )
            _claimed[place, tag] = own

    def begin(self, *, waits: bool = False) -> str:
        """Create the folder of the next save, on the node's first rank.

        Args:
            waits: wait for the memory of pending saves, as long as one is written within each ``wait_s``.

        Returns:
            An error message if there is no room for it, else an empty string.
        """
        if not self.is_owner:
            return ""
        for number in self.job.list_numbers():  # left by saves that failed
            if self.job.is_unfinished(number):
                delete_own(self.job.find_folder(number))
        if (why := self.make_room()) and waits:
            self.wait(self.options.wait_s, self._free_own)
            why = self.make_room()
        if why:
            return why
        try:
            self.job.reserve(self.number, self.node)
        except OSError as error:
            return f"{self.folder} cannot be made ({error}). {ADVICE}"
        return ""

    def choose_copied(self, comm: Comm) -> None:
        """Agree on the save that is copied to other nodes, and free older ones (collective, before the next save)."""
        if self.neighbours is not None:
            self.neighbours.agree(self.number + 1, comm)
            for save in drop_unwanted(self.job, self.options.keep) if self.is_owner else ():
                save.spare()

    def list_written(self) -> set[str]:
        """Return the folders and URLs that lack saves, on the node's first rank."""
        return set(list_late(self.job.list_saves())) if self.is_owner else set()

    def end(self, save_dir: str, tag: str, step: int, *, latest: bool, by_itself: bool) -> None:
        """Record that all of the node's files of the save are in memory, and notify the writer."""
        self.made[by_itself] += 1
        turn = [each for each in self.options.to if self.made[by_itself] % each.every == 0]
        places = [Destination(locate(each.place), 1 if by_itself else each.keep) for each in turn]
        if not (self.options.to or by_itself):
            places.append(Destination(locate(save_dir)))
        Snapshot(
            job=self.job.name, number=self.number, save_dir=locate(save_dir), tag=tag, step=step, latest=latest,
            node=self.node, nodes=self.nodes, places=tuple(places), folder=self.folder, by_itself=by_itself,
        ).write_record()  # fmt: skip
        self.needed = int(SPARE * measure(self.folder))
        if places and not by_itself:
            self._requested[self.number] = tag
        self.notify_writer()
        # Without a complete copy of this save, the loss of a node would leave only older saves complete.
        if latest and (self.neighbours is None or self.neighbours.safe):
            self.drop_dead(save_dir, tag, by_itself=by_itself)

    def drop_dead(self, save_dir: str, tag: str, *, by_itself: bool) -> None:
        """Remove dead jobs' saves for a folder, as this job has a complete save for it.

        Args:
            tag: tag of this job's save.
            by_itself: it is a snapshot, in memory alone.
        """
        for job in list_jobs(self.root):
            if job.name == self.job.name or job.is_owned():
                continue
            spare = _list_replaced(job, save_dir, tag, with_pending=not by_itself)
            for save in spare:
                save.remove()
            if spare:
                names = ", ".join(dict.fromkeys(save.tag for save in spare))
                logger.info("%s: removed %s of a dead job, as %s has %s now", job.folder, names, save_dir, tag)
                if job.holds_none():
                    job.remove()

    def overtake(self, save_dir: str, tag: str) -> None:
        """Wait for pending saves before a save that bypasses memory, and mark those that are still pending.

        These are written later, but must not replace the new save in ``latest`` or under its tag.
        """
        if not self.is_owner:
            return
        if list_late(self.job.list_saves()):
            self.notify_writer()
            self.wait(self.options.wait_s, lambda: False)
        for save in self.job.list_saves():
            for place in save.list_pending():
                save.note("overtaken", {tag: save_dir})
                if (place.folder, save.tag) == (locate(save_dir), tag):
                    save.note("done", {place.folder: ""})
        self._stuck = self._look_late()

    def list_missing(self) -> dict[str, str]:
        """Return the script's saves that a destination lacks: the reason by tag. Lost ones are named once."""
        missing, self.lost = self.lost, {}
        if self.is_lost():
            why = f"{self.job.folder} was removed, perhaps before it was written"
            missing |= dict.fromkeys(self._requested.values(), why)
        for save in self.job.list_saves() if self.is_owner else ():
            for place in save.list_pending() if not save.by_itself else ():
                faults = {**save.read("failed"), **save.list_refused()}
                fault = faults.get(place.folder) or f"see {self.job.folder}/log"
                missing[save.tag] = f"missing at {place.folder} ({fault})"
        return missing

    def notify_writer(self) -> None:
        """Notify the writer of a save, and start it if needed. If it cannot start, warn: the save is safe in memory."""
        if self._reach_writer():
            return
        try:
            self._pipe = start_writer(self.job, self.settings, self.neighbours)
        except OSError as error:
            logger.warning("%s: saves stay in memory until a writer can be started: %s", self.job.folder, error)

    def _reach_writer(self) -> bool:
        """Return True if the writer has been notified; its end of the pipe is closed after it was killed."""
        if self._pipe is None:
            return False
        try:
            self._pipe.write(b"\n")
            self._pipe.flush()
        except OSError:
            self._end_writer()
            return False
        return True

    def _end_writer(self) -> None:
        """Close the pipe; the writer exits when it has written all pending saves."""
        if self._pipe is not None:
            with suppress(OSError):
                self._pipe.close()
            self._pipe = None

    def warn_late(self, step: int) -> None:
        """Warn if a destination lacks several saves, whenever the number of steps has doubled."""
        self._warn_refused()
        late = self._look_late()
        for place, tags in late.items():
            behind = step - self._reached.setdefault(place, step)
            if len(tags) > 1 and behind >= 2 * self._logged_behind.get(place, 0):
                self._logged_behind[place] = max(behind, 1)
                logger.warning(
                    "%s is %s behind, memory holds %s for it: see %s/log",
                    place, pluralize(behind, "step"), ", ".join(tags), self.job.folder,
                )  # fmt: skip
        for place in self._reached.keys() - late.keys():
            self._logged_behind.pop(place, None)
            del self._reached[place]

    def _warn_refused(self) -> None:
        """Warn once about each save that the writer has given up."""
        for tag, why in list_refused(self.job.list_saves()).items():
            text = f"{tag} is in memory alone ({self.job.folder}), no retry can mend this: {why}"
            if text not in self._logged:
                self._logged.add(text)
                logger.warning("%s", text)

    def wait(self, seconds: float, is_enough: Callable[[], bool] | None = None) -> bool:
        """Wait until every destination has its saves, or no writer is running.

        Args:
            seconds: to wait at most.
            is_enough: ends the wait too. Then each written save extends it, and it ends at once if no save has
                been written since such a wait timed out.

        Returns:
            True if every destination has its saves.
        """
        seen, before = time.monotonic(), dict[str, list[str]]()
        end = seen + seconds
        while late := self._look_late():
            if is_enough is not None and (is_enough() or late == self._stuck):
                return False
            now = time.monotonic()
            refused = [(save.list_refused(), save.list_pending()) for save in self.job.list_saves()]
            if any(faults for faults, _ in refused) and all(len(faults) == len(places) for faults, places in refused):
                self._warn_refused()
                return False
            if is_locked(self.job):
                seen = now
            elif self._pipe is not None:
                self.notify_writer()  # it is starting, or was killed
            if not before:
                named = describe_late(self.job.list_saves())
                logger.info("waiting for saves to be written, %.0f s at most: %s", seconds, named)
            elif is_enough is not None and late != before:
                end = now + seconds
            before = late
            if now > min(end, seen + STARTING):
                named = describe_late(self.job.list_saves())
                logger.warning("still to be written: %s; see %s/log", named, self.job.folder)
                self._stuck = late
                return False
            time.sleep(POLLED)
        return True

    def _look_late(self) -> dict[str, list[str]]:
        """Return by destination the tags that it lacks, and note which saves of the script are written."""
        saves = self.job.list_saves()
        if not self.is_lost():
            pending = {save.number for save in saves if save.list_pending()}
            self._requested = {number: tag for number, tag in self._requested.items() if number in pending}
        return list_late(saves)

    def finish(self) -> bool:
        """Wait for ``wait_s`` as :meth:`wait` does; restart a writer that was killed."""
        if list_late(self.job.list_saves()):
            self.notify_writer()
        return self.wait(self.options.wait_s)

    def close(self) -> None:
        """Write pending saves at exit.

        After a normal end the writer frees the memory if every destination has all saves; otherwise the next run finds
        the saves there.
        """
        if not self.is_owner:
            return
        is_finished = not self.keeps_memory and getattr(sys, "last_value", None) is None and self.job.is_there()
        if is_finished or list_late(self.job.list_saves()):
            self.notify_writer()
        if is_finished and self._pipe is not None:
            with suppress(OSError):
                self._pipe.write(FINISHED)
        self._end_writer()
        end = time.monotonic() + self.options.wait_s
        is_written = self.wait(self.options.wait_s)
        if self.neighbours is not None:
            while self.neighbours.is_waited_for() and is_locked(self.job) and time.monotonic() < end:
                time.sleep(POLLED)
            self.neighbours.close()
        if is_written and is_finished:  # some platforms kill the writer with the rank
            while is_locked(self.job) and time.monotonic() < end:
                time.sleep(POLLED)
        self.job.disown()


def owns_memory(config: UniversalConfig, comm: Comm) -> bool:
    """Return True if this rank is the first of its node, which owns the folder in memory (collective)."""
    return list_owners(config, comm)[comm.rank] == comm.rank


def list_owners(config: UniversalConfig, comm: Comm) -> list[int]:
    """Return for each rank the first rank that shares its folder in memory (collective).

    Local ranks may differ: they depend on the launcher.
    """
    options = config.save or SaveOptions()

    def look() -> tuple[str, int, int]:
        found = os.stat(find_root(options.memory))
        return identify_host(), found.st_dev, found.st_ino

    ranks = dict[tuple[str, int, int], int]()
    return [ranks.setdefault(memory, rank) for rank, memory in enumerate(comm.each(look))]


_savers = WeakSet[Saver]()

_started = dict[str, float]()
"""Time at which this process started a writer for a dead job's folder."""


def list_savers() -> list[Saver]:
    """Return the savers of this process's engines."""
    return list(_savers)


def keep_memory() -> None:
    """Keep saves in memory after the normal end of this process: the job is started again and reads them there."""
    for saver in list_savers():
        saver.keeps_memory = True


def finish_dead(root: str, settings: Mapping[str, Any]) -> None:
    """Start writers for saves that dead jobs have left in memory; remove folders without any whole save."""
    for job in list_jobs(root):
        if job.is_owned():
            continue
        job.drop_spare()
        saves = job.list_saves()
        if list_late(saves):
            try:
                _started[job.folder] = time.monotonic()
                start_writer(job, settings).close()
            except OSError as error:
                logger.warning("%s: not written on: %s", job.folder, error)
        elif job.holds_none() and not is_locked(job):
            job.remove()


def list_settings(config: UniversalConfig) -> dict[str, Any]:
    """Return the settings of the writer."""
    options = config.save or SaveOptions()
    return {"keep": options.keep, "wait_s": options.wait_s, "storage_options": config.storage_options}


def _list_replaced(job: Job, save_dir: str, tag: str, *, with_pending: bool) -> list[Snapshot]:
    """Return the saves of a dead job to remove, as a running job has a complete save of this tag for a folder.

    These are the saves for that folder, except pending ones of a script, and saves for a folder next to it (as trainers
    have) that all their destinations have.

    Args:
        with_pending: include pending ones that have the same tag or can never be written.
    """
    own, saves = locate(save_dir), [*job.list_saves(), *job.list_copies()]
    is_starting = time.monotonic() < _started.get(job.folder, -math.inf) + STARTING
    if is_locked(job) or (is_starting and list_late(saves)):
        return []
    found = list[Snapshot]()
    for save in saves if with_pending else [each for each in saves if not each.list_pending()]:
        if save.save_dir != own:
            is_removable = is_safe(save) and os.path.dirname(save.save_dir) == os.path.dirname(own)
        else:
            is_removable = save.by_itself or save.is_copy() or save.tag == tag or not save.list_pending()
            if not is_removable and save.nodes > 1:  # without the part of a node that is lost it can never be written
                late = ", ".join(place.folder for place in save.list_pending())
                logger.warning("%s: %s is given up, it could not be written to %s", job.folder, save.tag, late)
                is_removable = True
        found += [save] if is_removable else []
    return found


def _is_only(save: Snapshot, saves: Iterable[Snapshot]) -> bool:
    """Return True if memory may have the only copy of the newest state of a save's folder."""
    return not is_safe(save) and not any(
        other.supersedes(save) and (other.nodes == 1 or other.is_written()) for other in saves
    )


def _split_dead(job: Job) -> tuple[list[Snapshot], list[Snapshot]]:
    """Return the removable saves and copies of a dead job, and those that may be the only ones of their state."""
    saves = job.list_saves()
    only = [save for save in saves if save.list_pending() or _is_only(save, saves)]
    keys = {save.key for save in saves} - {save.key for save in only}
    copies = job.list_copies()
    only += [copy for copy in copies if copy.key not in keys and _is_only(copy, saves)]
    return [save for save in [*saves, *copies] if save not in only], only
