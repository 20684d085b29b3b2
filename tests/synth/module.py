"""The module part of the files: parameters as in the engine's memory, buffers, shapes, frozen and tied parameters."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch

from .description import Model, Param, Run, State, Topology
from .layout import Flat, GroupLayout, group_layouts, list_atoms, partition_numel, stage3_slice
from .optimizer import fill


def module_state(model: Model, state: State, topology: Topology) -> OrderedDict[str, torch.Tensor]:
    """`engine.module_state_dict()`: views of the groups' flat buffers if these exist; empty tensors under ZeRO 3."""
    tensors = {param.name: _own_tensor(param, state, topology) for param in model.owners}
    if topology.flattens:
        for layout in group_layouts(model, topology):
            tensors.update(_views(layout, state, topology))
    result = OrderedDict((param.name, tensors[param.alias_of or param.name]) for param in model.params)
    result.update(model.buffers)
    result._metadata = _metadata(result)  # type: ignore[attr-defined]  # like torch's state_dict()
    return result


def param_shapes(topology: Topology, flats: Sequence[Flat]) -> list[OrderedDict[str, torch.Size]] | None:
    """`_get_zero_param_shapes`: a dict per group (under ZeRO 3 sub-group) in flat order, which round robin changes."""
    if topology.stage == 0:
        return None
    return [OrderedDict((param.name, torch.Size(param.shape)) for param in flat.own) for flat in flats]


def frozen_shapes(model: Model, topology: Topology) -> OrderedDict[str, torch.Size] | None:
    """`frozen_param_shapes`, from stage 2 on: parameters without optimizer, including zero-element ones."""
    if topology.stage < 2:
        return None
    return OrderedDict((param.name, torch.Size(param.shape)) for param in model.owners if not param.trains)


def frozen_fragments(
    model: Model, topology: Topology, run: Run, module: OrderedDict[str, torch.Tensor], state: State, rank: int
) -> OrderedDict[str, torch.Tensor] | None:
    """`frozen_param_fragments`: the whole tensor at stage 2, the rank's partition with garbage padding under ZeRO 3."""
    if topology.stage < 2:
        return None
    frozen = [param for param in model.owners if not param.trains]
    if topology.stage == 2:
        return OrderedDict((param.name, module[param.name]) for param in frozen)
    return OrderedDict((param.name, _partition(param, state, topology, run, rank)) for param in frozen)


def shared_params(model: Model, topology: Topology, *, first: bool) -> dict[str, str] | None:
    """`_get_shared_params`, which only the first rank fills.

    Below ZeRO 3 DeepSpeed compares data pointers, which are 0 for all zero-element parameters.
    """
    if topology.stage == 0:
        return None
    if not first:
        return {}
    result = {}
    first_empty = next((param.name for param in model.owners if param.numel == 0), None)
    for param in model.params:
        owner = first_empty if param.numel == 0 and topology.stage < 3 else param.alias_of or param.name
        if owner is not None and owner != param.name and not param.untold:
            result[param.name] = owner
    return result


def _own_tensor(param: Param, state: State, topology: Topology) -> torch.Tensor:
    """Return the value of a rank's parameter."""
    if topology.stage == 3:
        return torch.empty(0, dtype=topology.dtype)
    held = [state.atoms[name]["fp32"] for name in param.atoms]
    whole = torch.stack(held) if param.parts and held[0].shape != param.shape else held[0]
    return whole.to(topology.dtype, copy=True)


def _views(layout: GroupLayout, state: State, topology: Topology) -> dict[str, torch.Tensor]:
    names = list_atoms(layout.params)
    whole = Flat(layout.group, names, layout.numel, 0, layout.slices)
    flat = fill(whole, {name: state.atoms[name]["fp32"] for name in names}).to(topology.dtype)
    return {
        param.name: flat.narrow(0, offset, param.numel).view(param.shape)
        for param, offset in zip(layout.params, layout.offsets, strict=True)
    }


def _partition(param: Param, state: State, topology: Topology, run: Run, rank: int) -> torch.Tensor:
    part = stage3_slice(param, topology.dp, rank)
    flat = Flat(0, (param.name,), partition_numel(param, topology.dp), 0, (part,))
    return fill(flat, {param.name: state.atoms[param.name]["fp32"]}, run.garbage).to(topology.dtype)


def _metadata(tensors: OrderedDict[str, torch.Tensor]) -> OrderedDict[str, Any]:
    modules = dict.fromkeys([""])
    for name in tensors:
        path = name.split(".")[:-1]
        modules.update(dict.fromkeys(".".join(path[: depth + 1]) for depth in range(len(path))))
    return OrderedDict((module, {"version": 1}) for module in modules)
