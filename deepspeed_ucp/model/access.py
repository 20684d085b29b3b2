"""Read access of ranks to files, in a form that is small for any number of hosts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Files = Sequence[int] | Ints
"""File numbers."""


@dataclass(frozen=True, slots=True)
class ReadAccess:
    """Full access: every rank can read all files; else it is a :class:`PartialAccess`."""

    is_partial: ClassVar[bool] = False

    def select_files(self, files: Files) -> ReadAccess:
        """Return the access to these files, numbered in this order."""
        return self

    def can_read(self, rank: int, files: Files) -> npt.NDArray[np.bool_]:
        return np.ones(len(files), np.bool_)

    def list_readers(self, file: int, ranks: int) -> Ints:
        """List the ranks that can read a file, ascending; at least one."""
        return np.arange(ranks)

    def find_excluded(self, file: int) -> npt.NDArray[np.bool_] | None:
        """Return for each rank whether it cannot read a file; None if all can."""
        return None

    def find_reader(self, file: int) -> int:
        return int(self.list_readers(file, 1)[0])

    def group_files(self, files: Ints) -> list[Ints]:
        """Group files with equal readers; return indices into ``files`` per group."""
        return [np.arange(len(files))] if len(files) else []

    def sum_earlier(self, files: Ints, counts: Ints) -> Ints:
        """Return per file the sum of ``counts`` of files before it with equal readers."""
        first = np.zeros(len(files), np.int64)
        for rows in self.group_files(files):
            first[rows] = np.cumsum(counts[rows]) - counts[rows]
        return first

    def assign(self, files: Ints, turns: Ints, ranks: int) -> Ints:
        """Assign each file to one of its readers, round robin by ``turns``."""
        return turns % ranks

    def take_turns(self, files: Files, ranks: int) -> Ints:
        """Assign files to ranks that can read them, round robin among equal readers."""
        numbers = np.asarray(files, np.int64)
        return self.assign(numbers, self.sum_earlier(numbers, np.ones_like(numbers)), ranks)

    def find_indices(self, rank: int, files: Ints, ranks: int) -> tuple[Ints, Ints, Ints]:
        """Return a rank's files, its index among each one's readers, and their number."""
        mine = files[self.can_read(rank, files)]
        indices, counts = np.zeros(len(mine), np.int64), np.zeros(len(mine), np.int64)
        for rows in self.group_files(mine):
            readers = self.list_readers(int(mine[rows[0]]), ranks)
            indices[rows], counts[rows] = np.searchsorted(readers, rank), len(readers)
        return mine, indices, counts


READ_ALL = ReadAccess()


@dataclass(frozen=True, slots=True)
class PartialAccess(ReadAccess):
    """Access if some rank cannot read some file.

    Ranks with equal access form a view; files with equal readers form a group.

    Attributes:
        views: [ranks] view of each rank.
        groups: [files] group of each file.
        seen: [groups, views / 8] bit mask of the views that can read a group.
    """

    is_partial: ClassVar[bool] = True

    views: Ints
    groups: Ints
    seen: npt.NDArray[np.uint8]

    @classmethod
    def of(cls, views: Sequence[int], readers: Iterable[Iterable[int]]) -> PartialAccess:
        """Build from each rank's view, and for each file the views that can read it."""
        count, numbers = max(views) + 1, dict[bytes, int]()
        groups = [numbers.setdefault(_pack_bits(file_readers, count), len(numbers)) for file_readers in readers]
        seen = np.frombuffer(b"".join(numbers), np.uint8).reshape(len(numbers), -(-count // 8))
        return cls(np.array(views, np.int64), np.array(groups, np.int64), seen)

    def select_files(self, files: Files) -> PartialAccess:
        return replace(self, groups=self.groups[np.asarray(files, np.int64)])

    def can_read(self, rank: int, files: Files) -> npt.NDArray[np.bool_]:
        byte, bit = divmod(int(self.views[rank]), 8)
        groups = self.groups[np.asarray(files, np.int64)]
        bits: npt.NDArray[np.uint8] = self.seen[groups, byte] >> (7 - bit) & 1
        return bits.astype(np.bool_)

    def list_readers(self, file: int, ranks: int) -> Ints:
        return np.flatnonzero(~self.find_excluded(file))

    def find_excluded(self, file: int) -> npt.NDArray[np.bool_]:
        bits = np.unpackbits(self.seen[self.groups[file]])
        readers: npt.NDArray[np.bool_] = np.take(bits, self.views).view(np.bool_)
        return ~readers

    def assign(self, files: Ints, turns: Ints, ranks: int) -> Ints:
        chosen = np.zeros(len(files), np.int64)
        for rows in self.group_files(files):
            readers = self.list_readers(int(files[rows[0]]), ranks)
            chosen[rows] = readers[turns[rows] % len(readers)]
        return chosen

    def group_files(self, files: Ints) -> list[Ints]:
        groups = self.groups[files]
        order = np.argsort(groups, kind="stable")
        return np.split(order, np.flatnonzero(np.diff(groups[order])) + 1) if len(groups) else []


def _pack_bits(views: Iterable[int], count: int) -> bytes:
    bits = np.zeros(count, np.bool_)
    bits[list(views)] = True
    return np.packbits(bits).tobytes()
