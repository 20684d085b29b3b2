"""What Python does at its start where a variable of the environment asks for deepspeed_ucp; nothing where none does.

``deepspeed_ucp.pth`` (from Python 3.15 on ``deepspeed_ucp.start``, PEP 829), which lies beside the installed package,
calls :func:`start`, in a virtual environment twice. So it stands apart from the package, and imports next to nothing.
"""

import os
import sys

SWITCH = "DEEPSPEED_UCP"
"""Variable that switches the plugin on: :func:`deepspeed_ucp.config.read_environment`."""

TEMPLATE = "DEEPSPEED_UCP_TEMPLATE"
"""Variable that has the process handed over to one that has imported what it needs."""

OFF = ("", "0", "false", "off")
"""Values of the switch with which nothing is to be done, in small letters."""

LIBRARIES = ("deepspeed", "accelerate", "lightning", "megatron", "pytorch_lightning", "transformers")
"""Packages with something that the plugin wraps (:data:`deepspeed_ucp.attach.TABLE`)."""


def start() -> None:
    """Do what the environment asks for; what fails is told in a line, and Python starts all the same."""
    try:
        if os.environ.get(SWITCH, "").strip().lower() not in OFF and _waker not in sys.meta_path:
            sys.meta_path.insert(0, _waker)
        if os.environ.get(TEMPLATE):
            _hand_over()
    except Exception as error:  # noqa: BLE001 - a plugin is no reason for a Python not to start
        _tell(error)


def _hand_over() -> None:
    """Without importing the package, which would take the environment for this process's own."""
    import importlib.util

    name = "deepspeed_ucp.warm.handover"
    package = importlib.util.find_spec("deepspeed_ucp")
    if name in sys.modules or package is None or not package.submodule_search_locations:
        return
    path = os.path.join(package.submodule_search_locations[0], "warm", "handover.py")
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is not None and spec.loader is not None:
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        module.hand_over()


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


def is_waking() -> bool:
    """Whether it is the environment that has the plugin imported, and no script."""
    return _waker.waking


def _tell(error: Exception) -> None:
    sys.stderr.write(f"deepspeed_ucp: not switched on in this process ({type(error).__name__}: {error})\n")
