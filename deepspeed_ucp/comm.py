"""What ranks tell each other: one rank alone, or the ranks of ``torch.distributed``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from .errors import RemoteError, UcpError

NumpyArray = npt.NDArray[Any]


class Comm:
    """Ranks that load together; this base is the one-rank case."""

    rank = 0
    size = 1

    def gather(self, value: Any) -> list[Any]:
        """Every rank's ``value`` (picklable), in rank order, on every rank."""
        return [value]

    def broadcast(self, value: Any, src: int = 0) -> Any:
        """The ``value`` of rank ``src``, on every rank."""
        return value

    def swap(self, data: torch.Tensor, sends: list[int], receives: list[int]) -> torch.Tensor:
        """Send ``sends[r]`` bytes of ``data`` (1-D, uint8, CPU) to rank r, in rank order; what the ranks sent here."""
        return data

    def swap_tables(self, tables: list[NumpyArray]) -> list[NumpyArray]:
        """Send ``tables[r]`` to rank r; what the ranks sent here. Dtype and further dimensions are the same for all."""
        shape, dtype = tables[0].shape[1:], tables[0].dtype
        width = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        sends = [len(table) * width for table in tables]
        told = self.swap(torch.tensor(sends).view(torch.uint8), [8] * self.size, [8] * self.size)
        receives = told.view(torch.int64).tolist()
        packed = np.concatenate([np.ascontiguousarray(table).reshape(-1).view(np.uint8) for table in tables])
        received = self.swap(torch.from_numpy(packed), sends, receives)
        return [part.numpy().view(dtype).reshape(-1, *shape) for part in received.split(receives)]

    def any_of(self, mask: NumpyArray) -> NumpyArray:
        """Element by element, whether some rank's ``mask`` is true."""
        return mask

    @contextmanager
    def together(self) -> Iterator[None]:
        """Run a block that has no collectives; if it fails on any rank, every rank raises that rank's error.

        Raises:
            UcpError: the first failing rank's error, the same on all ranks.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as caught:  # noqa: BLE001 - re-raised on every rank below
            error = caught
        self.agree(error)

    def agree(self, error: Exception | None) -> None:
        """Raise the first rank's error on every rank; return when no rank has one."""
        reports = self.gather(_describe(error))
        failed = next((rank for rank, report in enumerate(reports) if report is not None), None)
        if failed is None:
            return
        kind, text = reports[failed]
        prefix = f"[rank {failed}] " if self.size > 1 else ""
        raise kind(f"{prefix}{text}") from error


def _describe(error: Exception | None) -> tuple[type[UcpError], str] | None:
    if error is None:
        return None
    if isinstance(error, UcpError):
        return type(error), str(error)
    return RemoteError, f"{type(error).__name__}: {error}"


class TorchComm(Comm):
    """The ranks of the default process group, over whatever backend the launch uses."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self.device = _find_device(str(dist.get_backend()))

    def gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def broadcast(self, value: Any, src: int = 0) -> Any:
        values = [value]
        dist.broadcast_object_list(values, src=src)
        return values[0]

    def swap(self, data: torch.Tensor, sends: list[int], receives: list[int]) -> torch.Tensor:
        received = torch.empty(sum(receives), dtype=torch.uint8, device=self.device)
        dist.all_to_all_single(received, data.to(self.device), receives, sends)
        return received.cpu()

    def any_of(self, mask: NumpyArray) -> NumpyArray:
        flags = torch.from_numpy(mask.astype(np.uint8)).to(self.device)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        return flags.cpu().numpy().astype(np.bool_)


def _find_device(backend: str) -> torch.device:
    """Where tensors have to be for a backend's collectives (``nccl``, ``gloo``, ``cpu:gloo,cuda:nccl``, …)."""
    if {"gloo", "mpi", "ccl"} & set(re.split("[:,]", backend)):
        return torch.device("cpu")
    accelerator = getattr(torch, "accelerator", None)  # torch 2.6
    kind = accelerator.current_accelerator() if accelerator else None
    index = accelerator.current_device_index() if accelerator else torch.cuda.current_device()
    return torch.device(kind.type if kind else "cuda", index)


_SLICE = 8 << 20
_IN_FLIGHT = 8


def gather_in_place(flat: torch.Tensor, process_group: Any) -> None:
    """Complete a flat buffer of equal partitions, of which each rank of ``process_group`` has its own; collective.

    On the CPU by broadcasts of slices: gloo's all-gather copies the whole buffer aside first.
    """
    size, rank = dist.get_world_size(process_group), dist.get_rank(process_group)
    if size == 1:
        return
    partitions = flat.view(size, -1)
    if flat.device.type != "cpu":
        gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # renamed in torch 2.13
        gather(flat, partitions[rank], group=process_group)
        return
    owners = [dist.get_global_rank(process_group, r) if process_group is not None else r for r in range(size)]
    parts = partitions.view(torch.uint8)
    pending: list[Any] = []
    for low in range(0, parts.shape[1], _SLICE):
        for part, owner in zip(parts, owners, strict=True):
            pending.append(dist.broadcast(part[low : low + _SLICE], src=owner, group=process_group, async_op=True))
        while len(pending) > _IN_FLIGHT:
            pending.pop(0).wait()
    for work in pending:
        work.wait()


def connect() -> Comm:
    """The ranks of this launch."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return TorchComm()
    return Comm()
