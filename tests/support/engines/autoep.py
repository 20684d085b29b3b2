"""What ranks do with AutoEP's engines: blocks of experts that lie in one tensor, of which each rank holds some."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import Tensor, nn

from tests.support.engines import going_on
from tests.support.engines.cases import enable
from tests.support.engines.going_on import Kind, States, forget_groups, read_optimizer, train_on_noise

EXPERTS = 4
BATCH = 8
HIDDEN, INNER = 6, 5
KINDS = ("column", "row")
"""How AutoTP cuts the two dense layers of a block."""


@dataclass(frozen=True)
class Spread(Kind):
    """An engine: ranks, ZeRO stage, precision, expert-parallel degree, order of the groups, further ZeRO options.

    Attributes:
        tp: ranks over which AutoTP cuts the dense layers; experts are spread over these too.
        muon: it trains the matrices, those of the experts included.
        pp: stages of a pipeline.
    """

    world: int
    stage: int
    precision: str
    ep: int
    data_first: bool = False
    options: tuple[tuple[str, Any], ...] = ()
    tp: int = 1
    muon: bool = False
    pp: int = 1

    def __str__(self) -> str:
        order = "-data-first" if self.data_first else ""
        more = "".join(f"-{key}={value}" for key, value in self.options) + "-muon" * self.muon
        degrees = f"dp{self.world // self.tp // self.pp}" + f"-tp{self.tp}" * (self.tp > 1)
        degrees += f"-pp{self.pp}" * (self.pp > 1)
        return f"zero{self.stage}-{self.precision}-{degrees}-ep{self.ep}{order}{more}"

    def join(self, parts: Sequence[States]) -> States:
        return join(parts, self)

    def is_direct(self, source: Any) -> bool:
        return source != self or (self.stage == 0 and self.precision == "bf16" and self.pp > 1)  # BF16_Optimizer

    def find_refusal(self, source: Any) -> str:
        """Muon sorts by size, and cut matrices have another one."""
        return "the param groups differ" if self.muon and source.stage == 0 and self.tp > 1 else ""

    def adjust(self, state: str, saved: Tensor, loaded: Tensor) -> Tensor:
        """ZeRO 3 keeps momentum in bf16, in whatever dtype it is read."""
        return saved.bfloat16() if state == "momentum_buffer" and self.stage == 3 else saved


class Gate(nn.Linear):
    """Mixtral's router; that its outputs are recorded lets AutoEP keep it under two names."""

    _can_record_outputs: ClassVar = {"router_logits": {"index": 0}}

    def __init__(self, *, biased: bool) -> None:
        super().__init__(HIDDEN, EXPERTS, bias=False)
        if biased:
            self.register_buffer("e_score_correction_bias", torch.randn(EXPERTS))


class Block(nn.Module):
    """Mixtral's experts, as transformers 5 holds them; AutoEP replaces it before it is ever called."""

    def __init__(self, *, biased: bool) -> None:
        super().__init__()
        self.gate, self.experts = Gate(biased=biased), nn.Module()
        self.experts.gate_up_proj = nn.Parameter(torch.randn(EXPERTS, 2 * INNER, HIDDEN) / 4)
        self.experts.down_proj = nn.Parameter(torch.randn(EXPERTS, HIDDEN, INNER) / 4)


class Layer(nn.Module):
    def __init__(self, *, frozen: bool, biased: bool):
        super().__init__()
        self.dense = nn.Sequential(nn.Linear(HIDDEN, 8), nn.Linear(8, HIDDEN))
        self.mlp = Block(biased=biased)
        self.mlp.experts.requires_grad_(not frozen)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.dense(x))
        return x + self.mlp(x)


class Stack(nn.Module):
    """Layers with tokens that depend on no other token, under the names of Mixtral."""

    def __init__(self, layers: Sequence[nn.Module], experts: int):
        super().__init__()
        self.config = SimpleNamespace(model_type="mixtral", num_local_experts=experts, num_experts_per_tok=2)
        self.model = nn.Module()
        self.model.layers = nn.ModuleList(layers)
        self.head = nn.Linear(HIDDEN, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.model.layers:
            x = layer(x)
        return self.head(x)


class Model(Stack):
    """Two layers of experts."""

    def __init__(self, *, frozen: bool = False, biased: bool = True):
        super().__init__([Layer(frozen=each, biased=biased) for each in (frozen, False)], EXPERTS)


def make(spread: Spread, seed: int, *, frozen: bool = False, biased: bool = True, checkpoint: Any = None) -> Any:
    forget_groups()
    if spread.muon:
        torch._dynamo.config.disable = True  # the compiled update needs minutes
    torch.manual_seed(seed)
    module = Model(frozen=frozen, biased=biased)
    module = make_pipeline(module, spread) if spread.pp > 1 else module
    config = make_config(spread, checkpoint)
    return deepspeed.initialize(model=module, model_parameters=module.parameters(), config=config)[0]


def make_config(spread: Spread, checkpoint: Any = None) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_batch_size": BATCH,
        "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
        "zero_optimization": {"stage": spread.stage, **dict(spread.options)},
        "expert_parallel": {"enabled": True, "autoep_size": spread.ep, "use_grouped_mm": False},
        "checkpoint": checkpoint or {"universal": {"patterns": PATTERNS}},
        "use_data_before_expert_parallelism": spread.data_first,
        **enable(spread.precision),
    }
    if spread.tp > 1:
        config["tensor_parallel"] = cut_dense(spread.tp)
    if spread.muon:
        params = {"lr": 0.02, "muon_lr": 0.05, "momentum": 0.9}
        config["optimizer"] = {"type": "Muon", "params": params | ({} if spread.stage else {"torch_adam": True})}
        if spread.stage == 3:
            config["zero_optimization"]["reduce_scatter"] = False
        config["zero_force_ds_cpu_optimizer"] = False
    if spread.pp > 1:
        config["expert_parallel"] |= {"preset_model": "mixtral", "moe_layer_pattern": r"\d+\.mlp"}
        config["steps_per_print"] = 1 << 30
    return config


def cut_dense(tp: int) -> dict[str, Any]:
    """Returns the section of AutoTP for the two dense layers of a block."""
    specs = [{"patterns": [rf".*\.dense\.{n}\.weight"], "partition_type": kind} for n, kind in enumerate(KINDS)]
    return {"autotp_size": tp, "partition_config": {"use_default_specs": False, "layer_specs": specs}}


PIPELINE = [
    {"from": r"(?P<n>[12])\.(?P<rest>.+)", "to": "model.layers.{n-1}.{rest}"},
    {"from": r"3\.(?P<rest>.+)", "to": "head.{rest}"},
    {"from": r"model\.layers\.(?P<n>\d+)\.(?P<rest>.+)", "to": "{n+1}.{rest}"},
    {"from": r"head\.(?P<rest>.+)", "to": "3.{rest}"},
]
CUTS = [
    {"match": r"\d+\.dense\.0\..+", "pattern": "shard-v"},
    {"match": r"\d+\.dense\.1\.weight", "pattern": "shard-h"},
]
PATTERNS = {"rename": PIPELINE, "rules": CUTS}
"""A pipeline's names, of which AutoTP's own description does not know."""


def make_pipeline(model: Model, spread: Spread) -> Any:
    """The same layers, each under its number; every stage has one with experts, as DeepSpeed wants it."""
    degrees = {"num_pp": spread.pp, "num_mp": 1, "num_dp": spread.world // spread.pp}
    module = PipelineModule(
        [nn.Identity(), *model.model.layers, model.head],
        topology=PipeModelDataParallelTopology(**degrees),
        loss_fn=lambda outputs, _: outputs.float().pow(2).mean(),
        partition_method="uniform",
    )
    module.config = model.config
    return module


def find_name(name: str) -> str:
    """What a pipeline's parameter is called in the model."""
    number, _, rest = name.partition(".")
    if not number.isdigit():
        return name
    return f"head.{rest}" if number == "3" else f"model.layers.{int(number) - 1}.{rest}"


def train(engine: Any, steps: range) -> list[float]:
    group = engine.seq_data_parallel_group
    return train_on_noise(engine, steps, (BATCH, 1, HIDDEN), (dist.get_rank(group), dist.get_world_size(group)))


def read_states(engine: Any) -> States:
    """Everything that this rank and its replicas hold, of experts by their number in the whole layer."""
    held = {f"{name}.experts": module for name, module in engine.module.named_modules() if _is_layer(module)}
    found: States = {(name, "buffer"): buffer.clone() for name, buffer in engine.module.named_buffers()}
    masters = {} if engine.zero_optimization_stage() == 3 else read_optimizer(engine.optimizer)
    for name, param in engine.module.named_parameters():
        kept = {state: tensor for state, tensor in masters.get(id(param), {}).items() if state != "step"}
        states = _read_parameter(param) | kept
        layer = held.get(name.rpartition(".")[0])
        if layer is None:
            found.update({(name, state): tensor for state, tensor in states.items()})
            continue
        for place in range(layer.num_local_experts):
            expert = layer.ep_rank * layer.num_local_experts + place
            found.update({(f"{name}.{expert}", state): tensor[place] for state, tensor in states.items()})
    kept = {key: tensor for key, tensor in found.items() if "tokens_per_expert" not in key[0]}
    return {(find_name(name), state): tensor for (name, state), tensor in kept.items()}


def _is_layer(module: nn.Module) -> bool:
    return isinstance(module, AutoEPMoELayer)


def _read_parameter(param: Any) -> dict[str, Tensor]:
    with deepspeed.zero.GatheredParameters([param], enabled=hasattr(param, "ds_id")):
        states = {"copy": param.detach().clone()}
    if param.requires_grad and hasattr(param, "ds_id"):
        states["fp32"] = safe_get_full_fp32_param(param).clone()
        for state in ("exp_avg", "exp_avg_sq", "momentum_buffer"):
            with suppress(KeyError):
                states[state] = safe_get_full_optimizer_state(param, state).clone()
    return states


CUT = {"dense.0.weight": 0, "dense.0.bias": 0, "dense.1.weight": 1}
"""By the end of its name the dimension along which AutoTP cuts a parameter."""


def join(parts: Sequence[States], spread: Spread) -> States:
    """Join the states of all ranks."""
    return going_on.join(parts, lambda name: CUT.get(".".join(name.split(".")[-3:])), spread.tp)
