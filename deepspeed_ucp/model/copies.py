"""Copies of bytes from records to memory, as data: every plan, reader and exchange uses these two types."""

from __future__ import annotations

from typing import NamedTuple

STAGE = -1
"""Number of an owner's staging memory: as a destination, and as the record of the bytes that it sends.

It indexes a list of destinations from its end.
"""


class CopyItem(NamedTuple):
    """Copy ``count`` runs of ``run`` bytes, ``step`` bytes apart, from byte ``offset`` of a record to a destination.

    Attributes:
        record: number in the index.
        destination: number of the memory.
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
        """Bytes of all runs."""
        return self.run * self.count

    @property
    def end(self) -> int:
        """End of the last run in the record."""
        return self.offset + (self.count - 1) * self.step + self.run

    @property
    def is_contiguous(self) -> bool:
        """Whether the runs follow each other in the record."""
        return self.count == 1 or self.step == self.run


class Read(NamedTuple):
    """Read ``count`` runs of ``run`` bytes, ``step`` bytes apart, and scatter them over ``items`` in order.

    Only single runs are read from files. Several runs are received from the rank that reads the bytes between them too.
    Bytes behind those of the items are read for a checksum alone.
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
        """Bytes of all runs."""
        return self.run * self.count

    @property
    def end(self) -> int:
        """End of the last run in the record."""
        return self.offset + (self.count - 1) * self.step + self.run
