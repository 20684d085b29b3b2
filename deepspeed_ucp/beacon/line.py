"""A line on stdout for log monitors such as SageMaker HyperPod's.

Its form is stable: ``deepspeed_ucp step=120 seconds_per_step=1.243``.
"""

from __future__ import annotations

import os
import sys
import time

from ..errors import ConfigError
from ..platforms import find_rank
from . import Listener

_VARIABLE = "DEEPSPEED_UCP_BEACON"
"""Environment variable: minimum seconds between two lines."""

_HYPERPOD, _PAUSE = "HYPERPOD_ELASTICAGENT_SOCKET_SERVER_PATH", 10.0
"""Variable of HyperPod's agent, which reads the logs of all ranks; default seconds between two lines."""


class Line(Listener):
    """Writes a line at the end of a step, at least ``pause`` seconds after the last."""

    def __init__(self, pause: float) -> None:
        self.pause = pause
        self.last: tuple[int, float] | None = None

    def report_step(self, step: int, total: int | None) -> None:
        now = time.monotonic()
        if self.last is not None and (step <= self.last[0] or now - self.last[1] < self.pause):
            return
        pace = "" if self.last is None else f" seconds_per_step={(now - self.last[1]) / (step - self.last[0]):.3f}"
        sys.stdout.write(f"deepspeed_ucp step={step}{pace}\n")
        sys.stdout.flush()
        self.last = step, now


def find() -> Line | None:
    """Return the listener on every rank under HyperPod, else on rank 0 if requested.

    Raises:
        ConfigError: the variable is no number of seconds.
    """
    value, every_rank = os.environ.get(_VARIABLE), _HYPERPOD in os.environ
    try:
        pause = float(value) if value else _PAUSE
    except ValueError:
        raise ConfigError(f"{_VARIABLE}={value!r}: set the seconds between two lines, such as 30.") from None
    return Line(pause) if every_rank or (value and find_rank() <= 0) else None
