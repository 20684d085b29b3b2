"""DeepSpeed's optimizer wrappers: layout and names of masters and states.

Each wrapper is a row of :data:`WRAPPERS` and, for live engines, has a class in ``engine/engines.py``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from ..errors import UnsupportedError
from .flat import FlatBuffer, Shape, join_parameters, join_reserved

ATOMIC = "atomic"
"""Wrapper of an atomic checkpoint, which has whole tensors."""

BARE = "none"
"""Wrapper of an engine below ZeRO 3 without optimizer, and of its saves, which are not partitioned."""

STATELESS = "optimizer states missing"
"""Wrapper of a save without its optimizer states: trained parameters have only 16-bit copies."""

MOMENTUM = "momentum_buffer"
"""State name of Muon, and of some other optimizers."""

USE_MUON = "use_muon"
"""Hyper-parameter of the param groups of DeepSpeed's Muon: True for Muon, False for Adam."""

SCALER_STATE = ("cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window", "cur_hysteresis")
"""Fields of a dynamic loss scaler that a load restores; the others are this run's configuration."""

_ALL = ("float32", "bfloat16", "float16")


class Form(Enum):
    """Layout of a wrapper's masters and optimizer states."""

    PARTITIONS = "a flat buffer per param group, cut into equal partitions"
    RESERVED = "a flat buffer per sub-group, with the same number of elements of each parameter in every partition"
    FLAT = "a flat buffer per param group, whole on every rank"
    SINGLE = "a tensor per parameter, whole on every rank"
    NOTHING = "no masters"


@dataclass(frozen=True, slots=True)
class Wrapper:
    """One optimizer wrapper.

    Attributes:
        name: name in a :class:`~deepspeed_ucp.model.topology.Topology`.
        stages: ZeRO stages of engines with this wrapper.
        precisions: precisions of such engines; empty if the wrapper cannot be selected.
        live_class: DeepSpeed's class; empty if the engine has the optimizer itself, or none.
        masters, params: attributes of the live wrapper with the masters and their parameters, for each group or
            sub-group.
        keys: keys of its state dict in a file, beginning with the masters'.
        inner: key of the torch optimizer's state dict there; empty if the state dict is the torch optimizer's.
        by_pipelines: stages at which DeepSpeed selects it only for pipelines.
        has_copies: the model computes with copies of the masters instead of the masters.
        strips_padding: saved masters lack the padding at the end of a partition.
        can_be_elastic: supports saves without padding and hyper-parameters (``elastic_checkpoint``).
        whole: states of groups trained by Muon without offload that cover whole parameters if a partition has any
            element of these.
    """

    name: str
    form: Form = Form.NOTHING
    stages: tuple[int, ...] = (0,)
    precisions: tuple[str, ...] = ()
    live_class: str = ""
    masters: str = ""
    params: str = ""
    keys: tuple[str, ...] = ()
    inner: str = "optimizer_state_dict"
    by_pipelines: tuple[int, ...] = ()
    has_copies: bool = True
    strips_padding: bool = False
    can_be_elastic: bool = False
    whole: frozenset[str] = frozenset()

    @property
    def is_cut(self) -> bool:
        """True if masters are partitioned over data-parallel ranks that each save a file."""
        return self.form in (Form.PARTITIONS, Form.RESERVED)

    @property
    def is_positional(self) -> bool:
        """True if saves identify the optimizer's parameters by position, not by name."""
        return self.form in (Form.FLAT, Form.SINGLE)

    @property
    def is_flat(self) -> bool:
        """True if every rank has one buffer for a whole param group."""
        return self.form is Form.FLAT

    def has_saved(self, state: Collection[Any]) -> bool:
        """Return True if the wrapper saved this optimizer state dict."""
        return bool(self.keys) and all(key in state for key in self.keys)

    @property
    def records_stage(self) -> bool:
        """True if its files contain ZeRO's stage; else only the ds_config does."""
        return len(self.stages) == 1 or ZERO_STAGE_KEY in self.keys

    def list_whole(self, hyper: Mapping[str, Any], *, offloaded: bool = False) -> frozenset[str]:
        """Return the states of a param group that cover whole parameters (see ``whole``)."""
        return self.whole if hyper.get(USE_MUON) and not offloaded else frozenset()

    def lay_out(
        self,
        group: int,
        names: Sequence[str],
        shapes: Sequence[Shape],
        parts: int = 1,
        partition: int | None = None,
        gaps: Sequence[int] = (),
    ) -> list[FlatBuffer]:
        """Make the flat buffers of a param group or sub-group.

        Args:
            parts: number of ranks over which they are partitioned.
            partition, gaps: see :func:`~deepspeed_ucp.model.flat.join_parameters`.
        """
        if self.form is Form.RESERVED:
            return [join_reserved(group, names, shapes, parts)]
        if self.form is Form.SINGLE:
            return [join_parameters(group, (name,), (shape,)) for name, shape in zip(names, shapes, strict=True)]
        parts = parts if self.is_cut else 1
        return [join_parameters(group, names, shapes, parts=parts, partition=partition, gaps=gaps)]


ZERO_STAGE_KEY = "zero_stage"
"""Key of ZeRO's stage in a state dict."""

_ROWS = (
    Wrapper(
        "zero12",
        Form.PARTITIONS,
        (1, 2),
        _ALL,
        live_class="DeepSpeedZeroOptimizer",
        masters="single_partition_of_fp32_groups",
        params="bit16_groups",
        keys=("single_partition_of_fp32_groups", ZERO_STAGE_KEY),
        inner="base_optimizer_state",
        strips_padding=True,
        can_be_elastic=True,
        whole=frozenset({MOMENTUM}),
    ),
    Wrapper(
        "zero3",
        Form.RESERVED,
        (3,),
        _ALL,
        live_class="DeepSpeedZeroOptimizer_Stage3",
        masters="fp32_partitioned_groups_flat",
        params="fp16_groups",
        keys=("fp32_flat_groups",),
    ),
    Wrapper(
        "bf16",
        Form.PARTITIONS,
        (0, 1),
        ("bfloat16",),
        live_class="BF16_Optimizer",
        masters="fp32_groups_flat_partition",
        params="bf16_groups",
        keys=("single_partition_of_fp32_groups",),
        inner="base_optimizer_state",
        by_pipelines=(0,),
    ),
    Wrapper(
        "fp16_fused",
        Form.FLAT,
        precisions=("bfloat16", "float16"),
        live_class="FP16_Optimizer",
        masters="fp32_groups_flat",
        params="fp16_groups",
        keys=("fp32_groups_flat",),
    ),
    Wrapper(
        "fp16_unfused",
        Form.SINGLE,
        precisions=("bfloat16", "float16"),
        live_class="FP16_UnfusedOptimizer",
        masters="fp32_groups",
        params="fp16_groups",
        keys=("fp32_groups",),
    ),
    Wrapper("torch", Form.SINGLE, precisions=("float32",), keys=("param_groups", "state"), inner="", has_copies=False),
    Wrapper("zero3_inference", stages=(3,), live_class="DeepSpeedZeRoOffload", has_copies=False),
    Wrapper(BARE, stages=(0, 1, 2), live_class="NoneType", has_copies=False),
    Wrapper(STATELESS, stages=(0, 1, 2, 3)),
    Wrapper(ATOMIC, stages=(0, 1, 2, 3)),
)

WRAPPERS: dict[str, Wrapper] = {row.name: row for row in _ROWS}
"""Rows by name. If several fit, DeepSpeed selects the first (engine.py ``_do_optimizer_sanity_check``)."""


def find_wrapper(name: str) -> Wrapper:
    """Return the row of a wrapper.

    Raises:
        UnsupportedError: there is none; a later release may have written it.
    """
    if name not in WRAPPERS:
        raise UnsupportedError(f"optimizer wrapper {name!r} is unknown (known: {', '.join(WRAPPERS)}).")
    return WRAPPERS[name]


def find_saved(state: Collection[Any]) -> Wrapper | None:
    """Return the wrapper that saved an optimizer state dict, or None if it is unknown."""
    return next((row for row in WRAPPERS.values() if row.has_saved(state)), None)


def find_live(optimizer: Any) -> Wrapper | None:
    """Return the wrapper of a live engine's optimizer, or None for an unknown class."""
    kind = type(optimizer).__name__
    return next((row for row in WRAPPERS.values() if row.live_class == kind), None)


def list_selectable(zero: int, precision: str) -> list[Wrapper]:
    """List the wrappers that a user can select at a ZeRO stage and in a precision."""
    return [row for row in WRAPPERS.values() if zero in row.stages and precision in row.precisions]


def choose_wrapper(zero: int, precision: str, *, pipeline: bool) -> Wrapper:
    """Return the wrapper that DeepSpeed selects at a ZeRO stage and in a precision."""
    return next(row for row in list_selectable(zero, precision) if pipeline or zero not in row.by_pipelines)
