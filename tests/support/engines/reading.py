"""States of engines' ranks, read from DeepSpeed's optimizers independently of the plugin, and joined."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

States = dict[tuple[str, str], Tensor]
"""Whole tensors by parameter and state; ``fp32`` is the master, ``copy`` the model's parameter."""


def read_optimizer(wrapped: Any) -> dict[int, dict[str, Tensor]]:
    """Read masters and states by the parameter's identity, whole; partitions are gathered over their own groups."""
    optimizer = getattr(wrapped, "optimizer", wrapped)
    found: dict[int, dict[str, Tensor]] = defaultdict(dict)
    for params, master, cuts, more in _list_masters(wrapped, optimizer):
        states = {"fp32": master, **optimizer.state[master], **more}
        if "momentum_buffer" in states and getattr(wrapped, "params_in_partition", None) and not wrapped.cpu_offload:
            held = wrapped.params_in_partition[_find_group(wrapped, params)]  # Muon's: of whole parameters
            pieces = states.pop("momentum_buffer").split([param.numel() for param in held])
            for param, piece in zip(held, pieces, strict=True):
                found[id(param)]["momentum_buffer"] = piece.view(param.shape).clone()
        for state, value in states.items():
            tensor = value.detach() if torch.is_tensor(value) else torch.tensor(float(value))
            pieces = cuts(tensor) if tensor.dim() else [tensor] * len(params)
            for param, piece in zip(params, pieces, strict=True):
                found[id(param)][state] = piece.clone()
    return found


Cuts = Callable[[Tensor], Sequence[Tensor]]
"""Cuts a tensor of the master's shape into tensors of its parameters."""


def _list_masters(wrapped: Any, optimizer: Any) -> Iterator[tuple[Sequence[Any], Tensor, Cuts, dict[str, Tensor]]]:
    """Yields parameters, their master, how to cut them out of it, and states outside the optimizer."""
    if hasattr(wrapped, "fp32_partitioned_groups_flat"):  # ZeRO 3
        memory = getattr(wrapped, "muon_momentum_buffer_partitioned_groups_flat", {})
        for number, params in enumerate(wrapped.fp16_groups):
            more = {"momentum_buffer": memory[number]} if number in memory else {}
            yield params, wrapped.fp32_partitioned_groups_flat[number], _join_partitions(params), more
    elif hasattr(wrapped, "partition_count"):  # ZeRO 1 and 2, BF16_Optimizer
        held = getattr(wrapped, "round_robin_bit16_groups", None) or wrapped.bf16_groups
        masters = getattr(wrapped, "single_partition_of_fp32_groups", None) or wrapped.fp32_groups_flat_partition
        for params, master, group in zip(held, masters, wrapped.real_dp_process_group, strict=True):
            yield params, master, _cut_flat(params, group), {}
    elif hasattr(wrapped, "fp32_groups_flat"):  # FP16_Optimizer
        for params, master in zip(wrapped.fp16_groups, wrapped.fp32_groups_flat, strict=True):
            yield params, master, _cut_flat(params), {}
    else:
        masters = getattr(wrapped, "fp32_groups", None) or [group["params"] for group in optimizer.param_groups]
        held = getattr(wrapped, "fp16_groups", None) or masters
        for param, master in zip(chain(*held), chain(*masters), strict=True):
            yield [param], master, lambda tensor: [tensor], {}


def _find_group(wrapped: Any, params: Sequence[Any]) -> int:
    return next(number for number, held in enumerate(wrapped.round_robin_bit16_groups) if held is params)


def _cut_flat(params: Sequence[Any], group: Any = None) -> Cuts:
    def cut(tensor: Tensor) -> list[Tensor]:
        whole, start, pieces = torch.cat(_gather(tensor, group)) if group else tensor, 0, []
        for param in params:
            pieces.append(whole[start : start + param.numel()].view(param.shape))
            start += param.numel()
        return pieces

    return cut


def _join_partitions(params: Sequence[Any]) -> Cuts:
    def cut(tensor: Tensor) -> list[Tensor]:
        parts, start, pieces = _gather(tensor, None), 0, []
        for param in params:
            size = -(-param.ds_numel // len(parts))
            whole = torch.cat([part[start : start + size] for part in parts])
            pieces.append(whole[: param.ds_numel].view(param.ds_shape))
            start += size
        return pieces

    return cut


def _gather(tensor: Tensor, group: Any) -> list[Tensor]:
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return parts


def join(parts: Sequence[States], find_cut: Callable[[str], int | None] = lambda _: None, tp: int = 1) -> States:
    """Join the states of all ranks; replicas have to be equal.

    Args:
        parts: by rank of the world.
        find_cut: returns the dimension along which tensor parallelism cuts a parameter, by its name.
        tp: tensor-parallel ranks.
    """
    lanes: dict[tuple[str, str], dict[int, Tensor]] = {}
    for rank, part in enumerate(parts):
        for key, tensor in part.items():
            is_cut = find_cut(key[0]) is not None and tensor.dim() > 0
            held = lanes.setdefault(key, {}).setdefault(rank % tp if is_cut else 0, tensor)
            assert torch.equal(held, tensor), (key, rank)
    return {
        key: torch.cat([held[lane] for lane in sorted(held)], find_cut(key[0]) or 0) if len(held) > 1 else held[0]
        for key, held in lanes.items()
    }
