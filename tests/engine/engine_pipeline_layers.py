"""The layers of the pipeline tests. Imports torch, so only the ranks import it."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Embedding(nn.Module):
    """DeepSpeed ties `weight`; `shift`, like Megatron's position embeddings, lives on apart in every stage."""

    def __init__(self, width: int, with_shift: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width))
        self.shift = nn.Parameter(torch.randn(width)) if with_shift else None
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = x @ self.weight.T
        return x if self.shift is None else x + self.shift


def head(embedding: Embedding, x: Tensor) -> Tensor:
    """The tied module as the output layer."""
    x = x @ embedding.weight
    return x if embedding.shift is None else x + embedding.shift


class Block(nn.Module):
    """A residual layer with a frozen parameter and a buffer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.frozen = nn.Parameter(torch.randn(width), requires_grad=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + torch.tanh(self.inner(x) * self.frozen)


def scale(x: Tensor) -> Tensor:
    """A layer without parameters."""
    return x * 1.5
