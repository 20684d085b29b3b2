"""Models of the hub's local cache."""

from __future__ import annotations

import sys


def find_cached(name: str) -> str:
    """Return a hub model's folder in the local cache by its id (``org/name``).

    Raises:
        ImportError: the hub's library is not installed.
        OSError, ValueError: the model is not cached.
    """
    from huggingface_hub import snapshot_download

    return str(snapshot_download(name, local_files_only=True))


def describe_cached(name: str) -> str:
    """Return the end of an error message if a wrong path is a cached hub model's id."""
    if "huggingface_hub" not in sys.modules:  # it takes long to import, and an id is unlikely without it
        return ""
    try:
        return f"is a model of the hub, in its local cache: name {find_cached(name)}"
    except (ImportError, OSError, ValueError):
        return ""
