"""States of engines' ranks as tensors by parameter and state, and their join."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from deepspeed_ucp.model.storage import strip_compiled
from deepspeed_ucp.testing.capture import _list_partitioned, capture

States = dict[tuple[str, str], Tensor]
"""Whole tensors by parameter and state; ``fp32`` is the master, ``copy`` the model's parameter."""


def read_states(engine: Any) -> States:
    """Read the whole states of this rank and its replicas; partitions are gathered over their groups."""
    names = {id(param): strip_compiled(name) for name, param in engine.module.named_parameters()}
    found: States = {}
    for name, held in capture(engine).parameters.items():
        states = {**held.tensors, **{key: torch.tensor(value) for key, value in held.scalars.items()}}
        if held.fp32 is not None:
            states["fp32"] = held.fp32
        found |= {(name, state): tensor for state, tensor in {**states, "copy": held.value}.items()}
    momentum = _read_momentum(engine.optimizer)
    return found | {(names[id(param)], "momentum_buffer"): tensor for param, tensor in momentum}


def _read_momentum(wrapped: Any) -> Iterator[tuple[Any, Tensor]]:
    """Yield Muon's momentum: of whole parameters under ZeRO 1 and 2, maybe outside of the optimizer under ZeRO 3."""
    for number, flat in getattr(wrapped, "muon_momentum_buffer_partitioned_groups_flat", {}).items():
        for param, _, make_whole in _list_partitioned(wrapped.fp16_groups[number], flat):
            yield param, make_whole(flat).clone()
    if not getattr(wrapped, "params_in_partition", None) or wrapped.cpu_offload:
        return
    for held, master in zip(wrapped.params_in_partition, wrapped.single_partition_of_fp32_groups, strict=True):
        whole = wrapped.optimizer.state.get(master, {}).get("momentum_buffer")
        sizes = [param.numel() for param in held] if whole is not None else []
        for param, piece in zip(held[: len(sizes)], whole.split(sizes) if sizes else (), strict=True):
            yield param, piece.view(param.shape).clone()


def join(parts: Sequence[States], find_cut: Callable[[str], int | None] = lambda _: None, tp: int = 1) -> States:
    """Join the states of all ranks; replicas must be equal.

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
