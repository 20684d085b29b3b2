"""From wants (parts of atoms) to read requests (byte ranges of files with their destinations)."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..atoms import ITEMSIZE, Atom, Record

DISCARD = -1
"""Buffer number of bytes that are read for their checksum alone (padding between fragments)."""

MAX_PARTS = 512
"""Parts per request; the kernel takes 1024 buffers in one ``preadv``."""


@dataclass(frozen=True, slots=True)
class Want:
    """Elements [start, start + numel) of an atom go to ``buffer`` at element ``offset``."""

    atom: Atom
    start: int
    numel: int
    buffer: int
    offset: int


@dataclass(frozen=True, slots=True)
class Part:
    """``nbytes`` bytes of a request go to ``buffer`` at element ``position``."""

    nbytes: int
    buffer: int
    position: int


@dataclass(frozen=True, slots=True)
class Request:
    """One contiguous read: bytes [offset, offset + nbytes) of a record, scattered over parts in order."""

    record: int
    offset: int
    nbytes: int
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """One rank's part of a load: requests in the order in which they are read, and the bytes that they read."""

    requests: tuple[Request, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class _Piece:
    record: int
    offset: int
    nbytes: int
    buffer: int
    position: int
    itemsize: int


def plan_load(
    wants: Iterable[Want],
    touched: Iterable[Atom],
    records: Sequence[Record],
    rank: int,
    size: int,
    chunk: int,
) -> LoadPlan:
    """Plan one rank's reads.

    Args:
        wants: what this rank needs.
        touched: atoms that some rank reads; bytes of their records that belong to none of them (padding) are read
            too, by one rank each, so that every record's checksum can be formed.
        records: of the index.
        rank, size: this rank and how many there are.
        chunk: largest request in bytes.

    Returns:
        The plan; each request lies in one record. They are in file order, but each rank starts at a place of its own
        and wraps around, so that ranks that need neighbouring bytes do not all wait for the same part of the storage.
    """
    pieces = [piece for want in wants for piece in _locate(want)]
    pieces += _find_gaps(touched, records, rank, size)
    pieces.sort(key=lambda piece: (records[piece.record].file, records[piece.record].offset + piece.offset))
    ordered = tuple(_coalesce(_split(pieces, chunk), chunk))
    first = len(ordered) * rank // size
    requests = ordered[first:] + ordered[:first]
    return LoadPlan(requests, sum(request.nbytes for request in requests))


def _locate(want: Want) -> Iterable[_Piece]:
    """The byte ranges that hold a want, in element order."""
    itemsize = ITEMSIZE[want.atom.dtype]
    fragments = want.atom.fragments
    first = bisect_right(fragments, want.start, key=lambda fragment: fragment.start) - 1
    end = want.start + want.numel
    for fragment in fragments[max(first, 0) :]:
        if fragment.start >= end:
            return
        low, high = max(want.start, fragment.start), min(end, fragment.start + fragment.numel)
        if low < high:
            offset = fragment.offset + (low - fragment.start) * itemsize
            nbytes = (high - low) * itemsize
            yield _Piece(fragment.record, offset, nbytes, want.buffer, want.offset + low - want.start, itemsize)


def _find_gaps(touched: Iterable[Atom], records: Sequence[Record], rank: int, size: int) -> list[_Piece]:
    """Bytes of the touched records that no touched atom holds; each record's gaps go to one rank."""
    spans: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for atom in touched:
        itemsize = ITEMSIZE[atom.dtype]
        for fragment in atom.fragments:
            if fragment.record % size == rank:
                spans[fragment.record].append((fragment.offset, fragment.offset + fragment.numel * itemsize))
    gaps = []
    for record, covered in spans.items():
        position = 0
        for low, high in [*sorted(covered), (records[record].nbytes, records[record].nbytes)]:
            if low > position:
                gaps.append(_Piece(record, position, low - position, DISCARD, 0, 1))
            position = max(position, high)
    return gaps


def _split(pieces: Iterable[_Piece], chunk: int) -> Iterable[_Piece]:
    for piece in pieces:
        step = max(chunk // piece.itemsize, 1) * piece.itemsize
        for low in range(0, piece.nbytes, step):
            yield _Piece(
                piece.record,
                piece.offset + low,
                min(step, piece.nbytes - low),
                piece.buffer,
                piece.position + low // piece.itemsize,
                piece.itemsize,
            )


def _coalesce(pieces: Iterable[_Piece], chunk: int) -> Iterable[Request]:
    """Join pieces that follow each other in a record, up to ``chunk`` bytes a request."""
    run: list[_Piece] = []
    nbytes = 0
    for piece in pieces:
        follows = run and piece.record == run[-1].record and piece.offset == run[-1].offset + run[-1].nbytes
        if run and not (follows and nbytes + piece.nbytes <= chunk and len(run) < MAX_PARTS):
            yield _request(run, nbytes)
            run, nbytes = [], 0
        run.append(piece)
        nbytes += piece.nbytes
    if run:
        yield _request(run, nbytes)


def _request(run: list[_Piece], nbytes: int) -> Request:
    parts = tuple(Part(piece.nbytes, piece.buffer, piece.position) for piece in run)
    return Request(run[0].record, run[0].offset, nbytes, parts)
