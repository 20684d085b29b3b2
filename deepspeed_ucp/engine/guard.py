"""Block steps and saves of a half-loaded engine until a load succeeds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

from ..engine_state import find_state
from ..errors import CheckpointError, UcpError, UnsupportedError

_BLOCKED = ("step", "train_batch", "save_checkpoint", "save_16bit_model")
"""Methods that would train with such state, or save it."""


def check_states(engine: Any, *, with_states: bool) -> None:
    """Raise UnsupportedError if the load would keep states that a failed one mixed up."""
    if find_state(engine).half_states and not with_states:
        raise UnsupportedError(
            "An earlier load failed while it filled the engine, so that its optimizer states are a mixture, and a "
            "load of the weights alone does not replace them. Load with the optimizer states, or build a new engine."
        )


@contextmanager
def guard_engine(engine: Any, *, with_states: bool) -> Iterator[None]:
    """Context manager around changes of the engine: an error blocks it.

    Success unblocks it.

    Args:
        with_states: the optimizer states change too.

    Raises:
        UcpError: the error with the message of the blocked methods; other errors become a CheckpointError.
    """
    try:
        yield
    except Exception as error:
        kind = type(error) if isinstance(error, UcpError) else CheckpointError
        failure = kind(block_engine(engine, error, with_states=with_states))
        failure.shared, failure.echo = getattr(error, "shared", False), getattr(error, "echo", False)
        raise failure from error
    except BaseException as interrupt:
        block_engine(engine, interrupt, with_states=with_states)
        raise
    unblock_engine(engine)


def block_engine(engine: Any, error: BaseException, *, with_states: bool) -> str:
    """Block a half-filled engine; return the message of its blocked methods."""
    reason = str(error) or type(error).__name__
    message = (
        f"{reason} This happened while the engine was being filled: it holds a part of the checkpoint and must not be "
        "used. Load again (this tag or another one), or build a new engine."
    )
    state = find_state(engine)
    state.broken, state.half_states = message, with_states or state.half_states
    fields = vars(engine)
    for name in _BLOCKED:
        if hasattr(engine, name):
            replaced = fields[name].args[1] if _is_blocked(engine, name) else fields.get(name)
            fields[name] = partial(_refuse, message, replaced)
    return message


def _is_blocked(engine: Any, name: str) -> bool:
    return getattr(vars(engine).get(name), "func", None) is _refuse


def _refuse(message: str, _replaced: Any, *_: Any, **__: Any) -> NoReturn:
    raise CheckpointError(message)


def unblock_engine(engine: Any) -> None:
    """Unblock an engine; functions that a script had set as methods are restored."""
    state = find_state(engine)
    state.broken, state.half_states = "", False
    for name in _BLOCKED:
        if _is_blocked(engine, name) and (replaced := vars(engine).pop(name).args[1]) is not None:
            vars(engine)[name] = replaced
