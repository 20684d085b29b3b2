"""What each rank has of an engine's saves into memory (:mod:`.saving` makes them, all ranks together).

On each node one rank, the node's first, keeps the folder, starts the writer and tells it of saves.
"""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import Any
from weakref import WeakSet

from ..comm import Comm
from ..config import SaveOptions, UniversalConfig
from ..errors import StorageError, UcpError, count_of
from ..io.filesystems import MEMORY, find_kind
from ..io.memory import identify_host
from ..sources.files import BASE
from ..sources.seal import SealedFile
from .files import MappedFiles, Stable, StateFile, save_over
from .frozen import FrozenBase
from .memory import Destination, Job, Snapshot, count_free, drop_unwanted, find_root, list_jobs, locate
from .neighbours import Neighbours
from .states import find_stable
from .writer import POLLED, STARTING, is_locked, list_late, list_refused, start_writer

logger = logging.getLogger("deepspeed_ucp")

_COPIED = 0.005
"""Seconds between looks whether the node's other ranks have copied."""

SPARE = 1.05
"""Of the bytes that a save is reckoned to take: files have more in them than tensors."""

ADVICE = 'Give the container more memory, or let "save": {"memory": …} name a folder of local NVMe'

_AT_ONCE = 'without "overlap" all is copied before a save returns'

_COPYING = 600.0
"""Seconds that the node's other ranks may take longer to copy, however short the end of the job waits."""

_claimed = dict[tuple[str, str], tuple[str, str, int]]()
"""By place of ``to`` and tag the folder that this script named for it, the job, and the step."""

_given, _shared = dict[tuple[str, str], tuple[str, int]](), set[str]()
"""By folder and tag the job that saved it last, and the step. Folders of which is told that two engines save there."""


class Saver:
    """One engine's saves, on one rank.

    Args:
        first: by rank the first one of those that share a folder of memory with it: its node's.
    """

    def __init__(self, config: UniversalConfig, name: str, rank: int, first: Sequence[int]) -> None:
        options = config.save or SaveOptions()
        self.settings = list_settings(config)
        firsts = list(dict.fromkeys(first))
        self.options, self.rank, self.ranks = options, rank, first.count(first[rank])
        self.is_first, self.node, self.nodes = first[rank] == rank, firsts.index(first[rank]), len(firsts)
        self.root = find_root(options.memory)
        self.job = Job(os.path.join(self.root, name))
        self.neighbours: Neighbours | None = None
        self.number, self.failed = 0, ""
        self.needed: int | None = None  # bytes of memory that a save takes of this node, as far as this rank knows
        self.made = {False: 0, True: 0}  # saves that a script has asked for, and others
        self._thread: Thread | None = None
        self._behind = ""
        self._stable, self._left = Stable(), list[StateFile]()
        self.mapped = MappedFiles(wanted=find_kind(self.root) == MEMORY)
        self._copied = Event()
        self._copied.set()
        self.base: FrozenBase | None = None
        self._said = set[str]()
        self._lines: Any = None
        _savers.add(self)
        self._reached, self._told = dict[str, int](), dict[str, int]()  # by place that is late

    def open(self) -> None:
        """Make this job's folder, and have done what dead ones have left."""
        self.job.own()
        finish_dead(self.root, self.settings)
        atexit.register(self.close)

    def is_lost(self) -> bool:
        """Whether somebody has removed this job's folder."""
        return self.is_first and not self.job.is_there()

    def leave(self) -> None:
        """Let go of a folder that is lost: another saver goes on in another one."""
        self.finish_copy()
        self.mapped.tidy(everything=True)
        self._end_writer()
        if self.neighbours is not None:
            self.neighbours.close()
        atexit.unregister(self.close)
        self.job.disown()

    @property
    def folder(self) -> str:
        """Of the save that is made: of tags, in memory."""
        return self.job.find_folder(self.number)

    def make_room(self, save_dir: str) -> str:
        """Let go of what is not needed, where a save would not fit; why it does not even so, in words.

        Args:
            save_dir: what another job has for it in memory alone is needed until this one has something.
        """
        safe, own = self.job.read_copying()[0], locate(save_dir)
        older = sorted(self.job.list_saves()[:-1], key=lambda save: save.number == safe)
        dead = [save for save in self._list_dead() if save.places or save.save_dir != own]
        needed = self.needed or 0
        for save in [*dead, *older]:
            if count_free(self.root) < needed and (save.is_copy() or not save.list_pending()):
                save.remove()
        if count_free(self.root) < needed:
            self.job.drop_spare()
        free = count_free(self.root)
        if free >= needed:
            return ""
        return f"a save takes {needed >> 20:,} MiB of {self.root}, where {free >> 20:,} MiB are free. {ADVICE}"

    def _list_dead(self) -> Iterator[Snapshot]:
        for job in list_jobs(self.root):
            if job.name != self.job.name and not job.is_owned():
                yield from sorted([*job.list_saves(), *job.list_copies()], key=lambda save: save.number)

    def write_file(self, state_dict: Any, path: str) -> None:
        """What ``torch.save`` does, into memory that an older save has left.

        What fails is kept for the end of the save: other ranks would wait for this one in DeepSpeed's own barrier.
        """
        if self.failed:
            return
        try:
            self.job.reuse(path)
            left = save_over(state_dict, path, self._stable, self.mapped)
        except OSError as error:
            self.failed = f"{path} cannot be written ({error})"
        else:
            self._left += [left] if left else []

    def write_split(self, base: FrozenBase, engine: Any, state_dict: Any, path: str) -> None:
        """The same without frozen parameters, which a base has."""
        if self.failed:
            return
        try:
            base.write(state_dict, path, engine, self.write_file)
        except OSError as error:
            self.failed = f"frozen parameters of {path} cannot be written ({error})"

    def change_base(self, base: FrozenBase, written: Iterable[Mapping[str, SealedFile]] | None) -> None:
        """The save that is made names a base, of which each rank has written some files, or has failed (None)."""
        if self.base is not base and self.is_first:
            for left in filter(None, [self.base if written is not None else base]):
                left.remove()
        if written is not None:
            base.join(written)
            self.base = base

    def tell_once(self, text: str) -> None:
        """Log something, on the first rank, that is the same of each save."""
        if self.rank == 0 and text not in self._said:
            logger.info("%s", text)
        self._said.add(text)

    def copy(self, work: Callable[..., Any], source: str, destination: str, **options: Any) -> Any:
        """What ``shutil`` does, into memory; what fails is kept as by :meth:`write_file`."""
        try:
            return work(source, destination, **options)
        except OSError as error:
            if not destination.startswith(f"{self.folder}{os.sep}"):
                raise
            faults = error.args[0] if isinstance(error, shutil.Error) else [error]  # of a tree a list
            self.failed = self.failed or f"{destination} cannot be written ({faults[0]})"
            return destination

    def claim(self, save_dir: str, tag: str, step: int) -> None:
        """Keep what two engines, or saves into two folders, put into one place of ``to`` apart.

        Two engines that save one step under one tag into one folder are told of, once.

        Raises:
            StorageError: the place has another save of this script's under the same tag.
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
                    f"has {tag!r} of {other[0]}, in whose place that of {own[0]} would come. Give each engine a place "
                    'of its own in "save": {"to": …}, or each save a tag of its own.',
                    path=place,
                )
            _claimed[place, tag] = own

    def begin(self, save_dir: str) -> str:
        """Make the folder of the next save, on the node's first rank; why there is no room for it, in words."""
        if not self.is_first:
            return ""
        for number in self.job.list_numbers():  # what earlier ones have left that failed
            if self.job.is_unfinished(number):
                shutil.rmtree(self.job.find_folder(number), ignore_errors=True)
        if why := self.make_room(save_dir):
            return why
        os.makedirs(self.folder, mode=0o700)
        return ""

    def choose_copied(self, comm: Comm) -> None:
        """Before the next save: agree on which one is copied to other nodes, and let go of older ones; collective."""
        if self.neighbours is not None:
            self.neighbours.agree(self.number + 1, comm)
            for save in drop_unwanted(self.job, self.options.keep) if self.is_first else ():
                save.spare()

    def drop(self) -> None:
        """Give up the save that is made."""
        self._abandon_left()
        if self.is_first:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _abandon_left(self) -> None:
        while self._left:
            self._left.pop().abandon()

    def note_stable(self, engine: Any) -> None:
        """Take what may be copied until the next step, where that is asked for."""
        self._stable = find_stable(engine) if self.options.overlap else Stable()

    def end_behind(self, end: Callable[[], None], save_dir: str) -> None:
        """Copy what is left in a thread of its own, and ``end`` the save when all ranks of the node have."""
        self._copied.clear()
        self._behind = locate(save_dir)
        self._begin_behind(partial(self._copy_left, end))

    def map_behind(self) -> None:
        """Map what has been written for the first time, in a thread of its own."""
        self._behind = ""
        self._begin_behind(self.mapped.settle)

    def _begin_behind(self, work: Callable[[], None]) -> None:
        self._thread = Thread(target=work, name="ucp-save")
        self._thread.start()

    def _copy_left(self, end: Callable[[], None]) -> None:
        why = ""
        try:
            while self._left:
                self._left.pop().copy_left()
            if not self._stable.is_unchanged():
                why = f"weights were written to between it and the next step: {_AT_ONCE}"
        except (OSError, UcpError) as error:
            why = str(error)
            self._abandon_left()
        self._stable = Stable()
        self._copied.set()
        if why:
            logger.warning("%s: this save is dropped: %s", self.folder, why)
        try:
            open(os.path.join(self.folder, f".{'failed' if why else 'copied'}-{self.rank}"), "x").close()
            if self.is_first and self._have_copied():
                end()
        except (OSError, UcpError) as error:
            logger.warning("%s: this save is dropped: %s", self.folder, error)
        self.mapped.settle()

    def _have_copied(self) -> bool:
        """Wait for the node's other ranks; whether all have copied their parts."""
        until = time.monotonic() + _COPYING
        while time.monotonic() < until:
            told = [name for name in os.listdir(self.folder) if name.startswith((".copied-", ".failed-"))]
            if len(told) == self.ranks:
                return not any(name.startswith(".failed-") for name in told)
            time.sleep(_COPIED)
        raise StorageError(f"of {self.ranks} ranks not all have copied their parts within {_COPYING:.0f} s.")

    def wait_for_copy(self) -> None:
        """Wait until this rank has copied all that it saves: then it may be changed."""
        self._copied.wait()

    def list_written(self) -> set[str]:
        """Folders and URLs that saves are still to come to; on the node's first rank."""
        if not self.is_first:
            return set()
        behind = {self._behind} if self._thread is not None and self._thread.is_alive() else set[str]()
        return behind | set(list_late(self.job.list_saves()))

    def finish_copy(self) -> None:
        """Wait until the node's ranks have, and the save counts."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def end(
        self,
        save_dir: str,
        tag: str,
        step: int,
        base: FrozenBase | None = None,
        *,
        latest: bool,
        by_itself: bool,
    ) -> None:
        """All of the node's files are there: say so, and have the writer take them on.

        Args:
            base: has its frozen parameters.
        """
        if base is not None:
            base.add(self.folder, tag)
        self.made[by_itself] += 1
        turn = [each for each in self.options.to if self.made[by_itself] % each.every == 0]
        places = [Destination(locate(each.place), 1 if by_itself else each.keep, each.limit_mb_s) for each in turn]
        if not (self.options.to or by_itself):
            places.append(Destination(locate(save_dir)))
        Snapshot(
            job=self.job.name, number=self.number, save_dir=locate(save_dir), tag=tag, step=step, latest=latest,
            node=self.node, nodes=self.nodes, places=tuple(places), folder=self.folder, by_itself=by_itself,
        ).write_record()  # fmt: skip
        files = (path for path in Path(self.folder).rglob("*") if path.is_file())
        self.needed = int(SPARE * sum(each.stat().st_size for each in files if not each.parent.name.startswith(BASE)))
        self.tell_writer()
        if latest and (self.neighbours is None or self.neighbours.safe):  # else a lost node leaves the older ones alone
            self.drop_dead(save_dir, by_itself=by_itself)

    def drop_dead(self, save_dir: str, *, by_itself: bool) -> None:
        """Let go of what dead jobs have for a folder, as this one has a whole save for it.

        Args:
            by_itself: in memory alone.
        """
        for job in list_jobs(self.root):
            if job.name == self.job.name or job.is_owned() or (by_itself and list_late(job.list_saves())):
                continue
            if _is_replaced(job, save_dir):
                job.remove()

    def tell_writer(self) -> None:
        """Of a new save, or that there will be one; what keeps a writer from starting is a warning: memory is safe."""
        if self._reach_writer():
            return
        try:
            self._lines = start_writer(self.job, self.settings, self.neighbours)
        except OSError as error:
            logger.warning("%s: saves stay in memory until a writer can be started: %s", self.job.folder, error)

    def _reach_writer(self) -> bool:
        """Whether there is one: its end of the pipe is closed once it has been killed, and not while it starts."""
        if self._lines is None:
            return False
        try:
            self._lines.write(b"\n")
            self._lines.flush()
        except OSError:
            self._end_writer()
            return False
        return True

    def _end_writer(self) -> None:
        """Have the writer end when nothing is pending; what is not closed here outlives this object with its Popen."""
        if self._lines is not None:
            with suppress(OSError):
                self._lines.close()
            self._lines = None

    def warn_late(self, step: int) -> None:
        """Say by how many steps a place is behind more than a save, whenever that has doubled."""
        self._warn_refused()
        late = list_late(self.job.list_saves())
        for place, count in late.items():
            behind = step - self._reached.setdefault(place, step)
            if count > 1 and behind >= 2 * self._told.get(place, 0):
                self._told[place] = max(behind, 1)
                log = os.path.join(self.job.folder, "log")
                logger.warning(
                    "%s is %s behind, older saves give way to newer ones: see %s", place, count_of(behind, "step"), log
                )
        for place in self._reached.keys() - late.keys():
            self._told.pop(place, None)
            del self._reached[place]

    def _warn_refused(self) -> None:
        """Warn once about each save that the writer has given up."""
        for tag, why in list_refused(self.job.list_saves()).items():
            if (
                text := f"{tag} is in memory alone ({self.job.folder}), no retry can mend this: {why}"
            ) not in self._said:
                self._said.add(text)
                logger.warning("%s", text)

    def wait(self, seconds: float) -> bool:
        """Wait until all places have what they are to have, or nobody writes any more; whether they have it."""
        self.finish_copy()
        seen, told = time.monotonic(), False
        end = seen + seconds
        while late := list_late(self.job.list_saves()):
            now = time.monotonic()
            if all(len(save.list_refused()) == len(save.list_pending()) for save in self.job.list_saves()):
                self._warn_refused()
                return False
            if is_locked(self.job):
                seen = now
            elif self._lines is not None:
                self.tell_writer()  # it starts, or has been killed
            if now > min(end, seen + STARTING):
                logger.warning("still to be written: %s; see %s/log", ", ".join(sorted(late)), self.job.folder)
                return False
            if not told:
                logger.info("waiting for saves to be written, %.0f s at most: %s", seconds, ", ".join(sorted(late)))
                told = True
            time.sleep(POLLED)
        return True

    def finish(self) -> bool:
        """What :meth:`wait` does, for ``wait_s`` at most and with another writer where that has been killed."""
        if list_late(self.job.list_saves()):
            self.tell_writer()
        return self.wait(self.options.wait_s)

    def close(self) -> None:
        """At the end of the process: finish what is pending; the writer ends, and memory is what the next run finds."""
        self.finish_copy()
        if not self.is_first:
            return
        if list_late(self.job.list_saves()):
            self.tell_writer()
        self._end_writer()
        end = time.monotonic() + self.options.wait_s
        self.wait(self.options.wait_s)
        if self.neighbours is not None:
            while self.neighbours.is_waited_for() and is_locked(self.job) and time.monotonic() < end:
                time.sleep(POLLED)
            self.neighbours.close()
        self.job.disown()


def forget_frozen() -> None:
    """After a load, or another change: frozen parameters that have been saved need not be what they are now."""
    for saver in list(_savers):
        if saver.base is not None:
            saver.base.forget()


def keeps_folder(config: UniversalConfig, comm: Comm) -> bool:
    """Whether this rank is the first one of its node, which keeps the folder of memory; collective."""
    return list_first(config, comm)[comm.rank] == comm.rank


def list_first(config: UniversalConfig, comm: Comm) -> list[int]:
    """By rank the first one that shares its folder of memory, whatever local ranks a launcher gives; collective."""
    options = config.save or SaveOptions()

    def look() -> tuple[str, int, int]:
        found = os.stat(find_root(options.memory))
        return identify_host(), found.st_dev, found.st_ino

    ranks = dict[tuple[str, int, int], int]()
    return [ranks.setdefault(memory, rank) for rank, memory in enumerate(comm.each(look))]


_savers = WeakSet[Saver]()


def list_savers() -> list[Saver]:
    """Those of this process's engines."""
    return list(_savers)


def wait_for_copies() -> None:
    """Wait until what engines of this process save may be changed."""
    for saver in list_savers():
        saver.wait_for_copy()


def finish_dead(root: str, settings: Mapping[str, Any]) -> None:
    """Have written what dead jobs have left in memory, and remove what holds nothing whole."""
    for job in list_jobs(root):
        if job.is_owned():
            continue
        job.drop_spare()
        saves = job.list_saves()
        if list_late(saves):
            try:
                start_writer(job, settings).close()
            except OSError as error:
                logger.warning("%s: not written on: %s", job.folder, error)
        elif job.holds_none() and not is_locked(job):
            job.remove()


def list_settings(config: UniversalConfig) -> dict[str, Any]:
    """Of the writer."""
    options = config.save or SaveOptions()
    return {"keep": options.keep, "wait_s": options.wait_s, "storage_options": config.storage_options}


def _is_replaced(job: Job, save_dir: str) -> bool:
    """Whether a dead job's saves may go now that a living one has a whole save for the same place.

    Those that were for a place beside it, as a trainer's are, may go when all of them are where they are to be.
    """
    saves, own = job.list_saves() or job.list_copies(), locate(save_dir)
    if all(save.save_dir == own for save in saves):
        return bool(saves) and not is_locked(job)
    return not list_late(saves) and all(os.path.dirname(save.save_dir) == os.path.dirname(own) for save in saves)
