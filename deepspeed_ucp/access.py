"""Which ranks can read which files: as data, small at any number of hosts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Files = Sequence[int] | Ints
"""Numbers of files."""


@dataclass(frozen=True, slots=True)
class ReadAccess:
    """Which ranks can read which files: every rank all of them, unless it is a :class:`PartialAccess`."""

    is_partial: ClassVar[bool] = False

    def choose(self, files: Files) -> ReadAccess:
        """The same of some of the files."""
        return self

    def can_read(self, rank: int, files: Files) -> npt.NDArray[np.bool_]:
        """Of each of some files whether a rank can read it."""
        return np.ones(len(files), np.bool_)

    def list_readers(self, file: int, ranks: int) -> Ints:
        """Those of the ranks that can read a file, ascending; at least one."""
        return np.arange(ranks)

    def find_blind(self, file: int) -> npt.NDArray[np.bool_] | None:
        """[ranks] which ranks cannot read a file; None where all can."""
        return None

    def find_reader(self, file: int) -> int:
        """The first rank that can read a file."""
        return int(self.list_readers(file, 1)[0])

    def split(self, files: Ints) -> list[Ints]:
        """The places of those among some files that the same ranks can read."""
        return [np.arange(len(files))] if len(files) else []

    def number(self, files: Ints, counts: Ints) -> Ints:
        """Where each of some files begins that follow those which the same ranks can read; they are so long."""
        first = np.zeros(len(files), np.int64)
        for rows in self.split(files):
            first[rows] = np.cumsum(counts[rows]) - counts[rows]
        return first

    def assign(self, files: Ints, turns: Ints, ranks: int) -> Ints:
        """Of each of some files the rank whose turn it is, of those that can read it."""
        return turns % ranks

    def take_turns(self, files: Files, ranks: int) -> Ints:
        """For each of some files a rank that can read it; those that can read the same take turns."""
        numbers = np.asarray(files, np.int64)
        return self.assign(numbers, self.number(numbers, np.ones_like(numbers)), ranks)

    def find_places(self, rank: int, files: Ints, ranks: int) -> tuple[Ints, Ints, Ints]:
        """Those of some files that a rank can read; its place among the ranks that can, and how many these are."""
        mine = files[self.can_read(rank, files)]
        places, counts = np.zeros(len(mine), np.int64), np.zeros(len(mine), np.int64)
        for rows in self.split(mine):
            readers = self.list_readers(int(mine[rows[0]]), ranks)
            places[rows], counts[rows] = np.searchsorted(readers, rank), len(readers)
        return mine, places, counts


READ_ALL = ReadAccess()


@dataclass(frozen=True, slots=True)
class PartialAccess(ReadAccess):
    """Ranks that see the same are of one view; files that the same views can read are of one group.

    Attributes:
        views: [ranks] each rank's view.
        groups: [files] each file's group.
        seen: [groups, views / 8] bit by bit, whether a view can read the files of a group.
    """

    is_partial: ClassVar[bool] = True

    views: Ints
    groups: Ints
    seen: npt.NDArray[np.uint8]

    @classmethod
    def of(cls, views: Sequence[int], readers: Iterable[Iterable[int]]) -> PartialAccess:
        """From each rank's view, and by file the views that can read it."""
        count, numbers = max(views) + 1, dict[bytes, int]()
        groups = [numbers.setdefault(_pack(each, count), len(numbers)) for each in readers]
        seen = np.frombuffer(b"".join(numbers), np.uint8).reshape(len(numbers), -(-count // 8))
        return cls(np.array(views, np.int64), np.array(groups, np.int64), seen)

    def choose(self, files: Files) -> PartialAccess:
        return replace(self, groups=self.groups[np.asarray(files, np.int64)])

    def can_read(self, rank: int, files: Files) -> npt.NDArray[np.bool_]:
        byte, bit = divmod(int(self.views[rank]), 8)
        groups = self.groups[np.asarray(files, np.int64)]
        bits: npt.NDArray[np.uint8] = self.seen[groups, byte] >> (7 - bit) & 1
        return bits.astype(np.bool_)

    def list_readers(self, file: int, ranks: int) -> Ints:
        return np.flatnonzero(self._who_reads(file))

    def find_blind(self, file: int) -> npt.NDArray[np.bool_]:
        return ~self._who_reads(file)

    def _who_reads(self, file: int) -> npt.NDArray[np.bool_]:
        bits = np.unpackbits(self.seen[self.groups[file]])
        told: npt.NDArray[np.bool_] = np.take(bits, self.views).view(np.bool_)
        return told

    def assign(self, files: Ints, turns: Ints, ranks: int) -> Ints:
        chosen = np.zeros(len(files), np.int64)
        for rows in self.split(files):
            readers = self.list_readers(int(files[rows[0]]), ranks)
            chosen[rows] = readers[turns[rows] % len(readers)]
        return chosen

    def split(self, files: Ints) -> list[Ints]:
        groups = self.groups[files]
        order = np.argsort(groups, kind="stable")
        return np.split(order, np.flatnonzero(np.diff(groups[order])) + 1) if len(groups) else []


def _pack(views: Iterable[int], count: int) -> bytes:
    bits = np.zeros(count, np.bool_)
    bits[list(views)] = True
    return np.packbits(bits).tobytes()
