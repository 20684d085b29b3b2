"""Print an uncaught error of all ranks once: on rank 0, and a line on other nodes."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from functools import partial
from types import TracebackType

from .errors import RemoteError, UcpError
from .platforms import is_first_of_node

_SHOWN = 160
"""Characters of an error on ranks that do not print all of it."""

_HEAD_START = 0.5
"""Seconds that these ranks wait before they exit: the launcher then ends rank 0, which must have printed by then."""


def find_fault(error: UcpError) -> BaseException | None:
    """Return the unexpected exception behind an error, or None if there is none."""
    cause: BaseException | None = error if isinstance(error, RemoteError) else None
    while isinstance(cause, UcpError):
        cause = cause.__cause__
    return cause


def shorten_uncaught() -> None:
    """Install the hook that prints uncaught errors, once in a process."""
    if getattr(sys.excepthook, "func", None) is not _report_uncaught:
        sys.excepthook = partial(_report_uncaught, sys.excepthook)


def _report_uncaught(
    former: Callable[..., object], kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    if isinstance(error, UcpError) and error.shared:
        error.__cause__ = find_fault(error)
        if error.__cause__ is None:
            summary = _summarize(error)
            if summary is not None:
                former(kind, summary, summary.__traceback__)
            return
    former(kind, error, trace)


def _summarize(error: UcpError) -> UcpError | None:
    """Return the error that this rank prints for an error of all ranks, or None."""
    if not error.echo:
        ranks = int(os.environ.get("WORLD_SIZE") or 1)
        if ranks > 1:
            error.args = (*error.args, f"(This error ended ranks 0-{ranks - 1}.)")
        return error
    time.sleep(_HEAD_START)
    if not is_first_of_node():
        return None
    text = str(error).partition("\n")[0]
    return type(error)(f"{text[:_SHOWN]}{'…' * (len(text) > _SHOWN)} (all of it on rank 0)")
