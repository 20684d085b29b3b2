"""Large pages for memory that is filled for the first time."""

from __future__ import annotations

import mmap

from .filesystems import load_libc

_SPEED = 2 << 30
"""Bytes a second of processor time that memory at hand is filled with at least, with all else that is done to them."""

_LOSS = 0.05
"""Seconds of processor time that large pages may lose against that speed before they are given up."""


class LargePages:
    """Memory that is filled for the first time: in large pages, as long as the machine has these at hand.

    The system zeroes memory before it gives it away, on 2 cores of an AMD EPYC 16 to 22 GiB a second in large pages and
    3.2 in small ones, which is most of what a load needs a processor for. But a virtual machine gives what is free back
    to its host (a balloon with free page reporting), and that is what large pages would be made of: the host gives them
    again at 0.4 GiB/s, while small ones are left. Nothing tells in advance. So the processor time is looked at, in
    which that wait is counted, and the rest is filled in small pages from where it has become too long. What tells is
    a cumulative sum: no good time before makes up for a bad one.

    Any thread may call :meth:`note`.
    """

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []
        self._lost = 0.0

    def add(self, address: int, nbytes: int) -> None:
        """Have memory, as long as it is not touched, lie in large pages as far as it fills them.

        A system without them leaves it as it is.
        """
        low, high = -(-address // mmap.PAGESIZE), (address + nbytes) // mmap.PAGESIZE
        place = low * mmap.PAGESIZE, (high - low) * mmap.PAGESIZE
        if place[1] > 0 and _advise(*place, mmap.MADV_HUGEPAGE):
            self._ranges.append(place)

    def note(self, nbytes: int, seconds: float) -> None:
        """Tell how long a processor has worked on filling so many bytes of it."""
        self._lost = max(self._lost + seconds - nbytes / _SPEED, 0.0)
        if self._lost > _LOSS and self._ranges:
            ranges, self._ranges = self._ranges, []
            for place in ranges:
                _advise(*place, mmap.MADV_NOHUGEPAGE)


def _advise(address: int, nbytes: int, advice: int) -> bool:
    return bool(load_libc().madvise(address, nbytes, advice) == 0)
