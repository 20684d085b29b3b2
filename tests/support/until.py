"""Wait for other processes and threads, on a busy machine too."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def wait_until(condition: Callable[[], Any], seconds: float = 120.0) -> None:
    """Wait until the condition is true; fail after the timeout."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "timeout"
        time.sleep(0.02)
