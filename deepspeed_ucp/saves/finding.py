"""The newest save that the nodes' memory has of a folder, for a load."""

from __future__ import annotations

from typing import Any

from ..comm import Comm
from ..config import UniversalConfig
from .memory import find_root
from .saver import finish_dead, keeps_folder, list_settings
from .search import Found, search_memory


def find_in_memory(config: UniversalConfig, load_dir: str, tag: Any, comm: Comm) -> Found | None:
    """The newest save of a place that is whole in the memory of all nodes together; collective.

    None where there is none, or where the place itself has a later one.

    Args:
        load_dir: the folder of all tags, or without ``tag`` that of one, which need not be there yet.
    """
    options = config.save
    if options is None:
        return None
    root = comm.run(lambda: find_root(options.memory))
    is_first = keeps_folder(config, comm)
    comm.run(lambda: finish_dead(root, list_settings(config)) if is_first else None)
    return search_memory(root, load_dir, tag, comm, is_first=is_first)
