"""Locate wants: ranges of target shards become copies of bytes, then reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from operator import itemgetter

from ..model.records import CopyItem, Read
from ..model.storage import ITEMSIZE, Atom, Fragments
from ..tensor_parallel.layout import Layout, Run, copy_runs, overlap, restrict_source, whole

ENDLESS = 1 << 62
"""A block size that no record exceeds."""

MAX_ITEMS = 512
"""Items per read; the kernel takes 1024 buffers in one ``preadv``."""


@dataclass(frozen=True, slots=True)
class View:
    """The relation of a target shard to the source's shards.

    Attributes:
        rank: the target shard.
        shards: source shards that may contribute to it.
    """

    source: Layout
    target: Layout
    rank: int
    shards: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Want:
    """Elements [start, start + numel) of a flattened target shard to put somewhere.

    Attributes:
        destination: number of the memory.
        position: element of the destination that receives the first element.
        view: how the target shard is made; None if it is the source's shard ``shard``.
    """

    atom: Atom
    start: int
    numel: int
    destination: int = 0
    position: int = 0
    view: View | None = None
    shard: int = 0

    @property
    def end(self) -> int:
        return self.start + self.numel

    @property
    def itemsize(self) -> int:
        """Stored bytes per element."""
        return ITEMSIZE[self.atom.dtype]

    @property
    def nbytes(self) -> int:
        """Stored bytes of the range."""
        return self.numel * self.itemsize

    @property
    def is_mean(self) -> bool:
        """Whether the values are the mean of all source shards (Partial)."""
        return self.view is not None and self.view.source.mean

    def pick_shard(self, shard: int) -> Want:
        """Return the same range of one of several replicas."""
        return self if self.view is None else replace(self, view=replace(self.view, shards=(shard,)))


def find_shards(source: Layout, target: Layout, rank: int) -> tuple[int, ...]:
    """Return the source shards that may contribute to a target shard."""
    if source.replicated:
        return (0,)
    alike = source.view[1:] == target.view[1:] and source.claims is None and rank < len(source.shards)
    if alike and source.shards[rank] == target.shards[rank]:
        return (rank,)
    return tuple(range(len(source.shards)))


def list_runs(want: Want) -> Iterator[tuple[int, Run]]:
    """Yield (record, run) for all runs of a want.

    The order is by source shard, then by element or block. The runs' sources count elements from the record's start,
    and their targets elements of the destination.
    """
    storage = want.atom.shards[want.shard].states[want.atom.state]
    parts = _list_shard_runs(want)
    if isinstance(storage, Fragments) and storage.shape and (want.view is None or _is_whole(want.view.source)):
        parts = _list_block_runs(want, storage)
    for record, first, run in parts:
        dst = run.dst - want.start + want.position
        yield record, Run(run.src + first, dst, run.width, run.count, run.src_step, run.dst_step)


def _is_whole(layout: Layout) -> bool:
    """Return True if the layout's only shard is the whole tensor, in row-major order."""
    return len(layout.shards) == 1 and all(
        [low for low, _ in intervals] + [size] == [0] + [high for _, high in intervals]
        for intervals, size in zip(layout.shards[0], layout.view, strict=True)
    )


def _list_block_runs(want: Want, storage: Fragments) -> Iterator[tuple[int, int, Run]]:
    """Like :func:`_list_shard_runs`, with all rows of a block in few runs."""
    target, rank = (whole(storage.shape), 0) if want.view is None else (want.view.target, want.view.rank)
    claims = None if want.view is None else want.view.source.claims
    for fragment in storage.find_blocks(want.start, want.end) if want.view is None else storage.fragments:
        begins = fragment.find_begins(storage.shape)
        spans = tuple(((low, low + size),) for low, size in zip(begins, fragment.block, strict=True))
        claimed = claims and (tuple(tuple(overlap(*axes)) for axes in zip(claims[0], spans, strict=True)),)
        source = Layout(storage.shape, storage.shape, (spans,), (fragment.block,), claims=claimed)
        for run in copy_runs(source, 0, target, rank, want.start, want.end):
            yield fragment.record, fragment.offset // want.itemsize, run


def _list_shard_runs(want: Want) -> Iterator[tuple[int, int, Run]]:
    """Yield (record, its element that ``run.src`` counts from, run)."""
    view = want.view
    for number in (want.shard,) if view is None else view.shards:
        runs: Iterable[Run] = (Run(want.start, want.start, want.numel),)
        if view is not None:
            runs = copy_runs(view.source, number, view.target, view.rank, want.start, want.end)
        for run in runs:
            for fragment in want.atom.shards[number].find(want.atom.state, run.src, run.src_end):
                for part in restrict_source(run, fragment.start, fragment.start + fragment.numel):
                    yield fragment.record, fragment.offset // want.itemsize - fragment.start, part


def locate(want: Want, block: int = ENDLESS, *, split: bool = False) -> Iterator[CopyItem]:
    """Yield the copies that fill a want.

    Args:
        block: cut them at multiples of this number of bytes.
        split: split items into runs that are contiguous in the record.
    """
    for record, run in list_runs(want):
        for part in _split_run(run) if split else (run,):
            yield from make_items(record, part, want.itemsize, want.destination, block)


def _split_run(run: Run) -> Iterator[Run]:
    """Yield runs that are contiguous in the source."""
    if run.count == 1 or run.src_step == run.width:
        yield run
        return
    for number in range(run.count):
        yield Run(run.src + number * run.src_step, run.dst + number * run.dst_step, run.width)


def make_items(record: int, run: Run, itemsize: int, destination: int, block: int = ENDLESS) -> Iterator[CopyItem]:
    """Yield a run's copies of bytes, cut at multiples of ``block`` bytes."""
    step = block // itemsize
    first, last = run.src // step, (run.src_end - 1) // step
    parts: Iterable[Run] = (run,)
    if first < last:
        parts = (part for at in range(first, last + 1) for part in restrict_source(run, at * step, (at + 1) * step))
    for part in parts:
        nbytes, stride = part.width * itemsize, 0 if part.dst_step == part.width else part.dst_step
        src_step = part.src_step if part.count > 1 else part.width
        yield CopyItem(
            record, part.src * itemsize, nbytes, src_step * itemsize, part.count, destination, part.dst, stride
        )


def list_claims(wants: Iterable[Want], block: int) -> list[Read]:
    """Return the reads, perhaps of many runs, that a rank's wants claim from others."""
    return join_items((item for want in wants for item in locate(want, block)), block)


def list_reads(wants: Iterable[Want], block: int = ENDLESS) -> list[Read]:
    """Return contiguous reads, each in one block, by which a rank fills wants itself."""
    return join_items((item for want in wants for item in locate(want, block, split=True)), block)


def join_items(items: Iterable[CopyItem], block: int = ENDLESS) -> list[Read]:
    """Join items that follow each other in a block into reads, by record and offset.

    Args:
        block: bytes per block; no item crosses its end.
    """
    ordered = sorted(items, key=itemgetter(0, 1))
    groups: list[list[CopyItem]] = []
    for item in (item for item in ordered if item.is_contiguous):
        last = groups[-1][-1] if groups else None
        follows = last is not None and (item.record, item.offset) == (last.record, last.end)
        if follows and item.offset % block and len(groups[-1]) < MAX_ITEMS:
            groups[-1].append(item)
        else:
            groups.append([item])
    reads = [Read(*item[:5], (item,)) for item in ordered if not item.is_contiguous]
    reads += [Read.of(group[0].record, group[0].offset, group[-1].end, *group) for group in groups]
    return sorted(reads, key=itemgetter(0, 1))
