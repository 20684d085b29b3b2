"""What a synthesised checkpoint holds: the model, its logical state, the topology that saved it, the run around it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from deepspeed_ucp.wrappers import Form, Wrapper, find_wrapper, list_foreseen

from .stages import differs_by_stage, instance_names

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

SHORT = {"torch": "raw", "fp16_unfused": "unfused", "fp16_fused": "fused", "zero12": "zero", "zero3": "zero"}
"""What tests call a wrapper of the package's table."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ADAMW = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "amsgrad": False}


@dataclass(frozen=True, slots=True)
class Param:
    """One parameter. `group` is its optimizer param group (None: not given to the optimizer), `alias_of` its owner.

    `tied` marks the `tied_weight_attr` of a pipeline's tied module: one value on all stages that hold it. `untold`
    aliases are in the module's state_dict and not in `shared_params`, as that of AutoEP's router. Of a rank's own
    parameter of experts `parts` are the whole model's parameters that lie in it, one behind the other.
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
        """DeepSpeed's `is_optimized_parameter`: zero-element parameters are left out like frozen ones."""
        return not self.frozen and self.numel > 0

    @property
    def atoms(self) -> tuple[str, ...]:
        """The whole model's names of what it holds."""
        return self.parts or (self.name,)


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """A layer of experts, by its module's name: DeepSpeed's own, or AutoEP's (`fused`).

    Of the former the whole model has `{prefix}{number}.{end}` for every expert, of the latter `{prefix}w1.{number}`.
    """

    name: str
    count: int
    fused: bool = False

    @property
    def prefix(self) -> str:
        """What the names of its experts' parameters begin with."""
        return f"{self.name}.experts." if self.fused else f"{self.name}.deepspeed_moe.experts.deepspeed_experts."

    def split(self, name: str) -> tuple[int, str]:
        """Of the whole model's name of an expert's parameter its number, and the rest."""
        rest = name.removeprefix(self.prefix)
        if self.fused:
            end, _, number = rest.rpartition(".")
            return int(number), end
        number, dot, end = rest.partition(".")
        return int(number), f"{dot}{end}"


@dataclass(frozen=True, slots=True)
class Spread:
    """A rank's own param group: the user's group that it comes from, the degree of its experts, who holds it.

    `degree` is None for what every rank holds. `ranks` are numbered as `experts.find_seat` does.
    """

    origin: int
    degree: int | None
    ranks: range


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer spec of a PipelineModule: a module of its own, or the tied module with the key `tied`.

    `file=False` has no state_dict, so DeepSpeed writes no layer file: a function, or a TiedLayerSpec with a
    forward_fn.
    """

    tied: str | None = None
    file: bool = True


@dataclass(frozen=True, slots=True)
class Model:
    """Parameters in `named_parameters` order (their order within a group too), and persistent buffers.

    `layers` make it a PipelineModule, whose names start with "<layer>." or "tied_modules.<key>.". `experts` are the
    layers of experts in module order, of all stages; `spread` tells of the param groups of one rank's own part of such
    a model, and `lane` is the tensor-parallel rank whose part it is.
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
        """What the optimizer was given, frozen and zero-element parameters included, per group."""
        count = 1 + max((param.group for param in self.owners if param.group is not None), default=-1)
        return tuple(tuple(param for param in self.owners if param.group == index) for index in range(count))

    def seat(self, group: int, topology: Topology, rank: int) -> tuple[int, int]:
        """(partition, partitions) of a data-parallel rank in a param group."""
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
    """The number of a data-parallel rank of a model's lane among those over which experts are spread."""
    return rank * topology.tp + model.lane if topology.folds_experts else rank


@dataclass(frozen=True, slots=True)
class Topology:
    """How the run that saved was laid out.

    `wrapper` is "raw" | "unfused" | "fused" at stage 0, "zero" | "bf16" (BF16_Optimizer) at stage 1, "zero" above;
    pipelines in bf16 have "bf16" at stage 0 too. None takes the one that DeepSpeed takes for a torch optimizer.
    `sub_group_size` is in elements of one partition.
    Like DeepSpeed, wrappers ignore the options that they do not have.

    `dp` includes the sequence-parallel degree. `placement` has the layers of each pipeline rank (None: contiguous and
    uniform). `model_axis` says whether the process topology has a model axis, which names the layer files; None: with
    tensor parallelism only. `ep` has the degree of each layer of experts (empty: 1), `data_first` is
    `use_data_before_expert_parallelism`, `max_group` the most elements of a group of experts; with `shuffled` odd ranks
    have the groups of several degrees in another order, with `dealt` AutoEP deals experts like cards. With
    `cut_experts` (expert tensor parallelism) every tensor-parallel rank has its part of each expert; without it experts
    are spread over the tensor-parallel ranks too, whole.
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

    def __post_init__(self) -> None:
        if self.pp > 1 and self.stage > 1:
            raise ValueError(f"DeepSpeed has no pipelines under ZeRO {self.stage}")
        if self.kind not in self._valid_kinds():
            raise ValueError(
                f"{self.kind!r} is no wrapper of stage {self.stage} in {self.precision}: {self._valid_kinds()} are"
            )
        if self.elastic and self.stage == 3:
            raise ValueError("DeepSpeed has no elastic_checkpoint under ZeRO 3")
        if any(self.seats % degree for degree in self.ep):
            raise ValueError(f"experts cannot be spread over {self.ep} of {self.seats} ranks")

    @property
    def kind(self) -> str:
        """The wrapper, resolved."""
        return self.wrapper or self._valid_kinds()[0]

    @property
    def row(self) -> Wrapper:
        """What the package knows of it."""
        zero = "zero3" if self.stage == 3 else "zero12"
        return find_wrapper({**{short: name for name, short in SHORT.items()}, "zero": zero}.get(self.kind, self.kind))

    @property
    def dtype(self) -> torch.dtype:
        """Of the module's parameters."""
        return DTYPES[self.precision]

    @property
    def flattens(self) -> bool:
        """Whether the module's parameters are views of one flat buffer per group."""
        return self.row.form in (Form.FLAT, Form.PARTITIONS)

    @property
    def keeps_lean_states(self) -> bool:
        """Whether elastic_checkpoint has its effect: a list of unpadded states instead of torch's state_dict."""
        return self.elastic and self.row.can_be_elastic

    @property
    def partitions(self) -> bool:
        """Whether data-parallel ranks own partitions and write files of their own."""
        return self.row.is_cut

    @property
    def mp(self) -> int:
        """Model-parallel ranks, DeepSpeed's mp_world_size."""
        return self.pp * self.tp

    @property
    def folds_experts(self) -> bool:
        """Whether experts are spread over the tensor-parallel ranks of a stage too."""
        return self.tp > 1 and not self.cut_experts

    @property
    def seats(self) -> int:
        """Over how many ranks experts are spread."""
        return self.dp * self.tp if self.folds_experts else self.dp

    @property
    def names_model_axis(self) -> bool:
        """Whether layer files have the tensor-parallel rank in their names."""
        return self.tp > 1 if self.model_axis is None else self.model_axis

    @property
    def label(self) -> str:
        """A readable test id: zero2-bf16-dp3-round_robin, zero1-fp32-tp2-pp2-dp1."""
        known = ("round_robin", "parameter_alignment", "elastic", "data_first", "shuffled", "dealt", "cut_experts")
        options = [name for name in known if getattr(self, name)]
        options += ["ep" + ".".join(map(str, self.ep))] if self.ep else []
        sub_group = [f"sub{self.sub_group_size}"] if self.sub_group_size else []
        sub_group += [f"max{self.max_group}"] if self.max_group else []
        kind = f"stage0-{self.kind}" if self.stage == 0 else f"zero{self.stage}" + "-bf16opt" * (self.kind == "bf16")
        degrees = [f"{axis}{degree}" for axis, degree in (("tp", self.tp), ("pp", self.pp)) if degree > 1]
        return "-".join([kind, self.precision, *degrees, f"dp{self.dp}", *options, *sub_group])

    def ds_config(self) -> dict[str, Any]:
        """A configuration that gives this topology."""
        config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": self._zero_config()}
        if self.precision != "fp32":
            config[self.precision] = {"enabled": True}
        if self.kind == "bf16" and self.stage == 1:
            config["data_types"] = {"grad_accum_dtype": "fp32"}
        if self.data_first:
            config["use_data_before_expert_parallelism"] = True
        return config

    def _zero_config(self) -> dict[str, Any]:
        options = {
            "round_robin_gradients": self.round_robin,
            "parameter_alignment": self.parameter_alignment,
            "elastic_checkpoint": self.elastic,
            "sub_group_size": self.sub_group_size,
        }
        return {"stage": self.stage, **{name: value for name, value in options.items() if value}}

    def _valid_kinds(self) -> tuple[str, ...]:
        rows = list_foreseen(self.stage, str(self.dtype).removeprefix("torch."))
        piped = [row for row in rows if self.stage in row.by_pipelines]
        kinds = [SHORT.get(row.name, row.name) for row in (self.pp > 1 and piped) or rows]
        return tuple(sorted(kinds, key=lambda kind: (kind != "unfused", kind == "bf16")))


@dataclass(frozen=True, slots=True)
class Run:
    """Everything else that a checkpoint carries. None takes what a fresh engine of the topology would have.

    `garbage` is left in ZeRO 3's padding, which is uninitialised memory in a real run: nan shows who reads it.
    `parallel_dimensions=False` leaves out what older releases do not write. `nest` makes the `module` of the file from
    the flat state_dict, for models whose state_dict is nested.
    """

    global_steps: int = 3
    global_samples: int | None = None
    skipped_steps: int = 0
    lr_scheduler: Mapping[str, Any] | None = None
    data_sampler: Mapping[str, Any] | None = None
    random_ltd: Mapping[str, Any] | None = None
    client_state: Mapping[str, Any] = field(default_factory=dict)
    ds_config: Mapping[str, Any] | None = None
    ds_version: str | None = None
    loss_scaler: Any = None
    clip_grad: float = 1.0
    overflow: bool = False
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
    equal_instances: bool = False,
) -> State:
    """Random atoms, fp32, the same on every machine.

    `step` None gives no scalar; `states=()` with `step=None` is a checkpoint from before the first step; parameters in
    `without` never got a gradient. Parameters that the optimizer does not train are rounded to `precision`, which is
    all that a checkpoint of that precision keeps of them. `dtype` is that of the states.

    With a `topology` there are the instances of what several pipeline ranks hold too ("name#1"): the weights equal,
    except a tied module's untied ones; the optimizer states all different, which shows who mixes them up, or equal as
    in a real run with `equal_instances`.
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
        own = differs_by_stage(params[name])
        for further in instances[1:]:
            draw(further, params[name])
            if equal_instances and not own:
                atoms[further] = dict(atoms[name])
            elif not own:
                atoms[further]["fp32"] = atoms[name]["fp32"]
    groups = tuple({**ADAMW, "lr": 1e-3 / (index + 1)} for index in range(len(model.groups)))
    return State(atoms, scalars, groups)


def assert_same_state(actual: State, expected: State) -> None:
    """Bitwise equality of two states; raises AssertionError naming the first atom or scalar that differs."""
    assert actual.atoms.keys() == expected.atoms.keys()
    for name, atoms in expected.atoms.items():
        assert actual.atoms[name].keys() == atoms.keys(), name
        for key, tensor in atoms.items():
            assert same_bits(actual.atoms[name][key], tensor), f"{name}: {key} differs"
        assert actual.scalars.get(name, {}) == expected.scalars.get(name, {}), f"{name}: scalars differ"
    assert list(map(dict, actual.groups)) == list(map(dict, expected.groups))


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Same shape, dtype and bytes (so nan equals itself, and -0 differs from 0)."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    return left.numel() == 0 or bool(torch.equal(_bytes(left), _bytes(right)))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).contiguous().view(torch.uint8)
