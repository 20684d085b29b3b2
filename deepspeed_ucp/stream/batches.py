"""Batches of ranges of logical tensors: read by a node's threads, each handed to a consumer as soon as it is there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ..io.checksum import Checked
from ..io.memory import Scratch
from ..io.threads import run_threads
from ..plan.conversion import Batch, Range
from .reader import AtomReader, Item
from .wholes import Whole

_ALIGNMENT = 16
"""Bytes; ranges begin at multiples of it, so that their elements can be looked at in place."""


@dataclass(frozen=True, slots=True)
class Source:
    """What is read from: a checkpoint, and what the batches' output numbers mean in it."""

    reader: AtomReader
    wholes: Sequence[Whole]

    def measure(self, batch: Batch) -> int:
        """Bytes of a batch."""
        return sum(self._count(each) for each in batch.ranges)

    def measure_memory(self, batch: Batch) -> int:
        """Bytes of memory that a batch needs."""
        return sum(_align(self._count(each)) for each in batch.ranges)

    def lay_out(self, batch: Batch, memory: memoryview) -> list[Item]:
        """A batch's ranges, one behind the other in memory."""
        items, position = [], 0
        for each in batch.ranges:
            nbytes = self._count(each)
            items.append(Item(self.wholes[each.output], each.start, each.numel, memory[position : position + nbytes]))
            position += _align(nbytes)
        return items

    def _count(self, each: Range) -> int:
        return each.numel * self.wholes[each.output].itemsize


def _align(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True, slots=True)
class ReadBatch:
    """A batch that has been read.

    Attributes:
        batch: its ranges.
        sides: per source, the ranges' bytes; good until the consumer returns.
        checks: of the source bytes.
        scratch: of this thread, for the consumer.
    """

    batch: Batch
    sides: tuple[list[Item], ...]
    checks: list[Checked]
    scratch: Scratch


def stream(
    sources: Sequence[Source],
    batches: Sequence[Batch],
    consume: Callable[[ReadBatch], None],
    *,
    threads: int,
    progress: Callable[[int], None] = lambda nbytes: None,
    halted: Callable[[], bool] = lambda: False,
) -> None:
    """Read batches, each from all sources, by threads that take them in order.

    Args:
        consume: is given every batch, by the thread that has read it.
        threads: each holds memory for the largest batch.
        progress: told the bytes of every batch; any thread calls it.
        halted: asked before every batch whether to leave the rest.

    Raises:
        UcpError: the first thread's error; the others stop after their batch.
    """

    largest = max((sum(source.measure_memory(batch) for source in sources) for batch in batches), default=0)

    def work(turn: Iterator[Batch]) -> None:
        memory, scratch = Scratch().take(largest), Scratch()
        for batch in turn:
            if halted():
                return
            consume(_read(sources, batch, memory, scratch))
            progress(sum(source.measure(batch) for source in sources))

    run_threads(batches, work, threads)


def _read(sources: Sequence[Source], batch: Batch, memory: memoryview, scratch: Scratch) -> ReadBatch:
    sides: list[list[Item]] = []
    checks: list[Checked] = []
    for source in sources:
        sides.append(source.lay_out(batch, memory))
        checks += source.reader.read_items(sides[-1])
        memory = memory[source.measure_memory(batch) :]
    return ReadBatch(batch, tuple(sides), checks, scratch)
