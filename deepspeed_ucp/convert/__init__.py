"""Converting: the atomic view written out as files, and everything else that streams whole atoms."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api import convert_checkpoint, default_destination
    from .driver import ConvertOptions, convert_index

_HOMES = {
    "ConvertOptions": "driver",
    "convert_checkpoint": "api",
    "convert_index": "driver",
    "default_destination": "api",
}


def __getattr__(name: str) -> Any:
    """Import what is asked for only: checking and exporting need no conversion."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)


__all__ = ["ConvertOptions", "convert_checkpoint", "convert_index", "default_destination"]
