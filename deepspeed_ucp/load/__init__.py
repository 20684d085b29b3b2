"""Carries a load out: reads into the live buffers, exchanges what several ranks need, finishes the engine.

Its names are imported when they are asked for: a dry run needs neither torch nor DeepSpeed.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .census import join_groups, list_live_rules, read_rules, take_census
    from .direct import LoadArguments, has_masters, load_direct
    from .report import LoadReport

_HOMES = {
    "LoadArguments": "direct",
    "LoadReport": "report",
    "has_masters": "direct",
    "join_groups": "census",
    "list_live_rules": "census",
    "load_direct": "direct",
    "read_rules": "census",
    "take_census": "census",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)


__all__ = [
    "LoadArguments",
    "LoadReport",
    "has_masters",
    "join_groups",
    "list_live_rules",
    "load_direct",
    "read_rules",
    "take_census",
]
