"""DLRover's agent, which reads the job's step from a file every 15 s (``report_training_step`` of its own trainer
writes the same)."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping

from ..platforms import find_rank
from .listener import Listener

_VARIABLE = "RUNTIME_METRICS_PATH"
_PAUSE = 1.0
"""Seconds between two writes, at least."""


class DLRover(Listener):
    """Writes the file, whole or not at all."""

    def __init__(self, path: str) -> None:
        self.path, self.written = path, 0.0

    def report_step(self, step: int, total: int | None) -> None:
        now = time.time()
        if abs(now - self.written) < _PAUSE:
            return
        self.written = now
        beside = f"{self.path}.{os.getpid()}"
        with open(beside, "w", encoding="utf-8") as stream:
            json.dump({"step": step, "timestamp": now}, stream)
        os.replace(beside, self.path)


def find(environment: Mapping[str, str]) -> DLRover | None:
    """On rank 0, where the agent has named its file and made the folder of it."""
    path = environment.get(_VARIABLE)
    return DLRover(path) if path and find_rank() <= 0 and os.path.isdir(os.path.dirname(path) or ".") else None
