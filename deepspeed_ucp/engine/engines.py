"""Targets for ZeRO 1 to 3, BF16_Optimizer, the FP16 wrappers, and no wrapper."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from deepspeed import comm as ds_comm
from torch._utils import _unflatten_dense_tensors

from ..errors import RemoteError
from ..io.memory import share_memory
from ..model.wrappers import BARE, WRAPPERS, find_live
from .base import Target, flatten
from .coverage import UnknownLayoutError, check_engine
from .optimizer import is_muon_group

_PIECE = 1 << 24
"""Elements of a master in one copy: torch allocates memory for the conversion of a copy to another device."""

_SLICE = 8 << 20
"""Bytes of each exchange between ranks on the CPU."""


class PartitionedTarget(Target):
    """Base of engines whose parameters are partitioned over a data-parallel group."""

    @property
    def dp(self) -> int:
        return ds_comm.get_world_size(group=self.wrapped.dp_process_group)  # type: ignore[no-any-return]


class Zero12Target(PartitionedTarget):
    """ZeRO 1/2 and BF16_Optimizer: one padded buffer per group, in equal partitions."""

    attributes: ClassVar = {
        "zero12": (
            "round_robin_bit16_groups",
            "bit16_groups_flat",
            "parallel_partitioned_bit16_groups",
            "single_partition_of_fp32_groups",
            "real_dp_process_group",
        ),
        "bf16": (
            "bf16_groups",
            "bf16_groups_flat",
            "bf16_partitioned_groups",
            "fp32_groups_flat_partition",
            "real_dp_process_group",
        ),
    }

    def _list_groups(self) -> list[tuple[list[Any], torch.Tensor, list[torch.Tensor], torch.Tensor, Any]]:
        """List each group's parameters, 16-bit buffer, partitions, master, process group."""
        return list(zip(*(getattr(self.wrapped, name) for name in self.attributes[self.wrapper]), strict=True))

    def collect(self) -> None:
        padding = getattr(self.wrapped, "round_robin_bit16_padding", None)
        for group, (params, flat, _, master, process_group) in enumerate(self._list_groups()):
            parts, gaps = ds_comm.get_world_size(group=process_group), padding[group] if padding else ()
            size = flat.numel() // parts
            (buffer,) = self.traits.lay_out(group, *self.describe(params), parts, size, gaps)
            hyper = self.optimizer.param_groups[group] if is_muon_group(self.optimizer, group) else {}
            whole = self.traits.list_whole(hyper, offloaded=bool(getattr(self.wrapped, "cpu_offload", False)))
            self.add_flat(buffer, ds_comm.get_rank(group=process_group), master, whole)

    def prepare(self) -> None:
        wait = getattr(self.wrapped, "_wait_for_offload_copies", None)
        if wait:
            wait()
        super().prepare()

    def refresh_copies(self) -> None:
        for _, _, partitions, master, process_group in self._list_groups():
            copy = partitions[ds_comm.get_rank(group=process_group)].data
            for low in range(0, copy.numel(), _PIECE):
                copy[low : low + _PIECE].copy_(master.data[low : low + _PIECE])

    def gather_copies(self) -> None:
        for _, flat, _, _, process_group in self._list_groups():
            gather_in_place(flat.data, process_group)

    def find_copies(self, flat: int) -> Sequence[torch.Tensor]:
        _, _, partitions, _, process_group = self._list_groups()[flat]
        return [partitions[ds_comm.get_rank(group=process_group)].detach()]

    def relink(self) -> None:
        opt = self.wrapped
        opt._link_all_hp_params()
        opt._hp_optimizer_states_linked = False
        if all(opt.optimizer.state.get(flat.tensor) for flat in self.flats):
            opt._lazy_init_hp_params_optimizer_state()  # so that safe_get_full_optimizer_state works before a step
        super().relink()


class Zero3Target(PartitionedTarget):
    """ZeRO 3: ``ceil(numel / dp)`` elements per parameter in each sub-group's buffer."""

    def collect(self) -> None:
        opt = self.wrapped
        for index, params in enumerate(opt.fp16_groups):
            process_group = getattr(params[0], "ds_process_group", opt.dp_process_group)
            parts, group = ds_comm.get_world_size(group=process_group), opt.sub_group_to_group_id[index]
            (buffer,) = self.traits.lay_out(group, *self.describe(params), parts)
            holder = opt.fp32_partitioned_groups_flat[index]
            self.add_flat(buffer, ds_comm.get_rank(group=process_group), holder)

    def refresh_copies(self) -> None:
        for index in range(len(self.flats)):
            with ExitStack() as stack:
                for extension in self.extensions:
                    stack.enter_context(extension.open_masters(self, index))
                self.wrapped._reassign_or_swap_out_partitioned_parameters(index)
        self.drop_secondary_copies()

    def find_copies(self, flat: int) -> Sequence[torch.Tensor]:
        copy = self.wrapped.fp16_partitioned_groups_flat[flat]
        return [] if copy is None or self.flats[flat].swap is not None else [copy.detach()]


class WholeTarget(Target):
    """The FP16 wrappers (stage 0, fp16 and bf16): every rank has all masters."""

    def list_pairs(self, group: int) -> list[tuple[list[Any], torch.Tensor]]:
        """List the masters of a param group, each with its parameters in order."""
        params, masters = (getattr(self.wrapped, name)[group] for name in (self.traits.params, self.traits.masters))
        if self.traits.is_flat:
            return [(params, masters)]
        return [([param], master) for param, master in zip(params, masters, strict=True)]

    @property
    def _pairs(self) -> list[tuple[list[Any], torch.Tensor]]:
        return [pair for group in range(len(self.optimizer.param_groups)) for pair in self.list_pairs(group)]

    def collect(self) -> None:
        for group in range(len(self.optimizer.param_groups)):
            for params, master in self.list_pairs(group):
                (buffer,) = self.traits.lay_out(group, *self.describe(params))
                self.add_flat(buffer, 0, master)

    def refresh_copies(self) -> None:
        for params, master in self._pairs if self.traits.has_copies else ():
            for param, value in zip(params, _unflatten_dense_tensors(master.data.reshape(-1), params), strict=True):
                param.data.copy_(value)

    def find_copies(self, flat: int) -> Sequence[torch.Tensor]:
        return [flatten(param) for param in self._pairs[flat][0]] if self.traits.has_copies else ()


class TorchTarget(WholeTarget):
    """No wrapper (stage 0, fp32): the model's parameters are their own masters."""

    @property
    def optimizer(self) -> Any:
        return self.wrapped

    def list_pairs(self, group: int) -> list[tuple[list[Any], torch.Tensor]]:
        params = self.wrapped.param_groups[group]["params"]
        return [([param], param) for param in params if param.requires_grad and param.numel()]


class WeightsTarget(Target):
    """An engine without an optimizer below ZeRO 3. In bf16 it has an empty wrapper."""

    def collect(self) -> None:
        """Do nothing: there are no masters."""

    @property
    def optimizer(self) -> Any:
        return None

    def refresh_copies(self) -> None:
        """Do nothing: there are no copies."""


class OffloadOnlyTarget(WeightsTarget, PartitionedTarget):
    """DeepSpeedZeRoOffload (ZeRO 3 without an optimizer): partitioned extras only."""

    def prepare(self) -> None:
        # Gathered parameters would hide the filled partitions; the wrapper has no `checkpoint_event_prologue`.
        self.wrapped.partition_all_parameters()
        super().prepare()

    def refresh_copies(self) -> None:
        self.drop_secondary_copies()


TARGETS: dict[str, type[Target]] = {
    "zero12": Zero12Target,
    "zero3": Zero3Target,
    "bf16": Zero12Target,
    "fp16_fused": WholeTarget,
    "fp16_unfused": WholeTarget,
    "torch": TorchTarget,
    BARE: WeightsTarget,
    "zero3_inference": OffloadOnlyTarget,
}
"""Name of the wrapper → class of its target."""


def open_target(engine: Any) -> Target:
    """Return the target for a live engine.

    Raises:
        UnknownLayoutError: the optimizer wrapper's layout is known to DeepSpeed only.
        UnsupportedError: the engine has state that no load restores.
    """
    check_engine(engine)
    wrapper = find_live(engine.optimizer)
    if not getattr(engine.optimizer, "using_real_optimizer", True):
        name = BARE
    elif wrapper is not None:
        name = wrapper.name
    elif isinstance(engine.optimizer, torch.optim.Optimizer):
        name = "torch"
    else:
        covered = sorted(row.live_class for row in WRAPPERS.values() if row.live_class)
        raise UnknownLayoutError(
            f"the engine's optimizer wrapper {type(engine.optimizer).__name__} is not supported (supported: "
            f"{', '.join(covered)} and raw torch optimizers)"
        )
    return TARGETS[name](engine, name)


def gather_in_place(flat: torch.Tensor, process_group: Any) -> None:
    """Gather equal partitions of a flat buffer from a process group (collective).

    gloo's all-gather would copy the whole buffer first. So on the CPU slices are exchanged: through shared memory if
    all ranks are on one machine, else by all-gathers of small slices.
    """
    size, rank = dist.get_world_size(process_group), dist.get_rank(process_group)
    if size == 1:
        return
    partitions = flat.view(size, -1)
    if flat.device.type != "cpu":
        ds_comm.all_gather_into_tensor(flat, partitions[rank], group=process_group)  # supports every accelerator
        return
    parts = partitions.view(torch.uint8)

    def gather(value: Any) -> list[Any]:
        values = [None] * size
        dist.all_gather_object(values, value, group=process_group)
        return values

    slice_bytes = min(_SLICE, parts.shape[1])
    try:
        shared = [memory for memory in share_memory(2 * slice_bytes, rank, gather) if memory is not None]
    except RemoteError:  # on every rank
        shared = []
    if len(shared) == size:
        _pass_around(parts.numpy(), rank, shared, lambda: dist.all_reduce(torch.zeros(1), group=process_group))
        return
    width = max(1, _SLICE // size)
    for low in range(0, parts.shape[1], width):
        pieces = [part[low : low + width] for part in parts]
        dist.all_gather(pieces, pieces[rank].clone(), group=process_group)


def _pass_around(
    parts: npt.NDArray[np.uint8], rank: int, shared: Sequence[memoryview], wait_for_all: Callable[[], object]
) -> None:
    """Exchange parts through the two halves of each rank's shared memory.

    Before a rank writes to a half again, the barrier of the other half ensures that all ranks have read the first.
    """
    half = len(shared[0]) // 2
    for turn, low in enumerate(range(0, parts.shape[1], half)):
        offset, width = half * (turn % 2), min(half, parts.shape[1] - low)
        windows = [np.frombuffer(memory, np.uint8)[offset : offset + width] for memory in shared]
        windows[rank][:] = parts[rank, low : low + width]
        wait_for_all()
        for peer, window in enumerate(windows):
            if peer != rank:
                parts[peer, low : low + width] = window
