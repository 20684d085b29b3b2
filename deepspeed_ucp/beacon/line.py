"""A line on stdout for who reads logs: SageMaker HyperPod's log monitoring, and others that are told its form.

``deepspeed_ucp step=120 seconds_per_step=1.243``; it stays as it is.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping

from ..errors import ConfigError
from ..platforms import find_rank
from .listener import Listener

_VARIABLE = "DEEPSPEED_UCP_BEACON"
"""Environment: seconds between two lines, at least."""

_HYPERPOD, _OFTEN = "HYPERPOD_ELASTICAGENT_SOCKET_SERVER_PATH", 10.0
"""Its agent reads every rank's own log; as often as that, unless it is said."""


class Line(Listener):
    """Writes a line at the end of a step, where the last one is some seconds old."""

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


def find(environment: Mapping[str, str]) -> Line | None:
    """On every rank under HyperPod's agent, on rank 0 where it is asked for.

    Raises:
        ConfigError: what asks for it is no number of seconds.
    """
    asked, every_rank = environment.get(_VARIABLE), _HYPERPOD in environment
    try:
        pause = float(asked) if asked else _OFTEN
    except ValueError:
        raise ConfigError(f"{_VARIABLE}={asked!r}: give the seconds between two lines, such as 30.") from None
    return Line(pause) if every_rank or (asked and find_rank() <= 0) else None
