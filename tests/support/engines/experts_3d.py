"""Engines of DeepSpeed's own experts under tensor and pipeline parallelism."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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

from tests.support.engines import experts as engine_experts
from tests.support.engines import kinds
from tests.support.engines.cases import enable
from tests.support.engines.kinds import Kind, States, forget_groups, train_on_noise

sys.path.append(str(Path(__file__).parents[3] / "examples" / "megatron_gpt"))
from parallel import Line, ParallelState, copy_to, reduce_from  # type: ignore[import-not-found]

EXPERTS = 4
BATCH = 8
FEATURES, INNER = 6, 8
CUT = {"up": 0, "up_bias": 0, "down": 1}
"""By the end of its name the dimension along which tensor parallelism cuts a parameter; the others are replicated."""

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
    """An engine: ranks, degrees, ZeRO stage, precision; how its experts are spread.

    Attributes:
        cut: expert tensor parallelism; without it experts are spread over the tensor-parallel ranks too.
        fp32_grads: gradients are summed in fp32, which makes DeepSpeed take BF16_Optimizer.
        second: another expert-parallel degree of the second layer; odd ranks then have the param groups of the two
            in another order.
        turns: dense layers alternate with layers of experts.
        dual: every pipeline rank holds two stages (DualPipeV).
    """

    world: int
    tp: int
    ep: int
    stage: int
    precision: str = "fp32"
    pp: int = 1
    cut: bool = False
    data_first: bool = False
    fp32_grads: bool = False
    pipeline: bool = False
    second: int = 0
    turns: bool = False
    dual: bool = False

    @property
    def dp(self) -> int:
        return self.world // (self.tp * self.pp)

    def __str__(self) -> str:
        marks = ["cut"] * self.cut + ["data-first"] * self.data_first + ["fp32grads"] * self.fp32_grads
        marks += ["pipeline"] * (self.pipeline and self.pp == 1) + ["turns"] * self.turns + ["dual"] * self.dual
        degrees = f"dp{self.dp}-tp{self.tp}" + f"-pp{self.pp}" * (self.pp > 1) + f"-ep{self.ep}"
        degrees += f".{self.second}" * (self.second > 0)
        return "-".join([f"zero{self.stage}-{self.precision}-{degrees}", *marks])

    def join(self, parts: Sequence[States]) -> States:
        """Join the states of all ranks; without expert tensor parallelism experts are whole."""

        def find_cut(name: str) -> int | None:
            return CUT.get(name.rpartition(".")[2]) if self.cut or ".experts." not in name else None

        return kinds.join(parts, find_cut, self.tp)

    def is_direct(self, source: Any) -> bool:
        return source != self or (self.stage == 0 and self.precision == "bf16" and self.pp > 1)  # BF16_Optimizer

    def find_refusal(self, source: Any) -> str:
        """Stage 0 saves no names, except with BF16_Optimizer, and the param groups differ."""
        nameless = source.stage == 0 and (source.pp == 1 or source.precision == "fp32")
        return "the experts in the module's order" if nameless and self.second else ""

    def find_tolerance(self, source: Any) -> dict[str, float] | None:
        return {"rel": 1e-5} if source.precision == self.precision == "fp32" else None


@dataclass(frozen=True)
class Peers:
    """The tensor-parallel ranks of a layer; a copy of a layer has the same ones."""

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
            getattr(self, name).tensor_model_parallel = name in CUT  # BF16_Optimizer takes the norm of these alone

    def forward(self, x: Tensor) -> Tensor:
        x = copy_to(x, self.peers.line) if self.peers else x
        x = torch.tanh(x @ self.up.T + self.up_bias) @ self.down.T
        return torch.tanh((reduce_from(x, self.peers.line) if self.peers else x) + self.down_bias)


class Sparse(nn.Module):
    """A layer of experts; tokens depend on no other token, and none is dropped."""

    def __init__(self, line: Line | None, spread: Spread, degree: int):
        super().__init__()
        expert = Block(line if spread.cut else None)
        self.moe = MoE(
            FEATURES, expert, EXPERTS, ep_size=degree, capacity_factor=EXPERTS, min_capacity=0, use_rts=False,
            enable_expert_tensor_parallelism=spread.cut,
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.moe(x)[0])


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


def make(spread: Spread, seed: int) -> Any:
    mappings._gather_tokens = gather_tokens
    forget_groups()
    groups.expert_tensor_parallel_world_size = 1
    state = ParallelState(spread.tp, spread.pp)
    line = state.tensor if spread.tp > 1 else None
    torch.manual_seed(seed)
    sparse = [LayerSpec(Sparse, line, spread, degree) for degree in (spread.ep, spread.second or spread.ep)]
    specs = [LayerSpec(Block, line), *sparse, LayerSpec(Block, line)]
    if spread.turns:
        specs = [sparse[0], LayerSpec(Block, line), sparse[1], LayerSpec(Block, line)]
    mpu = None
    if spread.pipeline or spread.pp > 1:
        topology = PipeModelDataParallelTopology(num_pp=spread.pp, num_mp=spread.tp, num_dp=spread.dp)
        module: nn.Module = (pipe.DualPipeVModule if spread.dual else PipelineModule)(
            specs,
            topology=topology,
            loss_fn=loss_of,
            partition_method="uniform",
        )
    else:
        module = Plain([spec.build() for spec in specs])
        mpu = state.make_mpu() if spread.tp > 1 else None
    vary_experts(module, seed, state.data.rank if spread.cut else dist.get_rank())
    params = split_params_into_different_moe_groups_for_optimizer({"params": list(module.parameters()), "name": "all"})
    params.sort(key=lambda group: group["name"])  # DeepSpeed orders them like a set of strings
    if spread.second and dist.get_rank() % 2:
        params[1:] = params[:0:-1]
    return deepspeed.initialize(model=module, model_parameters=params, config=make_config(spread), mpu=mpu)[0]


def make_config(spread: Spread) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_batch_size": BATCH,
        # A larger eps: the rounding of a zero gradient would become a whole step.
        "optimizer": {"type": "Adam", "params": {"lr": 0.01, "eps": 1e-4, "torch_adam": True}},
        "zero_optimization": {"stage": spread.stage},
        "gradient_clipping": 0.0,  # DeepSpeed's norm of experts depends on how they are spread
        "checkpoint": {"universal": {"patterns": RULES}},
        "use_data_before_expert_parallelism": spread.data_first,
        "steps_per_print": 1 << 30,
        **enable(spread.precision),
    }
    if spread.fp32_grads:
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    if spread.dual:  # needs two micro-batches per rank
        config["train_micro_batch_size_per_gpu"] = BATCH // (2 * spread.pp * spread.dp)
    return config


def vary_experts(module: nn.Module, seed: int, rank: int) -> None:
    """Give the experts of a layer different weights; DeepSpeed broadcasts them to replicas."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    for name, param in module.named_parameters():
        if ".experts." in name:
            param.data.add_(torch.randn(param.shape, generator=generator) / 4)


def train(engine: Any, steps: range) -> list[float]:
    place = engine.mpu.get_data_parallel_rank() if engine.mpu else dist.get_rank()
    part = place, BATCH // (engine.train_micro_batch_size_per_gpu() * engine.gradient_accumulation_steps())
    return train_on_noise(engine, steps, (BATCH, FEATURES), part, loss_of, lambda own: own.flip(1))


def read_states(engine: Any) -> States:
    """Read the states of this rank and its replicas, under the names of a pipeline."""
    found = engine_experts.read_states(engine)
    return {(name.removeprefix("layers."), state): tensor for (name, state), tensor in found.items()}
