"""A model that FSDP2 trains and saves, and that engines of every kind resume; run on the ranks of a group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import deepspeed
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.nn import functional

from deepspeed_ucp.testing.capture import capture
from tests.support.engines import autoep as engine_autoep
from tests.support.engines.autoep import EXPERTS, HIDDEN, Stack, make_block, make_pipeline
from tests.support.engines.kinds import Kind, mean_square
from tests.support.engines.reading import States

STEPS = 3
MATRICES, VECTORS = {"lr": 1e-2, "weight_decay": 0.1}, {"lr": 3e-3, "weight_decay": 0.0}
"""Hyper-parameters of the saved param groups."""


@dataclass(frozen=True)
class Target(engine_autoep.Spread):
    """An engine.

    Attributes:
        compiled: the model comes from ``torch.compile``.
        half: has no masters in fp32: ``masters`` and moments, by the configuration; or ``client``, a model in bf16
            without any such configuration.
    """

    kind: str = "fused"
    compiled: bool = False
    half: str = ""

    universal: ClassVar[Any] = {"patterns": engine_autoep.PATTERNS}

    @property
    def ds_config(self) -> dict[str, Any]:
        adam = {"type": "AdamW", "params": {"lr": 5e-2, "weight_decay": 0.5, "torch_adam": True}}
        config = {**super().ds_config, "optimizer": adam}
        if self.half == "masters":
            config["bf16"] |= {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
        if self.half == "client":
            del config[self.precision]
        return config

    def join(self, ranks: Sequence[Any]) -> States:
        return engine_autoep.join_cut([local.state.states for local in ranks], self.tp)


# --- the model


class Norm(nn.BatchNorm1d):
    """Uses the running figures of the checkpoint alone: any number of ranks computes the same."""

    def forward(self, x: Tensor) -> Tensor:
        figures = (each.float() for each in (self.running_mean, self.running_var, self.weight, self.bias))
        return functional.batch_norm(x.float().transpose(1, 2), *figures).transpose(1, 2).to(x.dtype)


class Layer(nn.Module):
    """A norm with buffers, two matrices that AutoTP cuts, a frozen vector, a matrix of two names, experts."""

    def __init__(self, kind: str, ep: int):
        super().__init__()
        self.norm = Norm(HIDDEN)
        self.dense = nn.Sequential(nn.Linear(HIDDEN, 10), nn.Linear(10, HIDDEN))
        self.shift = nn.Parameter(torch.randn(HIDDEN), requires_grad=False)
        self.mix, self.back = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(2))
        self.back.weight = self.mix.weight
        self.mlp = make_block(kind, EXPERTS, ep, biased=False)
        self.norm.num_batches_tracked += torch.randint(1, 1 << 40, ())
        for figures in (self.norm.running_mean, self.norm.running_var):
            figures.uniform_(0.5, 1.5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.dense(self.norm(x)) + self.shift)
        x = self.back(torch.tanh(self.mix(x)))
        return x + self.mlp(x)


def make_model(kind: str = "fused", ep: int = 1) -> Stack:
    return Stack([Layer(kind, ep) for _ in range(2)], EXPERTS)


def sort_parameters(module: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    trained = [param for param in module.parameters() if param.requires_grad]
    return [each for each in trained if each.dim() > 1], [each for each in trained if each.dim() < 2]


# --- FSDP2


def save(
    folder: str, *, flatten: bool = False, tp: int = 1, apart: bool = False, dtype: str = "float32"
) -> list[float]:
    """Train under FSDP2, save, train on. Returns the losses after the save.

    Args:
        tp: ranks of tensor parallelism, over which two matrices of a layer are cut first.
        apart: save model and optimizer in two folders, as Accelerate does.
    """
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(5)
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size() // tp, tp), mesh_dim_names=("dp", "tp"))
    model = make_model().to(getattr(torch, dtype))
    for layer in model.model.layers:
        if tp > 1:
            parallelize_module(layer, mesh["tp"], {"dense.0": ColwiseParallel(), "dense.1": RowwiseParallel()})
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    matrices, vectors = sort_parameters(model)
    parts = [{"params": matrices, **MATRICES}, {"params": vectors, **VECTORS}]
    optimizer = torch.optim.AdamW(parts, foreach=False)
    _train(model, optimizer, range(STEPS))
    weights, states = get_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=flatten))
    if apart:
        dcp.save({"model": weights}, checkpoint_id=f"{folder}/pytorch_model_fsdp_0")
        dcp.save({"optimizer": states}, checkpoint_id=f"{folder}/optimizer_0")
    else:
        dcp.save({"model": weights, "optim": states}, checkpoint_id=folder)
    return _train(model, optimizer, range(STEPS, STEPS + 2))


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        batch = torch.randn(Kind.batch, 1, HIDDEN, generator=torch.Generator().manual_seed(step))
        loss = mean_square(model(batch.to(next(model.parameters()).dtype)), batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses


# --- DeepSpeed


def make(target: Target, seed: int) -> Any:
    """Make an engine with other weights and the param groups in reverse order."""
    module: Any = make_model(target.kind, target.ep)
    if target.pp > 1:
        module = make_pipeline(module, target)
    if target.half == "client":
        module.bfloat16()
    if target.compiled:
        module = torch.compile(module, backend="eager")
    matrices, vectors = sort_parameters(module)
    params: Any = [{"params": vectors, "name": "vectors"}, {"params": matrices, "name": "matrices"}]
    return deepspeed.initialize(model=module, model_parameters=params, config=target.ds_config)[0]


step = engine_autoep.step


@dataclass
class Facts:
    """A rank of an engine.

    Attributes:
        states: by parameter and state, each expert separately.
        hyper: for each parameter's param group whether it has matrices, learning rate and weight decay.
    """

    states: States
    steps: set[float]
    hyper: set[tuple[bool, float, float]]
    counters: tuple[float, ...]
    scale: float | None


def read_states(engine: Any) -> Facts:  # type: ignore[misc]
    found = capture(engine)
    parameters = found.parameters.values()
    return Facts(
        engine_autoep.read_states(engine),
        {each.scalars["step"] for each in parameters if "step" in each.scalars},
        {(each.value.dim() > 1, each.hyper["lr"], each.hyper["weight_decay"]) for each in parameters if each.hyper},
        (found.counters["global_steps"], found.counters["skipped_steps"]),
        found.loss_scale,
    )


def take_apart(weights: dict[str, Tensor], states: dict[str, dict[str, Tensor]]) -> States:
    """Convert whole tensors of a checkpoint to states as :func:`read_states` reads them."""
    found: States = {}
    for saved_name, tensor in weights.items():
        name = saved_name.replace(".back.", ".mix.")
        kind = "fp32" if name in states else "buffer" if "running" in name or "num_batches" in name else "copy"
        kept = {state: each for state, each in states.get(name, {}).items() if state != "step"}
        for state, each in {kind: tensor, **kept}.items():
            found.update({(part, state): piece for part, piece in engine_autoep.take_apart(name, each)})
    return found
