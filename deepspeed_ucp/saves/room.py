"""Estimates the memory that saves take, decides which saves are not needed any more, and makes room for the next one.

:func:`is_spare` is the only rule; it is applied to older saves of a running job, and to all saves of dead jobs. A
running job's save replaces saves of dead jobs for the same folder, except pending ones that can still be written.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Iterable
from typing import Any

from ..comm import connect
from ..config import SaveOptions, UniversalConfig
from ..engine_state import find_state
from ..errors import ConfigError
from ..io.disk import count_allocated
from ..io.memory import identify_host, measure_available
from ..io.paths import MEMORY, find_kind
from ..model.wrappers import find_live
from .memory import Job, Snapshot, describe_late, find_root, is_locked, list_dead, locate
from .places import is_sealed

logger = logging.getLogger("deepspeed_ucp")

ADVICE = 'Give the container more memory, or let "save": {"memory": …} name a folder of local NVMe'

SPARE = 1.05
"""Factor from the bytes of a save's tensors to the bytes of its files."""


def count_free(root: str) -> int:
    """Return the bytes that can be written to a folder; for one in memory the container's limit counts too."""
    free = shutil.disk_usage(root).free
    return min(free, measure_available()) if find_kind(root) == MEMORY else free


def is_safe(save: Snapshot) -> bool:
    """Return True if all destinations have all nodes' files of a save, so that no memory is needed for it."""
    return save.is_written() and (save.node == 0 or all(is_sealed(save, place) for place in save.destinations))


def is_spare(save: Snapshot, saves: Iterable[Snapshot], *, is_dead: bool) -> bool:
    """Return True if memory does not need a save or a copy.

    It is not needed if its destinations have it. If none lacks it, a later save of its job is enough.

    Args:
        saves: all saves of its job.
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


def free_unwanted(job: Job) -> None:
    """Free the older saves of a running job that are neither needed nor being copied."""
    copying, saves = job.read("copying").values(), job.list_saves()
    for save in saves[:-1]:
        if save.number not in copying and is_spare(save, saves, is_dead=False):
            save.spare()


def _list_spare(job: Job, is_replaced: Callable[[Snapshot], bool] = lambda _: False) -> list[Snapshot]:
    """Return the saves and copies of a dead job that are not needed.

    Args:
        is_replaced: returns True if a running job has a save instead.
    """
    saves = job.list_saves()
    spare = [save for save in saves if is_replaced(save) or is_spare(save, saves, is_dead=True)]
    keys = {save.key for save in spare}
    return spare + [
        copy
        for copy in job.list_copies()
        if copy.key in keys or is_replaced(copy) or is_spare(copy, saves, is_dead=True)
    ]


class Room:
    """The memory of a running job's node.

    Attributes:
        root: folder of all jobs.
        needed: bytes of the job's next save on this node.
    """

    def __init__(self, job: Job, needed: int) -> None:
        self.root, self.job, self.needed = os.path.dirname(job.folder), job, needed

    def make(self) -> str:
        """Free memory for the next save.

        Keeps pending saves, and saves in memory alone that no later save supersedes.

        Returns:
            An error message if it still does not fit, else an empty string.
        """
        for job in list_dead(self.root) if not self._is_enough() else ():
            self._remove(_list_spare(job))
        if self.free_older():
            return ""
        needed, free = self._count_needed(), count_free(self.root)
        why = f"a save takes {needed >> 20:,} MiB of {self.root}, where {free >> 20:,} MiB are free"
        needed_saves = [save for job in list_dead(self.root) for save in [*job.list_saves(), *job.list_copies()]]
        for save in needed_saves[-1:]:
            why += (
                f". It also holds perhaps the only copy of a run's newest save: {save.tag} (step {save.step}) of "
                f"{save.save_dir}. If that is not needed: rm -r {os.path.dirname(save.folder)}"
            )
        return f"{why}. {ADVICE}"

    def free_older(self) -> bool:
        """Remove older saves of this job that are not needed until the next one fits; return True if it does."""
        safe, saves = self.job.read("copying").get("safe"), self.job.list_saves()
        older = [save for save in saves[:-1] if is_spare(save, saves, is_dead=False)]
        self._remove(sorted(older, key=lambda save: save.number == safe))
        if not self._is_enough():
            self.job.drop_spare()
        return self._is_enough()

    def _count_needed(self) -> int:
        """Return the bytes that must be free for the next save: if several are pending, some more for training."""
        pending = [save for save in self.job.list_saves() if save.list_pending()]
        return self.needed * (2 if len(pending) > 1 else 1)

    def _is_enough(self) -> bool:
        return count_free(self.root) >= self._count_needed()

    def _remove(self, saves: Iterable[Snapshot]) -> None:
        """Remove saves, with a log line for each, until the next one fits."""
        for save in saves:
            if self._is_enough():
                return
            save.remove()
            part = "another node's part of " if save.is_copy() else ""
            logger.info("%s: removed to make room, %s%s of %s", save.folder, part, save.tag, save.save_dir)

    def drop_dead(self, save_dir: str, tag: str, *, by_itself: bool) -> None:
        """Remove dead jobs' saves that nobody needs, as this job has a complete save for a folder.

        Pending saves stay, except those with the same tag, and those of several nodes: without the part of
        a node that is lost they can never be written.

        Args:
            tag: tag of this job's save.
            by_itself: it is a snapshot, in memory alone.
        """
        folder = locate(save_dir)

        def is_replaced(save: Snapshot) -> bool:
            is_removable = not by_itself and (save.tag == tag or save.nodes > 1)
            return save.save_dir == folder and (is_removable or not save.list_lacking())

        for job in list_dead(self.root):
            if is_locked(job):
                continue
            spare = _list_spare(job, is_replaced)
            given_up = describe_late(save for save in spare if save.tag != tag)
            for save in spare:
                save.remove()
            if given_up:
                logger.warning("%s: given up, it could not be written: %s", job.folder, given_up)
            if spare:
                names = ", ".join(dict.fromkeys(save.tag for save in spare))
                logger.info("%s: removed %s of a dead job, as %s has %s now", job.folder, names, save_dir, tag)
                if job.holds_none():
                    job.remove()


def foresee_saves(engine: Any, config: UniversalConfig) -> None:
    """Estimate the bytes of a new engine's save on this node, and log the memory that is free (collective).

    Raises:
        ConfigError: a node has no room for a save; the same on all ranks.
    """
    options, comm = config.save or SaveOptions(), connect()

    def look() -> tuple[str, int, int]:
        root = find_root(options.memory)
        removable = sum(count_allocated(job.folder) for job in list_dead(root))
        return identify_host(), _count_saved(engine), count_free(root) + removable

    nodes = dict[str, tuple[int, int]]()
    for host, needed, free in comm.each(look):
        known = nodes.get(host, (0, free))
        nodes[host] = known[0] + needed, min(known[1], free)
    find_state(engine).save_size = int(SPARE * nodes[identify_host()][0])
    needed, free = max(nodes.values(), key=lambda node: node[0] - node[1])
    needed = int(SPARE * needed)
    text = f"a save takes about {needed >> 20:,} MiB of {options.memory} on a node, where {free >> 20:,} MiB are free"
    if needed > free:
        raise ConfigError(f'{text}. {ADVICE}, or leave out "save".')
    if comm.rank == 0:
        wanted = 2 * needed * (1 + min(options.copies, len(nodes) - 1))
        few = "" if free >= wanted else "; older ones go before the next one is made"
        logger.info("%s%s", text, few)


def _count_saved(engine: Any) -> int:
    """Estimate the bytes of the tensors that a rank saves, with states that the first step creates."""
    inner, masters, states = _list_states(engine)
    has_weights = engine.save_non_zero_checkpoint and not engine.zero_optimization_partition_weights()
    model = list(engine.module.parameters()) if has_weights else []  # ZeRO 3 saves masters only
    kept = [param for param in engine.module.parameters() if not param.requires_grad]
    model += [param.ds_tensor for param in kept if hasattr(param, "ds_tensor")]  # of ZeRO 3, by each rank
    groups = getattr(inner, "param_groups", ())
    later = max((len(group.get("betas", ())) or bool(group.get("momentum")) for group in groups), default=0)
    unmade = [master for master in masters if not inner.state.get(master)] * later
    return sum(int(tensor.numel() * tensor.element_size()) for tensor in [*masters, *states, *unmade, *model])


def _list_states(engine: Any) -> tuple[Any, list[Any], list[Any]]:
    """Return torch's optimizer, also from within a wrapper, the masters and the states; empty for unknown kinds."""
    from torch import is_tensor
    from torch.optim import Optimizer

    optimizer, row = engine.optimizer, find_live(engine.optimizer)
    inner = getattr(optimizer, "optimizer", optimizer)
    if row is not None and row.masters:
        groups = [group if isinstance(group, list) else [group] for group in getattr(optimizer, row.masters)]
        masters = [master for group in groups for master in group]
    elif isinstance(optimizer, Optimizer):
        masters = [master for group in optimizer.param_groups for master in group["params"]]
    else:
        return inner, [], []
    states = [tensor for state in inner.state.values() for tensor in dict(state).values()]
    return inner, [*filter(is_tensor, masters)], [*filter(is_tensor, states)]
