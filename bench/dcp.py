"""FSDP2 over the GPT-shaped list of parameters, saved and loaded by torch.distributed.checkpoint, and by DeepSpeed."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import engines
import torch
import torch.distributed as dist
from engines import Engine, build_model, group_parameters, initialise
from fingerprint import STATES, Part, sum_range
from meters import Io, peak_resident_bytes, reset_peak, resident_bytes
from ranks import Body, Peer, release_free_memory
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

import deepspeed_ucp

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

TAG, OWN_TAG = "global_step1", "global_step1_zero3"
"""Of what FSDP2 saves, and of what a DeepSpeed engine that has loaded it saves."""

OURS = {"universal": True}


@dataclass(frozen=True)
class Shards:
    """Over how many ranks FSDP2 cuts every parameter."""

    ranks: int


@dataclass(frozen=True)
class Resume:
    """An engine that loads one of the two tags."""

    engine: Engine
    tag: str

    @property
    def ranks(self) -> int:
        return self.engine.ranks


def _build(world: int, params_m: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    dist.init_process_group("gloo")
    model = build_model(params_m, torch.float32)
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    return model, torch.optim.AdamW(group_parameters(model), lr=1e-3)


def save_body(topology: Shards, params_m: float, folder: Path) -> Body:
    """Take one step from random weights and save; each rank returns its part of the fingerprint.

    Then a ZeRO-3 engine on the same ranks saves the same state: it has loaded it, and a load of either has to give it.
    """

    def body(peer: Peer) -> dict[str, Any]:
        model, optimizer = _build(topology.ranks, params_m)
        torch.manual_seed(1 + peer.rank)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.to_local().normal_(std=0.02)  # type: ignore[attr-defined]
                parameter.grad = parameter * 1e-2
        peer.ready()
        optimizer.step()
        weights, states = get_state_dict(model, optimizer)
        checkpoint.save({"model": weights, "optim": states}, checkpoint_id=folder / TAG)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        saved = {"fingerprint": list_parts(model, optimizer), "parameters": parameters}
        del model, optimizer, weights, states
        _save_own(topology.ranks, params_m, folder)
        return saved

    return body


def _save_own(ranks: int, params_m: float, folder: Path) -> None:
    deepspeed_ucp.install()
    topology = Engine(ranks, 3, OURS)
    engine = initialise(topology, build_model(params_m, topology.dtype))
    engine.load_checkpoint(str(folder), tag=TAG)
    engine.save_checkpoint(str(folder), tag=OWN_TAG)


def load_body(topology: Shards | Resume, params_m: float, folder: Path, tag: str, with_plugin: bool) -> Body:
    """Load into a model and an optimizer that has never taken a step; each rank returns its measurements."""
    if isinstance(topology, Resume):
        return engines.load_body(topology.engine, params_m, folder, topology.tag, with_plugin)

    def body(peer: Peer) -> dict[str, Any]:
        model, optimizer = _build(topology.ranks, params_m)
        release_free_memory()
        peer.ready()
        reset_peak()
        held, io, began = resident_bytes(), Io.now(), time.perf_counter()
        phases = _load(model, optimizer, folder / tag)
        seconds, io, peak = time.perf_counter() - began, Io.now() - io, peak_resident_bytes()
        release_free_memory()
        after = resident_bytes()
        grown = sum(state[name].to_local().nbytes for state in optimizer.state.values() for name in STATES[1:])
        measured = {"seconds": seconds, "io": io, "phases": phases, "extra": max(0, peak - after)}
        dist.barrier()
        return measured | {"kept": after - held - grown, "fingerprint": list_parts(model, optimizer)}

    return body


def _load(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> dict[str, float]:
    """As torch's documentation has it; seconds by step."""
    times = [time.perf_counter()]
    weights, states = get_state_dict(model, optimizer)
    times.append(time.perf_counter())
    checkpoint.load({"model": weights, "optim": states}, checkpoint_id=folder)
    times.append(time.perf_counter())
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
    times.append(time.perf_counter())
    steps = ("get_state_dict", "load", "set_state_dict")
    return {step: end - begin for step, (begin, end) in zip(steps, pairwise(times), strict=True)}


def list_parts(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Part]:
    """What this rank holds of each parameter: rows that follow each other."""
    parts = []
    for name, parameter in model.named_parameters():
        _, offset = compute_local_shape_and_global_offset(
            parameter.shape,
            parameter.device_mesh,
            parameter.placements,  # type: ignore[attr-defined]
        )
        start = offset[0] * (parameter.numel() // parameter.shape[0])
        held = {"fp32": parameter, **{state: optimizer.state[parameter][state] for state in STATES[1:]}}
        sums = {state: sum_range(value.to_local(), start) for state, value in held.items()}
        parts.append(Part(name, 0, 0, 0, sums))
    return parts
