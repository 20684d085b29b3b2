"""What ranks do with engines whose experts lie in parameters of other forms: fused, AutoEP's, DeepSpeed's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import deepspeed
import torch
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from torch import Tensor, nn
from torch.nn import functional

from tests.support.engines import autoep as engine_autoep
from tests.support.engines import experts as engine_experts
from tests.support.engines.autoep import HIDDEN, INNER
from tests.support.engines.going_on import Kind, States, forget_groups

MIXED = {
    "train_batch_size": engine_autoep.BATCH,
    "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
}


@dataclass(frozen=True)
class Form(Kind):
    """An engine: ranks, ZeRO stage, in what form its experts are, how many, expert-parallel degree.

    Attributes:
        kind: ``fused``, one parameter for all; ``autoep``; ``native``, DeepSpeed's own.
    """

    world: int
    stage: int
    kind: str
    experts: int = 4
    ep: int = 1

    def __str__(self) -> str:
        return f"{self.kind}-zero{self.stage}-dp{self.world}-e{self.experts}-ep{self.ep}"

    def find_tolerance(self, source: Any) -> dict[str, float] | None:
        """DeepSpeed's own experts have another gate."""
        return None if "native" in (source.kind, self.kind) else {"abs": 1e-6}

    def adjust(self, state: str, saved: Tensor, loaded: Tensor) -> Tensor:
        return saved.view(loaded.shape)


class Experts(nn.Module):
    """Mixtral's experts, as transformers 5 holds them."""

    def __init__(self, experts: int):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(experts, 2 * INNER, HIDDEN) / 4)
        self.down_proj = nn.Parameter(torch.randn(experts, HIDDEN, INNER) / 4)

    def forward(self, x: Tensor, number: int) -> Tensor:
        gate, up = functional.linear(x, self.gate_up_proj[number]).chunk(2, dim=-1)
        return functional.linear(functional.silu(gate) * up, self.down_proj[number])


class Block(nn.Module):
    """Tokens to their two best experts, in the proportion of the scores; AutoEP puts its own in the place of it."""

    def __init__(self, experts: int):
        super().__init__()
        self.gate, self.experts = nn.Linear(HIDDEN, experts, bias=False), Experts(experts)

    def forward(self, x: Tensor) -> Tensor:
        scores, chosen = torch.softmax(self.gate(x).float(), dim=-1).topk(2, dim=-1)
        weights = (scores / scores.sum(-1, keepdim=True)).to(x.dtype)
        outputs = torch.stack([self.experts(x, number) for number in range(len(self.gate.weight))], dim=-2)
        taken = outputs.gather(-2, chosen[..., None].expand(*chosen.shape, x.shape[-1]))
        return (taken * weights[..., None]).sum(-2)


class Expert(nn.Module):
    """One expert."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(HIDDEN, INNER, bias=False) for _ in range(2))
        self.w2 = nn.Linear(INNER, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(functional.silu(self.w1(x)) * self.w3(x))


class Native(MoE):
    """DeepSpeed's own layer, its output alone."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[0]


def make_block(form: Form) -> nn.Module:
    if form.kind == "native":
        return Native(HIDDEN, Expert(), form.experts, ep_size=form.ep, drop_tokens=False, min_capacity=0)
    return Block(form.experts)


class Layer(nn.Module):
    def __init__(self, form: Form):
        super().__init__()
        self.dense, self.mlp = nn.Linear(HIDDEN, HIDDEN), make_block(form)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.dense(x))
        return x + self.mlp(x)


class Model(engine_autoep.Stack):
    """Two layers."""

    layer: Callable[[Form], nn.Module] = Layer

    def __init__(self, form: Form):
        super().__init__([type(self).layer(form) for _ in range(2)], form.experts)


def make(form: Form, seed: int, checkpoint: Any = None) -> Any:
    forget_groups()
    config = {**MIXED, "zero_optimization": {"stage": form.stage}, "checkpoint": checkpoint or {"universal": True}}
    if form.kind == "autoep":
        config["expert_parallel"] = {"enabled": True, "autoep_size": form.ep, "use_grouped_mm": False}
    torch.manual_seed(seed)
    module = Model(form)
    params: Any = list(module.parameters())
    if form.kind == "native":
        params = split_params_into_different_moe_groups_for_optimizer({"params": params, "name": "all"})
    return deepspeed.initialize(model=module, model_parameters=params, config=config)[0]


def read_states(engine: Any) -> States:
    """Everything that is held, experts of whatever form under AutoEP's names."""
    if any(isinstance(module, MoE) for module in engine.module.modules()):
        own = engine_experts.read_states(engine)
        return {(_rename(name), state): tensor for (name, state), tensor in own.items() if state != "step"}
    found: States = {}
    for (name, state), tensor in engine_autoep.read_states(engine).items():
        found.update({(_rename(part), state): each for part, each in take_apart(name, tensor)})
    return found


def _rename(name: str) -> str:
    """A name of DeepSpeed's own layer, or of a router, as AutoEP has it."""
    head, own, rest = name.partition(".deepspeed_moe.")
    if not own:
        return name.replace(".gate.gate.", ".gate.").replace(".router.gate.", ".gate.").replace(".router.", ".gate.")
    if rest.startswith("gate."):
        return f"{head}.gate.weight"
    _, _, number, param, _ = rest.split(".")
    return f"{head}.experts.{param}.{number}"


def take_apart(name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
    """The experts of a fused parameter, as AutoEP names them; any other as it is."""
    if name.endswith("gate_up_proj"):
        stem = name.removesuffix("gate_up_proj")
        return [
            (f"{stem}{param}.{number}", part)
            for number, both in enumerate(tensor)
            for param, part in zip(("w1", "w3"), both.chunk(2), strict=True)
        ]
    if name.endswith("down_proj"):
        return [(f"{name.removesuffix('down_proj')}w2.{number}", part) for number, part in enumerate(tensor)]
    return [(name, tensor)]


train = engine_autoep.train


def load_and_save(form: Form, folder: str, again: str) -> None:
    engine = make(form, 77)
    engine.load_checkpoint(folder)
    engine.save_checkpoint(again)
    engine.destroy()
