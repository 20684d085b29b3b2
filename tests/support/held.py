"""Check that a failed call releases its memory with the error, without the garbage collector."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn


class _Memory:
    """Memory of a call."""


class Failing:
    """A call that holds memory, keeps a reference to its error, and fails."""

    def __init__(self) -> None:
        self._memory = weakref.WeakSet[_Memory]()

    def fail(self, error: BaseException) -> NoReturn:
        """Raise an error."""
        memory, noted = _Memory(), [error]
        self._memory.add(memory)
        raise noted[0]

    @property
    def held(self) -> int:
        """Number of calls whose memory still exists."""
        return len(self._memory)


@contextmanager
def without_collector() -> Iterator[Failing]:
    """Context manager without garbage collection: only objects without references are freed."""
    gc.disable()
    try:
        yield Failing()
    finally:
        gc.enable()
