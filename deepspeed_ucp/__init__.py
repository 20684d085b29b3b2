"""Elastic resume for DeepSpeed: ``engine.load_checkpoint`` from any topology into any topology, to the bit.

Importing the package installs the hook, now or as soon as DeepSpeed is imported;
``"checkpoint": {"universal": true}`` in a ds_config switches it on. With the environment variable ``DEEPSPEED_UCP=1``
Python imports it by itself, and it is on for engines whose ds_config says nothing.
"""

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

from .attach import install, install_when_imported, uninstall
from .elastic_agent import end_with_agent
from .errors import (
    CheckpointError,
    ConfigError,
    DiskFullError,
    MismatchError,
    StorageError,
    UcpError,
    UnsupportedError,
    escape,
)
from .version import __version__

if TYPE_CHECKING:
    from .load.context import LoadReport
    from .saves.saver import finish_saves

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DiskFullError",
    "LoadReport",
    "MismatchError",
    "StorageError",
    "UcpError",
    "UnsupportedError",
    "__version__",
    "finish_saves",
    "install",
    "uninstall",
]

_LAZY = {"LoadReport": ".load.context", "finish_saves": ".saves.saver"}
"""Public names that are imported when they are asked for, and where they are."""


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name], __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})


def _escape_record(record: logging.LogRecord) -> bool:
    """Names of a checkpoint stand in log lines: none of them may forge another line, or reach the terminal raw."""
    record.msg, record.args = escape(record.getMessage()), ()
    return True


logging.getLogger("deepspeed_ucp").addFilter(_escape_record)
install_when_imported()
end_with_agent()
