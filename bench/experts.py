"""Real engines over a GPT of DeepSpeed's mixtures of experts, at any expert-parallel degree."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import deepspeed
import torch
from deepspeed.moe.experts import Experts
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import is_moe_param, split_params_into_different_moe_groups_for_optimizer
from deepspeed.utils import groups
from engines import Engine, fill_parameters, load_into
from fingerprint import Part, hold_whole, sum_parts
from ranks import Body, Peer
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

EXPERTS = 8


@dataclass(frozen=True)
class ExpertEngine(Engine):
    """A topology to run in, with the expert-parallel degree of all layers."""

    ep: int = 1


class MoEShapes(nn.Module):
    """The parameters of a GPT with experts; the forward is a sum of products over each of them, as of `GPTShapes`."""

    def __init__(self, width: int, layers: int, ep: int) -> None:
        super().__init__()
        self.wte = nn.Embedding(1024, width)
        self.wpe = nn.Embedding(1024, width)
        self.h = nn.ModuleList(_block(width, ep) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)

    def forward(self, scale: torch.Tensor) -> torch.Tensor:
        return scale * torch.stack([p.flatten() @ p.flatten() for p in self.parameters()]).float().sum()


def _block(width: int, ep: int) -> nn.ModuleDict:
    expert = nn.Sequential(nn.Linear(width, 4 * width), nn.Linear(4 * width, width))
    return nn.ModuleDict(
        {
            "ln_1": nn.LayerNorm(width),
            "qkv": nn.Linear(width, 3 * width),
            "projection": nn.Linear(width, width),
            "ln_2": nn.LayerNorm(width),
            "mlp": MoE(width, expert, EXPERTS, ep_size=ep),
        }
    )


def build_model(params_m: float, ep: int) -> MoEShapes:
    """A bf16 model of about `params_m` million parameters in all, all 0.5: what a load does not write stays visible."""
    width = 512 if params_m >= 50 else 128
    layers = max(1, round((params_m * 1e6 - 2048 * width) / ((4 + 8 * EXPERTS) * width**2)))
    with torch.device("meta"):
        model = MoEShapes(width, layers, ep)
    model = model.to(torch.bfloat16).to_empty(device="cpu")
    for module in model.modules():
        if isinstance(module, Experts):  # the marks of new parameters are lost
            for parameter in module.parameters():
                parameter.allreduce, parameter.group_name = False, f"ep_size_{ep}"
    fill_parameters(model)
    return model


def _initialise(topology: ExpertEngine, model: nn.Module) -> Any:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    chosen = [
        {"params": matrices, "weight_decay": 0.1, "name": "matrices"},
        {"params": others, "weight_decay": 0.0, "name": "others"},
    ]
    deepspeed.init_distributed("gloo")
    parted = split_params_into_different_moe_groups_for_optimizer(chosen)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=parted, config=topology.config())
    return engine


def save_body(topology: ExpertEngine, params_m: float, folder: Path) -> Body:
    """Train one step from random weights and save; each rank returns its part of the fingerprint."""

    def body(peer: Peer) -> dict[str, Any]:
        model = build_model(params_m, topology.ep)
        torch.manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                if not is_moe_param(parameter):  # alike on all ranks
                    parameter.normal_(std=0.02)
            torch.manual_seed(2 + peer.rank)
            for parameter in filter(is_moe_param, model.parameters()):
                parameter.normal_(std=0.02)
        engine = _initialise(topology, model)
        peer.ready()
        engine.backward(engine(torch.tensor(1e-2)))
        engine.step()
        engine.save_checkpoint(str(folder))
        return {"fingerprint": list_parts(engine), "parameters": count_parameters(model, topology.ep)}

    return body


def load_body(topology: ExpertEngine, params_m: float, folder: Path | str, tag: str, with_plugin: bool) -> Body:
    """As :func:`engines.load_into`, of this model."""

    def make() -> tuple[Any, Callable[[], list[Part]]]:
        engine = _initialise(topology, build_model(params_m, topology.ep))
        return engine, lambda: list_parts(engine)

    return load_into(make, folder, tag, with_plugin=with_plugin)


def count_parameters(model: nn.Module, ep: int) -> int:
    """Elements of all ranks' parameters, each once."""
    return sum(p.numel() * (ep if is_moe_param(p) else 1) for p in model.parameters())


def list_parts(engine: Any) -> list[Part]:
    """What this rank's optimizer holds of each parameter, experts by their numbers in the whole layer."""
    sums = sum_parts(engine, hold_whole)
    named = engine.module.named_parameters()
    return [Part(_name(name), 0, 0, 0, sums[id(parameter)]) for name, parameter in named if id(parameter) in sums]


def _name(name: str) -> str:
    def number(found: re.Match[str]) -> str:
        group = groups._get_max_expert_size_name()
        own = EXPERTS // groups._get_expert_parallel_world_size(group)
        return f".deepspeed_experts.{groups._get_expert_parallel_rank(group) * own + int(found[1])}."

    return re.sub(r"\.deepspeed_experts\.(\d+)\.", number, name)
