"""A variant of ``settle`` that raises if a parameter is open or wrong."""

from __future__ import annotations

from typing import Any

from deepspeed_ucp import tensor_parallel as patterns
from deepspeed_ucp.tensor_parallel import Settled


def settle(*args: Any, **options: Any) -> Settled:
    return patterns.settle(*args, **options).require()
