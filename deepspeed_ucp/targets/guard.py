"""An engine that a failed load has left half changed: it neither steps nor saves until a load succeeds."""

from __future__ import annotations

from typing import Any, NoReturn

from ..errors import CheckpointError

BROKEN = "_ucp_broken"
"""Attribute of an engine that holds a part of a checkpoint: why it must not be used."""

_SEALED = ("step", "train_batch", "save_checkpoint", "save_16bit_model")
"""Methods that would train on with such state, or save it."""


def seal(engine: Any) -> None:
    """Let these methods of this engine raise, if a load has left it half changed; others are left alone."""
    message = getattr(engine, BROKEN, None)
    for name in _SEALED if message else ():
        if hasattr(engine, name):
            engine.__dict__[name] = _Seal(str(message))


class _Seal:
    """Stands in the place of a method."""

    def __init__(self, message: str) -> None:
        self.message = message

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        raise CheckpointError(self.message)


def release(engine: Any) -> None:
    """After a load that succeeded: the engine's own methods again."""
    engine.__dict__.pop(BROKEN, None)
    for name in _SEALED:
        if isinstance(engine.__dict__.get(name), _Seal):
            del engine.__dict__[name]
