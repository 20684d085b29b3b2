"""Engines of a GPT without tensor parallelism, and what a rank does to save and to load."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import deepspeed
import torch
import torch.distributed as dist
from cold import make_cold
from fingerprint import Part, count_up, sum_parts
from meters import Io, peak_resident_bytes, release_free_memory, reset_peak, resident_bytes
from torch import nn

import deepspeed_ucp
import deepspeed_ucp.load.resume  # a load is measured without its imports


@dataclass(frozen=True)
class Made:
    """An engine on one rank.

    Attributes:
        step: trains one step.
        save: saves to a folder.
        list_parts: returns this rank's part of the fingerprint.
        parameters: number of the model's parameters.
    """

    engine: Any
    step: Callable[[], object]
    save: Callable[[str], object]
    list_parts: Callable[[], list[Part]]
    parameters: int


class Topology(Protocol):
    """Ranks, ZeRO stage and parallelism of an engine."""

    @property
    def ranks(self) -> int: ...

    def make(self, params_m: float, *, trains: bool) -> Made:
        """Make an engine; without `trains` all weights are 0.5, a value that no checkpoint has."""
        ...


@dataclass(frozen=True)
class Engine:
    """A data-parallel topology: ranks, ZeRO stage, `checkpoint` section of the ds_config, and bf16 or fp32."""

    ranks: int
    stage: int
    checkpoint: dict[str, Any] = field(default_factory=dict)
    precision: str = "bf16"

    def make(self, params_m: float, *, trains: bool) -> Made:
        model = build_model(params_m, torch.bfloat16 if self.precision == "bf16" else torch.float32)
        if trains:
            torch.manual_seed(1)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.normal_(std=0.02)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        config = make_config(self.stage, self.checkpoint, self.precision)
        engine, *_ = deepspeed.initialize(model=model, model_parameters=group_parameters(model), config=config)

        def step() -> None:
            engine.backward(engine(torch.tensor(1e-2)))
            engine.step()

        return Made(engine, step, engine.save_checkpoint, lambda: list_parts(engine), parameters)


def make_config(stage: int, checkpoint: dict[str, Any], precision: str = "bf16") -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "steps_per_print": 1 << 30,
        "bf16": {"enabled": precision == "bf16"},
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.1, "torch_adam": True}},
        "checkpoint": checkpoint,
    }


class GPTShapes(nn.Module):
    """The parameters of a GPT; the forward pass is a sum of products over each of them.

    Every parameter gets a dense gradient at almost no cost, which is all that a checkpoint needs.
    """

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.wte = nn.Embedding(1024, width)
        self.wpe = nn.Embedding(1024, width)
        self.h = nn.ModuleList(_make_block(width) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)

    def forward(self, scale: torch.Tensor) -> torch.Tensor:
        return scale * torch.stack([p.flatten() @ p.flatten() for p in self.parameters()]).float().sum()


def _make_block(width: int) -> nn.ModuleDict:
    return nn.ModuleDict(
        {
            "ln_1": nn.LayerNorm(width),
            "qkv": nn.Linear(width, 3 * width),
            "projection": nn.Linear(width, width),
            "ln_2": nn.LayerNorm(width),
            "expand": nn.Linear(width, 4 * width),
            "contract": nn.Linear(4 * width, width),
        }
    )


def build_model(params_m: float, dtype: torch.dtype) -> GPTShapes:
    """Build a model of about `params_m` million parameters, all 0.5."""
    width = 1024 if params_m >= 50 else 256
    layers = max(1, round((params_m * 1e6 - 2048 * width) / (12 * width**2)))
    with torch.device("meta"):
        model = GPTShapes(width, layers)
    model = model.to(dtype).to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    return model


def group_parameters(model: nn.Module) -> list[dict[str, Any]]:
    """Make two param groups: matrices with weight decay, vectors without."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]


def list_parts(engine: Any) -> list[Part]:
    """List this rank's parts of the parameters in the optimizer."""
    sums, named = sum_parts(engine, count_up), engine.module.named_parameters()
    return [Part(name, 0, 0, sums[id(parameter)]) for name, parameter in named if id(parameter) in sums]


def save(topology: Topology, params_m: float, folder: Path) -> dict[str, Any]:
    """Train one step from random weights and save (collective). Returns the number of parameters and the parts."""
    deepspeed_ucp.uninstall()
    made = topology.make(params_m, trains=True)
    made.step()
    made.save(str(folder))
    return {"parameters": made.parameters, "parts": made.list_parts()}


def load(topology: Topology, params_m: float, folder: Path, tag: str, *, with_plugin: bool) -> dict[str, Any]:
    """Load into an untrained engine with an empty page cache (collective). Returns measurements and the parts.

    `extra_bytes` is the growth of the peak of resident memory beyond the optimizer states that the load creates.
    """
    (deepspeed_ucp.install if with_plugin else deepspeed_ucp.uninstall)()
    made = topology.make(params_m, trains=False)
    if dist.get_rank() == 0:
        make_cold(folder)
    release_free_memory()
    dist.barrier()
    resident, states = resident_bytes(), _count_optimizer_bytes(made.engine)
    reset_peak()
    io, start = Io.now(), time.perf_counter()
    path, _ = made.engine.load_checkpoint(str(folder), tag=tag)
    seconds, io, peak = time.perf_counter() - start, Io.now() - io, peak_resident_bytes()
    if path is None:
        raise RuntimeError(f"nothing was loaded from {folder}/{tag}")
    release_free_memory()
    kept = resident_bytes() - resident - (_count_optimizer_bytes(made.engine) - states)
    extra = max(0, peak - resident_bytes()) + max(0, kept)
    report = getattr(made.engine, "ucp_report", None) if with_plugin else None
    return {
        "seconds": seconds,
        "storage_bytes": io.storage,
        "extra_bytes": extra,
        "direct": bool(report and report.direct),
        "parts": made.list_parts(),
    }


def _count_optimizer_bytes(engine: Any) -> int:
    states = engine.optimizer.optimizer.state.values()
    storages = [value.untyped_storage() for state in states for value in state.values() if torch.is_tensor(value)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
