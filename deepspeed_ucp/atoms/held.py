"""Where atoms lie: files, records, fragments, and what holds the states of one or of many parameters."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, overload

from ..flat import FlatBuffer
from .keys import ITEMSIZE, count


@dataclass(frozen=True, slots=True)
class FileRef:
    """A checkpoint file.

    Attributes:
        path: where this rank finds it; where it would lie, of a file that only other ranks see.
        size: in bytes.
        header_crc: CRC32 of its directory, if it has one.
        places: paths where this rank finds files of that name and size, the one that is read first in front; empty
            where ``path`` is all.
    """

    path: str
    size: int
    header_crc: int | None = None
    places: tuple[str, ...] = ()

    @property
    def copies(self) -> tuple[str, ...]:
        """Its paths, the one that is read first in front; at least one."""
        return self.places or (self.path,)


@dataclass(frozen=True, slots=True)
class Record:
    """A storage inside a file: ``nbytes`` bytes at byte ``offset``; ``crc`` as training wrote it, or None."""

    file: int
    offset: int
    nbytes: int
    crc: int | None


class Records(Sequence[Record]):
    """Records by number, as columns: there may be a million.

    Attributes:
        files, offsets, nbytes: of each record; 64-bit integers.
        crcs: -1 where there is none.
    """

    __slots__ = ("crcs", "files", "nbytes", "offsets")

    def __init__(self) -> None:
        self.files, self.offsets, self.nbytes, self.crcs = array("q"), array("q"), array("q"), array("q")

    @classmethod
    def of(cls, records: Sequence[Record]) -> Records:
        """Some records as columns; themselves if they are."""
        if isinstance(records, cls):
            return records
        made = cls()
        for record in records:
            made.append(record)
        return made

    def append(self, record: Record) -> None:
        """Add one."""
        self.files.append(record.file)
        self.offsets.append(record.offset)
        self.nbytes.append(record.nbytes)
        self.crcs.append(-1 if record.crc is None else record.crc)

    def extend(self, files: Iterable[int], offsets: Iterable[int], nbytes: Iterable[int], crcs: Iterable[int]) -> None:
        """Add several, as many of each."""
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
class Loose:
    """One state of one parameter, as fragments in element order."""

    dtype: str
    fragments: list[Fragment]

    def covers(self, shape: tuple[int, ...]) -> bool:
        """Whether it is one fragment, of all elements of a shape; of an empty one, none."""
        numel, parts = count(shape), self.fragments
        return (len(parts) == 1 and (parts[0].start, parts[0].numel) == (0, numel)) or not (parts or numel)

    def hold(self, place: int) -> tuple[Fragment, ...]:
        """The fragments of its parameter at a place."""
        return tuple(self.fragments)

    def list_records(self) -> Iterable[tuple[int, int]]:
        """Its parts, and the record that each lies in."""
        return enumerate(fragment.record for fragment in self.fragments)

    def list_part(self, part: int) -> Iterable[tuple[int, Fragment]]:
        """What is in a part: places of parameters, and the fragment of each."""
        return [(0, self.fragments[part])]


@dataclass(frozen=True)
class Spread:
    """One state of all parameters of a flat buffer, as files hold it: a record for each partition.

    Attributes:
        buffer: its parameters under the whole model's names.
        dtype: as stored.
        records: by partition its record; -1 where no file has it.
        offsets: by partition the byte of the record at which it begins.
    """

    buffer: FlatBuffer
    dtype: str
    records: Sequence[int]
    offsets: Sequence[int]

    @cached_property
    def _is_whole(self) -> bool:
        return self.buffer.is_whole and len(self.records) == self.buffer.parts and min(self.records) >= 0

    def covers(self, shape: tuple[int, ...]) -> bool:
        """Whether all partitions are there, and in them every element of each parameter once."""
        return self._is_whole

    def hold(self, place: int) -> Strip:
        """The fragments of its parameter at a place."""
        return Strip(self, place)

    def list_records(self) -> Iterable[tuple[int, int]]:
        """Its parts, and the record that each lies in."""
        return ((part, record) for part, record in enumerate(self.records) if record >= 0)

    @cached_property
    def _places(self) -> dict[str, int]:
        return {name: place for place, name in enumerate(self.buffer.names)}

    def list_part(self, part: int) -> Iterable[tuple[int, Fragment]]:
        """What is in a part: places of parameters, and the fragment of each."""
        record, begin, itemsize = self.records[part], self.offsets[part], ITEMSIZE[self.dtype]
        for cut in self.buffer.cuts(part):
            yield self._places[cut.name], Fragment(cut.start, cut.numel, record, begin + cut.offset * itemsize)


@dataclass(frozen=True, slots=True)
class Row:
    """One state of parameters of one size, each whole in a record of its own.

    Attributes:
        dtype: as stored.
        numel: of each of them, at least 1.
        first: record of the first one; those of the others follow it.
        offsets: by parameter the byte of the record at which it begins.
    """

    dtype: str
    numel: int
    first: int
    offsets: Sequence[int]

    def covers(self, shape: tuple[int, ...]) -> bool:
        """Whether it is all elements of a shape."""
        return count(shape) == self.numel

    def hold(self, place: int) -> tuple[Fragment, ...]:
        """The fragments of its parameter at a place."""
        return (Fragment(0, self.numel, self.first + place, self.offsets[place]),)

    def list_records(self) -> Iterable[tuple[int, int]]:
        """Its parts, and the record that each lies in."""
        return enumerate(range(self.first, self.first + len(self.offsets)))

    def list_part(self, part: int) -> Iterable[tuple[int, Fragment]]:
        """What is in a part: places of parameters, and the fragment of each."""
        return [(part, self.hold(part)[0])]


class Strip(NamedTuple):
    """The fragments of one parameter of a flat buffer, which are made when they are asked for."""

    spread: Spread
    place: int

    def find(self, low: int, high: int) -> Iterator[Fragment]:
        """Those of elements [low, high), and no further elements."""
        spread, itemsize = self.spread, ITEMSIZE[self.spread.dtype]
        for part, cut in spread.buffer.find_holders(self.place, low, high):
            if part < len(spread.records) and (record := spread.records[part]) >= 0:
                yield Fragment(cut.start, cut.numel, record, spread.offsets[part] + cut.offset * itemsize)


@dataclass(frozen=True, slots=True)
class Shard:
    """What one tensor-parallel rank holds of an atom: its local shape, and fragments in element order."""

    shape: tuple[int, ...]
    held: tuple[Fragment, ...] | Strip

    @property
    def numel(self) -> int:
        """Elements of the shard."""
        return count(self.shape)

    @property
    def fragments(self) -> tuple[Fragment, ...]:
        """All of them."""
        return tuple(self.held.find(0, self.numel)) if isinstance(self.held, Strip) else self.held

    def find(self, low: int, high: int) -> Iterable[Fragment]:
        """The fragments that hold elements [low, high)."""
        if isinstance(self.held, Strip):
            return self.held.find(low, high)
        first = max(bisect_right(self.held, low, key=lambda fragment: fragment.start) - 1, 0)
        last = bisect_right(self.held, high - 1, key=lambda fragment: fragment.start)
        return self.held[first:last]


class Holding(NamedTuple):
    """What files hold of a parameter in one tensor-parallel shard.

    Attributes:
        shape: local.
        place: of the parameter in what lies there with it.
        states: by name what lies there.
    """

    tp_shard: int
    shape: tuple[int, ...]
    place: int
    states: Mapping[str, Spread | Row | Loose]

    def shard(self, state: str) -> Shard:
        """What it is of an atom."""
        return Shard(self.shape, self.states[state].hold(self.place))
