"""DeepSpeed's optimizer wrappers: what each of them does to masters and states, in files and in live engines.

A wrapper is one row of :data:`WRAPPERS`; what differs in a live engine besides is one class of ``targets/engines.py``.
Everything else asks the row.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from .errors import UnsupportedError
from .flat import FlatBuffer, Shape, join_parameters, join_reserved

ATOMIC = "atomic"
"""Wrapper of an atomic checkpoint: whole tensors, which nothing wraps."""

BARE = "none"
"""Wrapper of an engine below ZeRO 3 without optimizer, and of its saves: nothing is partitioned, on any ranks."""

STATELESS = "optimizer states missing"
"""Wrapper of a save that has lost them: its trained parameters have copies alone."""

MOMENTUM = "momentum_buffer"
"""State name of what Muon keeps; other optimizers keep a state of that name as well."""

USE_MUON = "use_muon"
"""Hyper-parameter of the param groups of DeepSpeed's Muon: whether it is used, or an Adam."""

_ALL = ("float32", "bfloat16", "float16")


class Form(Enum):
    """How a wrapper lays out the masters, and the optimizer's states beside them."""

    PARTITIONS = "a flat buffer per param group, cut into equal partitions"
    RESERVED = "flat buffers of sub-groups, of whose parameters every partition has as many elements"
    FLAT = "a flat buffer per param group, whole on every rank"
    SINGLE = "each parameter by itself, whole on every rank"
    NOTHING = "there are none"


@dataclass(frozen=True, slots=True)
class Wrapper:
    """One optimizer wrapper.

    Attributes:
        name: in a :class:`~deepspeed_ucp.topology.Topology`.
        form: of masters and states.
        stages: of ZeRO at which an engine may have it.
        precisions: of such an engine; none where nobody can ask for it.
        live_class: DeepSpeed's class; empty where the engine has the optimizer itself, or nothing.
        masters, params: attributes of a live one, with the masters and the parameters that they belong to, group by
            group (sub-group by sub-group).
        keys: that its state dict has in a file, that of the masters in front: of ``SINGLE`` a list of them
            for each group.
        inner: key there of the torch optimizer's own state dict; empty where it is that itself.
        by_pipelines: stages at which engines have it by themselves only where they are pipelines.
        has_copies: the model computes with copies of the masters, and not with these themselves.
        strips_padding: files have the masters without the padding at the end of a partition.
        can_be_elastic: it can save states without padding or hyper-parameters (``elastic_checkpoint``).
        whole: states that a rank keeps of whole parameters, wherever its partition touches one, of groups that Muon
            trains and that are not offloaded.
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
        """Whether masters are cut over data-parallel ranks, each of which saves its part in a file of its own."""
        return self.form in (Form.PARTITIONS, Form.RESERVED)

    @property
    def is_positional(self) -> bool:
        """Whether its saves name no parameters of the optimizer: states are known by their places."""
        return self.form in (Form.FLAT, Form.SINGLE)

    @property
    def is_flat(self) -> bool:
        """Whether a whole param group lies in one buffer on every rank."""
        return self.form is Form.FLAT

    def saved(self, state: Collection[Any]) -> bool:
        """Whether an optimizer's state dict is one of it."""
        return bool(self.keys) and all(key in state for key in self.keys)

    @property
    def tells_stage(self) -> bool:
        """Whether its files tell ZeRO's stage, which else the ds_config does."""
        return len(self.stages) == 1 or STAGE in self.keys

    def list_whole(self, hyper: Mapping[str, Any], *, offloaded: bool = False) -> frozenset[str]:
        """States that a rank keeps of whole parameters of a param group with such hyper-parameters."""
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
        """The flat buffers of a param group (of a sub-group, where there are any).

        Args:
            group: number of the param group.
            names, shapes: of its parameters, in flat order.
            parts: ranks that these are cut over.
            partition, gaps: as for :func:`~deepspeed_ucp.flat.join_parameters`, where parameters share a buffer.
        """
        if self.form is Form.RESERVED:
            return [join_reserved(group, names, shapes, parts)]
        if self.form is Form.SINGLE:
            return [join_parameters(group, (name,), (shape,)) for name, shape in zip(names, shapes, strict=True)]
        parts = parts if self.is_cut else 1
        return [join_parameters(group, names, shapes, parts=parts, partition=partition, gaps=gaps)]


STAGE = "zero_stage"
"""Key of a state dict that tells ZeRO's stage."""

_ROWS = (
    Wrapper(
        "zero12",
        Form.PARTITIONS,
        (1, 2),
        _ALL,
        live_class="DeepSpeedZeroOptimizer",
        masters="single_partition_of_fp32_groups",
        params="bit16_groups",
        keys=("single_partition_of_fp32_groups", STAGE),
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
"""By name; where several fit, the first is what DeepSpeed takes (engine.py ``_do_optimizer_sanity_check``)."""


def find_wrapper(name: str) -> Wrapper:
    """The row of a wrapper.

    Raises:
        UnsupportedError: there is none; a later release may have written it.
    """
    found = WRAPPERS.get(name)
    if found is None:
        raise UnsupportedError(f"optimizer wrapper {name!r} is not known here (known: {', '.join(WRAPPERS)}).")
    return found


def find_saved(state: Collection[Any]) -> Wrapper | None:
    """The wrapper that saved an optimizer's state dict; None where none that is covered did."""
    return next((row for row in WRAPPERS.values() if row.saved(state)), None)


def find_live(optimizer: Any) -> Wrapper | None:
    """The wrapper that a live engine's optimizer is; None where no row has its class."""
    kind = type(optimizer).__name__
    return next((row for row in WRAPPERS.values() if row.live_class == kind), None)


def list_foreseen(zero: int | None = None, precision: str | None = None) -> list[Wrapper]:
    """The wrappers that can be asked for, at a stage of ZeRO and in a precision where these are given."""
    found = [row for row in WRAPPERS.values() if row.precisions]
    found = [row for row in found if zero is None or zero in row.stages]
    return [row for row in found if precision is None or precision in row.precisions]


def choose_wrapper(zero: int, precision: str, *, pipeline: bool) -> Wrapper:
    """What DeepSpeed takes."""
    return next(row for row in list_foreseen(zero, precision) if pipeline or zero not in row.by_pipelines)
