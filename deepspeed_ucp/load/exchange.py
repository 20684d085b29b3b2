"""Sends what one rank has read to all ranks that need it, within the memory window."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

import torch

from ..comm import Comm, TorchComm
from ..plan.share import Segment
from .sinks import TensorSink

_SMALL = 1 << 20


def exchange(segments: Sequence[Segment], sinks: Sequence[TensorSink], comm: Comm, window: int) -> None:
    """Broadcast every segment from its owner into everyone's buffers; collective.

    Large segments travel in place, ``window`` bytes at a time; small ones of one owner are packed together.
    """
    if not isinstance(comm, TorchComm):
        return
    for owner, run in groupby(segments, key=lambda segment: segment.owner):
        views = [sinks[s.buffer].tensor.narrow(0, s.offset, s.numel) for s in run]
        for batch in _batch(views, min(window, 64 << 20)):
            _broadcast(batch, owner, comm)


def _batch(views: Iterable[torch.Tensor], window: int) -> Iterator[list[torch.Tensor]]:
    """Pieces to send together: one large one, or several small ones of one device."""
    batch: list[torch.Tensor] = []
    size = 0
    for view in views:
        nbytes = view.numel() * view.element_size()
        if nbytes >= _SMALL:
            step = max(window // view.element_size(), 1)
            yield from ([part] for part in view.split(step))
            continue
        if batch and (size + nbytes > window or batch[0].device != view.device):
            yield batch
            batch, size = [], 0
        batch.append(view)
        size += nbytes
    if batch:
        yield batch


def _broadcast(batch: list[torch.Tensor], owner: int, comm: TorchComm) -> None:
    if len(batch) == 1:
        comm.broadcast_tensor(batch[0].view(torch.uint8), owner)
        return
    packed = torch.cat([view.view(torch.uint8) for view in batch])
    comm.broadcast_tensor(packed, owner)
    position = 0
    for view in batch:
        raw = view.view(torch.uint8)
        raw.copy_(packed.narrow(0, position, raw.numel()))
        position += raw.numel()
