"""Tensors as destinations of bytes."""

from __future__ import annotations

import torch

from ..plan import Part
from ..targets.base import dtype_name


class TensorSink:
    """A 1-D tensor; bytes of dtype ``stored`` go straight into its memory, or are converted on the way.

    Args:
        tensor: destination, any device; a tensor that is not 1-D and contiguous is filled through a proxy.
        stored: dtype of the bytes in the file, as ``float32``.
        fresh: memory that is not part of the engine yet, so that it may be filled before all is verified.
    """

    def __init__(self, tensor: torch.Tensor, stored: str, fresh: bool) -> None:
        self.target = tensor
        plain = tensor.dim() == 1 and tensor.is_contiguous()
        self.tensor = tensor if plain else torch.empty(tensor.numel(), dtype=tensor.dtype, device=tensor.device)
        self.stored = getattr(torch, stored)
        self.fresh = fresh
        self.memory: memoryview | None = None
        if self.tensor.device.type == "cpu" and dtype_name(self.tensor.dtype) == stored and self.tensor.numel():
            self.memory = memoryview(self.tensor.view(torch.uint8).numpy())
        self.itemsize = self.tensor.element_size()

    def view(self, position: int, nbytes: int) -> memoryview | None:
        """The tensor's memory from element ``position`` on, or None where bytes must be converted or moved."""
        if self.memory is None:
            return None
        low = position * self.itemsize
        return self.memory[low : low + nbytes]

    def store(self, part: Part, data: memoryview) -> None:
        """Convert and copy a part's bytes to the elements from ``part.position`` on, row by row where it has rows."""
        values = torch.frombuffer(data, dtype=self.stored)
        if not part.run:
            self.tensor.narrow(0, part.position, values.numel()).copy_(values)
            return
        rows = values.view(-1, part.run // self.stored.itemsize)
        base = self.tensor.storage_offset() + part.position
        self.tensor.as_strided(rows.shape, (part.stride, 1), base).copy_(rows)

    def take(self, part: Part, data: memoryview) -> None:
        """Copy a part's bytes from other memory."""
        view = None if part.run else self.view(part.position, part.nbytes)
        if view is None:
            self.store(part, data)
        else:
            view[:] = data

    def settle(self) -> None:
        """Bring a proxy's contents to the tensor that it stands for."""
        if self.tensor is not self.target:
            self.target.copy_(self.tensor.view(self.target.shape))
