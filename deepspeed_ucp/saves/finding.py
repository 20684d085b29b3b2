"""The newest save that the nodes' memory has of a folder, for a load."""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from ..comm import Comm
from ..config import UniversalConfig
from ..errors import UcpError, shorten
from ..io.paths import normalize
from ..sources.latest import read_latest
from ..sources.older import find_age
from .memory import Job, Snapshot, find_root, list_jobs, locate
from .places import find_mark
from .saver import finish_dead, keeps_folder, list_settings

logger = logging.getLogger("deepspeed_ucp")


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
    """Return the newest save of a folder that is whole in the memory of all nodes together; collective.

    None if there is none, or if the folder itself has a later one. Rank 0 warns if the folder had saves of that job and
    has none now: whoever removed it may want to start from scratch.

    Args:
        load_dir: the folder of all tags, or without ``tag`` that of one, which need not be there yet.
    """
    options = config.save
    if options is None:
        return None
    root = comm.run(lambda: find_root(options.memory))
    is_first = keeps_folder(config, comm)
    is_empty = comm.rank == 0 and _is_empty(load_dir)  # before a writer brings pending saves there
    comm.run(lambda: finish_dead(root, list_settings(config)) if is_first else None)
    found = _find(root, load_dir, tag, comm, is_first=is_first)
    if found is None and tag is None:
        found = _find(root, *os.path.split(normalize(load_dir)), comm, is_first=is_first)
    if found is not None and is_empty:
        _warn_removed(root, load_dir, found)
    return found


def _is_empty(load_dir: str) -> bool:
    """Return True if a folder does not exist or holds no checkpoint."""
    try:
        return read_latest(load_dir) is None
    except (UcpError, OSError):
        return False


def _warn_removed(root: str, load_dir: str, found: Found) -> None:
    """Warn if a job wrote saves to a folder, which is empty now, before its newest one is taken from memory."""
    place = locate(load_dir)
    job = Job(os.path.dirname(found.folder))
    noted = [save.tag for save in job.list_saves() if save.read_done().get(place)]
    written = list(dict.fromkeys([*job.read_written().get(place, ()), *noted]))
    if not written:
        return
    folders = [each.folder for each in list_jobs(root) if any(save.save_dir == place for save in each.list_saves())]
    logger.warning(
        "%s holds none of the checkpoints that were written there (%s): the run goes on from %s in memory, step %d. To "
        "start from scratch, remove it on each node: rm -r %s",
        load_dir, shorten(written), found.tag, found.step, " ".join(folders),
    )  # fmt: skip


def _find(root: str, load_dir: str, tag: Any, comm: Comm, *, is_first: bool) -> Found | None:
    wanted = locate(load_dir)

    def look() -> list[tuple[Snapshot, str | None]]:
        if not is_first:
            return []
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
