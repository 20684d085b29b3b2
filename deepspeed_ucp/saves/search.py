"""Finds saves in memory, for loads and for ``ds_ucp list``.

Imports neither torch nor deepspeed.
"""

from __future__ import annotations

import logging
import os
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ..comm import Comm
from ..config import UniversalConfig
from ..errors import UcpError
from ..formats.latest import find_age, read_latest
from ..io.paths import normalize
from ..io.store import is_folder
from .destinations import find_mark
from .launch import finish_dead_jobs
from .memory import Job, SavePart, find_root, list_jobs, locate, owns_memory

logger = logging.getLogger("deepspeed_ucp")

_ROOT = re.compile(r"deepspeed_ucp-\d+")
"""Name of a user's folder in memory."""


class FoundSave(NamedTuple):
    """A complete save in the nodes' memory.

    Attributes:
        folder: its folder of tags on this rank's node; it does not exist on a node without files of the save.
        copies: folders of tags with copies of other nodes' files; the same number on every rank, some may not exist.
    """

    folder: str
    tag: str
    step: int
    copies: tuple[str, ...] = ()


def find_in_memory(config: UniversalConfig, load_dir: str, tag: Any, comm: Comm) -> FoundSave | None:
    """Return the newest complete save of a folder in the nodes' memory (collective).

    Returns None as well if the folder has a later save, or else the first further folder that has a checkpoint.
    Pending saves of dead jobs are written meanwhile. Rank 0 warns if the destinations of that save were emptied.

    Args:
        load_dir: the folder of all tags, or without ``tag`` the folder of one tag; it may not exist yet.
    """
    if config.save is None:
        return None
    memory, also, is_empty = config.save.memory, config.with_tiers().also, False
    root, is_owner = comm.run(lambda: find_root(memory)), owns_memory(memory, comm)
    if comm.rank == 0 and list_jobs(root):  # before a writer writes pending saves there
        with suppress(UcpError, OSError):
            is_empty = all(read_latest(folder) is None for folder in (load_dir, *also))
    comm.run(lambda: finish_dead_jobs(root, config) if is_owner else None)
    newest = search_memory(root, load_dir, tag, comm, also=also, is_owner=is_owner)
    if newest is not None and is_empty:
        _warn_emptied(root, [locate(folder) for folder in (load_dir, *also)], newest)
    return newest


def _warn_emptied(root: str, folders: Sequence[str], newest: FoundSave) -> None:
    """Warn if a save's job has written to one of these folders without a checkpoint."""
    job = Job(os.path.dirname(newest.folder))
    written = set(job.read("written")).union(*(save.read("done") for save in job.list_saves()))
    if emptied := next((folder for folder in folders if folder in written), None):
        jobs = [job for job in list_jobs(root) if any(emptied in list_load_dirs(save) for save in job.list_saves())]
        logger.warning(
            "%s has no checkpoint, although the run wrote saves there: it continues from %s in memory, step %d. "
            "To start from scratch, run on each node: rm -r %s",
            emptied, newest.tag, newest.step, " ".join(job.folder for job in jobs),
        )  # fmt: skip


def search_memory(
    root: str, load_dir: str, tag: Any, comm: Comm, *, also: Sequence[str] = (), is_owner: bool = True
) -> FoundSave | None:
    """Like :func:`find_in_memory`, but read-only (collective).

    Args:
        also: further folders that the load reads.
        is_owner: this rank reads its node's memory for all ranks of the node.
    """
    newest = _find(root, load_dir, tag, comm, also, is_owner=is_owner)
    if newest is None and tag is None:
        newest = _find(root, *os.path.split(normalize(load_dir)), comm, also, is_owner=is_owner)
    return newest


_Marked = tuple[SavePart, Mapping[str, str]]
"""A save, its folder relative to the jobs' folder, and its marks by destination."""


def _find(root: str, load_dir: str, tag: Any, comm: Comm, also: Sequence[str], *, is_owner: bool) -> FoundSave | None:
    """Find the newest save of exactly this folder and tag (collective)."""
    wanted, tag = locate(load_dir), None if tag is None else str(tag)

    def list_local() -> list[_Marked]:
        # Other running jobs are skipped: their next save overwrites this memory.
        jobs = [job for job in list_jobs(root) if job.is_of_this_process() or not job.is_running()] if is_owner else []
        saves = [save for job in jobs for save in [*job.list_copies(), *job.list_saves()]]
        return [
            (replace(save, folder=os.path.relpath(save.folder, root)), save.read("done"))
            for save in saves
            if wanted in list_load_dirs(save) and (save.latest if tag is None else save.tag == tag)
        ]

    nodes, marked = defaultdict[tuple[str, int], set[int]](set), dict[tuple[str, int], _Marked]()
    listed = comm.gather_results(list_local)
    # A copy may lack marks of its node's own record, which is entered after it.
    by_node = sorted((entry for saves in listed for entry in saves), key=lambda it: (-it[0].node, not it[0].is_copy()))
    for entry in by_node:
        nodes[entry[0].key].add(entry[0].node)
        marked[entry[0].key] = entry
    complete = [save for save, _ in marked.values() if len(nodes[save.key]) == save.nodes]
    complete.sort(key=lambda save: (save.step, *save.key), reverse=True)  # names of jobs begin with their time

    def select() -> SavePart | None:
        try:
            folder, stored = _find_stored((load_dir, *also), tag) if complete else ("", None)
        except (UcpError, OSError):
            return complete[0]  # a folder cannot be read, and memory has a complete save
        return next((save for save in complete if _precedes(save, marked, folder, stored, tag)), None)

    newest = comm.once(select)
    if newest is None:
        return None
    job, key = Job(os.path.join(root, os.path.dirname(newest.folder))), newest.key
    max_copies = max(sum(save.is_copy() and save.key == key for save, _ in saves) for saves in listed)
    copies = [copy.folder for copy in job.list_copies() if copy.key == key]
    copies = [*copies, *[os.path.join(job.folder, "copy-none")] * max_copies][:max_copies]
    return FoundSave(job.find_folder(newest.number), newest.tag, newest.step, tuple(copies))


def _find_stored(folders: Sequence[str], tag: str | None) -> tuple[str, str | None]:
    """Return the folder and tag that a load takes if it takes no save from memory.

    It is the first folder that has the tag, or ``latest`` if no tag is given; else the first folder. The returned tag
    is None if no folder has ``latest``.
    """
    for folder in folders:
        if tag is None and (latest := read_latest(folder)) is not None:
            return folder, latest
        if tag is not None and is_folder(os.path.join(folder, tag)):
            return folder, tag
    return folders[0], tag


def _find_mark(save: SavePart, marked: Mapping[tuple[str, int], _Marked], folder: str) -> str | None:
    """Return the mark of a save in a folder.

    A save that was dropped for later ones counts as pending unless one of them has been written there.
    """
    key = locate(folder)
    mark = marked[save.key][1].get(key)
    if mark != "":
        return mark
    later = [entry for entry in marked.values() if entry[0].job == save.job and entry[0].number > save.number]
    # The mark of another node does not mean that the first node has published the save.
    is_written = any(done.get(key) and (other.node == 0 or find_mark(folder, other.tag)) for other, done in later)
    return None if later and not is_written else mark


def _precedes(
    save: SavePart, marked: Mapping[tuple[str, int], _Marked], folder: str, stored: str | None, tag: str | None
) -> bool:
    """Return True if a load prefers the save in memory to the stored checkpoint.

    A written save precedes it only while the folder names the save and has its seal: a user who writes another tag into
    ``latest``, or other files under this tag, wants those. Of equal steps the save in memory is taken.

    Args:
        stored: tag of the checkpoint in the folder, or None.
        tag: the tag of the load; None for the tag in ``latest``.
    """
    try:
        mark = _find_mark(save, marked, folder)
        if mark == "" and tag is None:
            return False
        if mark and stored is not None:
            return stored == save.tag and mark == find_mark(folder, save.tag)
        return stored is None or find_age([os.path.join(folder, stored)]).step <= save.step
    except (UcpError, OSError):
        return True  # the folder cannot be read, and memory has a complete save


@dataclass(frozen=True, slots=True)
class HeldSave:
    """A save in this node's memory.

    Attributes:
        parts: of the nodes whose files are here, in order; a node's memory may have copies of other nodes' files.
        load_dir: folder of tags in which a load finds it.
        is_running: the job that made it is running; loads take its saves when it has ended.
        is_taken: a load without a tag takes it.
    """

    parts: tuple[SavePart, ...]
    load_dir: str
    is_running: bool
    is_taken: bool

    @property
    def is_complete(self) -> bool:
        """True if the files of all nodes are here."""
        return len(self.parts) == self.parts[0].nodes


def is_root(folder: str) -> bool:
    """Return True if a path is a user's folder in memory."""
    return _ROOT.fullmatch(os.path.basename(folder)) is not None and os.path.isdir(folder)


def find_existing_root(memory: str) -> str | None:
    """Return this user's folder as :func:`find_root` does, or None if no user has one."""
    folder = os.path.expanduser(os.path.expandvars(memory))  # as `find_root` does
    is_there = os.path.isdir(folder) and any(map(_ROOT.fullmatch, os.listdir(folder)))
    return find_root(memory) if is_there else None


def list_in_memory(root: str, folder: str | None = None) -> list[HeldSave]:
    """List the saves in this node's memory, the oldest job first (read-only).

    Args:
        folder: only saves to this folder, to its direct subfolders, or with this tag folder; None for all.
    """
    parts = defaultdict[tuple[str, tuple[str, int]], list[SavePart]](list)
    jobs, wanted, taken = list_jobs(root), None if folder is None else locate(folder), dict[str, str]()
    for save in (save for job in jobs for save in [*job.list_saves(), *job.list_copies()]):
        for load_dir in [save.save_dir] if wanted is None else list_load_dirs(save):
            if wanted in (None, load_dir, os.path.dirname(load_dir), f"{load_dir}/{save.tag}"):
                parts[load_dir, save.key].append(save)
                break
    for (load_dir, _), saves in parts.items():
        searched = load_dir if wanted is None or wanted == os.path.dirname(load_dir) else wanted
        also = [destination for save in saves for destination in save.destinations]
        newest = search_memory(root, searched, None, Comm(), also=also)
        taken[load_dir] = newest.folder if newest is not None else ""
    running, listed = {job.name for job in jobs if job.is_running()}, list[HeldSave]()
    for (load_dir, (name, number)), saves in parts.items():
        is_taken = taken[load_dir] == Job(os.path.join(root, name)).find_folder(number)
        ordered = tuple(sorted(saves, key=lambda part: part.node))
        listed.append(HeldSave(ordered, load_dir, is_running=name in running, is_taken=is_taken))
    return listed


def list_load_dirs(save: SavePart) -> list[str]:
    """Return the folders in which a load finds a save: the script's and destinations."""
    return list(dict.fromkeys([save.save_dir, *save.destinations]))
