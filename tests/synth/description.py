"""Describes a synthesised checkpoint: the model, its logical state, the topology, and the run that saved it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from deepspeed_ucp.model.wrappers import Form, Wrapper, find_wrapper, list_selectable

from .stages import differs_by_stage, instance_names

SHORT = {"torch": "raw", "fp16_unfused": "unfused", "fp16_fused": "fused", "zero12": "zero", "zero3": "zero"}
"""Short names of the package's wrappers in tests."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ADAMW = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "amsgrad": False}


@dataclass(frozen=True, slots=True)
class Param:
    """One parameter. `group` is its optimizer param group (None: not given to the optimizer), `alias_of` its owner.

    `tied` marks the `tied_weight_attr` of a pipeline's tied module: one value on all its stages. `untold` aliases are
    in the module's state_dict but not in `shared_params`, as that of AutoEP's router. `parts` are the whole model's
    consecutive parameters in a rank's parameter of experts.
    """

    name: str
    shape: tuple[int, ...]
    group: int | None = 0
    frozen: bool = False
    alias_of: str | None = None
    tied: bool = False
    untold: bool = False
    parts: tuple[str, ...] = ()

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def trains(self) -> bool:
        """DeepSpeed's `is_optimized_parameter`: zero-element parameters are omitted like frozen ones."""
        return not self.frozen and self.numel > 0

    @property
    def atoms(self) -> tuple[str, ...]:
        """The whole model's parameters in this one."""
        return self.parts or (self.name,)


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """A layer of experts with its module's name: DeepSpeed's, or AutoEP's (`fused`).

    The whole model has `{prefix}{number}.{end}` for every expert of DeepSpeed's, `{prefix}w1.{number}` of AutoEP's.
    """

    name: str
    count: int
    fused: bool = False

    @property
    def prefix(self) -> str:
        return f"{self.name}.experts." if self.fused else f"{self.name}.deepspeed_moe.experts.deepspeed_experts."

    def split(self, name: str) -> tuple[int, str]:
        """Split the whole model's name of an expert's parameter into the expert's number and the rest."""
        rest = name.removeprefix(self.prefix)
        if self.fused:
            end, _, number = rest.rpartition(".")
            return int(number), end
        number, dot, end = rest.partition(".")
        return int(number), f"{dot}{end}"


@dataclass(frozen=True, slots=True)
class Spread:
    """A rank's param group: the user's group, the degree of its experts (None: dense), and the ranks that hold it.

    `ranks` are numbered as by `find_seat`.
    """

    origin: int
    degree: int | None
    ranks: range


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer spec of a PipelineModule, for the tied module with the key `tied` if given.

    `file=False`: DeepSpeed writes no layer file, as for a function or a TiedLayerSpec with a forward_fn.
    """

    tied: str | None = None
    file: bool = True


@dataclass(frozen=True, slots=True)
class Model:
    """Parameters in `named_parameters` order, also within a group, and persistent buffers.

    `layers` make it a PipelineModule, whose names start with "<layer>." or "tied_modules.<key>.". `experts` are the
    layers of experts of all stages in module order. A rank's part of a model with experts has `spread` for its param
    groups, and its tensor-parallel rank as `lane`.
    """

    params: tuple[Param, ...]
    buffers: Mapping[str, torch.Tensor] = field(default_factory=dict)
    layers: tuple[Layer, ...] = ()
    experts: tuple[ExpertLayer, ...] = ()
    spread: tuple[Spread, ...] = ()
    lane: int = 0

    @property
    def owners(self) -> tuple[Param, ...]:
        """The parameters without tied aliases."""
        return tuple(param for param in self.params if param.alias_of is None)

    @property
    def groups(self) -> tuple[tuple[Param, ...], ...]:
        """The optimizer's param groups, including frozen and zero-element parameters."""
        count = 1 + max((param.group for param in self.owners if param.group is not None), default=-1)
        return tuple(tuple(param for param in self.owners if param.group == index) for index in range(count))

    @property
    def live_groups(self) -> list[list[tuple[str, bool]]]:
        """The param groups as a live engine names them: (name, whether it trains) of each parameter."""
        return [[(param.name, param.trains) for param in group] for group in self.groups]

    def seat(self, group: int, topology: Topology, rank: int) -> tuple[int, int]:
        """Return (partition, partitions) of a data-parallel rank in a param group."""
        if not self.spread:
            return rank, topology.dp
        ranks = self.spread[group].ranks
        return ranks.index(find_seat(self, topology, rank)), len(ranks)


@dataclass(frozen=True, slots=True)
class State:
    """The logical state: atoms[name][state] in the parameter's shape ("fp32" is the master weight).

    `scalars[name]` are the parameter's scalar states ({"step": tensor(3.)}); `groups` the hyper-parameters per group.
    A parameter without states other than "fp32" has not been stepped: alone (no gradient yet), or with all the others
    (saved before the first step).
    """

    atoms: Mapping[str, Mapping[str, torch.Tensor]]
    scalars: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    groups: tuple[Mapping[str, Any], ...] = (ADAMW,)


def find_seat(model: Model, topology: Topology, rank: int) -> int:
    """Number a data-parallel rank of a model's lane among the ranks over which experts are spread."""
    return rank * topology.tp + model.lane if topology.folds_experts else rank


@dataclass(frozen=True, slots=True)
class Topology:
    """The topology of the run that saved. Wrappers ignore options that they do not have, as in DeepSpeed.

    * `dp`: includes the sequence-parallel degree.
    * `wrapper`: "raw" | "unfused" | "fused" at stage 0, "zero" | "bf16" (BF16_Optimizer) at stage 1, "zero" above;
      pipelines in bf16 have "bf16" also at stage 0. None: DeepSpeed's choice for a torch optimizer.
    * `sub_group_size`: in elements of one partition.
    * `placement`: layers of each pipeline rank; None: contiguous and uniform.
    * `model_axis`: the process topology has a model axis, which names the layer files; None: with tensor parallelism.
    * `ep`: degree of each layer of experts; empty: 1.
    * `data_first`: `use_data_before_expert_parallelism`. `max_group`: most elements of a group of experts.
    * `shuffled`: odd ranks have the groups of several degrees in another order.
    * `dealt`: AutoEP deals experts like cards.
    * `cut_experts`: expert tensor parallelism; without it whole experts are spread over tensor-parallel ranks too.
    """

    stage: int
    dp: int = 1
    precision: str = "fp32"
    wrapper: str | None = None
    round_robin: bool = False
    parameter_alignment: bool = False
    sub_group_size: int | None = None
    elastic: bool = False
    tp: int = 1
    pp: int = 1
    placement: tuple[tuple[int, ...], ...] | None = None
    model_axis: bool | None = None
    ep: tuple[int, ...] = ()
    data_first: bool = False
    max_group: int | None = None
    shuffled: bool = False
    dealt: bool = False
    cut_experts: bool = False

    @property
    def kind(self) -> str:
        if self.wrapper:
            return self.wrapper
        rows = list_selectable(self.stage, str(self.dtype).removeprefix("torch."))
        piped = [row for row in rows if self.stage in row.by_pipelines]
        kinds = [SHORT.get(row.name, row.name) for row in (self.pp > 1 and piped) or rows]
        return min(kinds, key=lambda kind: (kind != "unfused", kind == "bf16"))

    @property
    def row(self) -> Wrapper:
        zero = "zero3" if self.stage == 3 else "zero12"
        return find_wrapper({**{short: name for name, short in SHORT.items()}, "zero": zero}.get(self.kind, self.kind))

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.precision]

    @property
    def flattens(self) -> bool:
        """True if the module's parameters are views of one flat buffer per group."""
        return self.row.form in (Form.FLAT, Form.PARTITIONS)

    @property
    def keeps_lean_states(self) -> bool:
        """True if the save has a list of unpadded states instead of torch's state_dict (elastic_checkpoint)."""
        return self.elastic and self.row.can_be_elastic

    @property
    def partitions(self) -> bool:
        """True if every data-parallel rank writes a file with its partitions."""
        return self.row.is_cut

    @property
    def mp(self) -> int:
        """Model-parallel ranks, DeepSpeed's mp_world_size."""
        return self.pp * self.tp

    @property
    def folds_experts(self) -> bool:
        """True if experts are also spread over the tensor-parallel ranks of a stage."""
        return self.tp > 1 and not self.cut_experts

    @property
    def seats(self) -> int:
        return self.dp * self.tp if self.folds_experts else self.dp

    @property
    def names_model_axis(self) -> bool:
        """True if layer files have the tensor-parallel rank in their names."""
        return self.tp > 1 if self.model_axis is None else self.model_axis

    @property
    def label(self) -> str:
        """Readable test id: zero2-bf16-dp3-round_robin, zero1-fp32-tp2-pp2-dp1."""
        known = ("round_robin", "parameter_alignment", "elastic", "data_first", "shuffled", "dealt", "cut_experts")
        options = [name for name in known if getattr(self, name)]
        options += ["ep" + ".".join(map(str, self.ep))] if self.ep else []
        sub_group = [f"sub{self.sub_group_size}"] if self.sub_group_size else []
        sub_group += [f"max{self.max_group}"] if self.max_group else []
        kind = f"stage0-{self.kind}" if self.stage == 0 else f"zero{self.stage}" + "-bf16opt" * (self.kind == "bf16")
        degrees = [f"{axis}{degree}" for axis, degree in (("tp", self.tp), ("pp", self.pp)) if degree > 1]
        return "-".join([kind, self.precision, *degrees, f"dp{self.dp}", *options, *sub_group])

    def ds_config(self) -> dict[str, Any]:
        options = {
            "round_robin_gradients": self.round_robin,
            "parameter_alignment": self.parameter_alignment,
            "elastic_checkpoint": self.elastic,
            "sub_group_size": self.sub_group_size,
        }
        zero = {"stage": self.stage, **{name: value for name, value in options.items() if value}}
        config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": zero}
        if self.precision != "fp32":
            config[self.precision] = {"enabled": True}
        if self.kind == "bf16" and self.stage == 1:
            config["data_types"] = {"grad_accum_dtype": "fp32"}
        if self.data_first:
            config["use_data_before_expert_parallelism"] = True
        return config


@dataclass(frozen=True, slots=True)
class Run:
    """The rest of a checkpoint. None: the value of a fresh engine of the topology.

    `garbage` fills ZeRO 3's padding, which is uninitialised in a real run: nan reveals code that reads it.
    `parallel_dimensions=False` omits an entry that older releases do not write. `nest` converts the flat state_dict
    for models with a nested one.
    """

    global_steps: int = 3
    global_samples: int | None = None
    skipped_steps: int = 0
    lr_scheduler: Mapping[str, Any] | None = None
    client_state: Mapping[str, Any] = field(default_factory=dict)
    ds_config: Mapping[str, Any] | None = None
    loss_scaler: Any = None
    clip_grad: float = 1.0
    garbage: float = 0.0
    parallel_dimensions: bool = True
    nest: Callable[[Mapping[str, torch.Tensor]], Mapping[str, Any]] | None = None


def random_state(
    model: Model,
    seed: int,
    states: tuple[str, ...] = ("exp_avg", "exp_avg_sq"),
    *,
    step: float | None = 3,
    precision: str = "fp32",
    without: tuple[str, ...] = (),
    dtype: torch.dtype = torch.float32,
    topology: Topology | None = None,
) -> State:
    """Draw random fp32 atoms, reproducible on every machine.

    `step=None` gives no scalar; with `states=()` it is a checkpoint from before the first step. Parameters in `without`
    never got a gradient. Parameters that the optimizer does not train are rounded to `precision`, as in a checkpoint.
    `dtype` is that of the states.

    With a `topology` there are instances ("name#1") of parameters that several pipeline ranks hold. Their weights are
    equal, except those of a tied module without tied weight. Their states differ, to reveal a confusion.
    """
    random = torch.Generator().manual_seed(seed)
    atoms: dict[str, dict[str, torch.Tensor]] = {}
    scalars: dict[str, dict[str, Any]] = {}

    def draw(name: str, param: Param) -> None:
        fp32 = torch.randn(param.shape, generator=random)
        trained = param.trains and param.group is not None
        atoms[name] = {"fp32": fp32 if trained else fp32.to(DTYPES[precision]).float()}
        if trained and param.name not in without:
            atoms[name].update((key, torch.rand(param.shape, generator=random).to(dtype)) for key in states)
            scalars[name] = {} if step is None else {"step": torch.tensor(float(step))}

    for param in model.owners:
        draw(param.name, param)
    params = {param.name: param for param in model.owners}
    for name, instances in (instance_names(model, topology) if topology else {}).items():
        for further in instances[1:]:
            draw(further, params[name])
            if not differs_by_stage(params[name]):
                atoms[further]["fp32"] = atoms[name]["fp32"]
    groups = tuple({**ADAMW, "lr": 1e-3 / (index + 1)} for index in range(len(model.groups)))
    return State(atoms, scalars, groups)
