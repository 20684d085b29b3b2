"""Elastic resume for DeepSpeed: ``engine.load_checkpoint`` from any topology into any topology, to the bit.

Importing the package installs the hook; ``"checkpoint": {"universal": true}`` in a ds_config switches it on.
"""

from .errors import CheckpointError, ConfigError, MismatchError, UcpError, UnsupportedError
from .hook import install, uninstall
from .load import LoadReport

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "ConfigError",
    "LoadReport",
    "MismatchError",
    "UcpError",
    "UnsupportedError",
    "__version__",
    "install",
    "uninstall",
]

install()
