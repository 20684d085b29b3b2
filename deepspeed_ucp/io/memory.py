"""Memory for staging."""

from __future__ import annotations

import mmap


def allocate(nbytes: int) -> mmap.mmap:
    """``nbytes`` > 0 zeroed bytes that go back to the system once they are freed.

    malloc would keep buffers of a few MiB, in an arena for every thread: 200 MiB a rank.
    """
    return mmap.mmap(-1, nbytes)
