"""How fast one place is written to: pieces wait for their turn, whichever thread has them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_OF_A_SECOND, _LEAST = 16, 64 << 10
"""A second's share that a piece is to have, and the bytes that it has at least."""


class Pace:
    """So many bytes a second at most, over all that share it.

    Args:
        rate: bytes a second; None: any number.
    """

    def __init__(self, rate: float | None = None) -> None:
        self.rate = rate
        self._lock, self._free = threading.Lock(), 0.0

    def cut(self, most: int) -> int:
        """Bytes of a piece, where ``most`` would be one piece otherwise."""
        return most if self.rate is None else max(min(most, int(self.rate / _OF_A_SECOND)), _LEAST)

    def reserve(self, nbytes: int) -> float:
        """Seconds to wait before a piece is written: what was written until then is never more than the rate allows."""
        if self.rate is None:
            return 0.0
        with self._lock:
            now = time.monotonic()
            self._free = max(self._free, now) + nbytes / self.rate
            return self._free - now

    def wait(self, nbytes: int) -> None:
        """Until a piece may be written."""
        time.sleep(self.reserve(nbytes))


_ANY = Pace()
_current = ContextVar("pace", default=_ANY)


@contextmanager
def keep_pace(pace: Pace) -> Iterator[None]:
    """Inside, what this thread has a store write is written at this pace."""
    token = _current.set(pace)
    try:
        yield
    finally:
        _current.reset(token)


def find_pace() -> Pace:
    """At which the request that this runs for is to write."""
    return _current.get()
