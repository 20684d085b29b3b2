"""A rank of an engine on NVMe (ZeRO-Infinity)."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from deepspeed_ucp.extensions.nvme import Nvme
from deepspeed_ucp.model.view import EngineBuffer
from tests.support.reshard import SENTINEL, FakeTarget
from tests.synth import Model, Param, Topology

MODEL = Model(
    (Param("a", (7, 13)), Param("frozen", (50, 3), frozen=True), Param("b", (90,)), Param("small", (5,), group=1))
)
ALIGNED = 32
LEAST = 20
"""Least elements of a swapped partition."""


class Files(Nvme):
    """The swap files, without DeepSpeed's swapper."""

    def relink(self, target: Any) -> None:
        """Do nothing: the swapper keeps no states."""


class SwappedTarget(FakeTarget):
    """One rank of an engine on NVMe: swapped tensors are in files, and empty in the optimizer."""

    def __init__(self, folder: Path, topology: Topology, rank: int = 0) -> None:
        self.folder = folder / f"rank{rank}"
        self.folder.mkdir(parents=True)
        self.nvme = Files()
        super().__init__(MODEL, topology, rank)
        self.extensions = [self.nvme]

    def add_flat(self, buffer: Any, part: int, holder: torch.Tensor, *more: Any) -> None:
        if buffer.partition >= LEAST:
            super().add_flat(buffer, part, torch.empty(0).requires_grad_())
            self.flats[-1] = self.move(self.flats[-1], f"{len(self.flats) - 1}_9.tensor.swp", torch.float32)
        else:
            super().add_flat(buffer, part, holder)

    def move(self, held: EngineBuffer, name: str, dtype: torch.dtype) -> EngineBuffer:
        path, numel = self.folder / name, align(held.buffer.partition)
        path.write_bytes(torch.full((numel,), SENTINEL, dtype=dtype).view(torch.uint8).numpy().tobytes())
        return self.nvme.map_swapped(held, str(path), SimpleNamespace(dtype=dtype, _io_aligned_numel=align))

    def _extra(self, param: Param) -> EngineBuffer:
        held = super()._extra(param)
        if held.buffer.partition < LEAST:
            return held
        placeholder = self.make_buffer(held.buffer, held.part, torch.tensor(1).half())
        return self.move(placeholder, f"{param.name}_param.tensor.swp", self.kind.dtype)

    def look(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in sorted(self.folder.iterdir())}


def align(numel: int) -> int:
    return -(-numel // ALIGNED) * ALIGNED
