"""Lets ranks share GPUs: collectives go through host memory and gloo, not NCCL."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Work, _create_work_from_future  # type: ignore[attr-defined]
from torch.distributed import distributed_c10d

_COLLECTIVE = re.compile("all_?(reduce|gather|to_?all)|_allgather|_?reduce|broadcast|barrier|send|recv|gather|scatter")
"""Names of collective methods of groups in torch 2.5 to 2.13; their first argument is the output."""


class HostGroup(dist.ProcessGroup):
    """A process group that runs gloo's collectives on copies in host memory."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        gloo = distributed_c10d.ProcessGroupGloo(store, rank, size, timeout=timeout)
        self._host = dist.ProcessGroup(store, rank, size)
        self._host._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        self._host._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return distributed_c10d._world.pg_names[self]

    def _start_coalescing(self, device: Any) -> None:
        """Coalesced collectives need no preparation."""

    def _end_coalescing(self, device: Any) -> Work:
        return _make_completed_work()

    def _get_sequence_number_for_group(self) -> int:
        return 0

    def _set_sequence_number_for_group(self) -> None:
        """The number is only for debugging."""


def _make_collective(name: str) -> Callable[..., Work]:
    def collective(self: HostGroup, *args: Any, **options: Any) -> Work:
        on_host = [_to_host(arg) for arg in args]
        getattr(self._host, name)(*on_host, **options).wait()
        if args:
            _copy_back(args[0], on_host[0])
        return _make_completed_work()

    return collective


for _name in filter(_COLLECTIVE.match, dir(dist.ProcessGroup)):
    setattr(HostGroup, _name, _make_collective(_name))


def _to_host(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
    return [_to_host(item) for item in value] if isinstance(value, list | tuple) else value


def _copy_back(output: Any, values: Any) -> None:
    if isinstance(output, torch.Tensor):
        output.detach().copy_(values)
    elif isinstance(output, list | tuple):
        for target, value in zip(output, values, strict=True):
            _copy_back(target, value)


def _make_completed_work() -> Work:
    done: torch.futures.Future[None] = torch.futures.Future()
    done.set_result(None)
    work: Work = _create_work_from_future(done)
    return work


def share_gpus(backend: str) -> None:
    """Let ranks share this machine's GPUs: rank r takes GPU r modulo their number.

    :class:`HostGroup` becomes torch's backend ``backend``.
    """
    from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator

    count = max(torch.cuda.device_count(), 1)
    for name in ("device_name", "device"):
        setattr(CUDA_Accelerator, name, _wrap_index(getattr(CUDA_Accelerator, name), count))
    set_device = torch.cuda.set_device  # which torch's device meshes call as well
    torch.cuda.set_device = lambda device: set_device(_find_index(device) % count)
    dist.Backend.register_backend(backend, HostGroup, devices=["cuda"])


def _wrap_index(method: Callable[..., Any], count: int) -> Callable[..., Any]:
    def call(self: Any, device_index: Any = None) -> Any:
        return method(self, None if device_index is None else _find_index(device_index) % count)

    return call


def _find_index(device: Any) -> int:
    """Return the index in ``torch.device("cuda", 1)``, ``"cuda:1"``, ``"1"`` and 1."""
    index = device.index if isinstance(device, torch.device) else str(device).rpartition(":")[2]
    return int(index) if index not in (None, "cuda") else torch.cuda.current_device()
