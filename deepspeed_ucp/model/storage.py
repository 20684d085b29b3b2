"""Locations of atoms: files, records, fragments, and the storages that hold states of parameters."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from operator import attrgetter
from typing import NamedTuple, overload

from .flat import Cut, FlatBuffer
from .keys import ITEMSIZE, count

_START = attrgetter("start")


@dataclass(frozen=True, slots=True)
class FileRef:
    """A checkpoint file.

    Attributes:
        path: its path on this rank, or its expected path if only other ranks see the file.
        size: in bytes.
        header_crc: CRC32 of its directory, if it has one.
        places: paths of copies with this name and size that this rank sees, in reading order; empty for ``path`` alone.
    """

    path: str
    size: int
    header_crc: int | None = None
    places: tuple[str, ...] = ()

    @property
    def copies(self) -> tuple[str, ...]:
        """Its paths in reading order; at least one."""
        return self.places or (self.path,)


@dataclass(frozen=True, slots=True)
class Record:
    """A storage inside a file: ``nbytes`` bytes at byte ``offset``, with the CRC32 that the writer recorded or None."""

    file: int
    offset: int
    nbytes: int
    crc: int | None


class Records(Sequence[Record]):
    """Numbered records as columns of 64-bit integers, as there may be a million; a missing CRC32 is -1."""

    __slots__ = ("crcs", "files", "nbytes", "offsets")

    def __init__(self) -> None:
        self.files, self.offsets, self.nbytes, self.crcs = array("q"), array("q"), array("q"), array("q")

    @classmethod
    def of(cls, records: Sequence[Record]) -> Records:
        """Return records as columns; columns are returned unchanged."""
        if isinstance(records, cls):
            return records
        columns = cls()
        for record in records:
            columns.append(record)
        return columns

    def append(self, record: Record) -> None:
        """Add one record."""
        self.files.append(record.file)
        self.offsets.append(record.offset)
        self.nbytes.append(record.nbytes)
        self.crcs.append(-1 if record.crc is None else record.crc)

    def extend(self, files: Iterable[int], offsets: Iterable[int], nbytes: Iterable[int], crcs: Iterable[int]) -> None:
        """Add records from columns of equal length."""
        self.files.extend(files)
        self.offsets.extend(offsets)
        self.nbytes.extend(nbytes)
        self.crcs.extend(crcs)

    def __len__(self) -> int:
        return len(self.files)

    @overload
    def __getitem__(self, at: int) -> Record: ...
    @overload
    def __getitem__(self, at: slice) -> list[Record]: ...
    def __getitem__(self, at: int | slice) -> Record | list[Record]:
        if isinstance(at, slice):
            return [self[number] for number in range(len(self))[at]]
        crc = self.crcs[at]
        return Record(self.files[at], self.offsets[at], self.nbytes[at], None if crc < 0 else crc)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True, slots=True)
class Fragment:
    """Elements [start, start + numel) of a flattened shard, at byte ``offset`` of record ``record``."""

    start: int
    numel: int
    record: int
    offset: int


@dataclass(frozen=True, slots=True)
class Fragments:
    """One state of one parameter, as fragments in element order."""

    dtype: str
    fragments: list[Fragment]

    def covers(self, shape: tuple[int, ...]) -> bool:
        """Return True for a single fragment of all elements of a shape, or no fragment of an empty one."""
        numel, parts = count(shape), self.fragments
        return (len(parts) == 1 and (parts[0].start, parts[0].numel) == (0, numel)) or not (parts or numel)

    def find(self, place: int, low: int, high: int) -> list[Fragment]:
        """Return the fragments that hold some of the elements [low, high)."""
        first = max(bisect_right(self.fragments, low, key=_START) - 1, 0)
        return self.fragments[first : bisect_right(self.fragments, high - 1, key=_START)]

    def list_records(self) -> Iterable[tuple[int, int]]:
        """Yield (part, record) of all parts."""
        return enumerate(fragment.record for fragment in self.fragments)

    def list_part(self, part: int) -> Iterable[tuple[int, Fragment]]:
        """Yield (place of the parameter, fragment) of the fragments in a part."""
        return [(0, self.fragments[part])]


@dataclass(frozen=True)
class PartitionedState:
    """One state of all parameters of a flat buffer, with one record per partition.

    Experts' tensors of equal size in a record each are stored likewise, as a buffer with one partition per expert.

    Attributes:
        buffer: its parameters under the whole model's names.
        dtype: as stored.
        records: record of each partition; -1 if no file has it.
        offsets: byte in the record at which each partition begins.
    """

    buffer: FlatBuffer
    dtype: str
    records: Sequence[int]
    offsets: Sequence[int]

    @cached_property
    def _is_whole(self) -> bool:
        return self.buffer.is_whole and len(self.records) == self.buffer.parts and min(self.records) >= 0

    def covers(self, shape: tuple[int, ...]) -> bool:
        """Return True if all partitions exist and hold every element of each parameter once."""
        return self._is_whole

    def find(self, place: int, low: int, high: int) -> Iterator[Fragment]:
        """Yield the fragments of exactly the elements [low, high) of the parameter at a place."""
        for part, cut in self.buffer.find_holders(place, low, high):
            if part < len(self.records) and self.records[part] >= 0:
                yield self._locate(part, cut)

    def list_records(self) -> Iterable[tuple[int, int]]:
        """Yield (part, record) of all parts."""
        return ((part, record) for part, record in enumerate(self.records) if record >= 0)

    @cached_property
    def _places(self) -> dict[str, int]:
        return {name: place for place, name in enumerate(self.buffer.names)}

    def list_part(self, part: int) -> Iterable[tuple[int, Fragment]]:
        """Yield (place of the parameter, fragment) of the fragments in a part."""
        return ((self._places[cut.name], self._locate(part, cut)) for cut in self.buffer.cuts(part))

    def _locate(self, part: int, cut: Cut) -> Fragment:
        offset = self.offsets[part] + cut.offset * ITEMSIZE[self.dtype]
        return Fragment(cut.start, cut.numel, self.records[part], offset)


class Tile(NamedTuple):
    """A block of a tensor, stored row-major and without gaps at byte ``offset`` of record ``record``.

    Attributes:
        begins, shape: its first index and its size along each dimension of the tensor, in elements.
    """

    begins: tuple[int, ...]
    shape: tuple[int, ...]
    record: int
    offset: int

    def measure(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Return the half-open range that it spans in a flattened tensor of a shape."""
        first = last = 0
        for size, begin, width in zip(shape, self.begins, self.shape, strict=True):
            first, last = first * size + begin, last * size + begin + width - 1
        return first, last + 1

    def count_runs(self, shape: tuple[int, ...]) -> int:
        """Return the number of runs that :meth:`list_runs` yields."""
        return count(self.shape[: self._find_inner(shape)])

    def list_runs(self, shape: tuple[int, ...], itemsize: int) -> Iterator[Fragment]:
        """Yield its contiguous runs of a flattened tensor of a shape, in the record's order."""
        inner, offset = self._find_inner(shape), self.offset
        strides = [count(shape[dim + 1 :]) for dim in range(inner)]
        first, numel = self.measure(shape)[0], count(self.shape[inner:])
        for place in product(*map(range, self.shape[:inner])):
            start = first + sum(at * stride for at, stride in zip(place, strides, strict=True))
            yield Fragment(start, numel, self.record, offset)
            offset += numel * itemsize

    def _find_inner(self, shape: tuple[int, ...]) -> int:
        """Return the first dimension of a run: the trailing dimensions that it holds whole, and the one before."""
        inner = len(shape)
        while inner > 0 and self.shape[inner - 1] == shape[inner - 1]:
            inner -= 1
        return max(inner - 1, 0)


@dataclass(frozen=True, slots=True)
class Tiles:
    """One state of one parameter as a grid of tiles: a tensor cut along other dimensions than the first.

    Attributes:
        dtype: as stored.
        shape: of the tensor.
        tiles: non-empty tiles in ascending order of their first elements.
    """

    dtype: str
    shape: tuple[int, ...]
    tiles: tuple[Tile, ...]

    def covers(self, shape: tuple[int, ...]) -> bool:
        """Return True if it holds a tensor of this shape."""
        return shape == self.shape

    def meet(self, low: int, high: int) -> Iterator[Tile]:
        """Yield the tiles that may hold some of the elements [low, high)."""
        for tile in self.tiles:
            first, last = tile.measure(self.shape)
            if first < high and low < last:
                yield tile

    def find(self, place: int, low: int, high: int) -> Iterator[Fragment]:
        """Yield the runs that hold elements [low, high), in element order."""
        runs = (run for tile in self.meet(low, high) for run in tile.list_runs(self.shape, ITEMSIZE[self.dtype]))
        yield from sorted((run for run in runs if run.start < high and low < run.start + run.numel), key=_START)

    def cut(self, low: int, high: int, shape: tuple[int, ...]) -> Tiles | None:
        """Return elements [low, high) as a tensor of a shape; None if they are not whole rows of it."""
        row, itemsize = count(self.shape[1:]), ITEMSIZE[self.dtype]
        if not row or low % row or high % row:
            return None
        low, high = low // row, high // row
        dropped = 1 if (high - low, shape) == (1, self.shape[1:]) else 0  # one expert of many has no first dimension
        if not dropped and shape != (high - low, *self.shape[1:]):
            return None
        tiles = []
        for (begin, *begins), (rows, *sizes), record, offset in self.tiles:
            first, last = max(begin, low), min(begin + rows, high)
            if first < last:
                place, block = (first - low, *begins)[dropped:], (last - first, *sizes)[dropped:]
                tiles.append(Tile(place, block, record, offset + (first - begin) * count(tuple(sizes)) * itemsize))
        return Tiles(self.dtype, shape, tuple(tiles))

    def list_records(self) -> Iterable[tuple[int, int]]:
        """Yield (part, record) of all parts."""
        return enumerate(tile.record for tile in self.tiles)

    def list_part(self, part: int) -> Iterable[tuple[int, Fragment]]:
        """Yield (place of the parameter, fragment) of the fragments in a part."""
        return ((0, run) for run in self.tiles[part].list_runs(self.shape, ITEMSIZE[self.dtype]))

    def list_pieces(self) -> tuple[Fragment, ...]:
        """Return each tile as one fragment that starts at its first element."""
        return tuple(
            Fragment(tile.measure(self.shape)[0], count(tile.shape), tile.record, tile.offset) for tile in self.tiles
        )


Storage = PartitionedState | Fragments | Tiles
"""The storage of one state."""


@dataclass(frozen=True, slots=True)
class Shard:
    """A tensor-parallel rank's part of an atom.

    Attributes:
        shape: local.
        storage: its fragments, or the flat buffer or tiles that compute them on demand.
        place: of the parameter in the flat buffer.
    """

    shape: tuple[int, ...]
    storage: Storage
    place: int = 0

    @classmethod
    def of(cls, shape: tuple[int, ...], dtype: str, fragments: Iterable[Fragment]) -> Shard:
        """Make a shard of fragments."""
        return cls(shape, Fragments(dtype, list(fragments)))

    @property
    def numel(self) -> int:
        """Elements of the shard."""
        return count(self.shape)

    @property
    def fragments(self) -> tuple[Fragment, ...]:
        """All fragments, in element order; those of a faulty file may overlap."""
        return tuple(self.storage.fragments if isinstance(self.storage, Fragments) else self.find(0, self.numel))

    @property
    def pieces(self) -> tuple[Fragment, ...]:
        """Its contiguous pieces of records: fragments, or each tile as one."""
        return self.storage.list_pieces() if isinstance(self.storage, Tiles) else self.fragments

    def find(self, low: int, high: int) -> Iterable[Fragment]:
        """Return the fragments that hold elements [low, high)."""
        return self.storage.find(self.place, low, high)


class ParamStorage(NamedTuple):
    """Storages of the states of a parameter in one tensor-parallel shard.

    Attributes:
        shape: local.
        place: of the parameter in its flat buffer, or 0.
        states: state name → storage.
    """

    tp_shard: int
    shape: tuple[int, ...]
    place: int
    states: Mapping[str, Storage]

    def shard(self, state: str) -> Shard:
        """Return the shard of one state's atom."""
        return Shard(self.shape, self.states[state], self.place)
