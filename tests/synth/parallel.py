"""From the logical model to what each model-parallel rank holds: its parameters' names, shapes, values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from .description import Model, Param, State, Topology
from .stages import holders, instance, local_prefixes, placement_of

Cut = Callable[[str, torch.Tensor, int, int], torch.Tensor]  # (name, logical tensor, tp, tp rank) -> the rank's own


@dataclass(frozen=True, slots=True)
class Local:
    """What one model-parallel rank holds (on all of its data-parallel ranks together): local shapes and values.

    `model.layers` are those of the whole pipeline, `layers` the indices of the rank's own.
    """

    model: Model
    state: State
    layers: tuple[int, ...] = ()


def split(model: Model, state: State, topology: Topology, cut: Cut | None = None) -> dict[int, Local]:
    """{mp_rank: Local}, mp_rank = pp_rank * tp + tp_rank; `cut` gives the tensor-parallel shards of fp32 and states.

    An instance ("name#1") that `state` does not have takes the values of the plain name. Buffers are not cut.
    """
    models = local_models(model, topology, cut)
    placement = placement_of(model, topology)
    params = {param.name: param for param in model.params}
    result = {}
    for rank, local in models.items():
        pp, tp = divmod(rank, topology.tp)
        sources = {param.name: _instance_of(model, state, topology, param.name, pp) for param in local.owners}
        atoms = {
            name: {key: _shard(name, tensor, topology, tp, cut) for key, tensor in state.atoms[source].items()}
            for name, source in sources.items()
        }
        scalars = {name: state.scalars[source] for name, source in sources.items() if source in state.scalars}
        kept = _groups_of(tuple(params[param.name] for param in local.params)) if model.layers else None
        groups = state.groups if kept is None else tuple(state.groups[group] for group in kept)
        result[rank] = Local(local, State(atoms, scalars, groups), placement[pp])
    return result


def local_models(model: Model, topology: Topology, cut: Cut | None = None) -> dict[int, Model]:
    """The description of each model-parallel rank's own module."""
    if topology.tp > 1 and cut is None:
        raise ValueError(f"tp={topology.tp} needs a cut")
    stages = [_stage_model(model, layers) for layers in placement_of(model, topology)]
    return {
        pp * topology.tp + tp: _cut_model(stage, topology, tp, cut)
        for pp, stage in enumerate(stages)
        for tp in range(topology.tp)
    }


def _stage_model(model: Model, layers: tuple[int, ...]) -> Model:
    """The parameters and buffers of one pipeline rank, in its own order; groups without any are removed."""
    if not model.layers:
        return model
    prefixes = local_prefixes(model, layers)
    params = tuple(param for prefix in prefixes for param in model.params if param.name.startswith(prefix))
    names = {param.name for param in params}
    abroad = [param.name for param in params if param.alias_of and param.alias_of not in names]
    if abroad:
        raise ValueError(f"aliases of parameters of other stages: {abroad}; DeepSpeed ties these by TiedLayerSpec")
    buffers = {name: model.buffers[name] for prefix in prefixes for name in model.buffers if name.startswith(prefix)}
    kept = _groups_of(params)
    numbers: dict[int | None, int | None] = {group: index for index, group in enumerate(kept)}
    params = tuple(replace(param, group=numbers.get(param.group)) for param in params)
    return replace(model, params=params, buffers=buffers)


def _groups_of(params: tuple[Param, ...]) -> list[int]:
    """The optimizer's groups that these parameters (of one rank) are in: DeepSpeed drops those without any."""
    return sorted({param.group for param in params if param.alias_of is None and param.group is not None})


def _cut_model(stage: Model, topology: Topology, tp: int, cut: Cut | None) -> Model:
    return replace(stage, params=tuple(_cut_param(param, topology, tp, cut) for param in stage.params), lane=tp)


def _cut_param(param: Param, topology: Topology, tp: int, cut: Cut | None) -> Param:
    shard = _shard(param.alias_of or param.name, torch.empty(param.shape), topology, tp, cut)
    return replace(param, shape=tuple(shard.shape))


def _shard(name: str, tensor: torch.Tensor, topology: Topology, tp: int, cut: Cut | None) -> torch.Tensor:
    shard = tensor if cut is None or topology.tp == 1 else cut(name, tensor, topology.tp, tp)
    # Copies, so that a test can edit one rank's in place; with one rank there is nothing to keep apart.
    return shard.clone(memory_format=torch.contiguous_format) if topology.mp > 1 else shard


def _instance_of(model: Model, state: State, topology: Topology, name: str, pp: int) -> str:
    """Where `state` has the values of the stage's own instance."""
    own = instance(name, holders(model, topology, name).index(pp))
    return own if own in state.atoms else name


def flatten_module(module: Mapping[str, Any], prefix: str = "") -> dict[str, torch.Tensor]:
    """A module dict, nested as Megatron's is or not, by full names."""
    result: dict[str, torch.Tensor] = {}
    for key, value in module.items():
        name = f"{prefix}{key}"
        result.update(flatten_module(value, f"{name}.") if isinstance(value, Mapping) else {name: value})
    return result
