"""Small pipelines whose layers are letters.

E: an embedding-like layer with a weight that DeepSpeed ties and a shift that it does not; H: its head, which uses both;
e and h: the same without the shift. B: a block, N: a norm, f: a function.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import deepspeed
import torch
from deepspeed import pipe
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import Tensor, nn

from deepspeed_ucp.engine.parallel import find_parallel_state

if TYPE_CHECKING:
    from tests.support.engines.parallel import Launch

WIDTH = 6


def make(launch: Launch, seed: int) -> Any:
    """Make a PipelineEngine. Only matrices have weight decay."""
    module = (pipe.DualPipeVModule if launch.dual else pipe.PipelineModule)(
        [make_layer(letter) for letter in launch.model],
        num_stages=launch.pp,
        loss_fn=lambda found, wanted: (found.float() - wanted.float()).square().mean(),
        partition_method=launch.method,
    )
    return deepspeed.initialize(model=module, model_parameters=group(module), config=launch.ds_config)[0]


def step(engine: Any) -> float:
    return float(engine.train_batch(data_iter=_batches(engine)))


def group(module: nn.Module) -> list[dict[str, Any]]:
    """Group matrices with weight decay, and others without it at another learning rate."""
    parameters = list(module.parameters())
    return [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0, "lr": 2e-3},
    ]


def make_layer(letter: str) -> Any:
    if letter == "f":
        return scale
    if letter in "EH":
        return TiedLayerSpec("embed", Embedding, WIDTH, True, forward_fn=head if letter == "H" else None)
    if letter in "eh":
        return TiedLayerSpec("embed", Embedding, WIDTH, False, forward_fn=head if letter == "h" else None)
    return LayerSpec(Block, WIDTH) if letter == "B" else LayerSpec(nn.LayerNorm, WIDTH)


def _batches(engine: Any) -> Iterator[tuple[Any, Any]]:
    """A data set of which every data-parallel rank reads its share of one global batch."""
    parallel, size = find_parallel_state(engine), engine.train_batch_size()
    generator = torch.Generator().manual_seed(1000 + engine.global_steps)
    share = torch.randn(size, WIDTH, generator=generator).chunk(parallel.dp)[parallel.dp_rank]
    for micro in share.split(engine.train_micro_batch_size_per_gpu()):
        yield micro.to(engine.get_data_types()[0]), micro.flip(1)


class Embedding(nn.Module):
    """DeepSpeed ties `weight`; every stage has a separate `shift`, like Megatron's position embeddings."""

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
    return x * 1.5
