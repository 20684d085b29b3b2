"""An engine that a failed load has left half changed: it neither steps nor saves until a load succeeds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from ..errors import CheckpointError

BROKEN = "_ucp_broken"
"""Attribute of such an engine: what happened to it, in words."""

_SEALED = ("step", "train_batch", "save_checkpoint", "save_16bit_model")
"""Methods that would go on with, or pass on, state that is partly of the checkpoint and partly not."""


def seal(engine: Any) -> None:
    """Let these methods of this engine raise, if a load has left it half changed; others are left alone."""
    message = getattr(engine, BROKEN, None)
    if not message:
        return
    for name in _SEALED:
        if hasattr(engine, name):
            engine.__dict__[name] = _refuse(message)


def _refuse(message: str) -> Callable[..., NoReturn]:
    def refused(*_: Any, **__: Any) -> NoReturn:
        raise CheckpointError(message)

    return refused


def release(engine: Any) -> None:
    """After a load that succeeded: the engine's own methods again."""
    if engine.__dict__.pop(BROKEN, None) is None:
        return
    for name in _SEALED:
        engine.__dict__.pop(name, None)
