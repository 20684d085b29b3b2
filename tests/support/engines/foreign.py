"""A model that FSDP2 trains and saves, and that goes on in engines of every kind; run on the ranks of a group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.nn import functional

from deepspeed_ucp.atoms import strip_compiled
from tests.support.engines import autoep as engine_autoep
from tests.support.engines import fused as engine_fused
from tests.support.engines.autoep import BATCH, HIDDEN
from tests.support.engines.cases import allow_fp16_on_cpu, enable
from tests.support.engines.fused import Form
from tests.support.engines.going_on import States, forget_groups, mean_square

STEPS = 3
MATRICES, VECTORS = {"lr": 1e-2, "weight_decay": 0.1}, {"lr": 3e-3, "weight_decay": 0.0}
"""Hyper-parameters of the saved param groups."""

LIVE = {"lr": 5e-2, "weight_decay": 0.5}


@dataclass(frozen=True)
class Target:
    """An engine.

    Attributes:
        kind: in what form its experts are, as of :class:`.fused.Form`.
        options: further ones of ZeRO.
        compiled: the model comes from ``torch.compile``.
        half: what has no master in fp32: ``masters`` and moments, by the configuration; or all, since the ``client``
            has made the model so and the configuration does not say.
    """

    stage: int
    precision: str = "fp32"
    kind: str = "fused"
    tp: int = 1
    pp: int = 1
    ep: int = 1
    world: int = 2
    options: tuple[tuple[str, Any], ...] = ()
    compiled: bool = False
    half: str = ""

    def __str__(self) -> str:
        degrees = [
            f"{key}{degree}" for key, degree in (("tp", self.tp), ("pp", self.pp), ("ep", self.ep)) if degree > 1
        ]
        more = (
            [key for key, _ in self.options]
            + ["compiled"] * self.compiled
            + [f"{self.half}-in-16-bits"] * bool(self.half)
        )
        kind = [self.kind] * (self.kind != "fused")
        return "-".join([f"zero{self.stage}", self.precision, f"of{self.world}", *kind, *degrees, *more])


# --- the model


class Norm(nn.BatchNorm1d):
    """By its running figures alone, which come with a checkpoint: ranks of any number compute the same."""

    def forward(self, x: Tensor) -> Tensor:
        held = (
            each.float() for each in (self.running_mean, self.running_var, self.weight, self.bias) if each is not None
        )
        return functional.batch_norm(x.float().transpose(1, 2), *held).transpose(1, 2).to(x.dtype)


class Layer(nn.Module):
    """A norm with buffers, two matrices that AutoTP cuts, a frozen vector, a matrix of two names, experts."""

    def __init__(self, form: Form):
        super().__init__()
        self.norm = Norm(HIDDEN)
        self.dense = nn.Sequential(nn.Linear(HIDDEN, 10), nn.Linear(10, HIDDEN))
        self.shift = nn.Parameter(torch.randn(HIDDEN), requires_grad=False)
        self.mix, self.back = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(2))
        self.back.weight = self.mix.weight
        self.mlp = engine_fused.make_block(form)
        assert self.norm.num_batches_tracked is not None
        self.norm.num_batches_tracked += torch.randint(1, 1 << 40, ())
        for figures in (self.norm.running_mean, self.norm.running_var):
            assert figures is not None
            figures.uniform_(0.5, 1.5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.dense(self.norm(x)) + self.shift)
        x = self.back(torch.tanh(self.mix(x)))
        return x + self.mlp(x)


class Model(engine_fused.Model):
    """Two such layers."""

    layer = Layer


def sort_parameters(module: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Matrices and vectors that are trained."""
    trained = [param for param in module.parameters() if param.requires_grad]
    return [each for each in trained if each.dim() > 1], [each for each in trained if each.dim() < 2]


# --- FSDP2


def save(
    folder: str,
    *,
    flatten: bool = False,
    tp: int = 1,
    apart: bool = False,
    dtype: str = "float32",
    together: bool = False,
) -> list[float]:
    """Train under FSDP2, save, go on; the losses after the save.

    Args:
        tp: ranks of tensor parallelism, over which two matrices of a layer are cut first.
        apart: model and optimizer in folders of their own, as Accelerate has them.
        dtype: of the weights.
        together: all parameters are in one param group.
    """
    torch.manual_seed(5)
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size() // tp, tp), mesh_dim_names=("dp", "tp"))
    model = Model(Form(1, 0, "fused")).to(getattr(torch, dtype))
    _shard(model, mesh, tp)
    matrices, vectors = sort_parameters(model)
    parts = [{"params": matrices, **MATRICES}, {"params": vectors, **VECTORS}]
    parts = [{"params": [*matrices, *vectors], **MATRICES}] if together else parts
    optimizer = torch.optim.AdamW(parts, foreach=False)
    _train(model, optimizer, range(STEPS))
    weights, states = get_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=flatten))
    if apart:
        dcp.save({"model": weights}, checkpoint_id=f"{folder}/pytorch_model_fsdp_0")
        dcp.save({"optimizer": states}, checkpoint_id=f"{folder}/optimizer_0")
    else:
        dcp.save({"model": weights, "optim": states}, checkpoint_id=folder)
    return _train(model, optimizer, range(STEPS, STEPS + 2))


def _shard(model: Model, mesh: Any, tp: int) -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    for layer in model.model.layers:
        if tp > 1:
            parallelize_module(layer, mesh["tp"], {"dense.0": ColwiseParallel(), "dense.1": RowwiseParallel()})
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        batch = torch.randn(BATCH, 1, HIDDEN, generator=torch.Generator().manual_seed(step))
        loss = mean_square(model(batch.to(next(model.parameters()).dtype)), batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses


# --- DeepSpeed


def make(target: Target, patterns: Any, **more: Any) -> Any:
    """An engine with other weights, whose param groups come in another order."""
    forget_groups()
    allow_fp16_on_cpu()
    torch.manual_seed(77)
    module: Any = Model(Form(target.world, target.stage, target.kind, ep=target.ep))
    if target.pp > 1:
        module = engine_autoep.make_pipeline(module, engine_autoep.Spread(target.world, 0, "", 1, pp=target.pp))
    if target.half == "client":
        module.bfloat16()
    if target.compiled:
        module = torch.compile(module, backend="eager")
    matrices, vectors = sort_parameters(module)
    params: Any = [{"params": vectors, "name": "vectors"}, {"params": matrices, "name": "matrices"}]
    return deepspeed.initialize(model=module, model_parameters=params, config=make_config(target, patterns, **more))[0]


def make_config(target: Target, patterns: Any, **more: Any) -> dict[str, Any]:
    """``more``: options of the plugin."""
    config: dict[str, Any] = {
        "train_batch_size": BATCH,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {**LIVE, "torch_adam": True}},
        "zero_optimization": {"stage": target.stage, **dict(target.options)},
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 1 << 30,
        "checkpoint": {"universal": {**({"patterns": patterns} if patterns else {}), **more} or True},
    }
    if target.half != "client":
        config |= enable(target.precision)
    if target.half == "masters":
        config["bf16"] |= {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    if target.kind == "autoep":
        config["expert_parallel"] = {"enabled": True, "autoep_size": target.ep, "use_grouped_mm": False}
    if target.tp > 1:
        config["tensor_parallel"] = engine_autoep.cut_dense(target.tp)
    return config


@dataclass
class Loaded:
    """What a rank held after a load.

    Attributes:
        states: by parameter and state, experts one by one.
        steps: of the optimizer, all that there are.
        hyper: of each parameter's param group whether it has matrices, and learning rate and weight decay.
        losses: of the two steps that followed.
        scale: of the loss; None without one.
    """

    states: States
    steps: set[float]
    hyper: set[tuple[bool, float, float]]
    losses: list[float]
    counters: tuple[int, ...]
    scale: float | None


def load_each(target: Target, patterns: Any, folders: Sequence[str], **more: Any) -> list[Loaded | str]:
    """One engine takes them all, one after the other; of a refusal its text."""
    engine = make(target, patterns, **more)
    found: list[Loaded | str] = []
    for folder in folders:
        try:
            engine.load_checkpoint(folder)
        except Exception as error:  # noqa: BLE001 - the caller looks at it
            found.append(f"{type(error).__name__}: {error}")
            continue
        states = {
            (strip_compiled(name), state): held for (name, state), held in engine_fused.read_states(engine).items()
        }
        inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
        steps = {float(held["step"]) for held in inner.state.values() if "step" in held}
        hyper = {(each, group["lr"], group["weight_decay"]) for each, group in _list_groups(engine.optimizer, inner)}
        counters = engine.global_steps, engine.skipped_steps
        scale = float(engine.optimizer.cur_scale) if target.precision == "fp16" else None
        losses = engine_autoep.train(engine, range(STEPS, STEPS + 2))
        found.append(Loaded(states, steps, hyper, losses, counters, scale))
    engine.destroy()
    return found


def _list_groups(wrapped: Any, inner: Any) -> list[tuple[bool, dict[str, Any]]]:
    """Param groups, and whether a group has matrices, for each of its parameters."""
    numbers = getattr(wrapped, "sub_group_to_group_id", None)
    held = next(
        (
            each
            for name in ("round_robin_bit16_groups", "bit16_groups", "bf16_groups", "fp16_groups")
            if (each := getattr(wrapped, name, None))
        ),
        [group["params"] for group in inner.param_groups],
    )
    return [
        (len(getattr(param, "ds_shape", param.shape)) > 1, inner.param_groups[numbers[place] if numbers else place])
        for place, params in enumerate(held)
        for param in params
    ]


def take_apart(weights: dict[str, Tensor], states: dict[str, dict[str, Tensor]]) -> States:
    """Whole tensors of a checkpoint under the names that :func:`load_each` gives, experts one by one."""
    found: States = {}
    for told, tensor in weights.items():
        name = told.replace(".back.", ".mix.")
        kind = "fp32" if name in states else "buffer" if "running" in name or "num_batches" in name else "copy"
        held = {state: each for state, each in states.get(name, {}).items() if state != "step"}
        for state, each in {kind: tensor, **held}.items():
            found.update({(part, state): piece for part, piece in engine_fused.take_apart(name, each)})
    return found
