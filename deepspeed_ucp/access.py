"""Which ranks can read which files, where not every rank can read all: as data, small at any number of hosts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ReadAccess:
    """Ranks that see the same are of one view; files that the same views can read are of one group.

    Attributes:
        views: [ranks] each rank's view.
        groups: [files] each file's group.
        seen: [groups, views / 8] bit by bit, whether a view can read the files of a group.
    """

    views: Ints
    groups: Ints
    seen: npt.NDArray[np.uint8]

    @classmethod
    def of(cls, views: Sequence[int], readers: Iterable[Iterable[int]]) -> ReadAccess:
        """From each rank's view, and by file the views that can read it."""
        count, numbers = max(views) + 1, dict[bytes, int]()
        groups = [numbers.setdefault(_pack(each, count), len(numbers)) for each in readers]
        seen = np.frombuffer(b"".join(numbers), np.uint8).reshape(len(numbers), -(-count // 8))
        return cls(np.array(views, np.int64), np.array(groups, np.int64), seen)

    @classmethod
    def lose(cls, access: ReadAccess | None, lost: Sequence[frozenset[int]], files: int) -> ReadAccess:
        """What is left when ranks can no longer read some files.

        Args:
            access: before; None where every rank could read all.
            lost: by rank the files; of each file some reader is left.
            files: how many there are.
        """
        before = [0] * len(lost) if access is None else access.views.tolist()
        numbers = dict[tuple[int, frozenset[int]], int]()
        views = [numbers.setdefault(each, len(numbers)) for each in zip(before, lost, strict=True)]
        first = [views.index(number) for number in range(len(numbers))]
        could = [np.ones(files, np.bool_) if access is None else access.can_read(rank) for rank in first]
        readers = (
            [number for (_, gone), number in numbers.items() if could[number][file] and file not in gone]
            for file in range(files)
        )
        return cls.of(views, readers)

    def choose(self, files: Sequence[int] | Ints) -> ReadAccess:
        """The same of some of the files."""
        return replace(self, groups=self.groups[np.asarray(files, np.int64)])

    def who_reads(self, group: int) -> npt.NDArray[np.bool_]:
        """[ranks] whether a rank can read the files of a group."""
        told: npt.NDArray[np.bool_] = np.take(np.unpackbits(self.seen[group]), self.views).view(np.bool_)
        return told

    def list_readers(self, group: int) -> Ints:
        """The ranks that can read the files of a group, ascending; at least one."""
        return np.flatnonzero(self.who_reads(group))

    def find_reader(self, file: int) -> int:
        """The first rank that can read a file."""
        return int(self.list_readers(int(self.groups[file]))[0])

    def can_read(self, rank: int) -> npt.NDArray[np.bool_]:
        """[files] whether a rank can read a file."""
        byte, bit = divmod(int(self.views[rank]), 8)
        bits: npt.NDArray[np.uint8] = self.seen[self.groups, byte] >> (7 - bit) & 1
        return bits.astype(np.bool_)

    def take_turns(self, files: Sequence[int] | Ints) -> Ints:
        """For each of some files a rank that can read it; the readers of a group take turns."""
        groups = self.groups[np.asarray(files, np.int64)]
        chosen = np.zeros(len(groups), np.int64)
        for group in np.unique(groups).tolist():
            held, readers = np.flatnonzero(groups == group), self.list_readers(group)
            chosen[held] = readers[np.arange(len(held)) % len(readers)]
        return chosen


def _pack(views: Iterable[int], count: int) -> bytes:
    bits = np.zeros(count, np.bool_)
    bits[list(views)] = True
    return np.packbits(bits).tobytes()
