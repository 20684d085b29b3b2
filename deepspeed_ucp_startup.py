"""Startup hook of Python: imports deepspeed_ucp when ``DEEPSPEED_UCP`` is set.

The installed ``deepspeed_ucp.pth`` (``deepspeed_ucp.start`` from Python 3.15 on, PEP 829) calls :func:`start`. A
virtual environment calls it twice. This module is outside the package: a start without the variable stays fast.
"""

import os
import sys

SWITCH = "DEEPSPEED_UCP"
"""Variable that switches the plugin on: :func:`deepspeed_ucp.config.read_environment`."""

OFF = ("", "0", "false", "off")
"""Values that leave the switch off, in small letters."""

LIBRARIES = (
    *("deepspeed", "accelerate", "lightning", "lightning_fabric", "megatron", "pytorch_lightning", "transformers"),
)
"""Packages with methods that the plugin wraps (:data:`deepspeed_ucp.attach.TABLE`)."""


def start() -> None:
    """Switch the plugin on if the environment asks for it; an error is printed in one line and Python starts."""
    try:
        if os.environ.get(SWITCH, "").strip().lower() not in OFF and _waker not in sys.meta_path:
            sys.meta_path.insert(0, _waker)
    except Exception as error:  # noqa: BLE001 - a plugin is no reason for a Python not to start
        _tell(error)


class _Waker:
    """Import finder that finds nothing, but imports the plugin right before the first library.

    Attributes:
        waking: this finder, not a script, has begun to import the plugin.
    """

    def __init__(self) -> None:
        self.waking = False

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name in LIBRARIES and not self.waking:
            self.waking = True
            try:
                import deepspeed_ucp  # noqa: F401
            except Exception as error:  # noqa: BLE001 - as above
                _tell(error)


_waker = _Waker()


def _tell(error: Exception) -> None:
    sys.stderr.write(f"deepspeed_ucp: not switched on in this process ({type(error).__name__}: {error})\n")
