"""One target per optimizer wrapper: ZeRO 1/2, ZeRO 3, BF16_Optimizer, the FP16 wrappers, and no wrapper."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from deepspeed import comm as ds_comm
from deepspeed.runtime.zero import GatheredParameters
from deepspeed.runtime.zero.partition_parameters import PartitionedParamStatus, ZeroParamStatus
from torch._utils import _unflatten_dense_tensors

from ..atoms import strip_compiled
from ..comm import gather_in_place
from ..errors import UnsupportedError
from ..flat import join_parameters, join_reserved
from .base import Extra, Target, flatten
from .coverage import UnknownLayoutError, check_engine


class Zero12Target(Target):
    """DeepSpeedZeroOptimizer (stage_1_and_2.py): a padded flat buffer per group, cut into equal partitions."""

    wrapper = "zero12"

    @property
    def dp(self) -> int:
        return ds_comm.get_world_size(group=self.wrapped.dp_process_group)  # type: ignore[no-any-return]

    def collect(self) -> None:
        opt = self.wrapped
        padding = getattr(opt, "round_robin_bit16_padding", None)
        for group, params in enumerate(opt.round_robin_bit16_groups):
            master = opt.single_partition_of_fp32_groups[group]
            self._add(group, params, opt.bit16_groups_flat[group], master, padding[group] if padding else ())

    def _add(
        self, group: int, params: list[Any], flat: torch.Tensor, master: torch.Tensor, gaps: Sequence[int] = ()
    ) -> None:
        process_group = self.wrapped.real_dp_process_group[group]
        parts = ds_comm.get_world_size(group=process_group)
        raw, shapes = self._describe(params)
        names = tuple(map(strip_compiled, raw))
        buffer = join_parameters(group, names, shapes, parts=parts, partition=flat.numel() // parts, gaps=gaps)
        self.add_flat(buffer, ds_comm.get_rank(group=process_group), master, raw)

    def prepare(self) -> None:
        wait = getattr(self.wrapped, "_wait_for_offload_copies", None)
        if wait:
            wait()

    def copies(self) -> list[tuple[torch.Tensor, list[torch.Tensor], torch.Tensor, Any]]:
        """Per group: flat 16-bit buffer, its partitions, this rank's master, process group."""
        opt = self.wrapped
        return list(
            zip(
                opt.bit16_groups_flat,
                opt.parallel_partitioned_bit16_groups,
                opt.single_partition_of_fp32_groups,
                opt.real_dp_process_group,
                strict=True,
            )
        )

    def refresh_copies(self) -> None:
        for flat, partitions, master, process_group in self.copies():
            own = partitions[ds_comm.get_rank(group=process_group)]
            own.data.copy_(master.data)
            gather_in_place(flat.data, process_group)

    def relink(self) -> None:
        opt = self.wrapped
        opt._link_all_hp_params()
        opt._hp_optimizer_states_linked = False
        if all(opt.optimizer.state.get(flat.holder) for flat in self.flats):
            opt._lazy_init_hp_params_optimizer_state()  # so that safe_get_full_optimizer_state works before a step


class Bf16Target(Zero12Target):
    """BF16_Optimizer (bf16_optimizer.py): as ZeRO 1, other attribute names."""

    wrapper = "bf16"

    def collect(self) -> None:
        opt = self.wrapped
        for group, params in enumerate(opt.bf16_groups):
            self._add(group, params, opt.bf16_groups_flat[group], opt.fp32_groups_flat_partition[group])

    def copies(self) -> list[tuple[torch.Tensor, list[torch.Tensor], torch.Tensor, Any]]:
        opt = self.wrapped
        return list(
            zip(
                opt.bf16_groups_flat,
                opt.bf16_partitioned_groups,
                opt.fp32_groups_flat_partition,
                opt.real_dp_process_group,
                strict=True,
            )
        )


class Zero3Target(Target):
    """DeepSpeedZeroOptimizer_Stage3: per sub-group a flat buffer of each parameter's ``ceil(numel / dp)`` elements."""

    wrapper = "zero3"

    @property
    def dp(self) -> int:
        return ds_comm.get_world_size(group=self.wrapped.dp_process_group)  # type: ignore[no-any-return]

    def collect(self) -> None:
        opt = self.wrapped
        for index, params in enumerate(opt.fp16_groups):
            process_group = getattr(params[0], "ds_process_group", opt.dp_process_group)
            raw, shapes = self._describe(params)
            parts = ds_comm.get_world_size(group=process_group)
            buffer = join_reserved(opt.sub_group_to_group_id[index], tuple(map(strip_compiled, raw)), shapes, parts)
            self.add_flat(buffer, ds_comm.get_rank(group=process_group), opt.fp32_partitioned_groups_flat[index], raw)

    def extra_parameter(self, name: str, param: torch.Tensor) -> Extra:
        if not hasattr(param, "ds_tensor"):
            return super().extra_parameter(name, param)
        return partitioned_extra(name, param)

    def whole_parameters(self) -> AbstractContextManager[Any]:
        return gather_parameters(self.engine.module)

    def refresh_copies(self) -> None:
        opt = self.wrapped
        for index, master in enumerate(opt.fp32_partitioned_groups_flat):
            opt.fp16_partitioned_groups_flat[index].data.copy_(master.data)
            opt._unflatten_partitioned_parameters(index)
        self.drop_secondary_copies()


def gather_parameters(module: torch.nn.Module) -> AbstractContextManager[Any]:
    """ZeRO-3 parameters whole inside, rank 0's changes kept (as DeepSpeed's ``load_module_state_dict``)."""
    parted: list[Any] = [param for param in module.parameters() if hasattr(param, "ds_id")]
    away = [param for param in parted if param.ds_status == ZeroParamStatus.NOT_AVAILABLE]
    return GatheredParameters(away, modifier_rank=0)  # type: ignore[no-any-return]


def partitioned_extra(name: str, param: Any) -> Extra:
    """This rank's partition of a ZeRO-3 parameter without optimizer."""
    held = param.ds_tensor
    if hasattr(held, "ds_quant_scale") or held.status != PartitionedParamStatus.AVAILABLE:
        raise UnsupportedError(f"{name}: a quantized parameter, or one on NVMe, without optimizer cannot be filled.")
    group = param.ds_process_group
    buffer = join_reserved(0, (name,), (tuple(param.ds_shape),), ds_comm.get_world_size(group=group))
    part = ds_comm.get_rank(group=group)
    return Extra(buffer, part, flatten(held)[: sum(cut.numel for cut in buffer.cuts(part))])


class Fp16FusedTarget(Target):
    """FP16_Optimizer (fp16 and bf16, stage 0): one whole flat master per group on every rank."""

    wrapper = "fp16_fused"

    def collect(self) -> None:
        for group, params in enumerate(self.wrapped.fp16_groups):
            raw, shapes = self._describe(params)
            buffer = join_parameters(group, tuple(map(strip_compiled, raw)), shapes)
            self.add_flat(buffer, 0, self.wrapped.fp32_groups_flat[group])

    def refresh_copies(self) -> None:
        for params, master in zip(self.wrapped.fp16_groups, self.wrapped.fp32_groups_flat, strict=True):
            for param, value in zip(params, _unflatten_dense_tensors(master.data, params), strict=True):
                param.data.copy_(value)


class Fp16UnfusedTarget(Target):
    """FP16_UnfusedOptimizer (stage 0): a whole master per parameter on every rank."""

    wrapper = "fp16_unfused"

    def collect(self) -> None:
        for group, (params, masters) in enumerate(zip(self.wrapped.fp16_groups, self.wrapped.fp32_groups, strict=True)):
            for param, master in zip(params, masters, strict=True):
                (raw,), shapes = self._describe([param])
                self.add_flat(join_parameters(group, (strip_compiled(raw),), shapes), 0, master)

    def refresh_copies(self) -> None:
        for params, masters in zip(self.wrapped.fp16_groups, self.wrapped.fp32_groups, strict=True):
            for param, master in zip(params, masters, strict=True):
                param.data.copy_(master.data)


class TorchTarget(Target):
    """No wrapper (stage 0, fp32): the model's parameters are their own masters."""

    wrapper = "torch"

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        if self.wrapped is None:
            self.wrapper = "none"  # as of a save without an optimizer

    def collect(self) -> None:
        groups = self.wrapped.param_groups if self.wrapped is not None else []
        for group, fields in enumerate(groups):
            for param in fields["params"]:
                if param.requires_grad and param.numel():
                    (raw,), shapes = self._describe([param])
                    self.add_flat(join_parameters(group, (strip_compiled(raw),), shapes), 0, param)
        if self.place.pp == 1:  # where a pipeline's stage ends is part of the topology, an optimizer's order is not
            self.layout.clear()

    @property
    def optimizer(self) -> Any:
        return self.wrapped

    def refresh_copies(self) -> None:
        """Nothing to do: there are no copies."""


class OffloadOnlyTarget(Target):
    """DeepSpeedZeRoOffload: ZeRO 3 without an optimizer (inference); every parameter is a partitioned extra."""

    wrapper = "zero3_inference"

    def collect(self) -> None:
        """No masters."""

    def whole_parameters(self) -> AbstractContextManager[Any]:
        return gather_parameters(self.engine.module)

    @property
    def optimizer(self) -> Any:
        return None

    def extra_parameter(self, name: str, param: torch.Tensor) -> Extra:
        return partitioned_extra(name, param) if hasattr(param, "ds_tensor") else super().extra_parameter(name, param)

    def refresh_copies(self) -> None:
        self.drop_secondary_copies()


TARGETS: dict[str, type[Target]] = {
    "DeepSpeedZeroOptimizer": Zero12Target,
    "DeepSpeedZeroOptimizer_Stage3": Zero3Target,
    "BF16_Optimizer": Bf16Target,
    "FP16_Optimizer": Fp16FusedTarget,
    "FP16_UnfusedOptimizer": Fp16UnfusedTarget,
    "DeepSpeedZeRoOffload": OffloadOnlyTarget,
    "NoneType": TorchTarget,
}


def open_target(engine: Any) -> Target:
    """The target for a live engine.

    Raises:
        UnknownLayoutError: only DeepSpeed knows the layout of the optimizer wrapper.
        UnsupportedError: the engine keeps state that no load restores.
    """
    check_engine(engine)
    kind = type(engine.optimizer).__name__
    found = TARGETS.get(kind)
    if found is None and isinstance(engine.optimizer, torch.optim.Optimizer):
        found = TorchTarget
    if found is None:
        raise UnknownLayoutError(
            f"the engine's optimizer wrapper {kind} is not covered (covered: {', '.join(sorted(TARGETS))} and raw "
            "torch optimizers)"
        )
    return found(engine)
