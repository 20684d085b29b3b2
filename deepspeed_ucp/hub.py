"""Models of the hub's local cache."""

from __future__ import annotations

import sys


def find_cached(name: str) -> str:
    """Return the folder of a model in the hub's local cache by its id, such as ``org/name``.

    Raises:
        ImportError: the hub's library is not installed.
        OSError, ValueError: the model is not cached.
    """
    from huggingface_hub import snapshot_download

    return str(snapshot_download(name, local_files_only=True))


def describe_cached(name: str) -> str:
    """Describe a path that is the id of a cached model of the hub; empty for other paths."""
    if "huggingface_hub" not in sys.modules:  # it takes long to import, and an id is unlikely without it
        return ""
    try:
        return f"is a model of the hub, in its local cache: name {find_cached(name)}"
    except (ImportError, OSError, ValueError):
        return ""
