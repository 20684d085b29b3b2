"""Saves into memory: DeepSpeed's own save, directed to another folder.

The first rank of each node owns the folder in memory, starts the writer process and announces saves to it.
"""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cache, partial
from typing import Any
from weakref import WeakSet

from ..comm import Comm, connect, is_shared
from ..config import SaveOptions, UniversalConfig
from ..engine.references import replace_method
from ..engine_state import find_state
from ..errors import StorageError, UcpError
from ..io.deletion import try_delete_tree
from ..io.disk import count_allocated
from ..io.paths import MEMORY, find_storage_kind, is_below, is_url
from ..writer import find_other_writer, is_decoupled
from .budget import ADVICE, MemoryBudget, recycle_unneeded
from .files import MappedFiles, save_in_place
from .launch import POLLED, WriterPipe, finish_dead_jobs, wait_until_written
from .memory import (
    FINISHED,
    Job,
    SavePart,
    describe_pending,
    find_root,
    has_writer,
    list_owners,
    list_pending_tags,
    locate,
    name_job,
)
from .neighbours import find_neighbours
from .sizes import MARGIN

logger = logging.getLogger("deepspeed_ucp")

_ENGINE = "deepspeed.runtime.engine"

_savers = WeakSet["Saver"]()

_claimed = dict[tuple[str, str], tuple[str, tuple[str, int]]]()
"""(destination, tag) → the folder that the script named for the save there, and the save's job and step."""


@cache
def _warn_shared(folder: str) -> None:
    logger.warning(
        "%s: two engines save the same step under one tag there, so that one save replaces the other. Give each engine "
        "another folder or other tags.",
        folder,
    )


class Saver:
    """One engine's saves on one rank.

    Args:
        owners: for each rank the first rank that shares its folder in memory, and owns it.
        needed: bytes of the first save on this node, estimated.
    """

    def __init__(self, config: UniversalConfig, name: str, rank: int, owners: Sequence[int], needed: int = 0) -> None:
        options = config.save or SaveOptions()
        self.options = options
        nodes = list(dict.fromkeys(owners))
        self.is_owner, self.node, self.nodes = owners[rank] == rank, nodes.index(owners[rank]), len(nodes)
        self.root = find_root(options.memory)
        self.job = Job(os.path.join(self.root, name))
        self.number, self.failed = 0, ""
        self.budget, self.writer = MemoryBudget(self.job, needed), WriterPipe(self.job, config)
        self.made = 0  # number of saves of the script
        self.keeps_memory = False  # after a normal exit, as the job is restarted
        self._requested, self.lost = dict[int, str](), dict[str, str]()
        self.mapped = MappedFiles(wanted=find_storage_kind(self.root) == MEMORY)
        self._logged = dict[str, str]()  # faults that were logged, by late destination
        _savers.add(self)

    def open(self) -> None:
        """Create this job's folder, and start writers for saves of dead jobs."""
        self.job.create()
        finish_dead_jobs(self.root, self.writer.config)
        atexit.register(self.close)

    def is_deleted(self) -> bool:
        return self.is_owner and not self.job.exists()

    def release(self) -> None:
        """Release the resources of a saver whose folder was deleted."""
        self.mapped.release(everything=True)
        self.writer.close()
        if self.writer.neighbours is not None:
            self.writer.neighbours.close()
        atexit.unregister(self.close)
        self.job.unlock()

    def claim(self, save_dir: str, tag: str, step: int) -> None:
        """Reserve a tag in the folder that the script named and in all destinations.

        Rank 0 warns once if another engine has saved the same step to the same folder and tag.

        Raises:
            StorageError: one of them has the save of another folder under this tag.
        """
        folder, owner = locate(save_dir), (self.job.name, step)
        for destination in {folder, *(locate(tier.place) for tier in self.options.to)}:
            other, former = _claimed.setdefault((destination, tag), (folder, owner))
            if other != folder and former != owner:
                raise StorageError(
                    f"has {tag!r} of {other}, which the save of {folder} would replace. Give each engine another "
                    'destination in "save": {"to": …}, or each save another tag.',
                    path=destination,
                )
            is_shared = other == folder and former[0] != owner[0] and former[1] == step
            if is_shared and self.is_owner and self.node == 0:
                _warn_shared(folder)
            _claimed[destination, tag] = folder, owner

    @property
    def folder(self) -> str:
        """Folder of tags in memory for the current save."""
        return self.job.find_folder(self.number)

    def write_file(self, state_dict: Any, path: str) -> None:
        """Save as ``torch.save`` does, overwriting a file of a recycled save.

        An error is kept until the end of the save: raised here, it would leave other ranks in DeepSpeed's barrier.
        """
        if self.failed:
            return
        try:
            self.job.reuse(path)
            save_in_place(state_dict, path, self.mapped)
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

    def begin(self, *, waits: bool = False) -> str:
        """Create the folder of the next save, on the node's first rank.

        Args:
            waits: wait for the memory of pending saves, as long as one is written within each ``wait_s``.

        Returns:
            An error message if there is no room for it, else an empty string.

        Raises:
            StorageError: pending saves hold the memory, and none was written in ``wait_s``.
        """
        if not self.is_owner:
            return ""
        for number in self.job.list_numbers():  # left by saves that failed
            if self.job.is_unfinished(number):
                try_delete_tree(self.job.find_folder(number))
        if (why := self.budget.make_room()) and waits:
            self.finish(self.budget.free_own_saves)
            if why := self.budget.make_room():
                self.check_pending(why)
        if why:
            return why
        try:
            self.job.reserve(self.number, self.node)
        except OSError as error:
            return f"{self.folder} cannot be made ({error}). {ADVICE}"
        return ""

    def free_replaced(self, comm: Comm) -> None:
        """Agree on the save to copy, and free replaced saves (collective, before a save)."""
        if self.writer.neighbours is not None:
            self.writer.neighbours.agree_on_copies(self.number + 1, comm)
        if self.is_owner:
            recycle_unneeded(self.job, is_agreed=True)

    def list_pending(self) -> set[str]:
        """Return the folders and URLs that lack saves, on the node's first rank."""
        return set(list_pending_tags(self.job.list_saves())) if self.is_owner else set()

    def record(self, save_dir: str, tag: str, step: int, *, latest: bool, is_snapshot: bool) -> None:
        """Record that all of the node's files of the save are in memory."""
        self.made += not is_snapshot
        destinations: dict[str, int | None] = {} if is_snapshot or self.options.to else {locate(save_dir): None}
        for tier in self.options.to:
            if not is_snapshot and self.made % tier.every == 0:
                destinations[locate(tier.place)] = tier.keep
        SavePart(
            job=self.job.name, number=self.number, save_dir=locate(save_dir), tag=tag, step=step, latest=latest,
            node=self.node, nodes=self.nodes, destinations=destinations, folder=self.folder,
        ).write_record()  # fmt: skip
        self.budget.needed = int(MARGIN * count_allocated(self.folder))
        if destinations:
            self._requested[self.number] = tag

    def end(self, save_dir: str, tag: str, *, latest: bool, is_snapshot: bool) -> None:
        """Notify the writer of the recorded save, and delete saves that it replaces."""
        self.writer.notify()
        # Without a complete copy of this save, the loss of a node would leave only older saves complete.
        if latest and (self.writer.neighbours is None or self.writer.neighbours.safe):
            self.budget.delete_dead(save_dir, tag, is_snapshot=is_snapshot)

    def check_pending(self, why: str) -> None:
        """Refuse a save outside of memory while saves that would replace it are pending.

        Args:
            why: reason why memory does not take the save.

        Raises:
            StorageError: saves are pending.
        """
        if late := describe_pending(self.job.list_saves()):
            log = os.path.join(self.job.folder, "log")
            raise StorageError(
                f"it is not saved, as {why}. Earlier saves are still to be written: {late}; see {log}. Repair the "
                'destination, or for a slow one increase "save": {"wait_s": …}, and save again.',
                path=self.folder,
            )

    def list_missing(self) -> dict[str, str]:
        """Return by tag why a destination lacks a save of the script."""
        missing, self.lost = self.lost, {}  # lost ones are named once
        if self.is_deleted():
            why = f"{self.job.folder} was removed, perhaps before it was written"
            missing |= dict.fromkeys(self._requested.values(), why)
        for destination, faults in self._find_late().items():
            for tag, fault in faults.items():
                missing[tag] = f"missing at {destination} ({fault or f'see {self.job.folder}/log'})"
        return missing

    def warn_late(self) -> None:
        """Warn once about each destination that lacks a save, until it has all of them."""
        late = self._find_late()
        self._logged = {destination: fault for destination, fault in self._logged.items() if destination in late}
        for destination, faults in late.items():
            fault = next(filter(None, faults.values()), "")
            if self._logged.get(destination) != fault:
                self._logged[destination] = fault
                why = fault or f"see {self.job.folder}/log"
                logger.warning("%s still lacks %s, which memory holds: %s", destination, ", ".join(faults), why)

    def _find_late(self) -> dict[str, dict[str, str]]:
        """Return by destination the lacking tags, with faults; note which are written."""
        late, lacking = defaultdict[str, dict[str, str]](dict), set[int]()
        for save in self.job.list_saves() if self.is_owner else ():
            for destination in save.list_lacking():
                late[destination][save.tag] = save.find_failure(destination)
                lacking.add(save.number)
        if not self.is_deleted():
            self._requested = {number: tag for number, tag in self._requested.items() if number in lacking}
        return late

    def wait(self, is_enough: Callable[[], bool] | None = None) -> bool:
        """Wait at most ``wait_s`` for this node's saves; see :func:`wait_until_written`."""
        return wait_until_written(lambda: [self.job], self.options.wait_s, is_enough=is_enough)

    def finish(self, is_enough: Callable[[], bool] | None = None) -> bool:
        """Wait as :meth:`wait` does; a writer that was killed is restarted first."""
        if list_pending_tags(self.job.list_saves()):
            self.writer.notify()
        is_written = self.wait(is_enough)
        self._find_late()
        if is_written:
            self.warn_late()  # about saves that the writer has given up
        return is_written

    def close(self) -> None:
        """Write pending saves at exit.

        After a normal end the writer frees the memory if every destination has all saves; otherwise the next run finds
        the saves there.
        """
        if not self.is_owner:
            return
        is_finished = not self.keeps_memory and getattr(sys, "last_value", None) is None and self.job.exists()
        if is_finished or list_pending_tags(self.job.list_saves()):
            self.writer.notify()
        self.writer.close(FINISHED if is_finished else b"")
        end = time.monotonic() + self.options.wait_s
        frees = self.wait() and is_finished  # some platforms kill the writer with the rank
        neighbours = self.writer.neighbours
        while has_writer(self.job) and time.monotonic() < end:
            if not (frees or (neighbours is not None and neighbours.has_unsent_save())):
                break
            time.sleep(POLLED)
        if neighbours is not None:
            neighbours.close()
        self.job.unlock()


def list_savers() -> list[Saver]:
    """Return the savers of this process's engines."""
    return list(_savers)


def keep_memory() -> None:
    """Keep saves in memory after a normal exit, for the job that is started next."""
    for saver in list_savers():
        saver.keeps_memory = True


def save_into_memory(
    engine: Any,
    config: UniversalConfig,
    save_dir: str,
    tag: str,
    write: Callable[..., Any],
    *,
    latest: bool,
    is_snapshot: bool = False,
) -> tuple[Any, bool]:
    """Save into memory; the writer process writes to the destinations (collective).

    If there is no room, or the tag or the engine's writer is not supported, pending saves are written first. If there
    is no room even then, DeepSpeed saves to ``save_dir`` itself, with a warning.

    Args:
        write: DeepSpeed's save; takes the folder of tags.
        is_snapshot: the save stays in memory alone, and waits for no pending save.

    Returns:
        The result of ``write``, and True if the save is in memory.

    Raises:
        StorageError: it cannot be saved into memory, and it is a snapshot, or ``save_dir`` is a URL, or pending saves
            cannot be written; on all ranks.
    """
    saver = _open_saver(engine, config)
    comm = connect(waits=False)  # all ranks get here together, as to DeepSpeed's barriers
    saver.mapped.release()
    saver.free_replaced(comm)
    saver.number, saver.failed = saver.number + 1, ""
    saver.lost.pop(tag, None)  # it is saved again

    def begin(*, waits: bool = False) -> str:
        saver.claim(save_dir, tag, engine.global_steps)
        return _find_obstacle(engine, saver, tag) or saver.begin(waits=waits)

    if why := next(filter(None, comm.gather_results(begin)), ""):
        saver.mapped.release(everything=True)  # mapped memory is not free
        why = next(filter(None, connect().gather_results(partial(begin, waits=not is_snapshot))), "")
    if not why:
        saved, why = _write_quickly(engine, saver, write, comm)
    if why:
        saver.number -= 1
        saved = _write_slowly(saver, save_dir, tag, why, write, comm, is_snapshot=is_snapshot)
        comm.run(
            lambda: saver.budget.delete_dead(save_dir, tag, is_snapshot=False) if saver.is_owner and latest else None
        )
        return saved, False
    step = engine.global_steps

    def record() -> None:
        if saver.is_owner:
            saver.job.drop_spare()
            saver.warn_late()
            saver.record(save_dir, tag, step, latest=latest, is_snapshot=is_snapshot)

    try:
        comm.run(record)
    except UcpError as error:
        if is_shared(error) and saver.is_owner:  # another node could not record it
            for save in (save for save in saver.job.list_saves() if save.number == saver.number):
                save.remove()
        raise
    # Until all nodes have recorded this save, a dead job's may be the only complete one.
    comm.run(lambda: saver.end(save_dir, tag, latest=latest, is_snapshot=is_snapshot) if saver.is_owner else None)
    saver.mapped.settle()
    return saved, True


def _write_quickly(engine: Any, saver: Saver, write: Callable[..., Any], comm: Comm) -> tuple[Any, str]:
    """Let DeepSpeed save into memory; return its result and an error (collective)."""
    writer, copying = engine.checkpoint_engine, ((shutil, "copytree"), (sys.modules.get(_ENGINE), "copyfile"))
    with ExitStack() as stack:
        if type(writer).__name__ == "TorchCheckpointEngine" and writer.zipfile_serialization:  # others keep theirs
            stack.enter_context(replace_method(writer, "save", saver.write_file))
        for module, name in copying:  # functions that copy swap files and scripts
            if hasattr(module, name):
                stack.enter_context(replace_method(module, name, partial(saver.copy, getattr(module, name))))
        saved = write(saver.folder)
    failed = next(filter(None, comm.gather_results(lambda: saver.failed)), "")
    if failed:
        comm.run(lambda: try_delete_tree(saver.folder) if saver.is_owner else None)
    return saved, f"memory is full by now: {failed}. {ADVICE}" if failed else ""


def _write_slowly(
    saver: Saver, save_dir: str, tag: str, why: str, write: Callable[[str], Any], comm: Comm, *, is_snapshot: bool
) -> Any:
    """Save without memory, while training waits (collective).

    Raises:
        StorageError: it is a snapshot, DeepSpeed cannot write to the folder, or saves stay pending; on all ranks.
    """

    def check() -> None:
        if is_snapshot or is_url(save_dir):
            raise StorageError(f"{tag} cannot be saved through memory: {why}", path=save_dir)
        if saver.is_owner:
            saver.finish(lambda: False)
            saver.check_pending(why)

    connect().run(check)
    if comm.rank == 0:
        others = ", ".join(tier.place for tier in saver.options.to)
        only = f" (not to {others})" if others else ""
        logger.warning("%s: %s is saved there%s while training waits, as %s", save_dir, tag, only, why)
    return write(save_dir)


def finish_saves(engine: Any, *, required: bool = False) -> None:
    """Wait up to ``wait_s`` until every destination has the saves (collective).

    Args:
        required: raise StorageError on all ranks if a destination lacks a save of the script; a trainer removes older
            ones next.

    Example:
        >>> engine.save_checkpoint("checkpoints")  # returns when the save is in memory
        >>> finish_saves(engine, required=True)  # now the files are in "checkpoints"
    """
    saver = find_state(engine).saver

    def finish() -> None:
        if saver.is_owner:
            saver.finish()
        if required and (missing := saver.list_missing()):
            named = "; ".join(f"{tag}: {why}" for tag, why in missing.items())
            raise StorageError(
                f"not all saves are written after {saver.options.wait_s:.0f} s: {named}. Older checkpoints are not "
                "removed. Unwritten saves stay in memory: repair the destination, or save again.",
                path=", ".join(missing),
            )

    if saver is not None:
        connect().run(finish)


def _find_obstacle(engine: Any, saver: Saver, tag: str) -> str:
    """Return an error message if memory does not support a save, else an empty string."""
    if is_decoupled(engine):
        return 'another process writes its files later ("checkpoint": {"writer": {"decoupled": …}})'
    if writer := find_other_writer(engine):
        return f"{writer} may still write its files when it has returned"
    if not is_below(tag):
        return f"its tag {tag!r} is not a path below the folder"
    if saver.nodes > 1 and engine.use_node_local_storage():
        return "no node sees when the others have written (checkpoint.use_node_local_storage)"
    return ""


def _open_saver(engine: Any, config: UniversalConfig) -> Saver:
    """Return the engine's saver; replace one whose folder was deleted (collective)."""
    state, comm = find_state(engine), connect()
    lost: Saver | None = state.saver
    if lost is not None and any(connect(waits=False).gather_results(lost.is_deleted)):  # as in a save
        if comm.rank == 0:
            logger.warning(
                "%s: was deleted with all saves in it while the job runs; new saves continue", lost.job.folder
            )
        lost.release()
        state.saver = None
    if state.saver is None:
        name, owners = comm.broadcast(name_job()), list_owners((config.save or SaveOptions()).memory, comm)
        saver = comm.run(partial(Saver, config, name, comm.rank, owners, state.save_size))
        if lost is not None:
            saver.made = lost.made
            saver.lost |= lost.list_missing()
        comm.run(lambda: saver.open() if saver.is_owner else None)
        if saver.options.copies and not engine.use_node_local_storage():
            saver.writer.neighbours = find_neighbours(saver.options, saver.job, list(dict.fromkeys(owners)), comm)
        comm.run(lambda: saver.writer.notify() if saver.is_owner else None)  # it starts while the first save is made
        state.saver = saver
    opened: Saver = state.saver
    return opened
