"""Where the elements that a rank wants lie in files: from parts of target shards to strided pieces of records."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ..atoms import ITEMSIZE, Atom, Fragment, Shard
from ..patterns import Layout, Run, copy_runs, restrict_source


@dataclass(frozen=True, slots=True)
class View:
    """How a target shard relates to the source's shards.

    Attributes:
        source, target: layouts of both sides.
        rank: the target shard.
        shards: source shards that it is made from.
    """

    source: Layout
    target: Layout
    rank: int
    shards: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Want:
    """Elements [start, start + numel) of a flattened target shard go to ``buffer`` at element ``offset``.

    Without a view the target shard is the source's shard ``shard``.
    """

    atom: Atom
    start: int
    numel: int
    buffer: int
    offset: int
    view: View | None = None
    shard: int = 0


@dataclass(frozen=True, slots=True)
class Extent:
    """Elements of a record that go to a buffer: runs, with ``src`` in elements of the record, ``dst`` of the buffer."""

    record: int
    buffer: int
    itemsize: int
    run: Run

    @property
    def nbytes(self) -> int:
        """Bytes of all runs."""
        return self.run.count * self.run.width * self.itemsize

    @property
    def is_contiguous(self) -> bool:
        """The runs follow each other in the record."""
        return self.run.count == 1 or self.run.src_step == self.run.width

    def split(self) -> Iterator[Extent]:
        """The same with every piece contiguous in the record."""
        run = self.run
        if self.is_contiguous:
            yield self
            return
        for number in range(run.count):
            one = Run(run.src + number * run.src_step, run.dst + number * run.dst_step, run.width)
            yield Extent(self.record, self.buffer, self.itemsize, one)


def find_shards(source: Layout, target: Layout, rank: int) -> tuple[int, ...]:
    """Source shards that a target shard is made from."""
    if source.replicated:
        return (0,)
    alike = source.view[1:] == target.view[1:] and source.claims is None and rank < len(source.shards)
    if alike and source.shards[rank] == target.shards[rank]:
        return (rank,)
    return tuple(range(len(source.shards)))


def locate(want: Want) -> Iterator[Extent]:
    """The pieces that hold a want, source shard by source shard, in element order."""
    itemsize = ITEMSIZE[want.atom.dtype]
    for shard, runs in _copy_runs(want):
        for run in runs:
            for fragment, part in _meet(want.atom.shards[shard], run):
                src = part.src - fragment.start + fragment.offset // itemsize
                dst = part.dst - want.start + want.offset
                moved = Run(src, dst, part.width, part.count, part.src_step, part.dst_step)
                yield Extent(fragment.record, want.buffer, itemsize, moved)


def _copy_runs(want: Want) -> Iterator[tuple[int, tuple[Run, ...]]]:
    view, end = want.view, want.start + want.numel
    if view is None:
        yield want.shard, (Run(want.start, want.start, want.numel),)
        return
    for shard in view.shards:
        yield shard, copy_runs(view.source, shard, view.target, view.rank, want.start, end)


def _meet(shard: Shard, run: Run) -> Iterator[tuple[Fragment, Run]]:
    """The parts of a run by the fragments that hold them."""
    for fragment in shard.find(run.src, run.src_end):
        for part in restrict_source(run, fragment.start, fragment.start + fragment.numel):
            yield fragment, part


def cut_blocks(piece: Extent, block: int) -> Iterable[Extent]:
    """Cut a piece where the record's blocks of ``block`` bytes begin."""
    step = block // piece.itemsize
    run = piece.run
    first_block, last_block = run.src // step, (run.src_end - 1) // step
    if first_block == last_block:
        yield piece
        return
    for number in range(first_block, last_block + 1):
        for part in restrict_source(run, number * step, (number + 1) * step):
            yield Extent(piece.record, piece.buffer, piece.itemsize, part)
