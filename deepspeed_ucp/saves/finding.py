"""Finds the newest save of a folder in the memory of all nodes, for a load."""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from typing import Any

from ..comm import Comm
from ..config import UniversalConfig
from ..errors import UcpError, shorten
from ..formats.latest import read_latest
from .memory import Job, find_root, list_jobs, locate
from .saver import finish_dead, list_settings, owns_memory
from .search import Found, search_memory

logger = logging.getLogger("deepspeed_ucp")


def find_in_memory(config: UniversalConfig, load_dir: str, tag: Any, comm: Comm) -> Found | None:
    """Return the newest save of a folder that is complete in the memory of all nodes together (collective).

    Returns None as well if the folder has a later save, or else the first of the further places that has a checkpoint.
    Pending saves of dead jobs are written meanwhile. Rank 0 warns if the folder had saves of that job and was emptied:
    the user may want to start from scratch.

    Args:
        load_dir: the folder of all tags, or without ``tag`` the folder of one tag; it may not exist yet.
    """
    options = config.save
    if options is None:
        return None
    root = comm.run(lambda: find_root(options.memory))
    is_owner = owns_memory(config, comm)
    is_empty = False
    if comm.rank == 0:  # before a writer writes pending saves there
        with suppress(UcpError, OSError):
            is_empty = read_latest(load_dir) is None
    comm.run(lambda: finish_dead(root, list_settings(config)) if is_owner else None)
    found = search_memory(root, load_dir, tag, comm, also=config.with_tiers().also, is_owner=is_owner)
    if found is not None and is_empty:
        _warn_removed(root, load_dir, found)
    return found


def _warn_removed(root: str, load_dir: str, found: Found) -> None:
    """Warn if a job wrote saves to a folder that is empty now, and its newest one is loaded from memory."""
    place = locate(load_dir)
    job = Job(os.path.dirname(found.folder))
    noted = [save.tag for save in job.list_saves() if save.read("done").get(place)]
    written = list(dict.fromkeys([*job.read_written().get(place, ()), *noted]))
    if not written:
        return
    folders = [each.folder for each in list_jobs(root) if any(save.save_dir == place for save in each.list_saves())]
    logger.warning(
        "%s holds none of the checkpoints that were written there (%s): the run continues from %s in memory, step "
        "%d. To "
        "start from scratch, remove it on each node: rm -r %s",
        load_dir, shorten(written), found.tag, found.step, " ".join(folders),
    )  # fmt: skip
