"""Batches of ranges of full tensors: read by a node's threads, each handed to a consumer as soon as it is there."""

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
from .reader import AtomReader, Item

_ALIGNED = direct.ALIGNMENT
"""Bytes; in memory ranges begin at multiples of it, so that they can be written from there past the page cache."""

MakeBar = Callable[[int], AbstractContextManager[Callable[[int], None]]]
"""Makes a progress bar of so many bytes; inside it, what is told of more bytes that are done, by any thread."""

Consume = Callable[[Batch, Sequence[list[Item]], list[Checked], Scratch], None]
"""Takes a batch that has been read: per source its ranges' bytes, which are good until it returns, the checks of the
source bytes, and memory of the calling thread's own."""


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

    def divide(self, source: str) -> tuple[int, int]:
        """(threads, bytes that each reads at once): a thread holds about three times these, scratch memory included.

        Fewer threads than asked for where the window has no room for them.

        Args:
            source: a folder that is read from.
        """
        threads = max(min(self.count(source), self.window // (3 * ALIGNMENT)), 1)
        most = self.window // (3 * threads) // ALIGNMENT * ALIGNMENT
        return threads, max(min(most, RANGE), ALIGNMENT)

    def count(self, source: str) -> int:
        """Threads that read from a folder."""
        return self.workers or count_readers(source)


def stream(
    sources: Sequence[tuple[AtomReader, Sequence[FullTensor]]],
    batches: Sequence[Batch],
    consume: Consume,
    *,
    threads: int,
    progress: Callable[[int], None] = lambda nbytes: None,
    halted: Callable[[], bool] = lambda: False,
) -> None:
    """Read batches, each from all sources, by threads that take them in order.

    Args:
        sources: each a checkpoint, and the atoms that the batches' output numbers mean in it.
        consume: is given every batch, by the thread that has read it.
        threads: each holds memory for the largest batch.
        progress: told the bytes of every batch; any thread calls it.
        halted: asked before every batch whether to leave the rest.

    Raises:
        UcpError: the first thread's error; the others stop after their batch.
    """
    largest = [max((_lay_out(batch, atoms)[-1] for batch in batches), default=0) for _, atoms in sources]

    def work(turn: Iterator[Batch]) -> None:
        memory, scratch = [Scratch().take(nbytes) for nbytes in largest], Scratch()
        for batch in turn:
            if halted():
                return
            sides, checks = [], []
            for (reader, atoms), space in zip(sources, memory, strict=True):
                sides.append(_make_items(batch, atoms, space))
                checks += reader.read_items(sides[-1])
            consume(batch, sides, checks, scratch)
            progress(sum(item.into.nbytes for items in sides for item in items))

    run_threads(batches, work, threads)


def _lay_out(batch: Batch, atoms: Sequence[FullTensor]) -> list[int]:
    """Where each range of a batch begins in memory, in bytes, and where the last one ends."""
    places = [0]
    for each in batch.ranges:
        nbytes = each.numel * atoms[each.output].itemsize
        places.append(places[-1] + -(-nbytes // _ALIGNED) * _ALIGNED)
    return places


def _make_items(batch: Batch, atoms: Sequence[FullTensor], memory: memoryview) -> list[Item]:
    return [
        Item(
            atoms[each.output], each.start, each.numel, memory[place : place + each.numel * atoms[each.output].itemsize]
        )
        for each, place in zip(batch.ranges, _lay_out(batch, atoms), strict=False)
    ]
