"""The optimizer part of the files: one rank's `optimizer_state_dict` of each of DeepSpeed's wrappers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from deepspeed.git_version_info import version
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils import fragment_address

from deepspeed_ucp.model.wrappers import Form

from .description import Model, Run, State, Topology, find_seat
from .layout import Flat, GroupLayout, clip, group_layouts, recorded_offsets, trained


def optimizer_state(
    model: Model, state: State, topology: Topology, run: Run, flats: Sequence[Flat], rank: int
) -> dict[str, Any]:
    """Return the wrapper's `state_dict()` on one rank with the buffers `flats`."""
    if not topology.row.has_copies:
        return _torch_state_dict(model, state, flats, shaped=True)
    if not topology.row.is_cut:
        return _fp16_state(model, state, topology, run, flats)
    if topology.row.form is Form.RESERVED:
        return _stage3_state(model, state, topology, run, flats, rank)
    write = _stage12_state if topology.row.strips_padding else _bf16_state
    return write(model, state, topology, run, flats, rank)


def loss_scaler(topology: Topology, run: Run) -> Any:
    """Return the run's scaler; default: one without overflow since the start."""
    if run.loss_scaler is not None:
        return run.loss_scaler
    if topology.precision != "fp16":
        return LossScaler(scale=1.0)
    scaler = DynamicLossScaler(2**16, scale_window=1000, min_scale=1, delayed_shift=2, consecutive_hysteresis=False)
    scaler.cur_iter = run.global_steps
    return scaler


def fill(flat: Flat, sources: Mapping[str, torch.Tensor], padding: float = 0.0) -> torch.Tensor:
    """Fill a flat buffer from the parameters' tensors in `sources`, with zeros for missing parameters."""
    dtype = next(iter(sources.values())).dtype if sources else torch.float32
    out = torch.full((flat.numel,), padding, dtype=dtype)
    for part in flat.slices:
        source = sources.get(part.name)
        here = out[part.offset : part.offset + part.numel]
        here.copy_(source.reshape(-1)[part.start : part.start + part.numel]) if source is not None else here.zero_()
    return out


def _stage12_state(
    model: Model, state: State, topology: Topology, run: Run, flats: Sequence[Flat], rank: int
) -> dict[str, Any]:
    """`DeepSpeedZeroOptimizer.state_dict`: BF16_Optimizer's keys and more, with masters without padding."""
    result = {**_bf16_state(model, state, topology, run, flats, rank), **_scaling(topology, run)}
    result[topology.row.keys[0]] = [_lean(_master(flat, state), flat) for flat in flats]
    result["zero_stage"] = ZeroStageEnum(topology.stage)
    result["param_alignment_paddings"] = [list(group.paddings) for group in group_layouts(model, topology)]
    if topology.keeps_lean_states:
        result[topology.row.inner] = _lean_states(state, flats)
        if "step" in state.groups[0]:
            result["base_optimizer_state_step"] = state.groups[0]["step"]
    return result


def _bf16_state(
    model: Model, state: State, topology: Topology, run: Run, flats: Sequence[Flat], rank: int
) -> dict[str, Any]:
    """`BF16_Optimizer.state_dict`."""
    groups = group_layouts(model, topology)
    return {
        "clip_grad": run.clip_grad,
        topology.row.inner: _torch_state_dict(model, state, flats),
        topology.row.keys[0]: [_master(flat, state) for flat in flats],
        "group_paddings": [flat.padding for flat in flats],
        "partition_count": [group.parts for group in groups],
        "ds_version": version,
        "param_slice_mappings": [
            _slice_mapping(model, group, *model.seat(group.group, topology, rank)) for group in groups
        ],
    }


def _stage3_state(
    model: Model, state: State, topology: Topology, run: Run, flats: Sequence[Flat], rank: int
) -> dict[str, Any]:
    """`DeepSpeedZeroOptimizer_Stage3._rigid_state_dict`."""
    parted = [
        _partition_group(model, flat, topology, number, rank)
        for number, flat in enumerate(flats if model.spread else ())
    ]
    return {
        "zero_stage": ZeroStageEnum.weights,
        **_scaling(topology, run),
        "partition_count": topology.dp,
        **({"ds_zero_partition_groups": parted} if parted else {}),
        topology.row.inner: _torch_state_dict(model, state, flats, padding=run.garbage),
        topology.row.keys[0]: [_master(flat, state, run.garbage) for flat in flats],
    }


def _partition_group(model: Model, flat: Flat, topology: Topology, number: int, rank: int) -> dict[str, Any]:
    """`_zero3_partition_group_metadata`: the ranks of a sub-group."""
    spread = model.spread[flat.group]
    return {
        "sub_group": number,
        "partition_count": len(spread.ranks),
        "partition_rank": spread.ranks.index(find_seat(model, topology, rank)),
        "partition_ranks": list(spread.ranks),
        "families": ["replicated" if spread.degree is None else "autoep_expert"],
        "group_names": ["replicated" if spread.degree is None else f"ep_size_{spread.degree}"],
    }


def _fp16_state(model: Model, state: State, topology: Topology, run: Run, flats: Sequence[Flat]) -> dict[str, Any]:
    """`FP16_Optimizer.state_dict` (one flat per group) and `FP16_UnfusedOptimizer.state_dict` (nested lists)."""
    (key,) = topology.row.keys
    if topology.row.is_flat:
        scaling = _fp16_scaling(topology, run) if topology.precision == "fp16" else {}
        base = _torch_state_dict(model, state, flats)
        masters = [_master(flat, state) for flat in flats]
        return {**scaling, topology.row.inner: base, key: masters, "clip_grad": run.clip_grad}
    base = _torch_state_dict(model, state, flats, shaped=True)
    shaped = [_master(flat, state).detach().view(flat.own[0].shape).requires_grad_() for flat in flats]
    nested = [
        [master for flat, master in zip(flats, shaped, strict=True) if flat.group == index]
        for index in range(len(model.groups))
    ]
    return {**_fp16_scaling(topology, run), topology.row.inner: base, key: nested}


def _fp16_scaling(topology: Topology, run: Run) -> dict[str, Any]:
    scaler = loss_scaler(topology, run)
    result = {"dynamic_loss_scale": scaler.dynamic, "cur_scale": scaler.cur_scale}
    result["cur_iter"] = getattr(scaler, "cur_iter", run.global_steps)
    dynamic = ("last_overflow_iter", "scale_factor", "scale_window") if scaler.dynamic else ()
    return {**result, **{key: getattr(scaler, key) for key in dynamic}}


def _torch_state_dict(
    model: Model, state: State, flats: Sequence[Flat], *, shaped: bool = False, padding: float = 0.0
) -> dict[str, Any]:
    """Torch's `Optimizer.state_dict()` with the parameters `flats`; `shaped` states have the parameter's shape."""
    states = {index: _flat_state(flat, state, shaped, padding) for index, flat in enumerate(flats)}
    members = [[index for index, flat in enumerate(flats) if flat.group == group] for group in range(len(model.groups))]
    return {
        "state": {index: entry for index, entry in states.items() if entry},
        "param_groups": [{**hyper, "params": params} for hyper, params in zip(state.groups, members, strict=True)],
    }


def _flat_state(flat: Flat, state: State, shaped: bool, padding: float) -> dict[str, Any]:
    keys = dict.fromkeys(key for name in flat.names for key in state.atoms[name] if key != "fp32")
    scalars = next((state.scalars[name] for name in flat.names if state.scalars.get(name)), {})
    entry = {key: value.clone() if torch.is_tensor(value) else value for key, value in scalars.items()}
    for key in keys:
        sources = {name: state.atoms[name][key] for name in flat.names if key in state.atoms[name]}
        tensor = fill(flat, sources, padding)
        entry[key] = tensor.view(flat.own[0].shape) if shaped else tensor
    return entry


def _lean_states(state: State, flats: Sequence[Flat]) -> list[dict[str, Any]]:
    entries = [_flat_state(flat, state, False, 0.0) for flat in flats]
    return [
        {key: _lean(value, flat) if torch.is_tensor(value) and value.dim() else value for key, value in entry.items()}
        for entry, flat in zip(entries, flats, strict=True)
    ]


def _master(flat: Flat, state: State, padding: float = 0.0) -> torch.Tensor:
    return fill(flat, {name: state.atoms[name]["fp32"] for name in flat.names}, padding).requires_grad_()


def _lean(tensor: torch.Tensor, flat: Flat) -> torch.Tensor:
    """Return the tensor without padding, as a view of the padded storage, which torch.save writes."""
    return tensor[: flat.numel - flat.padding]


def _scaling(topology: Topology, run: Run) -> dict[str, Any]:
    scaler = loss_scaler(topology, run)
    return {"loss_scaler": scaler, "dynamic_loss_scale": scaler.dynamic, "overflow": False}


def _slice_mapping(model: Model, group: GroupLayout, part: int, parts: int) -> OrderedDict[str, fragment_address]:
    params = trained(model.groups[group.group])
    size = group.numel // parts
    slices = {whole.name: whole for whole in group.own}
    result = OrderedDict()
    for param, offset in zip(params, recorded_offsets(group, params), strict=True):
        whole = slices[param.name]
        piece = clip(replace(whole, offset=offset), part * size, (part + 1) * size)
        if piece:
            result[param.name] = fragment_address(numel=piece.numel, start=piece.offset)
    return result
