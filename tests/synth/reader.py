"""Reads the logical state from a checkpoint's files; inverse of the writer. It trusts the files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from deepspeed_ucp.model.wrappers import Form

from .description import Model, State, Topology, find_seat
from .expertfiles import expert_optim_file
from .experts import expert_rank, held_layers, is_writer, largest_degree
from .files import layer_file, model_file, optim_file
from .layout import Flat, partition_layout, stage3_slice
from .stages import layer_prefix, placement_of


def read_state(folder: Path | str, model: Model, topology: Topology) -> State:
    """Read the atoms, scalars and hyper-parameters of a tag's folder with one model-parallel rank."""
    return read_locals(folder, {0: model}, topology)[0]


def read_locals(folder: Path | str, models: Mapping[int, Model], topology: Topology) -> dict[int, State]:
    """Read {mp_rank: State} for the models of `local_models`.

    A weight that is in no file (untrained or at stage 0 in fp32, in a layer without a file) has no "fp32".
    """
    return {mp: _read_rank(Path(folder), models, topology, mp) for mp in models}


def _read_rank(path: Path, models: Mapping[int, Model], topology: Topology, mp: int) -> State:
    model = models[mp]
    contents = [
        _load(path / model_file(topology, rank, mp)) for rank in range(topology.dp if topology.stage == 3 else 1)
    ]
    optimizers = _read_optimizers(path, model, topology, contents, mp)
    atoms = {param.name: {"fp32": torch.zeros(param.shape)} for param in model.owners}
    scalars: dict[str, dict[str, Any]] = {}
    layout = partition_layout(model, topology)
    for rank, optimizer in optimizers.items():
        for index, flat in enumerate(layout[rank]):
            _take(atoms, scalars, flat, _buffers(optimizer, topology, index))
    if topology.folds_experts and model.experts:
        _take_folded(path, models, topology, mp, (atoms, scalars))
    if topology.stage == 3:
        _take_fragments(atoms, model, topology, contents)
    else:
        module = _read_module(path, model, topology, contents[0], mp)
        lane = f"{mp:02d}" if topology.cut_experts else "*"
        for file in path.glob(f"layer_*_expert_*_mp_rank_{lane}_model_states.pt"):
            module |= _load(file)
        _take_module(atoms, model, topology, module)
    return State(atoms, scalars, _hyper_parameters(optimizers[0], topology)[: len(model.groups)])


def _read_optimizers(
    path: Path, model: Model, topology: Topology, contents: list[dict[str, Any]], mp: int
) -> dict[int, dict[str, Any]]:
    if topology.partitions:
        files = {rank: path / optim_file(topology, rank, mp) for rank in range(topology.dp)}
        return {rank: _load(file)["optimizer_state_dict"] for rank, file in files.items()}
    if not model.experts:
        return {0: contents[0]["optimizer"]}
    degree, layer = largest_degree(model, topology), held_layers(model)[0]
    writers = [rank for rank in range(topology.dp) if is_writer(model, topology, layer, degree, rank)]
    places = {rank: expert_rank(topology, degree, find_seat(model, topology, rank)) for rank in writers}
    return {rank: _load(path / expert_optim_file(place, mp))["optimizer"] for rank, place in places.items()}


def _take_folded(
    path: Path,
    models: Mapping[int, Model],
    topology: Topology,
    mp: int,
    found: tuple[dict[str, dict[str, torch.Tensor]], dict[str, dict[str, Any]]],
) -> None:
    """Add the experts of the stage's other lanes."""
    first = mp // topology.tp * topology.tp
    for lane in {*range(first, first + topology.tp)} - {mp}:
        layout = partition_layout(models[lane], topology)
        for rank, optimizer in _read_optimizers(path, models[lane], topology, [], lane).items():
            for index, flat in enumerate(layout[rank]):
                if any(param.parts for param in flat.own):
                    _take(*found, flat, _buffers(optimizer, topology, index))


def _read_module(
    path: Path, model: Model, topology: Topology, content: Mapping[str, Any], mp: int
) -> dict[str, torch.Tensor]:
    """Read the module's tensors by full name; a pipeline's rank has them in layer files."""
    if not model.layers or model.experts:
        return dict(content["module"])
    pp, tp = divmod(mp, topology.tp)
    result: dict[str, torch.Tensor] = {}
    for layer in (layer for layer in placement_of(model, topology)[pp] if model.layers[layer].file):
        held, prefix = _load(path / layer_file(topology, layer, tp)), layer_prefix(model, layer)
        result |= {f"{prefix}{name}": tensor for name, tensor in held.items()}
    return result


def _load(path: Path) -> dict[str, Any]:
    return torch.load(path, weights_only=False)


def _buffers(optimizer: Mapping[str, Any], topology: Topology, index: int) -> Mapping[str, Any]:
    base, row = _base(optimizer, topology), topology.row
    entry = base[index] if topology.keeps_lean_states else base["state"].get(index, {})
    if not row.has_copies:
        return entry
    held = optimizer[row.keys[0]]
    masters = [tensor for group in held for tensor in group] if row.form is Form.SINGLE else held
    return {"fp32": masters[index].detach(), **entry}


def _base(optimizer: Mapping[str, Any], topology: Topology) -> Any:
    """Return torch's state_dict, or the list of states of an elastic checkpoint."""
    return optimizer[topology.row.inner] if topology.row.inner else optimizer


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
    """Return True for states; at stage 0 states of a 0-dimensional parameter are 0-dimensional, like the step."""
    return torch.is_tensor(value) and (value.dim() > 0 or key != "step")


def _take_module(
    atoms: dict[str, dict[str, torch.Tensor]], model: Model, topology: Topology, module: Mapping[str, torch.Tensor]
) -> None:
    for param in model.owners:
        if not topology.row.has_copies or not param.trains or param.group is None:
            del atoms[param.name]["fp32"]
            if param.name in module:
                atoms[param.name]["fp32"] = module[param.name].float()


def _take_fragments(
    atoms: dict[str, dict[str, torch.Tensor]], model: Model, topology: Topology, contents: list[dict[str, Any]]
) -> None:
    """Join the ranks' fragments of frozen parameters under ZeRO 3."""
    for param in (param for param in model.owners if not param.trains):
        for rank, content in enumerate(contents):
            part = stage3_slice(param, topology.dp, rank)
            fragment = content["frozen_param_fragments"][param.name][: part.numel]
            atoms[param.name]["fp32"].view(-1)[part.start : part.start + part.numel] = fragment.float()


def _hyper_parameters(optimizer: Mapping[str, Any], topology: Topology) -> tuple[dict[str, Any], ...]:
    if topology.keeps_lean_states:  # an elastic checkpoint has no hyper-parameters
        return ()
    groups = _base(optimizer, topology)["param_groups"]
    return tuple({key: value for key, value in group.items() if key != "params"} for group in groups)
