"""Locate wanted elements in files: from parts of target shards to strided pieces of records."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ..model import ITEMSIZE, Atom, Tiles
from ..tensor_parallel import Layout, Run, copy_runs, restrict_source, whole
from ..tensor_parallel.layout import overlap


@dataclass(frozen=True, slots=True)
class View:
    """The relation of a target shard to the source's shards.

    Attributes:
        source, target: layouts of both sides.
        rank: the target shard.
        shards: source shards from which it is made.
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
    """Runs of elements of a record for a buffer; ``src`` counts elements of the record, ``dst`` of the buffer."""

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
        """Whether the runs are adjacent in the record."""
        return self.run.count == 1 or self.run.src_step == self.run.width

    def split(self) -> Iterator[Extent]:
        """Yield the extent in pieces that are contiguous in the record."""
        run = self.run
        if self.is_contiguous:
            yield self
            return
        for number in range(run.count):
            one = Run(run.src + number * run.src_step, run.dst + number * run.dst_step, run.width)
            yield Extent(self.record, self.buffer, self.itemsize, one)


def find_shards(source: Layout, target: Layout, rank: int) -> tuple[int, ...]:
    """Return the source shards from which a target shard is made."""
    if source.replicated:
        return (0,)
    alike = source.view[1:] == target.view[1:] and source.claims is None and rank < len(source.shards)
    if alike and source.shards[rank] == target.shards[rank]:
        return (rank,)
    return tuple(range(len(source.shards)))


def locate(want: Want) -> Iterator[Extent]:
    """Yield the pieces of a want, by source shard and then in element order or by tile."""
    itemsize = ITEMSIZE[want.atom.dtype]
    held = want.atom.shards[want.shard].storage
    is_whole = want.view is None or _holds_all(want.view.source)
    for record, first, part in _meet_tiles(want, held) if isinstance(held, Tiles) and is_whole else _meet_shards(want):
        dst = part.dst - want.start + want.offset
        moved = Run(part.src + first, dst, part.width, part.count, part.src_step, part.dst_step)
        yield Extent(record, want.buffer, itemsize, moved)


def _holds_all(layout: Layout) -> bool:
    """Return True if the layout's only shard is the whole tensor, in row-major order."""
    return len(layout.shards) == 1 and all(
        [low for low, _ in held] + [size] == [0] + [high for _, high in held]
        for held, size in zip(layout.shards[0], layout.view, strict=True)
    )


def _meet_tiles(want: Want, held: Tiles) -> Iterator[tuple[int, int, Run]]:
    """Yield the same as :func:`_meet_shards`, with all rows of a tile in few runs."""
    end = want.start + want.numel
    target, rank = (whole(held.shape), 0) if want.view is None else (want.view.target, want.view.rank)
    claims = None if want.view is None else want.view.source.claims
    for tile in held.meet(want.start, end) if want.view is None else held.tiles:
        spans = tuple(((low, low + size),) for low, size in zip(tile.begins, tile.shape, strict=True))
        claimed = claims and (tuple(tuple(overlap(*each)) for each in zip(claims[0], spans, strict=True)),)
        source = Layout(held.shape, held.shape, (spans,), (tile.shape,), claims=claimed)
        for run in copy_runs(source, 0, target, rank, want.start, end):
            yield tile.record, tile.offset // ITEMSIZE[want.atom.dtype], run


def _meet_shards(want: Want) -> Iterator[tuple[int, int, Run]]:
    """Yield records with runs of the target shard, and the element of the record from which their sources count."""
    view, end, itemsize = want.view, want.start + want.numel, ITEMSIZE[want.atom.dtype]
    for number in (want.shard,) if view is None else view.shards:
        runs: Iterable[Run] = (Run(want.start, want.start, want.numel),)
        if view is not None:
            runs = copy_runs(view.source, number, view.target, view.rank, want.start, end)
        for run in runs:
            for fragment in want.atom.shards[number].find(run.src, run.src_end):
                for part in restrict_source(run, fragment.start, fragment.start + fragment.numel):
                    yield fragment.record, fragment.offset // itemsize - fragment.start, part


def cut_blocks(piece: Extent, block: int) -> Iterable[Extent]:
    """Cut a piece at the boundaries of the record's blocks of ``block`` bytes."""
    step = block // piece.itemsize
    run = piece.run
    first_block, last_block = run.src // step, (run.src_end - 1) // step
    if first_block == last_block:
        yield piece
        return
    for number in range(first_block, last_block + 1):
        for part in restrict_source(run, number * step, (number + 1) * step):
            yield Extent(piece.record, piece.buffer, piece.itemsize, part)
