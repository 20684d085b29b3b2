"""Reports this rank's steps and phases to monitors that the environment names.

Engines without the plugin report too. A listener that raises is dropped with a warning; training continues.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from ..platforms import find_rank

logger = logging.getLogger("deepspeed_ucp")


class Listener:
    """Base of the listeners; the training thread calls them, and they may raise."""

    def report_step(self, step: int, total: int | None) -> None:
        """The rank has reached ``step`` of ``total``, if known."""

    def enter(self, phase: str) -> None:
        """The rank enters a phase, inside the phases that it has not left."""

    def leave(self, phase: str) -> None:
        """The rank leaves the phase that it has entered last."""

    def end(self) -> None:
        """Stop: no further calls follow."""


LISTENERS = {
    "torchelastic": "TORCHELASTIC_TIMER_FILE",
    "nvrx": "FT_RANK_MONITOR_IPC_SOCKET",
    "dlrover": "RUNTIME_METRICS_PATH",
    "kubeflow": "KUBEFLOW_TRAINER_SERVER_URL",
}
"""Module → variable. Its function ``find`` takes the variable's value, unless that is empty, and returns a listener, or
None if the monitor is not in use."""

_active: dict[str, Listener] | None = None
"""Module → listener; None before the first report."""


def report_step(step: int, total: int | None = None) -> None:
    """Report that this rank has reached ``step`` of ``total``, if known."""
    for name, listener in _find_listeners():
        _call(name, listener.report_step, step, total)


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """Report a phase as a context: forward, backward, step, save, load, train_batch."""
    for room, listener in _find_listeners():
        _call(room, listener.enter, name)
    try:
        yield
    finally:
        for room, listener in _find_listeners():
            _call(room, listener.leave, name)


def mute(name: str) -> None:
    """Stop reporting to one of ``LISTENERS``, because other code in this process does."""
    _find_listeners()
    listener = _active.pop(name, None) if _active else None
    if listener is not None:
        with contextlib.suppress(Exception):  # the listener may have failed before
            listener.end()


def _find_listeners() -> list[tuple[str, Listener]]:
    global _active  # noqa: PLW0603 - one for the process
    if _active is None:
        present = {name: value for name, variable in LISTENERS.items() if (value := os.environ.get(variable))}
        listeners = {name: import_module(f".{name}", __name__).find(value) for name, value in present.items()}
        _active = {name: listener for name, listener in listeners.items() if listener is not None}
    return list(_active.items()) if _active else []


def _call(name: str, method: Any, *args: Any) -> None:
    try:
        method(*args)
    except Exception as error:  # noqa: BLE001 - training continues
        logger.warning("rank %d: %s gets no further reports of this rank: %s", find_rank(), name, error)
        mute(name)


os.register_at_fork(after_in_child=lambda: _active.clear() if _active else None)  # leaves the reports to the parent
