"""Writes steps to the file that DLRover's agent reads every 15 s."""

from __future__ import annotations

import json
import os
import time

from ..platforms import find_rank
from . import Listener

_PAUSE = 1.0
"""Minimum seconds between two writes."""


class DLRover(Listener):
    """Replaces the file atomically, in the form of DLRover's ``report_training_step``."""

    def __init__(self, path: str) -> None:
        self.path, self.written = path, 0.0

    def report_step(self, step: int, total: int | None) -> None:
        now = time.time()
        if abs(now - self.written) < _PAUSE:
            return
        self.written = now
        temporary = f"{self.path}.{os.getpid()}"
        with open(temporary, "w", encoding="utf-8") as stream:
            json.dump({"step": step, "timestamp": now}, stream)
        os.replace(temporary, self.path)


def find(path: str) -> DLRover | None:
    """Return rank 0's listener if the folder of the agent's file exists, else None."""
    return DLRover(path) if find_rank() <= 0 and os.path.isdir(os.path.dirname(path) or ".") else None
