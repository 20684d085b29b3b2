"""All-gather of flat buffers in place, for the 16-bit copies of the masters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from deepspeed import comm as ds_comm

from ..errors import RemoteError
from ..io.memory import share_memory

_SLICE = 8 << 20
_IN_FLIGHT = 8


def gather_in_place(flat: torch.Tensor, process_group: Any) -> None:
    """Gather a flat buffer of equal partitions from the ranks of ``process_group``, one each; collective.

    gloo's all-gather would copy the whole buffer first. So on the CPU slices are exchanged: through shared memory if
    all ranks are on one machine, else by broadcasts.
    """
    size, rank = dist.get_world_size(process_group), dist.get_rank(process_group)
    if size == 1:
        return
    partitions = flat.view(size, -1)
    if flat.device.type != "cpu":
        ds_comm.all_gather_into_tensor(flat, partitions[rank], group=process_group)  # supports every accelerator
        return
    parts = partitions.view(torch.uint8)

    def gather(value: Any) -> list[Any]:
        values = [None] * size
        dist.all_gather_object(values, value, group=process_group)
        return values

    slice_bytes = min(_SLICE, parts.shape[1])
    try:
        shared = [memory for memory in share_memory(2 * slice_bytes, rank, gather) if memory is not None]
    except RemoteError:  # on every rank
        shared = []
    if len(shared) == size:
        _pass_around(parts.numpy(), rank, shared, lambda: dist.all_reduce(torch.zeros(1), group=process_group))
    else:
        _broadcast_each(parts, process_group)


def _pass_around(
    parts: npt.NDArray[np.uint8], rank: int, shared: Sequence[memoryview], wait_for_all: Callable[[], object]
) -> None:
    """Exchange parts through the two halves of each rank's shared memory.

    Before a rank writes to a half again, the barrier of the other half ensures that all ranks have read the first.
    """
    half = len(shared[0]) // 2
    for turn, low in enumerate(range(0, parts.shape[1], half)):
        place, width = half * (turn % 2), min(half, parts.shape[1] - low)
        windows = [np.frombuffer(memory, np.uint8)[place : place + width] for memory in shared]
        windows[rank][:] = parts[rank, low : low + width]
        wait_for_all()
        for peer, window in enumerate(windows):
            if peer != rank:
                parts[peer, low : low + width] = window


def _broadcast_each(parts: torch.Tensor, process_group: Any) -> None:
    size = dist.get_world_size(process_group)
    owners = [dist.get_global_rank(process_group, r) if process_group is not None else r for r in range(size)]
    pending: list[Any] = []
    for low in range(0, parts.shape[1], _SLICE):
        for part, owner in zip(parts, owners, strict=True):
            pending.append(dist.broadcast(part[low : low + _SLICE], src=owner, group=process_group, async_op=True))
        while len(pending) > _IN_FLIGHT:
            pending.pop(0).wait()
    for work in pending:
        work.wait()
