"""Settling as those ask for it who need everything: what is open or wrong is an error."""

from __future__ import annotations

from typing import Any

from deepspeed_ucp import patterns
from deepspeed_ucp.patterns import Settled


def settle(*args: Any, **options: Any) -> Settled:
    return patterns.settle(*args, **options).require()
