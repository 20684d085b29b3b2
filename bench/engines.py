"""Real engines over a GPT-shaped list of parameters: one that trains a step and saves, and the loads to be measured.

Ranks are forked from a parent that has imported everything and put the plugin's hook off; those that measure the plugin
put it on again.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import deepspeed
import torch
import torch.distributed as dist
from fingerprint import STATES, Part, hold_whole, sum_parts
from meters import Io, peak_resident_bytes, reset_peak, resident_bytes
from ranks import Body, Peer, release_free_memory
from torch import nn

import deepspeed_ucp

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


class Topology(Protocol):
    """Ranks, ZeRO stage and parallelism of an engine."""

    @property
    def ranks(self) -> int: ...

    def make(self, params_m: float, *, trains: bool) -> Made: ...


@dataclass(frozen=True)
class Made:
    """An engine that is ready.

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


@dataclass(frozen=True)
class Engine:
    """A topology to run in: ranks, ZeRO stage, the `checkpoint` section of the configuration, bf16 or fp32."""

    ranks: int
    stage: int
    checkpoint: dict[str, Any] = field(default_factory=dict)
    precision: str = "bf16"

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.precision == "bf16" else torch.float32

    def config(self) -> dict[str, Any]:
        return {
            "train_micro_batch_size_per_gpu": 1,
            "steps_per_print": 1 << 30,
            "bf16": {"enabled": self.precision == "bf16"},
            "zero_optimization": {"stage": self.stage},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
            "checkpoint": self.checkpoint,
        }

    def build(self, params_m: float) -> nn.Module:
        return build_model(params_m, self.dtype)

    def draw(self, model: nn.Module) -> None:
        """Draw random weights, the same on all ranks."""
        torch.manual_seed(1)
        for parameter in model.parameters():
            parameter.normal_(std=0.02)

    def group(self, model: nn.Module) -> list[dict[str, Any]]:
        return group_parameters(model)

    def count(self, model: nn.Module) -> int:
        return sum(p.numel() for p in model.parameters())

    def rename(self, name: str) -> str:
        """Return a parameter's name in the whole model."""
        return name

    def make(self, params_m: float, *, trains: bool) -> Made:
        """Make an engine; without ``trains`` all weights have a value that no load writes."""
        model = self.build(params_m)
        if trains:
            with torch.no_grad():
                self.draw(model)
        engine = initialise(self, model)

        def step() -> None:
            engine.backward(engine(torch.tensor(1e-2)))
            engine.step()

        return Made(engine, step, engine.save_checkpoint, lambda: list_parts(engine, self.rename), self.count(model))


class GPTShapes(nn.Module):
    """The parameters of a GPT of the given sizes; the forward is a sum of products over each of them.

    That gives every parameter a dense gradient of its own at almost no cost, which is all that a checkpoint needs.
    """

    def __init__(self, width: int, layers: int, make_block: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.wte = nn.Embedding(1024, width)
        self.wpe = nn.Embedding(1024, width)
        self.h = nn.ModuleList(make_block(width) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)

    def forward(self, scale: torch.Tensor) -> torch.Tensor:
        return scale * torch.stack([p.flatten() @ p.flatten() for p in self.parameters()]).float().sum()


def _block(width: int) -> nn.ModuleDict:
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


def build_model(params_m: float, dtype: torch.dtype = torch.bfloat16) -> GPTShapes:
    """A model of about `params_m` million parameters, all 0.5: what a load does not write stays visible."""
    width = 1024 if params_m >= 50 else 256
    layers = max(1, round((params_m * 1e6 - 2048 * width) / (12 * width**2)))
    with torch.device("meta"):
        model = GPTShapes(width, layers, _block)
    model = model.to(dtype).to_empty(device="cpu")
    fill_parameters(model)
    return model


def fill_parameters(model: nn.Module) -> None:
    """Give every parameter the value that no load writes."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)


def initialise(topology: Engine, model: nn.Module) -> Any:
    """An engine with two param groups, in a launch that has its process group or its environment."""
    deepspeed.init_distributed("gloo")
    engine, *_ = deepspeed.initialize(model=model, model_parameters=topology.group(model), config=topology.config())
    return engine


def group_parameters(model: nn.Module) -> list[dict[str, Any]]:
    """Two param groups."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]


def save_body(topology: Topology, params_m: float, folder: Path) -> Body:
    """Train one step from random weights and save; each rank returns its part of the fingerprint."""

    def body(peer: Peer) -> dict[str, Any]:
        made = topology.make(params_m, trains=True)
        peer.ready()
        made.step()
        made.save(str(folder))
        return {"fingerprint": made.list_parts(), "parameters": made.parameters}

    return body


def load_body(topology: Topology, params_m: float, folder: Path | str, tag: str, with_plugin: bool) -> Body:
    """Load into an engine that is ready and has never trained; each rank returns its measurements."""

    def body(peer: Peer) -> dict[str, Any]:
        deepspeed.init_distributed("gloo")
        if with_plugin:
            deepspeed_ucp.install()
        made = topology.make(params_m, trains=False)
        release_free_memory()
        peer.ready()
        measured = measure_load(made.engine, folder, tag, with_plugin=with_plugin)
        measured["fingerprint"] = made.list_parts()
        dist.barrier()
        return measured

    return body


def measure_load(engine: Any, folder: Path | str, tag: str, *, with_plugin: bool) -> dict[str, Any]:
    """Measure time, bytes read and memory of one load.

    `kept` is the growth of resident memory without the optimizer state that the load creates;
    `extra` is the peak of resident memory above its final size; both in bytes.
    """
    state_before = _optimizer_bytes(engine)
    held_before = resident_bytes()
    reset_peak()
    io, began = Io.now(), time.perf_counter()
    path, _ = engine.load_checkpoint(str(folder), tag=tag)
    seconds, io = time.perf_counter() - began, Io.now() - io
    peak = peak_resident_bytes()
    if path is None:
        raise RuntimeError(f"nothing was loaded from {folder}/{tag}")
    release_free_memory()
    held = resident_bytes()
    grown = _optimizer_bytes(engine) - state_before
    measured = {"seconds": seconds, "io": io, "extra": max(0, peak - held), "kept": held - held_before - grown}
    return measured | _ask_plugin(engine) if with_plugin else measured


def _ask_plugin(engine: Any) -> dict[str, Any]:
    """What the plugin reports of the load that it has done, or left to DeepSpeed."""
    report = engine.ucp_report
    return {"phases": dict(report.phases), "direct": report.direct, "reason": report.reason}


def _optimizer_bytes(engine: Any) -> int:
    storages = {s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in _optimizer_tensors(engine))}
    return sum(storages.values())


def _optimizer_tensors(engine: Any) -> Iterator[torch.Tensor]:
    for state in engine.optimizer.optimizer.state.values():
        yield from (value for value in state.values() if torch.is_tensor(value))


def list_parts(engine: Any, rename: Callable[[str], str]) -> list[Part]:
    """List this rank's share of each parameter that the optimizer has."""
    sums = sum_parts(engine, hold_whole)
    named = engine.module.named_parameters()
    mirror = dist.get_rank() if engine.zero_optimization_stage() == 0 else 0
    return [Part(rename(name), 0, 0, mirror, sums[id(parameter)]) for name, parameter in named if id(parameter) in sums]


def state_bytes(parameters: int) -> int:
    """fp32 master, exp_avg and exp_avg_sq, without padding."""
    return parameters * 4 * len(STATES)
