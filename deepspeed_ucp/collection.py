"""Python's cyclic garbage collector, out of the way while indexes and plans are made."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def pause_collection() -> Iterator[None]:
    """Make many small acyclic objects without the collector walking torch's heap again and again.

    For the headers of a 1 T model's checkpoint that walk takes three quarters of the time (docs/benchmarks.md).
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
