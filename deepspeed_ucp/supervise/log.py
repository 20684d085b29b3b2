"""What a launch meets, as one JSON line per event."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable

from ..errors import ConfigError, hide_secrets

Log = Callable[..., None]
"""``log(event, **fields)``."""


def make_log(path: str | None, **always: object) -> Log:
    """What writes events, each at once: to the end of a file, or to stderr.

    Training does not end for its log: what the file does not take, as on a full disk, goes to stderr.

    Args:
        always: fields that all events have.

    Raises:
        ConfigError: the file cannot be written from the beginning.
    """
    if path is not None:
        append(path, "")

    def log(event: str, **fields: object) -> None:
        line = hide_secrets(json.dumps({"event": event, "time": round(time.time(), 3), **always, **fields})) + "\n"
        try:
            if path is None:
                _print(line)
            else:
                append(path, line)
        except ConfigError as error:
            _print(f"deepspeed_ucp: {error}\n{line}")

    return log


def _print(text: str) -> None:
    with contextlib.suppress(OSError):
        sys.stderr.write(text)
        sys.stderr.flush()


def append(path: str, text: str) -> None:
    """Add text to the end of a file.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        with open(path, "a", encoding="utf-8") as stream:
            stream.write(text)
    except OSError as error:
        raise ConfigError(f"{path}: nothing can be written there ({error.strerror}).") from None
