"""What a synthesised checkpoint holds: the model, its logical state, the topology that saved it, the run around it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ADAMW = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "amsgrad": False}


@dataclass(frozen=True, slots=True)
class Param:
    """One parameter. `group` is its optimizer param group (None: not given to the optimizer), `alias_of` its owner."""

    name: str
    shape: tuple[int, ...]
    group: int | None = 0
    frozen: bool = False
    alias_of: str | None = None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def trains(self) -> bool:
        """DeepSpeed's `is_optimized_parameter`: zero-element parameters are left out like frozen ones."""
        return not self.frozen and self.numel > 0


@dataclass(frozen=True, slots=True)
class Model:
    """Parameters in `named_parameters` order (their order within a group too), and persistent buffers."""

    params: tuple[Param, ...]
    buffers: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @property
    def owners(self) -> tuple[Param, ...]:
        """The parameters without tied aliases."""
        return tuple(param for param in self.params if param.alias_of is None)

    @property
    def groups(self) -> tuple[tuple[Param, ...], ...]:
        """What the optimizer was given, frozen and zero-element parameters included, per group."""
        count = 1 + max((param.group for param in self.owners if param.group is not None), default=-1)
        return tuple(tuple(param for param in self.owners if param.group == index) for index in range(count))


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


@dataclass(frozen=True, slots=True)
class Topology:
    """How the run that saved was laid out.

    `wrapper` is "raw" | "unfused" | "fused" at stage 0, "zero" | "bf16" (BF16_Optimizer) at stage 1, "zero" above;
    None takes the one that DeepSpeed takes for a torch optimizer. `sub_group_size` is in elements of one partition.
    Like DeepSpeed, wrappers ignore the options that they do not have.
    """

    stage: int
    dp: int = 1
    precision: str = "fp32"
    wrapper: str | None = None
    round_robin: bool = False
    parameter_alignment: bool = False
    sub_group_size: int | None = None
    elastic: bool = False

    def __post_init__(self) -> None:
        if self.kind not in self._valid_kinds():
            raise ValueError(
                f"{self.kind!r} is no wrapper of stage {self.stage} in {self.precision}: {self._valid_kinds()} are"
            )
        if self.elastic and self.stage == 3:
            raise ValueError("DeepSpeed has no elastic_checkpoint under ZeRO 3")

    @property
    def kind(self) -> str:
        """The wrapper, resolved."""
        return self.wrapper or self._valid_kinds()[0]

    @property
    def dtype(self) -> torch.dtype:
        """Of the module's parameters."""
        return DTYPES[self.precision]

    @property
    def flattens(self) -> bool:
        """Whether the module's parameters are views of one flat buffer per group."""
        return self.kind in ("fused", "bf16") or (self.kind == "zero" and self.stage < 3)

    @property
    def keeps_lean_states(self) -> bool:
        """Whether elastic_checkpoint has its effect: a list of unpadded states instead of torch's state_dict."""
        return self.elastic and self.kind == "zero" and self.stage in (1, 2)

    @property
    def label(self) -> str:
        """A readable test id: zero2-bf16-dp3-round_robin."""
        options = [name for name in ("round_robin", "parameter_alignment", "elastic") if getattr(self, name)]
        sub_group = [f"sub{self.sub_group_size}"] if self.sub_group_size else []
        kind = f"stage0-{self.kind}" if self.stage == 0 else f"zero{self.stage}" + "-bf16opt" * (self.kind == "bf16")
        return "-".join([kind, self.precision, f"dp{self.dp}", *options, *sub_group])

    def ds_config(self) -> dict[str, Any]:
        """A configuration that gives this topology."""
        config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": self._zero_config()}
        if self.precision != "fp32":
            config[self.precision] = {"enabled": True}
        if self.kind == "bf16":
            config["data_types"] = {"grad_accum_dtype": "fp32"}
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
        if self.stage == 0:
            return ("raw",) if self.precision == "fp32" else ("unfused", "fused")
        return ("zero", "bf16") if self.stage == 1 and self.precision == "bf16" else ("zero",)


@dataclass(frozen=True, slots=True)
class Run:
    """Everything else that a checkpoint carries. None takes what a fresh engine of the topology would have.

    `garbage` is left in ZeRO 3's padding, which is uninitialised memory in a real run: nan shows who reads it.
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


def random_state(
    model: Model,
    seed: int,
    states: tuple[str, ...] = ("exp_avg", "exp_avg_sq"),
    *,
    step: float | None = 3,
    precision: str = "fp32",
    without: tuple[str, ...] = (),
    dtype: torch.dtype = torch.float32,
) -> State:
    """Random atoms, fp32, the same on every machine.

    `step` None gives no scalar; `states=()` with `step=None` is a checkpoint from before the first step; parameters in
    `without` never got a gradient. Parameters that the optimizer does not train are rounded to `precision`, which is
    all that a checkpoint of that precision keeps of them. `dtype` is that of the states.
    """
    random = torch.Generator().manual_seed(seed)
    atoms: dict[str, dict[str, torch.Tensor]] = {}
    scalars: dict[str, dict[str, Any]] = {}
    for param in model.owners:
        fp32 = torch.randn(param.shape, generator=random)
        trained = param.trains and param.group is not None
        atoms[param.name] = {"fp32": fp32 if trained else fp32.to(DTYPES[precision]).float()}
        if trained and param.name not in without:
            atoms[param.name].update((key, torch.rand(param.shape, generator=random).to(dtype)) for key in states)
            scalars[param.name] = {} if step is None else {"step": torch.tensor(float(step))}
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
