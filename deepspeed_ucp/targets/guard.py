"""An engine that a failed load has left half changed: it neither steps nor saves until a load succeeds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

from ..engine_state import find_state
from ..errors import CheckpointError, UcpError, UnsupportedError

_BLOCKED = ("step", "train_batch", "save_checkpoint", "save_16bit_model")
"""Methods that would train on with such state, or save it."""


def check_states(engine: Any, *, with_states: bool) -> None:
    """Refuse a load that would leave optimizer states which an earlier load has half changed.

    Args:
        with_states: the load restores them.

    Raises:
        UnsupportedError: it does not, and they are.
    """
    if find_state(engine).half_states and not with_states:
        raise UnsupportedError(
            "An earlier load has failed while the engine was being filled, so that its optimizer states are a mixture, "
            "which a load of the weights alone would leave. Load with the optimizer states, or build the engine anew."
        )


@contextmanager
def guard_engine(engine: Any, *, with_states: bool) -> Iterator[None]:
    """Inside, the engine changes: an error marks it as one that must not be used, success takes the mark away.

    Args:
        with_states: its optimizer's states change as well.

    Raises:
        UcpError: the error with the mark's text; one that is not ours as a CheckpointError.
    """
    try:
        yield
    except Exception as error:
        kind = type(error) if isinstance(error, UcpError) else CheckpointError
        told = kind(mark(engine, error, with_states=with_states))
        told.shared, told.echo = getattr(error, "shared", False), getattr(error, "echo", False)
        raise told from error
    except BaseException as interrupt:
        mark(engine, interrupt, with_states=with_states)
        raise
    release(engine)


def mark(engine: Any, error: BaseException, *, with_states: bool) -> str:
    """Have an engine refuse to go on that a load has left half changed; what it then says."""
    reason = str(error) or type(error).__name__
    told = (
        f"{reason} This happened while the engine was being filled: it holds a part of the checkpoint and must not be "
        "used. Load again (this tag or another one), or build the engine anew."
    )
    state = find_state(engine)
    state.broken, state.half_states = told, with_states or state.half_states
    block(engine)
    return told


def block(engine: Any) -> None:
    """Let these methods of this engine raise, if a load has left it half changed; others are left alone."""
    message = find_state(engine).broken
    for name in _BLOCKED if message else ():
        if hasattr(engine, name):
            engine.__dict__[name] = partial(_refuse, message)


def _refuse(message: str, *_: Any, **__: Any) -> NoReturn:
    raise CheckpointError(message)


def release(engine: Any) -> None:
    """After a load that succeeded: the engine's own methods again."""
    state = find_state(engine)
    state.broken, state.half_states = "", False
    for name in _BLOCKED:
        if getattr(engine.__dict__.get(name), "func", None) is _refuse:
            del engine.__dict__[name]
