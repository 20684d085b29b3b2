"""Who reads what several ranks need: one owner per range, balanced by bytes, the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..atoms import ITEMSIZE
from .load import Want


@dataclass(frozen=True, slots=True)
class Segment:
    """Elements [offset, offset + numel) of ``buffer`` are read by ``owner`` and sent to everyone."""

    owner: int
    buffer: int
    offset: int
    numel: int


def share_wants(wants: Sequence[Want], size: int) -> tuple[list[list[Want]], list[Segment]]:
    """Cut wants that all ranks have in common into ``size`` shares of equal bytes.

    The wants are laid end to end in the given order and cut at multiples of a size-th of their bytes, rounded down to
    whole elements; ties go to the lower rank. Every rank computes the same cut.

    Returns:
        Per rank its wants, and all segments in order (neighbours of one owner in one buffer joined).
    """
    total = sum(want.numel * ITEMSIZE[want.atom.dtype] for want in wants)
    shares: list[list[Want]] = [[] for _ in range(size)]
    segments: list[Segment] = []
    position, owner = 0, 0
    for want in wants:
        itemsize = ITEMSIZE[want.atom.dtype]
        start = 0
        while start < want.numel:
            limit = total * (owner + 1) // size
            room = (limit - position) // itemsize
            if room <= 0 and owner < size - 1:
                owner += 1
                continue
            numel = want.numel - start if owner == size - 1 else min(room, want.numel - start)
            part = replace(want, start=want.start + start, numel=numel, offset=want.offset + start)
            shares[owner].append(part)
            _append(segments, Segment(owner, part.buffer, part.offset, numel))
            start += numel
            position += numel * itemsize
    return shares, segments


def _append(segments: list[Segment], new: Segment) -> None:
    last = segments[-1] if segments else None
    if last and (last.owner, last.buffer, last.offset + last.numel) == (new.owner, new.buffer, new.offset):
        segments[-1] = replace(last, numel=last.numel + new.numel)
    else:
        segments.append(new)
