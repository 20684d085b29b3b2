"""Decides which saves a node's memory still needs; makes room for the next one.

:func:`is_unneeded` is applied to saves of a running job and of dead jobs. In addition, a running job's save replaces
dead jobs' saves for the same folder (:meth:`MemoryBudget.delete_dead`). After a job's normal end the writer frees all.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Iterable

from ..errors import shorten
from ..io.memory import measure_available
from ..io.paths import MEMORY, find_storage_kind
from .destinations import has_sealed_part
from .memory import Job, SavePart, describe_pending, has_writer, list_dead, locate

logger = logging.getLogger("deepspeed_ucp")

ADVICE = 'Give the container more memory, or let "save": {"memory": …} name a folder of local NVMe'


def count_free(root: str) -> int:
    """Return the bytes free for a folder; in memory, within the container's limit."""
    free = shutil.disk_usage(root).free
    return min(free, measure_available()) if find_storage_kind(root) == MEMORY else free


def is_safe(save: SavePart) -> bool:
    """Return True if every destination has the files of all nodes of a save.

    The part of a node without files needs no memory in any case.
    """
    is_known = save.node == 0 or not save.list_files()
    return save.is_written() and (is_known or all(has_sealed_part(save, place) for place in save.destinations))


def is_unneeded(save: SavePart, saves: Iterable[SavePart], *, is_dead: bool) -> bool:
    """Return True if a save (or a copy) in memory may be deleted.

    No destination waits for it, and all have it or a later save replaces it.

    Args:
        saves: saves of its job that may replace it.
        is_dead: the job has ended. The first node may not have published the save, and the later save may lack the part
            of another node. For a running job no destination is read: training must not wait for a slow one.
    """
    if is_dead and is_safe(save):
        return True
    if save.list_lacking() and not save.is_copy():
        return False
    if save.destinations and not is_dead:
        return True
    later = (other for other in saves if other.supersedes(save))
    return any(not is_dead or other.nodes == 1 or other.is_written() for other in later)


def recycle_unneeded(job: Job, *, is_agreed: bool) -> None:
    """Delete a running job's unneeded older saves; the files of one stay for reuse.

    The save that is being copied and the last fully copied one stay.

    Args:
        is_agreed: all nodes have recorded the newest save. Else it replaces none, unless there is only one node.
    """
    copying, saves = job.read("copying").values(), job.list_saves()
    complete = [save for save in saves if is_agreed or save.nodes == 1 or save is not saves[-1]]
    for save in saves[:-1]:
        if save.number not in copying and is_unneeded(save, complete, is_dead=False):
            save.recycle()


def _list_unneeded(job: Job, is_replaced: Callable[[SavePart], bool] = lambda _: False) -> list[SavePart]:
    """Return a dead job's unneeded saves and copies, in this order.

    A copy is also unneeded if the save that it belongs to is.

    Args:
        is_replaced: returns True if a save of a running job replaces a save or a copy.
    """
    saves, keys, spare = job.list_saves(), set[tuple[str, int]](), list[SavePart]()
    for save in [*saves, *job.list_copies()]:
        if save.key in keys or is_replaced(save) or is_unneeded(save, saves, is_dead=True):
            spare.append(save)
            if not save.is_copy():
                keys.add(save.key)
    return spare


class MemoryBudget:
    """Frees memory on this node for a running job's next save of ``needed`` bytes."""

    def __init__(self, job: Job, needed: int) -> None:
        self.root, self.job, self.needed = os.path.dirname(job.folder), job, needed

    def make_room(self) -> str:
        """Delete unneeded saves, dead jobs' first, until the next one fits.

        Returns:
            The reason why it still does not fit, or an empty string.
        """
        for job in list_dead(self.root) if not self._is_enough() else ():
            self._remove(_list_unneeded(job))
        if self.free_own_saves():
            return ""
        needed, free = self.needed >> 20, count_free(self.root) >> 20
        why = f"a save takes {needed:,} MiB of {self.root}, where {free:,} MiB are free"
        if self._count_needed() > self.needed:
            why += "; twice as much must be free while several saves are pending"
        kept = [save for job in list_dead(self.root) for save in [*job.list_saves(), *job.list_copies()]]
        if kept:
            named = [f"{save.tag} (step {save.step}) of {save.save_dir}: rm -r {save.folder}" for save in kept]
            why += f". Dead jobs' saves there may be the only copies; delete unneeded ones: {shorten(named)}"
        return f"{why}. {ADVICE}"

    def free_own_saves(self) -> bool:
        """Delete unneeded saves of this job until the next one fits; True if it does.

        The last fully copied one goes after other older ones. The newest one goes last, if all destinations have it.
        """
        safe, saves = self.job.read("copying").get("safe"), self.job.list_saves()
        unneeded = [save for save in saves if is_unneeded(save, saves, is_dead=False)]
        self._remove(sorted((save for save in unneeded if save is not saves[-1]), key=lambda save: save.number == safe))
        if not self._is_enough():
            self.job.drop_spare()
        if not self._is_enough():
            self._remove(save for save in unneeded if save is saves[-1] and is_safe(save))
        return self._is_enough()

    def _count_needed(self) -> int:
        """Return the bytes that must be free: one save, or two while several are pending."""
        pending = [save for save in self.job.list_saves() if save.list_pending()]
        return self.needed * (2 if len(pending) > 1 else 1)

    def _is_enough(self) -> bool:
        return count_free(self.root) >= self._count_needed()

    def _remove(self, saves: Iterable[SavePart]) -> None:
        """Delete saves, with a log line for each, until the next one fits."""
        for save in saves:
            if self._is_enough():
                return
            save.remove()
            part = "another node's part of " if save.is_copy() else ""
            logger.info("%s: removed to make room, %s%s of %s", save.folder, part, save.tag, save.save_dir)

    def delete_dead(self, save_dir: str, tag: str, *, is_snapshot: bool) -> None:
        """Delete dead jobs' unneeded saves, and those that this job's save replaces."""
        folder = locate(save_dir)

        def is_replaced(save: SavePart) -> bool:
            """Return True if this job's save for the same folder replaces a dead job's.

            Pending saves stay, except those with the same tag, and those of several nodes: without the part of a lost
            node they can never be written.
            """
            is_removable = not is_snapshot and (save.tag == tag or save.nodes > 1)
            return save.save_dir == folder and (is_removable or not save.list_lacking())

        for job in list_dead(self.root):
            if has_writer(job):
                continue
            spare = _list_unneeded(job, is_replaced)
            given_up = describe_pending(save for save in spare if save.tag != tag)
            for save in spare:
                save.remove()
            if given_up:
                logger.warning("%s: deleted saves of a dead job that were not written: %s", job.folder, given_up)
            if spare:
                names = ", ".join(dict.fromkeys(save.tag for save in spare))
                logger.info("%s: deleted %s of a dead job, unneeded after %s of %s", job.folder, names, tag, save_dir)
                if job.is_empty():
                    job.remove()
