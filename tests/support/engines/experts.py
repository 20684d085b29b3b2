"""Engines of DeepSpeed's own experts; states are named by the experts' numbers in the whole layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.utils import groups
from torch import Tensor, nn

from tests.support.engines.kinds import Kind, forget_groups, step_on_noise
from tests.support.engines.reading import States, read_optimizer

EXPERTS = 4
FEATURES = 6
ADAM = {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}}


@dataclass(frozen=True)
class Spread(Kind):
    """DeepSpeed's own experts.

    Attributes:
        ep: expert-parallel degrees of the two layers.
        data_first: order of the groups.
        shuffled: odd ranks have the param groups of the degrees in another order.
        tied: the second layer of experts is the first one.
        residual: attribute that holds the residual layer.
        together: all parameters are in one param group of a client's optimizer.
    """

    ep: tuple[int, int] = (1, 1)
    data_first: bool = False
    shuffled: bool = False
    tied: bool = False
    residual: str = "residual"
    together: bool = False

    universal: ClassVar[Any] = True

    @property
    def ds_config(self) -> dict[str, Any]:
        more = {} if self.together else {"optimizer": ADAM}
        return self.make_config(use_data_before_expert_parallelism=self.data_first, **more)

    def find_refusal(self, source: Any) -> str:
        """Stage 0 saves no names, and the param groups of two degrees differ."""
        if source.stage or len(set(self.ep)) == 1:
            return ""
        return "the experts in the module's order" if self.shuffled else "the param groups differ"

    def find_tolerance(self, source: Any) -> float | None:
        return 1e-6 if source.precision == self.precision == "fp32" else None


class Layers(nn.Module):
    """Two layers of experts, one of them residual, with tokens that depend on no other token."""

    def __init__(self, degrees: tuple[int, int], *, tied: bool = False, residual: str = "residual"):
        super().__init__()
        self.first, self.name = nn.Linear(4, FEATURES), residual
        setattr(self, residual, self._make(degrees[0], use_residual=True))
        self.plain = getattr(self, residual) if tied else self._make(degrees[1])
        self.last = nn.Linear(FEATURES, 1)

    @staticmethod
    def _make(degree: int, **options: Any) -> MoE:
        expert = nn.Sequential(nn.Linear(FEATURES, 8), nn.Linear(8, FEATURES))
        return MoE(FEATURES, expert, EXPERTS, ep_size=degree, drop_tokens=False, min_capacity=0, **options)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(getattr(self, self.name)(torch.tanh(self.first(x)))[0])
        return self.last(torch.tanh(self.plain(x)[0]))


def make(spread: Spread, seed: int) -> Any:
    forget_groups()
    torch.manual_seed(seed + dist.get_rank())
    module = Layers(spread.ep, tied=spread.tied, residual=spread.residual)
    if spread.together:
        optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
        return deepspeed.initialize(model=module, optimizer=optimizer, config=spread.ds_config)[0]
    params = split_params_into_different_moe_groups_for_optimizer({"params": list(module.parameters()), "name": "all"})
    params.sort(key=lambda group: group["name"])  # DeepSpeed orders them like a set of strings
    if spread.shuffled and dist.get_rank() % 2:
        params[1:] = params[:0:-1]
    return deepspeed.initialize(model=module, model_parameters=params, config=spread.ds_config)[0]


def step(engine: Any) -> float:
    return step_on_noise(engine, (Spread.batch, 4))


def name_parameters(module: nn.Module) -> dict[int, str]:
    names = {id(param): name for name, param in module.named_parameters()}
    for name, layer in module.named_modules():
        if isinstance(layer, MoE):
            first = groups._get_expert_parallel_rank(layer.expert_group_name) * layer.num_local_experts
            for number, expert in enumerate(layer.deepspeed_moe.experts.deepspeed_experts):
                head = f"{name}.deepspeed_moe.experts.deepspeed_experts.{first + number}"
                names.update({id(param): f"{head}.{rest}" for rest, param in expert.named_parameters()})
    return names


def read_states(engine: Any) -> States:
    """Read the states of this rank and its replicas."""
    names, states = name_parameters(engine.module), read_optimizer(engine.optimizer)
    found = {(names[id(param)], "copy"): param.detach().clone() for param in engine.module.parameters()}
    return found | {(names[number], state): each for number, held in states.items() for state, each in held.items()}


def fill(src: States, dst: nn.Module) -> None:
    """A `custom_load_fn` that is not strict."""
    dst.load_state_dict(src, strict=False)
