"""Engines of DeepSpeed's native experts, also under tensor and pipeline parallelism."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import deepspeed
import torch
import torch.distributed as dist
from deepspeed import pipe
from deepspeed.moe import mappings
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from deepspeed.utils import groups
from deepspeed.utils.bwc import bwc_tensor_model_parallel_group, bwc_tensor_model_parallel_world_size
from torch import Tensor, nn

from tests.support.engines import reading
from tests.support.engines.kinds import SUMS_IN_FP32, Kind, step_on_noise
from tests.support.engines.reading import States, join

sys.path.append(str(Path(__file__).parents[3] / "examples" / "megatron_gpt"))
from parallel import Line, ParallelState, copy_to, reduce_from  # type: ignore[import-not-found]

EXPERTS = 4
FEATURES, INNER = 6, 8
ADAM = {"type": "Adam", "params": {"lr": 0.01, "eps": 1e-4, "torch_adam": True}}
"""Its larger eps prevents a whole step by the rounding of a zero gradient."""

CUT = {"up": 0, "up_bias": 0, "down": 1}
"""By the end of its name the dimension along which tensor parallelism cuts a parameter; the others are replicated."""

BELOW = "expert_layer"
"""A module name that makes DeepSpeed treat all parameters below as experts."""

RULES = {
    "rules": [
        {"match": r".*\.up(_bias)?", "pattern": "shard-v"},
        {"match": r".*\.down", "pattern": "shard-h"},
    ],
    "rename": [
        {"from": r"(?P<n>\d+)\.(?P<rest>.+)", "to": "layers.{n}.{rest}"},
        {"from": r"layers\.(?P<n>\d+)\.(?P<rest>.+)", "to": "{n}.{rest}"},
    ],
}


@dataclass(frozen=True)
class Spread(Kind):
    """Two layers of DeepSpeed's native experts between dense ones.

    Attributes:
        ep: expert-parallel degrees of the two layers, or of both.
        data_first: order of the groups.
        shuffled: odd ranks have the param groups of the degrees in another order.
        tied: the second layer of experts is the first one.
        residual: attribute with the first layer, which is then residual.
        together: all parameters are in one param group of a client's optimizer.
        cut: expert tensor parallelism; otherwise experts are also spread over the tensor-parallel ranks.
        fp32_grads: gradients are summed in fp32, which makes DeepSpeed take BF16_Optimizer.
        turns: dense layers alternate with layers of experts.
        dual: every pipeline rank holds two stages (DualPipeV).
    """

    ep: int | tuple[int, int] = 1
    data_first: bool = False
    shuffled: bool = False
    tied: bool = False
    residual: str = ""
    together: bool = False
    tp: int = 1
    pp: int = 1
    cut: bool = False
    fp32_grads: bool = False
    turns: bool = False
    dual: bool = False

    universal: ClassVar[Any] = {"patterns": RULES}

    @property
    def dp(self) -> int:
        return self.world // (self.tp * self.pp)

    @property
    def degrees(self) -> tuple[int, int]:
        return self.ep if isinstance(self.ep, tuple) else (self.ep, self.ep)

    @property
    def ds_config(self) -> dict[str, Any]:
        more: dict[str, Any] = dict(SUMS_IN_FP32) if self.fp32_grads else {}
        if not self.together:
            more["optimizer"] = ADAM
        if self.dual:  # needs two micro-batches per rank
            more["train_micro_batch_size_per_gpu"] = self.batch // (2 * self.pp * self.dp)
        return self.make_config(use_data_before_expert_parallelism=self.data_first, **more)

    def join(self, ranks: Sequence[Any]) -> States:
        """Join the states of all ranks; without expert tensor parallelism experts are whole."""

        def find_cut(name: str) -> int | None:
            return CUT.get(name.rpartition(".")[2]) if self.cut or ".experts." not in name else None

        return join([local.state for local in ranks], find_cut, self.tp)

    def is_direct(self, source: Any) -> bool:
        return source != self or (self.stage == 0 and self.precision == "bf16" and self.pp > 1)  # BF16_Optimizer

    def find_refusal(self, source: Any) -> str:
        """Stage 0 saves no names, except with BF16_Optimizer, and the param groups of two degrees differ."""
        nameless = source.stage == 0 and (source.pp == 1 or source.precision == "fp32")
        if not nameless or len(set(self.degrees)) == 1:
            return ""
        return "the experts in the module's order" if self.shuffled else "the param groups differ"

    def find_tolerance(self, source: Any) -> float | None:
        if {source.precision, self.precision} != {"fp32"}:
            return None
        return 1e-6 if {self.tp, self.pp, source.tp, source.pp} == {1} else 1e-5


@dataclass(frozen=True)
class Peers:
    """The tensor-parallel ranks of a layer, shared by copies of the layer."""

    line: Line

    def __deepcopy__(self, memo: Any) -> Peers:
        return self


class Block(nn.Module):
    """Two linear layers, the first cut by columns and the second by rows over several ranks."""

    def __init__(self, line: Line | None):
        super().__init__()
        self.peers, size, rank = Peers(line) if line else None, line.size if line else 1, line.rank if line else 0
        whole = {
            "up": torch.randn(INNER, FEATURES) / 2,
            "up_bias": torch.randn(INNER) / 2,
            "down": torch.randn(FEATURES, INNER) / 2,
            "down_bias": torch.randn(FEATURES) / 2,
        }
        for name, tensor in whole.items():
            own = tensor.chunk(size, CUT[name])[rank].contiguous() if name in CUT else tensor
            self.register_parameter(name, nn.Parameter(own))
            getattr(self, name).tensor_model_parallel = name in CUT  # BF16_Optimizer computes the norm of these only

    def forward(self, x: Tensor) -> Tensor:
        x = copy_to(x, self.peers.line) if self.peers else x
        x = torch.tanh(x @ self.up.T + self.up_bias) @ self.down.T
        return torch.tanh((reduce_from(x, self.peers.line) if self.peers else x) + self.down_bias)


class Sparse(nn.Module):
    """A layer of experts. No token depends on another token, and no token is dropped.

    Args:
        residual: attribute that holds a residual layer.
    """

    def __init__(self, line: Line | None, cut: bool, degree: int, residual: str = ""):
        super().__init__()
        self.name = residual or "moe"
        layer = MoE(
            FEATURES, Block(line if cut else None), EXPERTS, ep_size=degree, capacity_factor=EXPERTS, min_capacity=0,
            use_rts=False, use_residual=bool(residual), enable_expert_tensor_parallelism=cut,
        )  # fmt: skip
        setattr(self, self.name, layer)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(getattr(self, self.name)(x)[0])


class Plain(nn.Module):
    def __init__(self, layers: Sequence[nn.Module]):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def loss_of(outputs: Tensor, labels: Tensor) -> Tensor:
    return (outputs.float() - labels.float()).pow(2).mean()


def gather_tokens(tokens: Tensor, dim: int = 0) -> Tensor:
    """Replace DeepSpeed's ``_gather_tokens``, whose flat output gloo does not support."""
    parts = [torch.empty_like(tokens) for _ in range(bwc_tensor_model_parallel_world_size(groups.mpu))]
    dist.all_gather(parts, tokens.contiguous(), group=bwc_tensor_model_parallel_group(groups.mpu))
    return torch.cat(parts, dim)


def list_layers(spread: Spread, line: Line | None = None) -> list[LayerSpec]:
    first, second = spread.degrees
    sparse = [LayerSpec(Sparse, line, spread.cut, first, spread.residual), LayerSpec(Sparse, line, spread.cut, second)]
    dense = LayerSpec(Block, line)
    return [sparse[0], dense, sparse[1], dense] if spread.turns else [dense, *sparse, dense]


def make_module(spread: Spread, line: Line | None = None) -> Plain:
    """Make the model without a pipeline."""
    layers = [spec.build() for spec in list_layers(spread, line)]
    if spread.tied:
        layers[2] = layers[1]
    return Plain(layers)


def make(spread: Spread, seed: int, max_group: int | None = None) -> Any:
    """Make the engine; ``max_group``: most elements of a group of experts."""
    mappings._gather_tokens = gather_tokens
    groups.expert_tensor_parallel_world_size = 1
    state = ParallelState(spread.tp, spread.pp)
    line = state.tensor if spread.tp > 1 else None
    mpu = state.make_mpu() if spread.tp > 1 and spread.pp == 1 else None
    if spread.pp > 1:
        topology = PipeModelDataParallelTopology(num_pp=spread.pp, num_mp=spread.tp, num_dp=spread.dp)
        kind = pipe.DualPipeVModule if spread.dual else PipelineModule
        layers = list_layers(spread, line)
        module: nn.Module = kind(layers, topology=topology, loss_fn=loss_of, partition_method="uniform")
    else:
        module = make_module(spread, line)
    vary_experts(module, seed, state.data.rank if spread.cut else dist.get_rank())
    if spread.together:
        optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
        return deepspeed.initialize(model=module, optimizer=optimizer, config=spread.ds_config)[0]
    whole, limit = {"params": list(module.parameters()), "name": "all"}, {"max_group_size": max_group}
    params = split_params_into_different_moe_groups_for_optimizer(whole, **(limit if max_group else {}))
    params.sort(key=lambda group: group["name"])  # DeepSpeed orders them like a set of strings
    if spread.shuffled and dist.get_rank() % 2:
        params[1:] = params[:0:-1]
    return deepspeed.initialize(model=module, model_parameters=params, config=spread.ds_config, mpu=mpu)[0]


def vary_experts(module: nn.Module, seed: int, rank: int) -> None:
    """Give the experts of a layer different weights; DeepSpeed broadcasts them to replicas."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    for name, param in module.named_parameters():
        if ".experts." in name:
            param.data.add_(torch.randn(param.shape, generator=generator) / 4)


def step(engine: Any) -> float:
    place = engine.mpu.get_data_parallel_rank() if engine.mpu else dist.get_rank()
    parts = Spread.batch // (engine.train_micro_batch_size_per_gpu() * engine.gradient_accumulation_steps())
    return step_on_noise(engine, (Spread.batch, FEATURES), (place, parts), loss_of, lambda own: own.flip(1))


def read_states(engine: Any) -> States:
    """Read the states of this rank and its replicas, under the names of a pipeline and of the whole layers' experts."""
    first = {
        f"{name}.deepspeed_moe.experts.deepspeed_experts.": groups._get_expert_parallel_rank(layer.expert_group_name)
        * layer.num_local_experts
        for name, layer in engine.module.named_modules()
        if isinstance(layer, MoE)
    }

    def number(name: str) -> str:
        layer = next((layer for layer in first if name.startswith(layer)), "")
        if not layer:
            return name
        own, _, rest = name.removeprefix(layer).partition(".")
        return f"{layer}{first[layer] + int(own)}.{rest}"

    return {
        (number(name).removeprefix("layers."), state): tensor
        for (name, state), tensor in reading.read_states(engine).items()
    }


def fill(src: States, dst: nn.Module) -> None:
    """A `custom_load_fn` that is not strict."""
    dst.load_state_dict(src, strict=False)
