"""What ranks do for the benchmarks' tests."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

BENCH = Path(__file__).parents[3] / "bench"


def call_there(call: bytes) -> Any:
    """Run a function of the benchmarks' modules, which are no package."""
    if str(BENCH) not in sys.path:
        sys.path.insert(0, str(BENCH))
    work, args, options = pickle.loads(call)
    return work(*args, **options)
