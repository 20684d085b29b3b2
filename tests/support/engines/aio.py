"""A stand-in for DeepSpeed's asynchronous I/O operator, which needs libaio's headers to compile.

It has the operator's constraints: buffers are page-locked or not, reads and writes happen in `wait`, a read ends inside
its file, and a write does not truncate the file.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from deepspeed.ops.op_builder import AsyncIOBuilder
from torch import Tensor


class AioHandle:
    """``deepspeed_py_io_handle.h``, with the arguments of the operator."""

    locked: dict[int, Tensor] = {}  # noqa: RUF012 - of the process, as the operator's

    def __init__(self, **options: Any):
        self.options = options
        self.pending: list[tuple[str, Tensor, str | int, int]] = []

    def get_alignment(self) -> int:
        return 512

    def new_cpu_locked_tensor(self, numel: int, example: Tensor) -> Tensor:
        buffer = torch.full((numel,), float("nan"), dtype=example.dtype)
        self.locked[buffer.data_ptr()] = buffer
        return buffer

    def free_cpu_locked_tensor(self, buffer: Tensor) -> bool:
        return self.locked.pop(buffer.data_ptr(), None) is not None

    def is_pinned(self, tensor: Tensor) -> bool:
        low, high = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        return any(base <= low and high <= base + held.nbytes for base, held in self.locked.items())

    def async_pread(self, buffer: Tensor, path: str, offset: int) -> int:
        if os.path.getsize(path) - offset < buffer.nbytes:
            return -1
        self.pending.append(("read", buffer, path, offset))
        return 0

    def async_pwrite(self, buffer: Tensor, path: str | int, offset: int) -> int:
        """Write to a path, or to an open file for the fast writer."""
        self.pending.append(("write", buffer, path, offset))
        return 0

    def wait(self) -> int:
        done, self.pending = self.pending, []
        for kind, buffer, path, offset in done:
            data = memoryview(buffer.detach().view(torch.uint8).numpy())
            flags = os.O_RDONLY if kind == "read" else os.O_WRONLY | os.O_CREAT
            file = path if isinstance(path, int) else os.open(path, flags, 0o600)
            moved = os.preadv(file, [data], offset) if kind == "read" else os.pwrite(file, data, offset)
            if file != path:
                os.close(file)
            assert moved == data.nbytes
        return len(done)


class _Operator:
    aio_handle = AioHandle


def install() -> None:
    """Install the stand-in in this process, unless ``UCP_TEST_AIO=1`` requests the operator."""
    if os.environ.get("UCP_TEST_AIO") != "1":
        AsyncIOBuilder.load = lambda self, verbose=True: _Operator
