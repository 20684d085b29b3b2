"""The newest save that the nodes' memory has of a folder, for a load."""

from __future__ import annotations

from typing import Any

from ..comm import Comm
from ..config import UniversalConfig
from .memory import find_root
from .saver import finish_dead, keeps_folder, list_settings
from .search import Found, search_memory


def find_in_memory(config: UniversalConfig, load_dir: str, tag: Any, comm: Comm) -> Found | None:
    """Return the newest save of a folder that is complete in the memory of all nodes together (collective).

    None if there is none, or if the folder itself has a later one. Pending saves of dead jobs are written meanwhile.

    Args:
        load_dir: the folder of all tags, or without ``tag`` that of one tag; it may not exist yet.
    """
    options = config.save
    if options is None:
        return None
    root = comm.run(lambda: find_root(options.memory))
    is_first = keeps_folder(config, comm)
    comm.run(lambda: finish_dead(root, list_settings(config)) if is_first else None)
    return search_memory(root, load_dir, tag, comm, is_first=is_first)
