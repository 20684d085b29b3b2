"""Real engines over a GPT of DeepSpeed's mixtures of experts, at any expert-parallel degree."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from deepspeed.moe.experts import Experts
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import is_moe_param, split_params_into_different_moe_groups_for_optimizer
from deepspeed.utils import groups
from engines import Engine, GPTShapes, fill_parameters
from torch import nn

EXPERTS = 8


@dataclass(frozen=True)
class ExpertEngine(Engine):
    """A topology to run in, with the expert-parallel degree of all layers."""

    ep: int = 1

    def build(self, params_m: float) -> nn.Module:
        """Build a bf16 model of about so many parameters on all ranks together, all 0.5."""
        width = 512 if params_m >= 50 else 128
        layers = max(1, round((params_m * 1e6 - 2048 * width) / ((4 + 8 * EXPERTS) * width**2)))
        with torch.device("meta"):
            model = GPTShapes(width, layers, partial(_block, ep=self.ep))
        model = model.to(torch.bfloat16).to_empty(device="cpu")
        for module in model.modules():
            if isinstance(module, Experts):  # the marks of new parameters are lost
                for parameter in module.parameters():
                    parameter.allreduce, parameter.group_name = False, f"ep_size_{self.ep}"
        fill_parameters(model)
        return model

    def draw(self, model: nn.Module) -> None:
        """Draw random weights: experts of each rank, other weights the same on all ranks."""
        torch.manual_seed(1)
        for parameter in model.parameters():
            if not is_moe_param(parameter):
                parameter.normal_(std=0.02)
        torch.manual_seed(2 + int(os.environ["RANK"]))
        for parameter in filter(is_moe_param, model.parameters()):
            parameter.normal_(std=0.02)

    def group(self, model: nn.Module) -> list[dict[str, Any]]:
        named = zip(("matrices", "others"), super().group(model), strict=True)
        return split_params_into_different_moe_groups_for_optimizer([{**each, "name": name} for name, each in named])

    def count(self, model: nn.Module) -> int:
        """Count the elements of all ranks' parameters, each once."""
        return sum(p.numel() * (self.ep if is_moe_param(p) else 1) for p in model.parameters())

    def rename(self, name: str) -> str:
        """Number experts in the whole layer."""

        def number(found: re.Match[str]) -> str:
            group = groups._get_max_expert_size_name()
            own = EXPERTS // groups._get_expert_parallel_world_size(group)
            return f".deepspeed_experts.{groups._get_expert_parallel_rank(group) * own + int(found[1])}."

        return re.sub(r"\.deepspeed_experts\.(\d+)\.", number, name)


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
