"""What ranks do with engines of DeepSpeed's own experts under tensor and pipeline parallelism."""

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
from tests.support.engines.going_on import Loaded, States, load_and_go_on, save_and_go_on, train_on_noise

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
class Spread:
    """An engine: ranks, degrees, ZeRO stage, precision; how its experts are spread.

    Attributes:
        cut: expert tensor parallelism; without it experts are spread over the tensor-parallel ranks too.
        fp32_grads: gradients are summed in fp32, which makes DeepSpeed take BF16_Optimizer.
        second: expert-parallel degree of the second layer, where it is another one; odd ranks have the param groups of
            the two in another order then.
        turns: dense layers and those of experts take turns.
        dual: every pipeline rank holds two stages, one of the way there and one of the way back (DualPipeV).
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


@dataclass(frozen=True)
class Peers:
    """The tensor-parallel ranks of a layer; a copy of a layer has the same ones."""

    line: Line

    def __deepcopy__(self, memo: Any) -> Peers:
        return self


class Block(nn.Module):
    """Two linear layers, the first cut by columns and the second by rows where there are several ranks."""

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
    """In the place of DeepSpeed's ``_gather_tokens``, whose flat output gloo does not take."""
    parts = [torch.empty_like(tokens) for _ in range(bwc_tensor_model_parallel_world_size(groups.mpu))]
    dist.all_gather(parts, tokens.contiguous(), group=bwc_tensor_model_parallel_group(groups.mpu))
    return torch.cat(parts, dim)


def make(spread: Spread, seed: int) -> Any:
    mappings._gather_tokens = gather_tokens
    groups._EXPERT_PARALLEL_GROUP.clear()
    groups._EXPERT_DATA_PARALLEL_GROUP.clear()
    groups.expert_tensor_parallel_world_size = 1
    groups.mpu = None
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
    params.sort(key=lambda group: group["name"])  # DeepSpeed makes them in the order of a set of strings
    if spread.second and dist.get_rank() % 2:
        params[1:] = params[:0:-1]
    return deepspeed.initialize(model=module, model_parameters=params, config=make_config(spread), mpu=mpu)[0]


def make_config(spread: Spread) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_batch_size": BATCH,
        # A larger eps: what rounding leaves of a gradient that is zero would make a whole step of it.
        "optimizer": {"type": "Adam", "params": {"lr": 0.01, "eps": 1e-4, "torch_adam": True}},
        "zero_optimization": {"stage": spread.stage},
        "checkpoint": {"universal": {"patterns": RULES}},
        "use_data_before_expert_parallelism": spread.data_first,
        "steps_per_print": 1 << 30,
    }
    if spread.precision != "fp32":
        config[spread.precision] = {"enabled": True}
    if spread.fp32_grads:
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    if spread.dual:  # of which a step takes twice as many micro-batches as there are ranks
        config["train_micro_batch_size_per_gpu"] = BATCH // (2 * spread.pp * spread.dp)
    return config


def vary_experts(module: nn.Module, seed: int, rank: int) -> None:
    """All experts of a layer begin alike; the first of those that hold the same ones gives them its values."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    for name, param in module.named_parameters():
        if ".experts." in name:
            param.data.add_(torch.randn(param.shape, generator=generator) / 4)


def train(engine: Any, steps: range) -> list[float]:
    place = engine.mpu.get_data_parallel_rank() if engine.mpu else dist.get_rank()
    part = place, BATCH // (engine.train_micro_batch_size_per_gpu() * engine.gradient_accumulation_steps())
    return train_on_noise(engine, steps, (BATCH, FEATURES), part, loss_of, lambda own: own.flip(1))


def name_parameters(module: nn.Module) -> dict[int, str]:
    """Without what a model that is no pipeline has in front."""
    names = engine_experts.name_parameters(module)
    return {number: name.removeprefix("layers.") for number, name in names.items()}


def read_states(engine: Any) -> States:
    """Everything that this rank and its replicas hold; partitions are gathered over their own groups."""
    names, wrapped = name_parameters(engine.module), engine.optimizer
    found = {(names[id(param)], "copy"): param.detach().clone() for param in engine.module.parameters()}
    optimizer = getattr(wrapped, "optimizer", wrapped)
    if hasattr(wrapped, "partition_count"):
        held = getattr(wrapped, "round_robin_bit16_groups", None) or wrapped.bf16_groups
        masters = getattr(wrapped, "single_partition_of_fp32_groups", None) or wrapped.fp32_groups_flat_partition
        for params, part, group in zip(held, masters, wrapped.real_dp_process_group, strict=True):
            for state, tensor in {"fp32": part, **optimizer.state[part]}.items():
                whole = _gather(tensor.data, group) if tensor.dim() else tensor
                for param in params:
                    mine, whole = (whole[: param.numel()], whole[param.numel() :]) if whole.dim() else (whole, whole)
                    found[names[id(param)], state] = mine.clone().view(param.shape if mine.dim() else ())
        return found
    held = getattr(wrapped, "fp16_groups", None) or [group["params"] for group in wrapped.param_groups]
    for number, params in enumerate(held):
        flat = wrapped.fp32_groups_flat[number] if hasattr(wrapped, "fp32_groups_flat") else None
        masters = getattr(wrapped, "fp32_groups", held)[number] if flat is None else [flat] * len(params)
        begin = 0
        for param, master in zip(params, masters, strict=True):
            for state, tensor in {"fp32": master, **optimizer.state[master]}.items():
                own = tensor.detach()
                if flat is not None and tensor.dim():
                    own = own[begin : begin + param.numel()].view(param.shape)
                found[names[id(param)], state] = own.clone()
            begin += param.numel()
    return found


def _gather(tensor: Tensor, group: Any) -> Tensor:
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return torch.cat(parts)


def join(parts: Sequence[States], spread: Spread) -> States:
    """What all ranks hold, whole; what several hold alike has to be equal. ``parts`` are by rank of the world."""
    lanes: dict[tuple[str, str], dict[int, Tensor]] = {}
    for rank, part in enumerate(parts):
        for key, tensor in part.items():
            own = spread.cut if ".experts." in key[0] else True
            is_cut = own and key[0].rpartition(".")[2] in CUT and tensor.dim() > 0
            held = lanes.setdefault(key, {}).setdefault(rank % spread.tp if is_cut else 0, tensor)
            assert torch.equal(held, tensor), (key, rank)
    return {
        key: torch.cat([held[lane] for lane in sorted(held)], CUT[key[0].rpartition(".")[2]])
        if len(held) > 1
        else held[0]
        for key, held in lanes.items()
    }


def save(spread: Spread, folder: str, seed: int, again: bool = False) -> tuple[States, list[float]]:
    return save_and_go_on(make(spread, seed), folder, train, read_states, again=again)


def load_each(spread: Spread, folders: Sequence[str], tag: str | None = None, **arguments: Any) -> list[Loaded | str]:
    return load_and_go_on(make(spread, seed=77), folders, train, read_states, range(3, 5), tag, **arguments)
