"""The inverse of the writer: a checkpoint's files back into the logical state (only for tests: it trusts the files)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .description import Model, State, Topology
from .files import model_file, optim_file
from .layout import Flat, partition_layout, stage3_slice

if TYPE_CHECKING:
    from collections.abc import Mapping


def read_state(folder: Path | str, model: Model, topology: Topology) -> State:
    """The atoms, scalars and hyper-parameters of the checkpoint in `folder` (a tag's folder), fp32 masters."""
    path = Path(folder)
    modules = [_load(path / model_file(topology, rank)) for rank in range(topology.dp if topology.stage == 3 else 1)]
    optimizers = (
        [modules[0]["optimizer"]]
        if topology.stage == 0
        else [_load(path / optim_file(topology, rank))["optimizer_state_dict"] for rank in range(topology.dp)]
    )
    atoms = {param.name: {"fp32": torch.zeros(param.shape)} for param in model.owners}
    scalars: dict[str, dict[str, Any]] = {}
    for flats, optimizer in zip(partition_layout(model, topology), optimizers, strict=True):
        for index, flat in enumerate(flats):
            _take(atoms, scalars, flat, _buffers(optimizer, topology, index))
    _take_untrained(atoms, model, topology, modules)
    return State(atoms, scalars, _hyper_parameters(optimizers[0], topology))


def _load(path: Path) -> dict[str, Any]:
    return torch.load(path, weights_only=False)


def _buffers(optimizer: Mapping[str, Any], topology: Topology, index: int) -> Mapping[str, Any]:
    """One flat's tensors and scalars by state name."""
    masters = _masters(optimizer, topology)
    base = _base(optimizer, topology)
    entry = base[index] if topology.keeps_lean_states else base["state"].get(index, {})
    return entry if masters is None else {"fp32": masters[index].detach(), **entry}


def _masters(optimizer: Mapping[str, Any], topology: Topology) -> list[torch.Tensor] | None:
    if topology.kind == "raw":
        return None
    if topology.kind == "unfused":
        return [tensor for group in optimizer["fp32_groups"] for tensor in group]
    if topology.kind == "fused":
        return optimizer["fp32_groups_flat"]
    return optimizer["fp32_flat_groups" if topology.stage == 3 else "single_partition_of_fp32_groups"]


def _base(optimizer: Mapping[str, Any], topology: Topology) -> Any:
    """Torch's own state_dict, or the list that an elastic checkpoint keeps."""
    if topology.kind == "raw":
        return optimizer
    stage12 = topology.kind in ("zero", "bf16") and topology.stage < 3
    return optimizer["base_optimizer_state" if stage12 else "optimizer_state_dict"]


def _take(
    atoms: dict[str, dict[str, torch.Tensor]],
    scalars: dict[str, dict[str, Any]],
    flat: Flat,
    buffers: Mapping[str, Any],
) -> None:
    states = {key: value for key, value in buffers.items() if _is_state(key, value)}
    for name in flat.names:
        scalars.setdefault(name, {}).update((key, buffers[key]) for key in buffers.keys() - states.keys())
        for key, tensor in states.items():
            atoms[name].setdefault(key, torch.zeros(atoms[name]["fp32"].shape, dtype=tensor.dtype))
    for part in flat.slices:
        for key, tensor in states.items():
            source = tensor.reshape(-1)[part.offset : part.offset + part.numel]
            atoms[part.name][key].view(-1)[part.start : part.start + part.numel] = source


def _is_state(key: str, value: Any) -> bool:
    """At stage 0 the states of a 0-dimensional parameter have no dimension either, like the step."""
    return torch.is_tensor(value) and (value.dim() > 0 or key != "step")


def _take_untrained(
    atoms: dict[str, dict[str, torch.Tensor]], model: Model, topology: Topology, modules: list[dict[str, Any]]
) -> None:
    """Parameters that no master holds: the module's own, or the ranks' fragments under ZeRO 3."""
    for param in model.owners:
        if topology.stage < 3 and (topology.kind == "raw" or not param.trains or param.group is None):
            atoms[param.name]["fp32"] = modules[0]["module"][param.name].float()
        if topology.stage == 3 and not param.trains:
            for rank, content in enumerate(modules):
                part = stage3_slice(param, topology.dp, rank)
                fragment = content["frozen_param_fragments"][param.name][: part.numel]
                atoms[param.name]["fp32"].view(-1)[part.start : part.start + part.numel] = fragment.float()


def _hyper_parameters(optimizer: Mapping[str, Any], topology: Topology) -> tuple[dict[str, Any], ...]:
    if topology.keeps_lean_states:  # an elastic checkpoint does not keep them
        return ()
    groups = _base(optimizer, topology)["param_groups"]
    return tuple({key: value for key, value in group.items() if key != "params"} for group in groups)
