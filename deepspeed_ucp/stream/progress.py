"""Workers of a node: how many, the memory that each has, and who is told of their progress."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from ..io.threads import count_threads
from ..plan.conversion import ALIGNMENT, RANGE

MakeBar = Callable[[int], AbstractContextManager[Callable[[int], None]]]
"""Makes a progress bar of so many bytes; inside it, what is told of more bytes that are done, by any thread."""


def no_bar(total: int) -> AbstractContextManager[Callable[[int], None]]:
    """Progress that is shown to nobody."""
    return nullcontext(lambda nbytes: None)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkOptions:
    """Means of a node's work.

    Attributes:
        workers: threads; 0 chooses from the cores.
        window: bytes of memory for data on its way.
        bar: makes a progress bar of so many bytes.
    """

    workers: int = 0
    window: int = 256 << 20
    bar: MakeBar = no_bar


def default_workers() -> int:
    """Threads per node."""
    return count_threads(2, 4, 64)


def divide_window(workers: int, window: int) -> tuple[int, int]:
    """(threads, bytes that each reads at once): a thread holds about three times these, scratch memory included.

    Args:
        workers: threads asked for; 0 chooses from the cores. Fewer where the window has no room for them.
        window: bytes of memory for all of them.
    """
    threads = max(min(workers or default_workers(), window // (3 * ALIGNMENT)), 1)
    most = window // (3 * threads) // ALIGNMENT * ALIGNMENT
    return threads, max(min(most, RANGE), ALIGNMENT)
