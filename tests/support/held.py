"""What calls hold that fail: that it is given back with their error, and not when the collector of garbage comes."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn


class _Memory:
    """What a call holds."""


class Failing:
    """A call that holds memory and fails, and has noted its error, as calls do that try one thing after the other."""

    def __init__(self) -> None:
        self._memory = weakref.WeakSet[_Memory]()

    def fail(self, error: BaseException) -> NoReturn:
        """Raise an error."""
        memory, noted = _Memory(), [error]
        self._memory.add(memory)
        raise noted[0]

    @property
    def held(self) -> int:
        """Of how many calls memory is still there."""
        return len(self._memory)


@contextmanager
def without_collector() -> Iterator[Failing]:
    """Inside, only what nothing refers to is given back."""
    gc.disable()
    try:
        yield Failing()
    finally:
        gc.enable()
