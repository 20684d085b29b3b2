"""Startup hook of Python: imports deepspeed_ucp when ``DEEPSPEED_UCP`` is set.

The installed ``deepspeed_ucp.pth`` (``deepspeed_ucp.start`` from Python 3.15 on, PEP 829) calls :func:`start`, twice in
a virtual environment. The module is outside the package so that a start without the variable imports almost nothing.
"""

import os
import sys

SWITCH = "DEEPSPEED_UCP"
"""Variable that switches the plugin on: :func:`deepspeed_ucp.config.read_environment`."""

OFF = ("", "0", "false", "off")
"""Values of the switch with which nothing is to be done, in small letters."""

LIBRARIES = (
    *("deepspeed", "accelerate", "lightning", "lightning_fabric", "megatron", "pytorch_lightning", "transformers"),
)
"""Packages with something that the plugin wraps (:data:`deepspeed_ucp.attach.TABLE`)."""


def start() -> None:
    """Switch the plugin on if the environment asks for it; an error is printed in one line and Python starts."""
    try:
        if os.environ.get(SWITCH, "").strip().lower() not in OFF and _waker not in sys.meta_path:
            sys.meta_path.insert(0, _waker)
    except Exception as error:  # noqa: BLE001 - a plugin is no reason for a Python not to start
        _tell(error)


class _Waker:
    """Finds nothing; imports the plugin before the first of the libraries is imported, since that takes some time.

    Attributes:
        waking: the plugin is being imported, or was, by this and not by a script.
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
