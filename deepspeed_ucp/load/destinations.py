"""What a rank wants, bound to tensors: where bytes go, what is zeroed, what is averaged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from ..io.cast import average
from ..plan.wants import Home, Mean, Wants
from .sinks import Buffer, TensorSink


@dataclass(slots=True)
class Destinations:
    """The memory that a load fills.

    Attributes:
        buffers: by the wants' buffer numbers.
        sinks: by the numbers that wants name.
        blanks: (buffer, low, high): elements that are zeroed before anything is read.
        means: what is averaged.
    """

    buffers: list[Buffer] = field(default_factory=list)
    sinks: list[TensorSink] = field(default_factory=list)
    blanks: list[tuple[int, int, int]] = field(default_factory=list)
    means: list[Mean] = field(default_factory=list)

    def zero_blanks(self, *, fresh: bool) -> None:
        """Zero what no atom fills, of fresh memory or of live buffers."""
        for number, low, high in self.blanks:
            if self.buffers[number].fresh == fresh:
                self.buffers[number].memory[low:high].zero_()

    def commit(self) -> None:
        """Take the means, and bring everything that was read to where it belongs."""
        for mean in self.means:
            replicas = (self.buffers[number].memory for number in mean.replicas)
            self.buffers[mean.buffer].memory[mean.low : mean.high].copy_(average(replicas))
        for buffer in self.buffers:
            buffer.commit()


def bind(wants: Wants, tensors: Mapping[Home, torch.Tensor]) -> Destinations:
    """Give every buffer of the wants its tensor.

    Args:
        tensors: the live ones, and fresh ones for states; memory that is not among them is made.
    """
    buffers = [
        Buffer(tensors[spec.home] if spec.home in tensors else make_tensor(spec.numel, spec.dtype), spec.fresh)
        for spec in wants.buffers
    ]
    for buffer, spans in zip(buffers, wants.list_spans(), strict=True):
        buffer.spans += spans
    sinks = [TensorSink(buffers[number], stored) for number, stored in wants.sinks]
    return Destinations(buffers, sinks, wants.blanks, wants.means)


def make_tensor(numel: int, dtype: str) -> torch.Tensor:
    """Memory of the host."""
    return torch.empty(numel, dtype=getattr(torch, dtype))
