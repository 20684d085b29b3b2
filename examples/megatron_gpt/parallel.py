"""The grid of tensor, sequence, data and pipeline parallelism, and its collectives with their gradients."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Line:
    """The ranks that differ from this rank only along some axes of the grid.

    Attributes:
        ranks: global ranks in the order of the grid.
        rank: this rank's place among them.
        group: their process group.
    """

    ranks: tuple[int, ...]
    rank: int
    group: Any

    @property
    def size(self) -> int:
        return len(self.ranks)


class ParallelState:
    """This rank's groups. Ranks are numbered stage first, then data, sequence, tensor: tensor-parallel peers are
    neighbours, as in Megatron and in DeepSpeed's PipeModelDataParallelTopology.

    Collective: all ranks of the world create it together.

    Attributes:
        tensor, sequence, data, pipe, sequence_data: this rank's lines through the grid.
        experts: data-parallel ranks over which experts are distributed; neighbours, as in DeepSpeed by default.

    Raises:
        ValueError: tp · pp · sp, or ep, does not divide the number of ranks.
    """

    def __init__(self, tp: int = 1, pp: int = 1, sp: int = 1, ep: int = 1) -> None:
        world = dist.get_world_size()
        if world % (tp * pp * sp) or world % ep:
            raise ValueError(f"{world} ranks cannot be divided into tp {tp} × pp {pp} × sp {sp}, ep {ep}")
        grid = torch.arange(world).view(pp, -1, sp, tp)
        self.tensor = _find_line(grid)
        self.sequence = _find_line(grid.transpose(2, 3))
        self.data = _find_line(grid.movedim(1, 3))
        self.pipe = _find_line(grid.movedim(0, 3))
        self.sequence_data = _find_line(grid.permute(0, 3, 1, 2).flatten(2))
        self.experts = _find_line(torch.arange(world).view(-1, ep))

    def make_mpu(self) -> SimpleNamespace:
        """Return the `mpu` object that gives DeepSpeed the groups of a model without a pipeline module.

        Sequence parallelism is folded into data parallelism: ZeRO partitions over both, batches go by data alone.
        """
        mpu = SimpleNamespace(get_tensor_model_parallel_src_rank=lambda: self.tensor.ranks[0])
        lines = {
            "model_parallel": self.tensor,
            "tensor_model_parallel": self.tensor,
            "data_parallel": self.data,
            "sequence_parallel": self.sequence,
            "sequence_data_parallel": self.sequence_data,
            "pipeline_model_parallel": self.pipe,
        }
        for name, line in lines.items():
            setattr(mpu, f"get_{name}_rank", lambda line=line: line.rank)
            setattr(mpu, f"get_{name}_world_size", lambda line=line: line.size)
            setattr(mpu, f"get_{name}_group", lambda line=line: line.group)
            setattr(mpu, f"get_{name}_group_ranks", lambda line=line: list(line.ranks))
        return mpu


def _find_line(grid: torch.Tensor) -> Line:
    """Return this rank's line along the last axis of `grid`. Every rank creates every group, as torch requires."""
    found = None
    for ranks in grid.reshape(-1, grid.shape[-1]).tolist():
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            found = Line(tuple(ranks), ranks.index(dist.get_rank()), group)
    if found is None:
        raise RuntimeError(f"rank {dist.get_rank()} is not in the grid {grid.tolist()}")
    return found


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, line: Line) -> torch.Tensor:
        ctx.line = line
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _sum(gradient, ctx.line), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, line: Line) -> torch.Tensor:
        return _sum(x, line)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, line: Line, cut: int, join: int) -> torch.Tensor:
        ctx.line, ctx.cut, ctx.join = line, cut, join
        return _all_to_all(x, line, cut, join)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _all_to_all(gradient, ctx.line, ctx.join, ctx.cut), None, None, None


def copy_to(x: torch.Tensor, line: Line) -> torch.Tensor:
    """Return `x`, which is equal on all ranks of `line`; its gradient is summed over them (Megatron's f)."""
    return _Copy.apply(x, line) if line.size > 1 else x


def reduce_from(x: torch.Tensor, line: Line) -> torch.Tensor:
    """Return the sum of `x` over `line`; each rank gets its gradient (Megatron's g)."""
    return _Reduce.apply(x, line) if line.size > 1 else x


def exchange(x: torch.Tensor, line: Line, *, cut: int, join: int) -> torch.Tensor:
    """Give each rank of `line` its part of dimension `cut` and join the parts received along `join` (Ulysses)."""
    return _Exchange.apply(x, line, cut, join) if line.size > 1 else x


def _sum(x: torch.Tensor, line: Line) -> torch.Tensor:
    total = x.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=line.group)
    return total


def _all_to_all(x: torch.Tensor, line: Line, cut: int, join: int) -> torch.Tensor:
    sent = torch.stack(x.detach().chunk(line.size, cut))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=line.group)
    return torch.cat(received.unbind(0), join)
