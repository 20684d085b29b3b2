"""Waiting for what other processes and threads do: as long as it takes on a machine with much to do, and no longer."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def wait_until(condition: Callable[[], Any], seconds: float = 120.0) -> None:
    """Until something is so; a test that takes longer has failed."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it did not come"
        time.sleep(0.02)
