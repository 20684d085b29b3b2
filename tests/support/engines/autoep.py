"""Engines with experts in several forms: of AutoEP, fused by transformers, and native ones of DeepSpeed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import Tensor, nn
from torch.nn import functional

from deepspeed_ucp.model.storage import strip_compiled
from tests.support.engines import experts as engine_experts
from tests.support.engines import reading
from tests.support.engines.experts import ADAM
from tests.support.engines.kinds import Kind, mean_square, step_on_noise
from tests.support.engines.ranks import edit
from tests.support.engines.reading import States, join

EXPERTS = 4
HIDDEN, INNER = 6, 5
KINDS = ("column", "row")
"""How AutoTP cuts the two dense layers of a block."""

CUT = {"dense.0.weight": 0, "dense.0.bias": 0, "dense.1.weight": 1}
"""By the end of its name the dimension along which AutoTP cuts a parameter."""


@dataclass(frozen=True)
class Spread(Kind):
    """Experts in one of several forms.

    Attributes:
        data_first: order of the groups.
        tp: ranks over which AutoTP cuts the dense layers; experts are spread over these too.
        muon: it trains the matrices, including the experts' matrices.
        kind: form of the experts: ``autoep``; ``fused``, one parameter for all; ``native``, of DeepSpeed.
        biased: AutoEP's routers have a buffer.
    """

    ep: int = 1
    data_first: bool = False
    tp: int = 1
    muon: bool = False
    pp: int = 1
    kind: str = "autoep"
    experts: int = EXPERTS
    biased: bool = True

    @property
    def universal(self) -> Any:
        return {"patterns": PATTERNS} if self.kind == "autoep" else True

    @property
    def ds_config(self) -> dict[str, Any]:
        more: dict[str, Any] = {"optimizer": ADAM, "use_data_before_expert_parallelism": self.data_first}
        zero = {"reduce_scatter": False} if self.muon and self.stage == 3 else {}
        if self.kind == "autoep":
            more["expert_parallel"] = {"enabled": True, "autoep_size": self.ep, "use_grouped_mm": False}
            if self.pp > 1:
                more["expert_parallel"] |= {"preset_model": "mixtral", "moe_layer_pattern": r"\d+\.mlp"}
        if self.tp > 1:
            more["tensor_parallel"] = cut_dense(self.tp)
        if self.muon:
            params = {"lr": 0.02, "muon_lr": 0.05, "momentum": 0.9}
            more["optimizer"] = {"type": "Muon", "params": params | ({} if self.stage else {"torch_adam": True})}
        return self.make_config(zero, **more)

    def join(self, ranks: Sequence[Any]) -> States:
        return join_cut([local.state for local in ranks], self.tp)

    def is_direct(self, source: Any) -> bool:
        """Return True also for ZeRO 3, whose experts DeepSpeed's load is not known to restore, and BF16_Optimizer.

        At ZeRO 1 and 2 the momentum of Muon has the gradients' dtype: DeepSpeed's load would cast it to the masters'.
        """
        if source != self or self.stage == 3:
            return True
        return self.precision == "bf16" and (self.pp > 1 if self.stage == 0 else self.muon)

    def find_refusal(self, source: Any) -> str:
        """Return the expected refusal: Muon sorts by size, and cut matrices have another size."""
        return "the param groups differ" if self.muon and source.stage == 0 and self.tp > 1 else ""

    def find_tolerance(self, source: Any) -> float | None:
        """Native experts have another gate, and tensor parallelism and pipelines sum in another order."""
        if {self.precision, source.precision} != {"fp32"} or (self.kind == "native") != (source.kind == "native"):
            return None
        return 1e-6 if {self.tp, self.pp, source.tp, source.pp} == {1} else 1e-5

    def adjust(self, state: str, saved: Tensor, loaded: Tensor) -> Tensor:
        """Return the kept tensor: ZeRO 3 keeps momentum in bf16."""
        saved = saved.bfloat16() if state == "momentum_buffer" and self.stage == 3 else saved
        return saved.view(loaded.shape)


def join_cut(parts: Sequence[States], tp: int) -> States:
    """Join the states of all ranks whose dense layers AutoTP cuts."""
    return join(parts, lambda name: CUT.get(".".join(name.split(".")[-3:])), tp)


# --- models


class Gate(nn.Linear):
    """Mixtral's router. AutoEP keeps it under two names because its outputs are recorded."""

    _can_record_outputs: ClassVar = {"router_logits": {"index": 0}}

    def __init__(self, experts: int, *, biased: bool) -> None:
        super().__init__(HIDDEN, experts, bias=False)
        if biased:
            self.register_buffer("e_score_correction_bias", torch.randn(experts))


class FusedExperts(nn.Module):
    """Mixtral's experts in the form of transformers 5."""

    def __init__(self, experts: int):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(experts, 2 * INNER, HIDDEN) / 4)
        self.down_proj = nn.Parameter(torch.randn(experts, HIDDEN, INNER) / 4)

    def forward(self, x: Tensor, number: int) -> Tensor:
        gate, up = functional.linear(x, self.gate_up_proj[number]).chunk(2, dim=-1)
        return functional.linear(functional.silu(gate) * up, self.down_proj[number])


class Block(nn.Module):
    """Sends tokens to their two best experts, in the proportion of the scores; AutoEP replaces it."""

    def __init__(self, experts: int, *, biased: bool) -> None:
        super().__init__()
        self.gate, self.experts = Gate(experts, biased=biased), FusedExperts(experts)

    def forward(self, x: Tensor) -> Tensor:
        scores, chosen = torch.softmax(self.gate(x).float(), dim=-1).topk(2, dim=-1)
        weights = (scores / scores.sum(-1, keepdim=True)).to(x.dtype)
        outputs = torch.stack([self.experts(x, number) for number in range(len(self.gate.weight))], dim=-2)
        taken = outputs.gather(-2, chosen[..., None].expand(*chosen.shape, x.shape[-1]))
        return (taken * weights[..., None]).sum(-2)


class NativeExpert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(HIDDEN, INNER, bias=False) for _ in range(2))
        self.w2 = nn.Linear(INNER, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(functional.silu(self.w1(x)) * self.w3(x))


class NativeBlock(MoE):
    """DeepSpeed's native layer, which returns only the output."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[0]


def make_block(kind: str, experts: int, ep: int, *, biased: bool) -> nn.Module:
    if kind == "native":
        return NativeBlock(HIDDEN, NativeExpert(), experts, ep_size=ep, drop_tokens=False, min_capacity=0)
    return Block(experts, biased=biased)


class Layer(nn.Module):
    def __init__(self, block: nn.Module):
        super().__init__()
        self.dense = nn.Sequential(nn.Linear(HIDDEN, 8), nn.Linear(8, HIDDEN))
        self.mlp = block

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.dense(x))
        return x + self.mlp(x)


class Stack(nn.Module):
    """Layers with Mixtral's names. No token depends on another token."""

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
    """Two layers of experts, the first one frozen or not."""

    def __init__(
        self,
        kind: str = "autoep",
        experts: int = EXPERTS,
        ep: int = 1,
        *,
        frozen: bool = False,
        biased: bool = True,
    ):
        super().__init__([Layer(make_block(kind, experts, ep, biased=biased)) for _ in range(2)], experts)
        if frozen:
            self.model.layers[0].mlp.experts.requires_grad_(False)


# --- engines


def make(spread: Spread, seed: int, *, frozen: bool = False, biased: bool | None = None) -> Any:
    biased = spread.biased and spread.kind == "autoep" if biased is None else biased
    module: Any = Model(spread.kind, spread.experts, spread.ep, frozen=frozen, biased=biased)
    module = make_pipeline(module, spread) if spread.pp > 1 else module
    params: Any = module.parameters()  # AutoEP replaces some of them before DeepSpeed lists these
    if spread.kind == "native":
        params = split_params_into_different_moe_groups_for_optimizer({"params": list(params), "name": "all"})
    return deepspeed.initialize(model=module, model_parameters=params, config=spread.ds_config)[0]


def cut_dense(tp: int) -> dict[str, Any]:
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
"""Rules for the names of a pipeline, which AutoTP's description lacks."""


def make_pipeline(model: Stack, spread: Any) -> Any:
    """Number the same layers; every stage has one with experts, as DeepSpeed requires."""
    degrees = {"num_pp": spread.pp, "num_mp": 1, "num_dp": spread.world // spread.pp}
    module = PipelineModule(
        [nn.Identity(), *model.model.layers, model.head],
        topology=PipeModelDataParallelTopology(**degrees),
        loss_fn=mean_square,
        partition_method="uniform",
    )
    module.config = model.config
    return module


def step(engine: Any) -> float:
    group = engine.seq_data_parallel_group
    return step_on_noise(engine, (Spread.batch, 1, HIDDEN), (dist.get_rank(group), dist.get_world_size(group)))


# --- states


def read_states(engine: Any) -> States:
    """Read the states of this rank and its replicas, experts of any form under AutoEP's names in the whole layer."""
    if any(isinstance(module, MoE) for module in engine.module.modules()):
        native = engine_experts.read_states(engine)
        return {(find_name(name), state): tensor for (name, state), tensor in native.items() if state != "step"}
    layers = {
        strip_compiled(f"{name}.experts"): module
        for name, module in engine.module.named_modules()
        if isinstance(module, AutoEPMoELayer)
    }
    found: States = {
        (strip_compiled(name), "buffer"): buffer.clone()
        for name, buffer in engine.module.named_buffers()
        if "tokens_per_expert" not in name
    }
    for (name, state), tensor in reading.read_states(engine).items():
        if state == "step":
            continue
        parts = take_apart(name, tensor)
        layer = layers.get(name.rpartition(".")[0])
        if layer is not None:
            first = layer.ep_rank * layer.num_local_experts
            parts = [(f"{name}.{first + place}", tensor[place]) for place in range(layer.num_local_experts)]
        found.update({(part, state): piece for part, piece in parts})
    return {(find_name(name), state): tensor for (name, state), tensor in found.items()}


def take_apart(name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
    """Split a fused parameter into its experts, under AutoEP's names; return any other parameter as it is."""
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


def find_name(name: str) -> str:
    """Return AutoEP's name, without a pipeline, of a parameter in any form."""
    number, _, rest = name.partition(".")
    if number.isdigit():
        name = f"head.{rest}" if number == "3" else f"model.layers.{int(number) - 1}.{rest}"
    head, layer_marker, rest = name.partition(".deepspeed_moe.")
    if not layer_marker:
        return name.replace(".gate.gate.", ".gate.").replace(".router.gate.", ".gate.").replace(".router.", ".gate.")
    if rest.startswith("gate."):
        return f"{head}.gate.weight"
    _, _, number, param, _ = rest.split(".")
    return f"{head}.experts.{param}.{number}"


MOVED = {0: 2, 1: 0, 2: 3, 3: 1}
"""New expert at each position of two ranks with two experts each."""


def move_experts(folder: Path) -> None:
    """Change the placement of AutoEP's experts in a save of two expert-parallel ranks."""

    def move(tree: Any) -> None:
        for layer in tree.get("ds_autoep_layers", ()):
            layer["affine_maps"] = {}
            for each in layer["expert_placement"]["ranks"]:
                each["experts"] = [MOVED[expert] for expert in each["experts"]]

    for path in folder.rglob("*_model_states.pt"):
        edit(path, move)
