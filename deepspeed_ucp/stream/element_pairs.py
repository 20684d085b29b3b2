"""Compare pairs of elements of a checkpoint in any files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ..comm import Comm
from ..errors import UcpError, raise_first
from ..io.filesystems import choose_map
from ..io.read import MemorySink
from ..model import ITEMSIZE, Atom, AtomicIndex
from ..plan.claims import Part, Request, list_requests
from ..plan.locate import Want
from .copies import CopyReader
from .reader import AtomReader

_AT_ONCE = 8 << 20
"""Bytes of pairs that are read together."""

_CHUNK = 4 << 20
"""Maximum bytes of each side of a pair."""


class Elements(NamedTuple):
    """Elements [low, high) of a flattened shard of an atom."""

    atom: Atom
    shard: int
    low: int
    high: int

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return (self.high - self.low) * ITEMSIZE[self.atom.dtype]

    @property
    def want(self) -> Want:
        """The same elements as a request into their own buffer."""
        return Want(self.atom, self.low, self.high - self.low, 0, 0, shard=self.shard)


Pair = tuple[Elements, Elements]
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


def cut_pair(first: Elements, other: Elements) -> Iterator[Pair]:
    """Cut a pair into chunks."""
    step = _CHUNK // ITEMSIZE[first.atom.dtype]
    for low in range(0, first.high - first.low, step):
        one, two = (
            each._replace(low=each.low + low, high=min(each.low + low + step, each.high)) for each in (first, other)
        )
        yield one, two


def _judge(values: Iterable[Values], judge: Judge, first: int = 0) -> None:
    for number, (here, there) in enumerate(values, first):
        judge(number, here, there)


def _read_here(index: AtomicIndex, pairs: Sequence[Pair]) -> Iterator[Values]:
    apply = choose_map(index.run.state_file)
    with AtomReader(index) as reader:  # with checksums, from the places that a load reads
        for batch in _divide(pairs):
            yield from apply(lambda pair: (reader.read_elements(*pair[0]), reader.read_elements(*pair[1])), batch)


def _divide(pairs: Sequence[Pair]) -> Iterator[list[Pair]]:
    batch, held = list[Pair](), 0
    for pair in pairs:
        batch.append(pair)
        held += sum(each.nbytes for each in pair)
        if held >= _AT_ONCE:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch


def _read_there(index: AtomicIndex, pairs: Sequence[Pair], comm: Comm) -> list[Values]:
    """Return the bytes of this rank's pairs, each read by a rank that can; collective."""
    stored, elements = index.stored, [each for pair in pairs for each in pair]
    requests = [list_requests([each.want]) for each in elements]
    asked = [request for one in requests for request in one]
    files = [stored.records[request.record].file for request in asked]
    turns = stored.access.take_turns(files, comm.size)
    ranks = np.where(stored.access.can_read(comm.rank, files), comm.rank, turns).tolist()
    questions = [(request.record, request.offset, request.nbytes) for request in asked]
    with CopyReader(stored) as reader:

        def read(question: tuple[int, int, int]) -> bytes:
            data = bytearray(question[-1])
            reader.read([Request(*question, (Part(len(data), 0, 0),))], [MemorySink(memoryview(data))])
            return bytes(data)

        answers = iter(comm.ask(list(zip(ranks, questions, strict=True)), read))
    values = [_put_together(*each, answers) for each in zip(elements, requests, strict=True)]
    return list(zip(values[::2], values[1::2], strict=True))


def _put_together(each: Elements, requests: Iterable[Request], answers: Iterator[bytes]) -> bytearray:
    whole, itemsize = bytearray(each.nbytes), ITEMSIZE[each.atom.dtype]
    for request in requests:
        data, used = next(answers), 0
        for part in request.parts:
            low = part.position * itemsize
            whole[low : low + part.nbytes] = data[used : used + part.nbytes]
            used += part.nbytes
    return whole
