"""Copies of bytes from records to memory, as data: every plan, reader and exchange uses these two types."""

from __future__ import annotations

from typing import NamedTuple

STAGE = -1
"""Number of the staging buffer of a rank that reads bytes for others, both as a destination and as a record.

It indexes a list of destinations from its end.
"""


class CopyItem(NamedTuple):
    """Copy ``count`` runs of ``run`` bytes from byte ``offset`` of a record to a destination.

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
    """Read ``count`` runs of ``run`` bytes, whose starts are ``step`` bytes apart, and copy them to ``items`` in order.

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
        """Bytes of all runs."""
        return self.run * self.count

    @property
    def end(self) -> int:
        """End of the last run in the record."""
        return self.offset + (self.count - 1) * self.step + self.run
