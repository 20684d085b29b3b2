"""Files, their records, and copies of bytes from records to memory, as data."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

STAGING = -1
"""Number of the staging buffer of a rank that reads bytes for others, both as a destination and as a record.

It indexes a list of destinations from its end.
"""


@dataclass(frozen=True, slots=True)
class FileRef:
    """A checkpoint file.

    Attributes:
        path: its path on this rank, or its expected path if only other ranks see the file.
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


class Record(NamedTuple):
    """A storage in a file: its offset and bytes, and the writer's CRC32 or None."""

    offset: int
    nbytes: int
    crc: int | None


_column = partial(array, "q")


@dataclass(slots=True)
class Records:
    """Numbered records, and their files, as columns of 64-bit integers.

    There may be a million. A missing CRC32 is -1.
    """

    files: array[int] = field(default_factory=_column)
    offsets: array[int] = field(default_factory=_column)
    nbytes: array[int] = field(default_factory=_column)
    crcs: array[int] = field(default_factory=_column)

    @classmethod
    def of(cls, rows: Iterable[tuple[int, int, int, int | None]]) -> Records:
        """Make the columns from rows (file, offset, nbytes, crc)."""
        columns = cls()
        for file, offset, nbytes, crc in rows:
            columns.append(file, Record(offset, nbytes, crc))
        return columns

    def append(self, file: int, record: Record) -> None:
        self.files.append(file)
        self.offsets.append(record.offset)
        self.nbytes.append(record.nbytes)
        self.crcs.append(-1 if record.crc is None else record.crc)

    def extend(self, files: Iterable[int], offsets: Iterable[int], nbytes: Iterable[int], crcs: Iterable[int]) -> None:
        self.files.extend(files)
        self.offsets.extend(offsets)
        self.nbytes.extend(nbytes)
        self.crcs.extend(crcs)

    def __len__(self) -> int:
        return len(self.files)

    def __iter__(self) -> Iterator[Record]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, number: int) -> Record:
        crc = self.crcs[number]
        return Record(self.offsets[number], self.nbytes[number], None if crc < 0 else crc)


class CopyItem(NamedTuple):
    """Copy ``count`` runs of ``run`` bytes from byte ``offset`` of a record.

    Attributes:
        record: number of the record in the index.
        step: bytes between the starts of two runs in the record.
        destination: index in the list of destination buffers.
        position: element of the destination that receives the first byte.
        stride: elements between the starts of two runs in the destination; 0 if the runs follow each other there.
    """

    record: int
    offset: int
    run: int
    step: int
    count: int  # type: ignore[assignment]  # hides a method of tuples
    destination: int
    position: int
    stride: int = 0

    @property
    def nbytes(self) -> int:
        return self.run * self.count

    @property
    def end(self) -> int:
        return self.offset + (self.count - 1) * self.step + self.run

    @property
    def is_contiguous(self) -> bool:
        return self.count == 1 or self.step == self.run


class Read(NamedTuple):
    """Read runs of ``run`` bytes and copy them to ``items`` in order.

    The ``count`` runs start ``step`` bytes apart.

    A read from a file has one run. A read with several runs receives them from another rank, which reads the range.
    Bytes after the last item are read only to compute a checksum.
    """

    record: int
    offset: int
    run: int
    step: int
    count: int  # type: ignore[assignment]  # hides a method of tuples
    items: tuple[CopyItem, ...] = ()

    @classmethod
    def of(cls, record: int, low: int, high: int, *items: CopyItem) -> Read:
        """Make a read of bytes [low, high) of a record."""
        return cls(record, low, high - low, high - low, 1, items)

    @property
    def nbytes(self) -> int:
        return self.run * self.count

    @property
    def end(self) -> int:
        return self.offset + (self.count - 1) * self.step + self.run
