"""Engines of DeepSpeed's own experts under tensor and pipeline parallelism."""

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

from tests.support.engines import experts as engine_experts
from tests.support.engines.kinds import SUMS_IN_FP32, Kind, forget_groups, step_on_noise
from tests.support.engines.reading import States, join

sys.path.append(str(Path(__file__).parents[3] / "examples" / "megatron_gpt"))
from parallel import Line, ParallelState, copy_to, reduce_from  # type: ignore[import-not-found]

EXPERTS = 4
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
    """Experts with tensor and pipeline parallelism.

    Attributes:
        cut: expert tensor parallelism; without it experts are spread over the tensor-parallel ranks too.
        data_first: order of the groups.
        fp32_grads: gradients are summed in fp32, which makes DeepSpeed take BF16_Optimizer.
        second: another expert-parallel degree of the second layer; odd ranks then have the param groups of the two
            in another order.
        turns: dense layers alternate with layers of experts.
        dual: every pipeline rank holds two stages (DualPipeV).
    """

    tp: int = 1
    ep: int = 1
    pp: int = 1
    cut: bool = False
    data_first: bool = False
    fp32_grads: bool = False
    second: int = 0
    turns: bool = False
    dual: bool = False

    universal: ClassVar[Any] = {"patterns": RULES}

    @property
    def dp(self) -> int:
        return self.world // (self.tp * self.pp)

    @property
    def ds_config(self) -> dict[str, Any]:
        # A larger eps: the rounding of a zero gradient would become a whole step.
        optimizer = {"type": "Adam", "params": {"lr": 0.01, "eps": 1e-4, "torch_adam": True}}
        more: dict[str, Any] = SUMS_IN_FP32 if self.fp32_grads else {}
        if self.dual:  # needs two micro-batches per rank
            more = {**more, "train_micro_batch_size_per_gpu": self.batch // (2 * self.pp * self.dp)}
        return self.make_config(optimizer=optimizer, use_data_before_expert_parallelism=self.data_first, **more)

    def join(self, ranks: Sequence[Any]) -> States:
        """Join the states of all ranks; without expert tensor parallelism experts are whole."""

        def find_cut(name: str) -> int | None:
            return CUT.get(name.rpartition(".")[2]) if self.cut or ".experts." not in name else None

        return join([local.state for local in ranks], find_cut, self.tp)

    def is_direct(self, source: Any) -> bool:
        return source != self or (self.stage == 0 and self.precision == "bf16" and self.pp > 1)  # BF16_Optimizer

    def find_refusal(self, source: Any) -> str:
        """Stage 0 saves no names, except with BF16_Optimizer, and the param groups differ."""
        nameless = source.stage == 0 and (source.pp == 1 or source.precision == "fp32")
        return "the experts in the module's order" if nameless and self.second else ""

    def find_tolerance(self, source: Any) -> float | None:
        return 1e-5 if source.precision == self.precision == "fp32" else None


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
    if spread.pp > 1:
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
    """Read the states of this rank and its replicas, under the names of a pipeline."""
    found = engine_experts.read_states(engine)
    return {(name.removeprefix("layers."), state): tensor for (name, state), tensor in found.items()}
