"""Saves into memory, on the ranks: DeepSpeed's own save into another folder; and loads from there.

On each node one rank, the node's first, keeps the folder, starts the writer and tells it of saves.
"""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import Any, NamedTuple
from weakref import WeakSet

from torch import is_tensor
from torch.optim import Optimizer

from ..comm import Comm, connect
from ..config import SaveOptions, UniversalConfig
from ..engine_state import find_state
from ..errors import ConfigError, StorageError, UcpError, count_of
from ..io.filesystems import MEMORY, find_kind
from ..io.memory import identify_host
from ..io.paths import is_url
from ..sources.files import BASE
from ..sources.latest import read_latest
from ..sources.older import find_age
from ..sources.seal import SealedFile
from ..wrappers import USE_MUON, find_live
from ..writer import is_decoupled
from .files import MappedFiles, Stable, StateFile, save_over
from .frozen import FrozenBase, choose_base
from .memory import Destination, Job, Snapshot, count_free, drop_unwanted, find_root, list_jobs, locate, name_job
from .neighbours import Neighbours, find_neighbours
from .places import find_mark
from .writer import is_locked, list_late, start_writer

logger = logging.getLogger("deepspeed_ucp")

_POLLED = 0.05
"""Seconds between looks whether the writer has done what is pending."""

_COPIED = 0.005
"""Seconds between looks whether the node's other ranks have copied."""

_AT_ONCE = 'without "overlap" all is copied before a save returns'

_STARTING = 20.0
"""Seconds that a writer may take to start."""

_SPARE = 1.05
"""Of the bytes that a save is reckoned to take: files have more in them than tensors."""


_claimed = dict[tuple[str, str], tuple[str, str, int]]()
"""By place of ``to`` and tag the folder that this script named for it, the job, and the step."""


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
        self.number, self.bytes, self.failed = 0, 0, ""
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
        self._reached, self._told = dict[str, int](), dict[str, int]()  # by place that is late

    def open(self) -> None:
        """Make this job's folder, and have done what dead ones have left."""
        self.job.own()
        finish_dead(self.root, self.settings)
        atexit.register(self.close)

    @property
    def folder(self) -> str:
        """Of the save that is made: of tags, in memory."""
        return self.job.find_folder(self.number)

    def make_room(self, needed: int, save_dir: str) -> str:
        """Let go of what is not needed, where a save would not fit; why it does not even so, in words.

        Args:
            save_dir: what another job has for it in memory alone is needed until this one has something.
        """
        safe, own = self.job.read_copying()[0], locate(save_dir)
        older = sorted(self.job.list_saves()[:-1], key=lambda save: save.number == safe)
        dead = [save for save in self._list_dead() if save.places or save.save_dir != own]
        for save in [*dead, *older]:
            if count_free(self.root) < needed and (save.is_copy() or not save.list_pending()):
                save.remove()
        if count_free(self.root) < needed:
            shutil.rmtree(self.job.spare, ignore_errors=True)
        free = count_free(self.root)
        if free >= needed:
            return ""
        return f"a save takes {needed >> 20:,} MiB of {self.root}, where {free >> 20:,} MiB are free. {_ADVICE}"

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

        Raises:
            StorageError: the place has another save of this script's under the same tag.
        """
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

    def begin(self, needed: int, save_dir: str) -> str:
        """Make the folder of the next save, on the node's first rank; why there is no room for it, in words."""
        if not self.is_first:
            return ""
        for number in self.job.list_numbers():  # what earlier ones have left that failed
            if self.job.is_unfinished(number):
                shutil.rmtree(self.job.find_folder(number), ignore_errors=True)
        if why := self.make_room(needed, save_dir):
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
        while self._left:
            self._left.pop().abandon()
        if self.is_first:
            shutil.rmtree(self.folder, ignore_errors=True)

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
        until = time.monotonic() + self.options.wait_s
        while time.monotonic() < until:
            told = [name for name in os.listdir(self.folder) if name.startswith((".copied-", ".failed-"))]
            if len(told) == self.ranks:
                return not any(name.startswith(".failed-") for name in told)
            time.sleep(_COPIED)
        raise StorageError(f"of {self.ranks} ranks not all have copied their parts within {self.options.wait_s:.0f} s.")

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
        local: bool,
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
        node, nodes = (0, 1) if local else (self.node, self.nodes)
        Snapshot(
            job=self.job.name if nodes == self.nodes else f"{self.job.name}-{self.node}",
            number=self.number, save_dir=locate(save_dir), tag=tag, step=step, latest=latest, node=node, nodes=nodes,
            places=tuple(places), folder=self.folder, by_itself=by_itself,
        ).write_record()  # fmt: skip
        files = (path for path in Path(self.folder).rglob("*") if path.is_file())
        self.bytes = sum(path.stat().st_size for path in files if not path.parent.name.startswith(BASE))
        self._tell_writer()
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

    def _tell_writer(self) -> None:
        """Of a new save, which is safe in memory: what keeps a writer from starting is a warning."""
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

    def wait(self, seconds: float) -> bool:
        """Wait until all places have what they are to have, or nobody writes any more; whether they have it."""
        self.finish_copy()
        seen, told = time.monotonic(), False
        end = seen + seconds
        while late := list_late(self.job.list_saves()):
            now = time.monotonic()
            if is_locked(self.job):
                seen = now
            elif self._lines is not None:
                self._tell_writer()  # it starts, or has been killed
            if now > min(end, seen + _STARTING):
                logger.warning("still to be written: %s; see %s/log", ", ".join(sorted(late)), self.job.folder)
                return False
            if not told:
                logger.info("waiting for saves to be written, %.0f s at most: %s", seconds, ", ".join(sorted(late)))
                told = True
            time.sleep(_POLLED)
        return True

    def finish(self) -> bool:
        """What :meth:`wait` does, for ``wait_s`` at most and with another writer where that has been killed."""
        if list_late(self.job.list_saves()):
            self._tell_writer()
        return self.wait(self.options.wait_s)

    def close(self) -> None:
        """At the end of the process: finish what is pending; the writer ends, and memory is what the next run finds."""
        self.finish_copy()
        if not self.is_first:
            return
        if list_late(self.job.list_saves()):
            self._tell_writer()
        self._end_writer()
        end = time.monotonic() + self.options.wait_s
        self.wait(self.options.wait_s)
        if self.neighbours is not None:
            while self.neighbours.is_waited_for() and is_locked(self.job) and time.monotonic() < end:
                time.sleep(_POLLED)
            self.neighbours.close()
        self.job.disown()


def save_into_memory(
    engine: Any,
    config: UniversalConfig,
    save_dir: str,
    tag: str,
    write: Callable[..., Any],
    *,
    latest: bool,
    by_itself: bool = False,
    frozen: bool = True,
) -> tuple[Any, bool]:
    """Save into memory, from where a process of its own writes to the places; collective.

    Args:
        write: DeepSpeed's own save, into a folder of tags, by which arguments.
        by_itself: no script has asked for it: it is not for ``save_dir``, and waits for nothing.
        frozen: it is to have frozen parameters.

    Returns:
        What that has returned, and whether it has gone into memory. Where there is no room, and with tags and
        writers that memory is not for, it has written to ``save_dir`` itself, with a warning: once what is pending
        has been written.

    Raises:
        StorageError: it cannot go into memory, and DeepSpeed cannot write to where it is to go, or has not been asked
            to; the same everywhere.
    """
    comm, saver = connect(), _open_saver(engine, config)
    if saver.options.to:
        comm.run(lambda: saver.claim(save_dir, tag, engine.global_steps))
    saver.finish_copy()
    saver.mapped.tidy()
    saver.choose_copied(comm)
    saver.number, saver.failed = saver.number + 1, ""
    base = _choose_base(engine, saver, comm, wanted=frozen)
    known = saver.bytes * (base is None or not base.is_new)
    told = comm.each(lambda: (identify_host(), count_saved(engine), known, _find_obstacle(engine, tag)))
    needed, obstacle = _count_needed(told), next(filter(None, (each[-1] for each in told)), "")

    def begin() -> str:
        return obstacle or next(filter(None, comm.each(partial(saver.begin, needed, save_dir))), "")

    if why := begin():
        _finish_others(engine, by_itself=by_itself)
        saver.mapped.tidy(everything=True)
        why = begin()
    if not why:
        saved, why = _write_quickly(engine, saver, base, write, comm)
        if why:
            _finish_others(engine, by_itself=by_itself)
    if why:
        saver.number -= 1
        saved = _write_slowly(save_dir, why, write, comm, by_itself=by_itself)
        comm.run(lambda: saver.drop_dead(save_dir, by_itself=False) if saver.is_first and latest else None)
        return saved, False
    step, local = engine.global_steps, engine.use_node_local_storage()

    def end() -> None:
        if saver.is_first:
            shutil.rmtree(saver.job.spare, ignore_errors=True)
            saver.warn_late(step)
            saver.end(save_dir, tag, step, base, latest=latest, local=local, by_itself=by_itself)

    if saver.options.overlap:
        saver.end_behind(end, save_dir)
    else:
        comm.run(end)
        saver.map_behind()
    return saved, True


def _choose_base(engine: Any, saver: Saver, comm: Comm, *, wanted: bool) -> FrozenBase | None:
    """What has the frozen parameters of the save that is made; None where that has to have them; collective."""
    if not wanted or saver.options.frozen == "always":
        return None
    if _is_plain(engine.checkpoint_engine):
        base = choose_base(engine, saver.base, saver.job.folder, comm)
    else:
        base = f"a {type(engine.checkpoint_engine).__name__} writes its files"
    if isinstance(base, str):
        saver.tell_once(f'"frozen": "once": each save has all parameters, as {base}')
        return None
    return base


def forget_frozen() -> None:
    """After a load, or another change: frozen parameters that have been saved need not be what they are now."""
    for saver in list(_savers):
        if saver.base is not None:
            saver.base.forget()


def _write_quickly(
    engine: Any, saver: Saver, base: FrozenBase | None, write: Callable[..., Any], comm: Comm
) -> tuple[Any, str]:
    """DeepSpeed's own save into memory, and why nothing has come of it, in words; collective."""
    saver.note_stable(engine)
    write_file = saver.write_file if base is None else partial(saver.write_split, base, engine)
    with _write_by(engine.checkpoint_engine, write_file), _copy_by(saver.copy):
        saved = write(saver.folder, **(base.arguments if base else {}))
    answers = comm.each(lambda: (saver.failed, base.files if base else {}))
    failed = next((failed for failed, _ in answers if failed), "")
    if failed:
        comm.run(saver.drop)
    if base is not None:
        saver.change_base(base, None if failed else [files for _, files in answers])
    return saved, f"memory is full by now: {failed}. {_ADVICE}" if failed else ""


def _finish_others(engine: Any, *, by_itself: bool) -> None:
    """Before DeepSpeed's own save: `latest` would go back to what is written after it."""
    if not by_itself:
        finish_saves(engine)


def _write_slowly(save_dir: str, why: str, write: Callable[[str], Any], comm: Comm, *, by_itself: bool) -> Any:
    """DeepSpeed's own save, where it cannot go into memory; collective."""

    def check() -> None:
        if by_itself or is_url(save_dir):
            raise StorageError(f"cannot be saved to by way of memory: {why}", path=save_dir)

    comm.alike(check)
    if comm.rank == 0:
        logger.warning("%s: saved while training waits, as %s", save_dir, why)
    return write(save_dir)


def _is_plain(checkpoint_engine: Any) -> bool:
    """Whether DeepSpeed's files are what ``torch.save`` makes of them, and nothing else."""
    name = type(checkpoint_engine).__name__
    return name == "TorchCheckpointEngine" and bool(checkpoint_engine.zipfile_serialization)


@contextmanager
def _write_by(checkpoint_engine: Any, write: Callable[[Any, str], None]) -> Iterator[None]:
    """Have DeepSpeed's plain writer write in another way; what else it may be given writes in its own."""
    if not _is_plain(checkpoint_engine):
        yield
        return
    checkpoint_engine.save = write
    try:
        yield
    finally:
        del checkpoint_engine.save


@contextmanager
def _copy_by(copy: Callable[..., Any]) -> Iterator[None]:
    """Have DeepSpeed copy in another way what lies beside its own files: swap files on NVMe, scripts."""
    copying = (shutil, "copytree"), (sys.modules.get("deepspeed.runtime.engine"), "copyfile")
    before = [(module, name, getattr(module, name)) for module, name in copying if hasattr(module, name)]
    for module, name, work in before:
        setattr(module, name, partial(copy, work))
    try:
        yield
    finally:
        for each in before:
            setattr(*each)


def finish_saves(engine: Any, *, required: bool = False) -> None:
    """Wait until all places have an engine's saves that are to have them, ``wait_s`` at most; collective.

    Args:
        required: what is not there by then is an error: a trainer removes older checkpoints next.

    Raises:
        StorageError: it is required, and is not there; the same on every rank.
    """
    saver = find_state(engine).saver

    def finish() -> None:
        saver.finish_copy()
        if saver.is_first and not saver.finish() and required:
            raise StorageError(
                f"its saves were not written within {saver.options.wait_s:.0f} s ({saver.job.folder}/log tells why). "
                "Older checkpoints, which would be removed now, stay; memory has the newest one.",
                path=", ".join(sorted(list_late(saver.job.list_saves()))),
            )

    if saver is not None:
        connect().run(finish)


_ADVICE = 'Give the container more memory, or let "save": {"memory": …} name a folder of local NVMe'


def _find_obstacle(engine: Any, tag: str) -> str:
    """Why a save cannot go by way of memory however much there is, in words; empty where it can."""
    if is_decoupled(engine):
        return 'its files come after it ("checkpoint": {"writer": {"decoupled": …}})'
    if tag != os.path.normpath(tag) or os.path.isabs(tag) or tag in (".", "..") or tag.startswith("../"):
        return f"its tag {tag!r} is no path of a folder below that one"
    return ""


def _open_saver(engine: Any, config: UniversalConfig) -> Saver:
    """The engine's, made with its first save; collective."""
    state = find_state(engine)
    if state.saver is None:
        comm = connect()
        name, first = comm.broadcast(name_job()), list_first(config, comm)
        saver = comm.run(partial(Saver, config, name, comm.rank, first))
        comm.run(lambda: saver.open() if saver.is_first else None)
        if saver.options.copies:
            saver.neighbours = _find_neighbours(engine, saver, list(dict.fromkeys(first)), comm)
        state.saver = saver
        _savers.add(saver)
    found: Saver = state.saver
    return found


def _find_neighbours(engine: Any, saver: Saver, first: Sequence[int], comm: Comm) -> Neighbours | None:
    if not engine.use_node_local_storage():
        return find_neighbours(saver.options, saver.job, first, comm)
    if comm.rank == 0:
        logger.warning("no node's save is copied to another: each has its own (checkpoint.use_node_local_storage)")
    return None


def list_first(config: UniversalConfig, comm: Comm) -> list[int]:
    """By rank the first one that shares its folder of memory, whatever local ranks a launcher gives; collective."""
    options = config.save or SaveOptions()

    def look() -> tuple[str, int, int]:
        found = os.stat(find_root(options.memory))
        return identify_host(), found.st_dev, found.st_ino

    ranks = dict[tuple[str, int, int], int]()
    return [ranks.setdefault(memory, rank) for rank, memory in enumerate(comm.each(look))]


def _count_needed(told: Sequence[tuple[str, int, int, str]]) -> int:
    """Bytes of memory that a save takes on this node, by what ranks tell of: host, reckoned, those of the last one."""
    own = [each for each in told if each[0] == identify_host()]
    return int(_SPARE * (max(before for _, _, before, _ in own) or sum(reckoned for _, reckoned, _, _ in own)))


def foresee_saves(engine: Any, config: UniversalConfig) -> None:
    """Say what saves of a new engine take of the nodes' memory, and what these have; collective.

    Raises:
        ConfigError: a node has no room for one; the same on every rank.
    """
    options, comm = config.save or SaveOptions(), connect()

    def look() -> tuple[str, int, int]:
        root = find_root(options.memory)
        left = sum(job.count_bytes() for job in list_jobs(root) if not job.is_owned())  # it goes where it is needed
        return identify_host(), count_saved(engine), count_free(root) + left

    nodes = dict[str, tuple[int, int]]()
    for host, needed, free in comm.each(look):
        known = nodes.get(host, (0, free))
        nodes[host] = known[0] + needed, min(known[1], free)
    needed, free = max(nodes.values(), key=lambda node: node[0] - node[1])
    needed = int(_SPARE * needed)
    told = f"a save takes about {needed >> 20:,} MiB of {options.memory} on a node, where {free >> 20:,} MiB are free"
    if needed > free:
        raise ConfigError(f'{told}. {_ADVICE}, or leave out "save".')
    if comm.rank == 0:
        wanted = (options.keep + 1) * needed * (1 + min(options.copies, len(nodes) - 1))
        few = "" if free >= wanted else "; older ones go before the next one is made"
        logger.info("%s%s", told, few)


def count_saved(engine: Any) -> int:
    """Bytes of the tensors that a rank saves, about; with states that its optimizer makes in its first step."""
    inner, masters, states = _list_states(engine)
    model = _list_weights(engine) if engine.save_non_zero_checkpoint else []
    kept = [param for param in engine.module.parameters() if not param.requires_grad]
    model += [param.ds_tensor for param in kept if hasattr(param, "ds_tensor")]  # of ZeRO 3, by each rank
    groups = getattr(inner, "param_groups", ())
    later = max((len(group.get("betas", ())) or bool(group.get("momentum")) for group in groups), default=0)
    unmade = [each for each in masters if not inner.state.get(each)] * later
    return sum(int(each.numel() * each.element_size()) for each in [*masters, *states, *unmade, *model])


def _list_states(engine: Any) -> tuple[Any, list[Any], list[Any]]:
    """Torch's optimizer, within a wrapper or by itself; an engine's masters, and states; nothing of kinds not known."""
    optimizer, row = engine.optimizer, find_live(engine.optimizer)
    inner = getattr(optimizer, "optimizer", optimizer)
    if row is not None and row.masters:
        groups = [each if isinstance(each, list) else [each] for each in getattr(optimizer, row.masters)]
        masters = [each for group in groups for each in group]
    elif isinstance(optimizer, Optimizer):
        masters = [each for group in optimizer.param_groups for each in group["params"]]
    else:
        return inner, [], []
    states = [each for state in inner.state.values() for each in dict(state).values()]
    return inner, [*filter(is_tensor, masters)], [*filter(is_tensor, states)]


def find_stable(engine: Any) -> Stable:
    """What of an engine only its optimizer's step changes; nothing of engines that do so beside the backward pass."""
    inner, masters, states = _list_states(engine)
    is_muon = any(group.get(USE_MUON) for group in getattr(inner, "param_groups", ()))
    if not masters or is_muon or getattr(engine, "zenflow", False):
        return Stable()
    return Stable([*masters, *states, *_list_weights(engine)], engine.module.buffers())


def _list_weights(engine: Any) -> list[Any]:
    """Of the model, as far as saves have them: ZeRO 3 saves its masters alone."""
    return [] if engine.zero_optimization_partition_weights() else list(engine.module.parameters())


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


class Found(NamedTuple):
    """A whole save in the nodes' memory.

    Attributes:
        folder: of tags, on this rank's node; nodes without a part of it have none there.
        copies: the same for the parts of other nodes, as many on every rank; where there are fewer some are not there.
    """

    folder: str
    tag: str
    step: int
    copies: tuple[str, ...] = ()


def find_in_memory(config: UniversalConfig, load_dir: str, tag: Any, comm: Comm) -> Found | None:
    """The newest save of a place that is whole in the memory of all nodes together; collective.

    None where there is none, or where the place itself has a later one.
    """
    options = config.save
    if options is None:
        return None
    root, wanted = comm.run(lambda: find_root(options.memory)), locate(load_dir)
    is_first = list_first(config, comm)[comm.rank] == comm.rank

    def look() -> list[tuple[Snapshot, str | None]]:
        if not is_first:
            return []
        finish_dead(root, list_settings(config))
        # A living job's next save writes over the memory of an older one.
        jobs = [job for job in list_jobs(root) if job.is_own() or not job.is_owned()]
        saves = [save for job in jobs for save in [*job.list_copies(), *job.list_saves()]]
        saves = [save for save in saves if (save.latest if tag is None else save.tag == str(tag))]
        mine = [save for save in saves if wanted in (save.save_dir, *(place.folder for place in save.places))]
        return [
            (replace(save, folder=os.path.relpath(save.folder, root)), save.read_done().get(wanted)) for save in mine
        ]

    nodes, found = defaultdict[tuple[str, int], set[int]](set), dict[tuple[str, int], tuple[Snapshot, str | None]]()
    told = comm.each(look)
    for save, mark in sorted((each for own in told for each in own), key=lambda each: -each[0].node):
        nodes[save.key].add(save.node)
        found[save.key] = save, mark
    whole = [save for save, _ in found.values() if len(nodes[save.key]) == save.nodes]
    whole.sort(key=lambda save: (save.step, save.number), reverse=True)

    def choose() -> Snapshot | None:
        marks = {save.key: _find_mark(save, found, load_dir) for save in whole}
        return next((save for save in whole if _is_newer(save, marks[save.key], load_dir, tag)), None)

    newest = comm.once(choose)
    if newest is None:
        return None
    job, key = Job(os.path.join(root, os.path.dirname(newest.folder))), newest.key
    most = max(sum(save.is_copy() and save.key == key for save, _ in own) for own in told)
    copies = [copy.folder for copy in job.list_copies() if copy.key == key]
    copies = [*copies, *[os.path.join(job.folder, "copy-none")] * most][:most]
    return Found(job.find_folder(newest.number), newest.tag, newest.step, tuple(copies))


def _find_mark(
    save: Snapshot, found: Mapping[tuple[str, int], tuple[Snapshot, str | None]], load_dir: str
) -> str | None:
    """A save's mark in a place; what has given way to later ones, of which none has come there, counts as pending."""
    mark = found[save.key][1]
    if mark != "":
        return mark
    later = [each for each in found.values() if each[0].job == save.job and each[0].number > save.number]
    # What a further node has written alone is no save yet.
    has_come = any(other and (each.node == 0 or find_mark(load_dir, each.tag)) for each, other in later)
    return None if later and not has_come else mark


def _is_newer(save: Snapshot, mark: str | None, load_dir: str, tag: Any) -> bool:
    """Whether a save is not older than what a place has, or is that.

    What has been written there counts as long as the place names it and has its seal: who puts another tag into
    ``latest``, or something else under this tag, wants that. A place that is gone wants nothing.

    Args:
        mark: of it there, where it has been written; None where it has not been yet; empty where it is not to be any
            more.
        tag: that is asked for.
    """
    try:
        named = tag if tag is not None else read_latest(load_dir)
        if mark == "" and tag is None:
            return False
        if mark and named is not None:
            return named == save.tag and mark == find_mark(load_dir, save.tag)
        return named is None or find_age([os.path.join(load_dir, named)]).step <= save.step
    except (UcpError, OSError):
        return True  # it cannot be told, and memory has a whole one
