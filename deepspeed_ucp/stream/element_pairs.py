"""Compare pairs of elements of a checkpoint in any files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from ..comm import Comm
from ..errors import UcpError, raise_first
from ..io.filesystems import choose_map
from ..io.read import MemorySink
from ..model import AtomicIndex, CopyItem, Read
from ..plan import Want, list_reads
from .copies import CopyReader
from .reader import AtomReader

_AT_ONCE = 8 << 20
"""Bytes of pairs that are read together."""

_CHUNK = 4 << 20
"""Maximum bytes of each side of a pair."""


Pair = tuple[Want, Want]
Values = tuple[bytearray, bytearray]
Judge = Callable[[int, bytearray, bytearray], None]
"""Takes a pair's number and the bytes of both sides; its errors are raised on all ranks."""


def compare_pairs(index: AtomicIndex, pairs: Sequence[Pair], judge: Judge, comm: Comm) -> None:
    """Read pairs of elements, and call ``judge`` for each in order; collective.

    Args:
        pairs: this rank's pairs. Other ranks read for it if it cannot.

    Raises:
        UcpError: a file cannot be read, or the error of ``judge``; equal on all ranks.
    """
    if not index.stored.access.is_partial or comm.size == 1:
        comm.run(lambda: _judge(_read_here(index, pairs), judge))
        return
    batches, first, failed = list(_divide(pairs)), 0, list[UcpError]()
    for at in range(max(comm.gather(len(batches)))):
        batch = batches[at] if at < len(batches) else []
        values = _read_there(index, batch, comm)
        try:
            _judge(values, judge, first)
        except UcpError as error:
            failed.append(error)
        first += len(batch)

    comm.run(lambda: raise_first(failed))


def cut_pair(first: Want, other: Want) -> Iterator[Pair]:
    """Cut a pair into chunks."""
    step = _CHUNK // first.itemsize
    for low in range(0, first.numel, step):
        numel = min(step, first.numel - low)
        yield replace(first, start=first.start + low, numel=numel), replace(other, start=other.start + low, numel=numel)


def _judge(values: Iterable[Values], judge: Judge, first: int = 0) -> None:
    for number, (here, there) in enumerate(values, first):
        judge(number, here, there)


def _read_here(index: AtomicIndex, pairs: Sequence[Pair]) -> Iterator[Values]:
    apply = choose_map(index.run.state_file)
    with AtomReader(index) as reader:  # with checksums, from the places that a load reads
        for batch in _divide(pairs):
            yield from apply(lambda pair: (reader.read_want(pair[0]), reader.read_want(pair[1])), batch)


def _divide(pairs: Sequence[Pair]) -> Iterator[list[Pair]]:
    """Yield batches of pairs that are read together."""
    batch, nbytes = list[Pair](), 0
    for pair in pairs:
        batch.append(pair)
        nbytes += pair[0].nbytes + pair[1].nbytes
        if nbytes >= _AT_ONCE:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch


def _read_there(index: AtomicIndex, pairs: Sequence[Pair], comm: Comm) -> list[Values]:
    """Return the bytes of this rank's pairs, each read by a rank that can; collective."""
    stored, wants = index.stored, [want for pair in pairs for want in pair]
    reads = [list_reads([want]) for want in wants]
    spans = [(read.record, read.offset, read.end) for row in reads for read in row]
    files = [stored.records[record].file for record, _, _ in spans]
    turns = stored.access.take_turns(files, comm.size)
    ranks = np.where(stored.access.can_read(comm.rank, files), comm.rank, turns).tolist()
    with CopyReader(stored) as reader:

        def read_span(span: tuple[int, int, int]) -> bytes:
            record, low, high = span
            data = bytearray(high - low)
            item = CopyItem(record, low, len(data), len(data), 1, 0, 0)
            reader.read([Read.of(*span, item)], [MemorySink(memoryview(data))])
            return bytes(data)

        answers = iter(comm.ask(list(zip(ranks, spans, strict=True)), read_span))
    values = [_join(want, row, answers) for want, row in zip(wants, reads, strict=True)]
    return list(zip(values[::2], values[1::2], strict=True))


def _join(want: Want, reads: Iterable[Read], answers: Iterator[bytes]) -> bytearray:
    """Scatter the bytes of a want's reads."""
    values = bytearray(want.nbytes)
    sink = MemorySink(memoryview(values), want.itemsize)
    for read in reads:
        data = memoryview(next(answers))
        for item in read.items:
            sink.store(item, data[: item.nbytes])
            data = data[item.nbytes :]
    return values
