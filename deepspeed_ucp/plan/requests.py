"""What is read and where it goes: the plan's units, carried out by ``io`` and ``load``."""

from __future__ import annotations

from dataclasses import dataclass

DISCARD = -1
"""Buffer number of bytes that are read for their checksum alone (padding, replicas)."""

MAX_PARTS = 512
"""Parts per request; the kernel takes 1024 buffers in one ``preadv``."""


@dataclass(frozen=True, slots=True)
class Part:
    """``nbytes`` bytes go to ``buffer`` from element ``position`` on.

    With ``run`` they are rows of ``run`` bytes each, and the buffer's rows begin ``stride`` elements apart.
    """

    nbytes: int
    buffer: int
    position: int
    run: int = 0
    stride: int = 0


@dataclass(frozen=True, slots=True)
class Request:
    """One contiguous read: bytes [offset, offset + nbytes) of a record, scattered over parts in order."""

    record: int
    offset: int
    nbytes: int
    parts: tuple[Part, ...]
