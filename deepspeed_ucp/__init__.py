"""Elastic resume for DeepSpeed: load a checkpoint of any topology, bit for bit.

Importing the package wraps DeepSpeed's methods, at once or when DeepSpeed is imported. ``"checkpoint": {"universal":
true}`` in a ds_config enables the plugin for an engine. With the environment variable ``DEEPSPEED_UCP=1`` each Python
process imports the package, which enables the plugin for each engine whose ds_config does not mention it.
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
"""Public name → module that is imported at the first use of the name."""


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name], __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})


def _escape_record(record: logging.LogRecord) -> bool:
    """Escape a log record: names in checkpoints must not forge lines or send codes."""
    record.msg, record.args = escape(record.getMessage()), ()
    return True


logging.getLogger("deepspeed_ucp").addFilter(_escape_record)
install_when_imported()
end_with_agent()
