"""What ranks print of an error that nothing catches: the first one all of it, the others a line each."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from types import TracebackType

from .errors import RemoteError, UcpError

_SHOWN = 160
"""Characters of an error on ranks that do not tell it in full."""

_HEAD_START = 0.5
"""Seconds that these wait before they end: a launcher then ends the others, of which the first is to have its say."""


def find_fault(error: UcpError) -> BaseException | None:
    """What an error was raised from that was not raised on purpose; of others the text says all, and no trace more."""
    cause: BaseException | None = error if isinstance(error, RemoteError) else None
    while isinstance(cause, UcpError):
        cause = cause.__cause__
    return cause


def shorten_uncaught() -> None:
    """Let what ends this process be one line, where it is an error that another rank tells in full."""
    if getattr(sys.excepthook, "func", None) is not _report_uncaught:
        sys.excepthook = partial(_report_uncaught, sys.excepthook)


def _report_uncaught(
    former: Callable[..., object], kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    if isinstance(error, UcpError) and error.shared:
        error.__cause__ = find_fault(error)
    if isinstance(error, UcpError) and error.echo and error.__cause__ is None:
        text = str(error).partition("\n")[0]
        error, trace = kind(f"{text[:_SHOWN]}{'…' * (len(text) > _SHOWN)} (all of it on rank 0)"), None
        time.sleep(_HEAD_START)
    former(kind, error, trace)
