"""Read batches of ranges of full tensors in a node's threads, and pass each batch to a consumer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from ..io import direct
from ..io.checksum import Checked
from ..io.filesystems import count_readers
from ..io.memory import Scratch
from ..io.threads import run_threads
from ..plan.conversion import ALIGNMENT, RANGE, Batch
from .full_tensors import FullTensor
from .reader import AtomReader

_ALIGNED = direct.ALIGNMENT
"""Alignment of ranges in memory in bytes, as direct I/O requires."""

MakeBar = Callable[[int], AbstractContextManager[Callable[[int], None]]]
"""Factory of a progress bar for a number of bytes; its context manager yields a thread-safe callback for bytes done."""

Consume = Callable[[Batch, Sequence[list[memoryview]], list[Checked], Scratch], None]
"""Takes a batch, by source the bytes of its ranges (valid until it returns), the checks of the bytes read, and scratch
memory of the thread."""


def no_bar(total: int) -> AbstractContextManager[Callable[[int], None]]:
    """Factory of an invisible progress bar."""
    return nullcontext(lambda nbytes: None)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkOptions:
    """Resources of a node.

    Attributes:
        workers: number of threads; 0: chosen by the cores.
        window: bytes of memory for data in transit.
        bar: factory of a progress bar.
    """

    workers: int = 0
    window: int = 256 << 20
    bar: MakeBar = no_bar

    def divide(self, source: str) -> tuple[int, int]:
        """Return (threads, bytes per read of a thread). A thread holds about three times these bytes.

        The window may limit the number of threads.

        Args:
            source: folder of the source.
        """
        threads = max(min(self.count(source), self.window // (3 * ALIGNMENT)), 1)
        most = self.window // (3 * threads) // ALIGNMENT * ALIGNMENT
        return threads, max(min(most, RANGE), ALIGNMENT)

    def count(self, source: str) -> int:
        """Return the number of threads that read from a folder."""
        return self.workers or count_readers(source)


def stream(
    sources: Sequence[tuple[AtomReader, Sequence[FullTensor]]],
    batches: Sequence[Batch],
    consume: Consume,
    *,
    threads: int,
    bar: MakeBar = no_bar,
    halted: Callable[[], bool] = lambda: False,
) -> None:
    """Read batches from all sources in threads, which take them in order.

    Args:
        sources: reader of each checkpoint, and its atoms by the batches' output number.
        consume: called with each batch, in the thread that has read it.
        threads: number of threads; each holds memory for the largest batch.
        bar: factory of a progress bar for the bytes of all sources.
        halted: called before each batch; True stops the thread.

    Raises:
        UcpError: the first thread's error; the others stop after their batch.
    """
    largest = [max((_lay_out(batch, atoms)[-1] for batch in batches), default=0) for _, atoms in sources]
    spans = [span for batch in batches for span in batch.ranges]
    total = sum(span.numel * atoms[span.output].itemsize for _, atoms in sources for span in spans)

    def work(turn: Iterator[Batch]) -> None:
        spaces, scratch = [Scratch().take(nbytes) for nbytes in largest], Scratch()
        for batch in turn:
            if halted():
                return
            sides, checks = [], []
            for (reader, atoms), space in zip(sources, spaces, strict=True):
                wants = [atoms[span.output].want(span.start, span.numel) for span in batch.ranges]
                places = _lay_out(batch, atoms)
                sides.append([space[place:][: want.nbytes] for want, place in zip(wants, places, strict=False)])
                checks += reader.read_tensors(wants, sides[-1])
            consume(batch, sides, checks, scratch)
            progress(sum(data.nbytes for side in sides for data in side))

    with bar(total) as progress:
        run_threads(batches, work, threads)


def _lay_out(batch: Batch, atoms: Sequence[FullTensor]) -> list[int]:
    """Return the offset of each range of a batch in memory, and the end of the last one."""
    places = [0]
    for span in batch.ranges:
        nbytes = span.numel * atoms[span.output].itemsize
        places.append(places[-1] + -(-nbytes // _ALIGNED) * _ALIGNED)
    return places
