"""An engine that a failed load has left half changed: it neither steps nor saves until a load succeeds."""

from __future__ import annotations

from functools import partial
from typing import Any, NoReturn

from ..errors import CheckpointError

BROKEN = "_ucp_broken"
"""Attribute of an engine that holds a part of a checkpoint: why it must not be used."""

HALF_STATES = "_ucp_half_states"
"""Attribute of such an engine: its optimizer's states may be a mixture, which a load of the weights alone leaves."""

_SEALED = ("step", "train_batch", "save_checkpoint", "save_16bit_model")
"""Methods that would train on with such state, or save it."""


def check_states(engine: Any, *, with_states: bool) -> None:
    """Refuse a load that would leave optimizer states which an earlier load has half changed.

    Args:
        with_states: the load restores them.

    Raises:
        CheckpointError: it does not, and they are.
    """
    if getattr(engine, HALF_STATES, False) and not with_states:
        raise CheckpointError(
            "An earlier load has failed while the engine was being filled, so that its optimizer states are a mixture, "
            "which a load of the weights alone would leave. Load with the optimizer states, or build the engine anew."
        )


def seal(engine: Any) -> None:
    """Let these methods of this engine raise, if a load has left it half changed; others are left alone."""
    message = getattr(engine, BROKEN, None)
    for name in _SEALED if message else ():
        if hasattr(engine, name):
            engine.__dict__[name] = partial(_refuse, str(message))


def _refuse(message: str, *_: Any, **__: Any) -> NoReturn:
    raise CheckpointError(message)


def release(engine: Any) -> None:
    """After a load that succeeded: the engine's own methods again."""
    for mark in (BROKEN, HALF_STATES):
        engine.__dict__.pop(mark, None)
    for name in _SEALED:
        if getattr(engine.__dict__.get(name), "func", None) is _refuse:
            del engine.__dict__[name]
