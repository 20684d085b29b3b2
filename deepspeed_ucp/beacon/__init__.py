"""Report this rank's steps and phases to the monitors that the environment names, also for engines without the plugin.

A listener that raises is dropped with a warning; training goes on.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from ..platforms import find_rank
from .listener import Listener

logger = logging.getLogger("deepspeed_ucp")

LISTENERS = ("torchelastic", "nvrx", "dlrover", "kubeflow", "line")
"""Modules of this room; the ``find`` of each gives the listener that the environment names, or None."""

_phases: list[str] = []
"""The phases that this rank is in, the innermost last."""

_chosen: dict[str, Listener] | None = None
"""Who listens, by module; None before there is something to tell."""


def report_step(step: int, total: int | None = None) -> None:
    """Tell that this rank has got as far as ``step``, of ``total`` where that is known."""
    for name, listener in _find_listeners():
        _tell(name, listener.report_step, step, total)


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """Inside, this rank is in a phase: ``forward``, ``backward``, ``step``, ``save`` or ``load``, or a pipeline's
    ``train_batch``, which has others within; at its end in the one around it, or in none."""
    _phases.append(name)
    for each, listener in _find_listeners():
        _tell(each, listener.enter, name)
    try:
        yield
    finally:
        _phases.pop()
        for each, listener in _find_listeners():
            _tell(each, listener.leave, name)


def mute(name: str) -> None:
    """Tell one of ``LISTENERS`` nothing from now on: something else in this process does."""
    _find_listeners()
    listener = _chosen.pop(name, None) if _chosen else None
    if listener is not None:
        with contextlib.suppress(Exception):  # of one that fails this may fail too
            listener.end()


def _find_listeners() -> list[tuple[str, Listener]]:
    global _chosen  # noqa: PLW0603 - one for the process
    if _chosen is None:
        found = {name: import_module(f".{name}", __name__).find(os.environ) for name in LISTENERS}
        _chosen = {name: listener for name, listener in found.items() if listener is not None}
    return list(_chosen.items()) if _chosen else []


def _tell(name: str, tell: Any, *what: Any) -> None:
    try:
        tell(*what)
    except Exception as error:  # noqa: BLE001 - whatever it is: training goes on
        logger.warning("rank %d: %s hears no more of this rank: %s", find_rank(), name, error)
        mute(name)


def _let_go() -> None:
    """In a forked child: who has been found listens to its parent alone."""
    global _chosen  # noqa: PLW0603
    _chosen = _chosen and {}


os.register_at_fork(after_in_child=_let_go)
