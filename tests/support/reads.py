"""Copies and reads of contiguous bytes."""

from __future__ import annotations

from deepspeed_ucp.model.records import CopyItem, Read


def item(record: int, offset: int, nbytes: int, destination: int, position: int) -> CopyItem:
    return CopyItem(record, offset, nbytes, nbytes, 1, destination, position)


def read_of(*items: CopyItem) -> Read:
    """Read items that follow each other."""
    return Read.of(items[0].record, items[0].offset, items[-1].end, *items)
