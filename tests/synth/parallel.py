"""Divides the logical model among model-parallel ranks: names, shapes and values of parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from .description import Model, Param, State, Topology
from .stages import holders, instance, local_prefixes, placement_of

ShardFunction = Callable[[str, torch.Tensor, int, int], torch.Tensor]  # (name, logical tensor, tp, tp rank) -> shard


@dataclass(frozen=True, slots=True)
class Local:
    """The part of one model-parallel rank, over all its data-parallel ranks: local shapes and values.

    `model.layers` are the whole pipeline's layers, `layers` the indices of the rank's.
    """

    model: Model
    state: State
    layers: tuple[int, ...] = ()


def split(model: Model, state: State, topology: Topology, cut: ShardFunction | None = None) -> dict[int, Local]:
    """Return {pp_rank * tp + tp_rank: Local}; `cut` returns the tensor-parallel shards of fp32 and states.

    An instance ("name#1") that `state` lacks has the values of the plain name. Buffers are not sharded.
    """
    models = local_models(model, topology, cut)
    placement = placement_of(model, topology)
    params = {param.name: param for param in model.params}
    result = {}
    for rank, local in models.items():
        pp, tp = divmod(rank, topology.tp)
        held = {p.name: instance(p.name, holders(model, topology, p.name).index(pp)) for p in local.owners}
        sources = {name: found if found in state.atoms else name for name, found in held.items()}
        atoms = {
            name: {key: _shard(name, tensor, topology, tp, cut) for key, tensor in state.atoms[source].items()}
            for name, source in sources.items()
        }
        scalars = {name: state.scalars[source] for name, source in sources.items() if source in state.scalars}
        kept = _groups_of(tuple(params[param.name] for param in local.params)) if model.layers else None
        groups = state.groups if kept is None else tuple(state.groups[group] for group in kept)
        result[rank] = Local(local, State(atoms, scalars, groups), placement[pp])
    return result


def local_models(model: Model, topology: Topology, cut: ShardFunction | None = None) -> dict[int, Model]:
    """Return the description of each model-parallel rank's module."""
    models = {}
    for pp, layers in enumerate(placement_of(model, topology)):
        stage = _stage_model(model, layers)
        for tp in range(topology.tp):
            params = tuple(_cut_param(param, topology, tp, cut) for param in stage.params)
            models[pp * topology.tp + tp] = replace(stage, params=params, lane=tp)
    return models


def _stage_model(model: Model, layers: tuple[int, ...]) -> Model:
    """Return the parameters and buffers of one pipeline rank in its order, without empty groups."""
    if not model.layers:
        return model
    prefixes = local_prefixes(model, layers)
    params = tuple(param for prefix in prefixes for param in model.params if param.name.startswith(prefix))
    buffers = {name: model.buffers[name] for prefix in prefixes for name in model.buffers if name.startswith(prefix)}
    kept = _groups_of(params)
    numbers: dict[int | None, int | None] = {group: index for index, group in enumerate(kept)}
    params = tuple(replace(param, group=numbers.get(param.group)) for param in params)
    return replace(model, params=params, buffers=buffers)


def _groups_of(params: tuple[Param, ...]) -> list[int]:
    """Return the optimizer's groups with parameters of one rank, as DeepSpeed drops empty ones."""
    return sorted({param.group for param in params if param.alias_of is None and param.group is not None})


def _cut_param(param: Param, topology: Topology, tp: int, cut: ShardFunction | None) -> Param:
    shard = _shard(param.alias_of or param.name, torch.empty(param.shape), topology, tp, cut)
    return replace(param, shape=tuple(shard.shape))


def _shard(name: str, tensor: torch.Tensor, topology: Topology, tp: int, cut: ShardFunction | None) -> torch.Tensor:
    shard = tensor if cut is None or topology.tp == 1 else cut(name, tensor, topology.tp, tp)
    # A test may edit one rank's tensors in place, so several ranks get copies.
    return shard.clone(memory_format=torch.contiguous_format) if topology.mp > 1 else shard
