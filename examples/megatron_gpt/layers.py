"""Tensor-parallel layers, cut as in Megatron and with Megatron's attributes on each parameter.

Each initial weight is a function of the seed and the parameter's canonical name. It is created in full and then cut, so
all topologies have the same model.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from parallel import copy_to, reduce_from
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Sequence

    from config import GPTConfig
    from parallel import Line, ParallelState


def draw_weight(seed: int, name: str, shape: Sequence[int], std: float) -> torch.Tensor:
    """Draw the full initial weight of a parameter (fp32, on the CPU, normal), a function of the arguments alone."""
    generator = np.random.Generator(np.random.Philox(key=[seed, zlib.crc32(name.encode())]))
    return torch.from_numpy(generator.standard_normal(tuple(shape), dtype=np.float32)).mul_(std)


def cut_weight(whole: torch.Tensor, line: Line, dim: int, blocks: Sequence[int] = ()) -> torch.Tensor:
    """Cut this rank's part of `whole` along `dim`.

    Args:
        whole: the full parameter.
        line: the tensor-parallel ranks.
        dim: the dimension to cut.
        blocks: widths along `dim` of fused parts (query, key, value; gate, up; experts). Each is cut separately, and
            the rank's parts are joined, as [q_r; k_r; v_r].

    Raises:
        ValueError: a block is not divisible by the number of ranks.
    """
    blocks = blocks or (whole.shape[dim],)
    if any(width % line.size for width in blocks):
        raise ValueError(f"widths {tuple(blocks)} along dimension {dim} cannot be cut for {line.size} ranks")
    parts = [block.chunk(line.size, dim)[line.rank] for block in whole.split(list(blocks), dim)]
    return torch.cat(parts, dim).contiguous()


def make_parameter(
    whole: torch.Tensor, line: Line, *, dim: int | None = None, blocks: Sequence[int] = ()
) -> nn.Parameter:
    """Make this rank's parameter with Megatron's attributes; it is replicated if `dim` is None.

    `partition_stride` is the number of blocks of equal width that are cut separately along `partition_dim`. If widths
    differ, `partition_sizes` has the local widths (as in Megatron's Mamba).
    """
    parameter = nn.Parameter(whole if dim is None else cut_weight(whole, line, dim, blocks))
    mark_parameter(parameter, line, dim, blocks)
    return parameter


def mark_parameter(parameter: nn.Parameter, line: Line, dim: int | None = None, blocks: Sequence[int] = ()) -> None:
    """Set the attributes that describe how a parameter of this rank is cut."""
    attributes = {"tensor_model_parallel": dim is not None, "partition_dim": -1 if dim is None else dim}
    attributes["partition_stride"] = len(blocks) if len(set(blocks)) == 1 else 1
    if len(set(blocks)) > 1:
        attributes["partition_sizes"] = [width // line.size for width in blocks]
    vars(parameter).update(attributes)


class ColumnParallelLinear(nn.Module):
    """y = x Wᵀ + b with the output dimension cut: each rank has the full input and a part of the output.

    Args:
        config: sizes, seed and biases.
        parallel: groups of this rank.
        name: canonical name, from which the weight is drawn.
        blocks: widths of the parts that are fused in the output; their sum is the output width.
    """

    def __init__(self, config: GPTConfig, parallel: ParallelState, name: str, blocks: Sequence[int]) -> None:
        super().__init__()
        self.line = parallel.tensor
        whole = draw_weight(config.seed, name, (sum(blocks), config.hidden), config.init_std)
        self.weight = make_parameter(whole, self.line, dim=0, blocks=blocks)
        self.bias = make_parameter(torch.zeros(sum(blocks)), self.line, dim=0, blocks=blocks) if config.bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(copy_to(x, self.line), self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """y = x Wᵀ + b with the input dimension cut: partial results are summed, then the replicated bias is added."""

    def __init__(self, config: GPTConfig, parallel: ParallelState, name: str, width: int) -> None:
        super().__init__()
        self.line = parallel.tensor
        whole = draw_weight(config.seed, name, (config.hidden, width), config.output_std)
        self.weight = make_parameter(whole, self.line, dim=1)
        self.bias = make_parameter(torch.zeros(config.hidden), self.line) if config.bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = reduce_from(F.linear(x, self.weight), self.line)
        return y if self.bias is None else y + self.bias


class VocabParallelEmbedding(nn.Module):
    """A table of tokens whose rows are cut. Padding gives every rank equally many rows."""

    def __init__(self, config: GPTConfig, parallel: ParallelState, name: str) -> None:
        super().__init__()
        self.line = parallel.tensor
        rows = config.padded_vocabulary(self.line.size)
        self.weight = make_parameter(
            draw_weight(config.seed, name, (rows, config.hidden), config.init_std), self.line, dim=0
        )
        self.first = self.line.rank * (rows // self.line.size)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        local = tokens - self.first
        elsewhere = (local < 0) | (local >= self.weight.shape[0])
        rows = F.embedding(local.masked_fill(elsewhere, 0), self.weight)
        return reduce_from(rows.masked_fill(elsewhere.unsqueeze(-1), 0), self.line)


def vocab_parallel_cross_entropy(logits: torch.Tensor, labels: torch.Tensor, line: Line) -> torch.Tensor:
    """Mean cross-entropy in nats, an fp32 scalar, of logits whose last dimension is cut.

    As in Megatron the softmax includes rows of padding.

    Args:
        logits: (batch, length, rows of this rank), any floating dtype.
        labels: (batch, length), integers below the vocabulary's size.
        line: the tensor-parallel ranks.
    """
    logits = logits.float()
    top = logits.detach().amax(-1)
    if line.size > 1:
        dist.all_reduce(top, dist.ReduceOp.MAX, group=line.group)
    logits = logits - top.unsqueeze(-1)
    total = reduce_from(logits.exp().sum(-1), line)
    local = labels - line.rank * logits.shape[-1]
    elsewhere = (local < 0) | (local >= logits.shape[-1])
    target = logits.gather(-1, local.masked_fill(elsewhere, 0).unsqueeze(-1)).squeeze(-1)
    target = reduce_from(target.masked_fill(elsewhere, 0), line)
    return (total.log() - target).mean()


class Norm(nn.Module):
    """LayerNorm, or RMSNorm (no bias) if configured; replicated."""

    def __init__(self, config: GPTConfig, parallel: ParallelState) -> None:
        super().__init__()
        self.weight = make_parameter(torch.ones(config.hidden), parallel.tensor)
        self.bias = None if config.rmsnorm else make_parameter(torch.zeros(config.hidden), parallel.tensor)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.bias is not None:
            return F.layer_norm(x, x.shape[-1:], self.weight, self.bias)
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)).to(x.dtype) * self.weight
