"""Gathers the full state of a live engine, parameter by parameter, for tests.

It comes from DeepSpeed's public `safe_get_full_fp32_param` and `safe_get_full_optimizer_state`, or from the optimizer
wrapper if these do not support the engine (stage 0) or are wrong (round_robin_gradients).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate, repeat
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.zero import GatheredParameters
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

from deepspeed_ucp.model.storage import strip_compiled
from deepspeed_ucp.model.wrappers import WRAPPERS, Form

Tensor = torch.Tensor


@dataclass
class CapturedParameter:
    """One full parameter, on the CPU.

    Attributes:
        value: parameter of the model, in the engine's dtype.
        fp32: its master, in the dtype of the engine's masters; None for a frozen parameter.
        tensors: element-wise optimizer states by name; empty before the optimizer has made them.
        scalars: other optimizer states (`step`), as floats.
        hyper: hyper-parameters of its group.
    """

    value: Tensor
    fp32: Tensor | None = None
    tensors: dict[str, Tensor] = field(default_factory=dict)
    scalars: dict[str, float] = field(default_factory=dict)
    hyper: dict[str, Any] = field(default_factory=dict)


@dataclass
class CapturedEngine:
    """The state of an engine that a resume restores.

    Attributes:
        parameters: by name, without the prefix of torch.compile; a tied parameter has its first name.
        buffers: persistent buffers by name.
        counters: global_steps, global_samples, skipped_steps.
    """

    parameters: dict[str, CapturedParameter]
    buffers: dict[str, Tensor]
    counters: dict[str, float]
    scheduler: dict[str, Any] | None
    loss_scale: float | None


def capture(engine: Any) -> CapturedEngine:
    """Copy the state of `engine` (collective over all its ranks)."""
    wrapper = engine.optimizer
    inner, homes = getattr(wrapper, "optimizer", wrapper), dict[int, _Source]()
    for number, masters in _list_masters(wrapper, inner):
        hyper = {key: value for key, value in inner.param_groups[number].items() if key != "params"}
        homes |= {
            id(param): _Source(master, inner.state.get(master, {}), hyper, whole) for param, master, whole in masters
        }
    named = dict(engine.module.named_parameters())
    with GatheredParameters([parameter for parameter in named.values() if hasattr(parameter, "ds_id")]):  # at stage 3
        values = {name: _copy(parameter.data) for name, parameter in named.items()}
    parameters = {}
    for name, parameter in named.items():
        parameters[strip_compiled(name)] = state = CapturedParameter(value=values[name])
        if id(parameter) in homes:
            _fill_states(state, parameter, homes[id(parameter)])
    buffers, persistent = engine.module.named_buffers(remove_duplicate=False), set(engine._get_buffer_names())
    scheduler = engine.lr_scheduler
    return CapturedEngine(
        parameters=parameters,
        buffers={strip_compiled(name): _copy(buffer) for name, buffer in buffers if name in persistent},
        counters={key: getattr(engine, key) for key in ("global_steps", "global_samples", "skipped_steps")},
        scheduler=dict(scheduler.state_dict()) if hasattr(scheduler, "state_dict") else None,
        loss_scale=_read_loss_scale(engine),
    )


Whole = Callable[[Tensor], Tensor]
"""Makes the full parameter from a tensor of the master's shape."""


@dataclass
class _Source:
    """Location of a trainable parameter's state.

    `state` belongs to `master`, the tensor that the optimizer steps. If `whole` is None, DeepSpeed's public functions
    gather the parameter.
    """

    master: Tensor
    state: dict[str, Any]
    hyper: dict[str, Any]
    whole: Whole | None = None


Masters = Iterator[tuple[Any, Tensor, Whole | None]]
"""Parameters with the tensor that the optimizer steps, and the function that makes them full."""


def _list_masters(wrapper: Any, inner: Any) -> Iterator[tuple[int, Masters]]:
    """Yield masters with the number of their group in the optimizer."""
    row = next((row for row in WRAPPERS.values() if row.masters and hasattr(wrapper, row.masters)), None)
    if row is None:  # a torch optimizer without wrapper
        for number, group in enumerate(getattr(inner, "param_groups", ())):
            yield number, ((parameter, parameter, lambda whole: whole) for parameter in group["params"])
        return
    for index, masters in enumerate(getattr(wrapper, row.masters)):
        parameters = getattr(wrapper, row.params)[index]
        number = wrapper.sub_group_to_group_id[index] if hasattr(wrapper, "sub_group_to_group_id") else index
        if row.form is Form.SINGLE:
            rows: Masters = zip(parameters, masters, repeat(lambda whole: whole))
        elif row.is_flat:
            starts = accumulate((parameter.numel() for parameter in parameters), initial=0)
            rows = ((p, masters, _cutter(p, start)) for p, start in zip(parameters, starts, strict=False))
        elif getattr(wrapper, "round_robin_gradients", False):
            rows = _list_shuffled(wrapper, index, masters)
        elif row.form is Form.RESERVED and masters.dtype != torch.float32:
            rows = _list_partitioned(parameters, masters)
        else:
            _link_states(parameters, masters, inner)
            rows = zip(parameters, repeat(masters), repeat(None))
        # DeepSpeed rebuilds Adagrad with all flat buffers in one group.
        yield min(number, len(inner.param_groups) - 1), rows


def _list_shuffled(wrapper: Any, index: int, flat: Tensor) -> Masters:
    """List masters with round_robin_gradients; DeepSpeed's getters misplace them.

    The 16-bit parameters are views of the flat 16-bit buffer, from which the offsets follow.
    """
    lowered = wrapper.bit16_groups_flat[index]
    process_group = wrapper.real_dp_process_group[index]
    for parameter in wrapper.bit16_groups[index]:
        start = (parameter.data_ptr() - lowered.data_ptr()) // lowered.element_size() if parameter.numel() else 0
        yield parameter, flat, functools.partial(_gather_and_cut, process_group, _cutter(parameter, start), slice(None))


def _list_partitioned(parameters: list[Any], flat: Tensor) -> Masters:
    """List 16-bit masters of stage 3, whose moments DeepSpeed's getters would round."""
    start = 0
    for parameter in parameters:
        cut, end = _cutter(torch.empty(parameter.ds_shape, device="meta"), 0), start + parameter.partition_numel()
        yield parameter, flat, functools.partial(_gather_and_cut, parameter.ds_process_group, cut, slice(start, end))
        start = end


def _gather_and_cut(process_group: Any, cut: Whole, span: slice, flat: Tensor) -> Tensor:
    partition = flat[span]
    parts = [torch.empty_like(partition) for _ in range(dist.get_world_size(process_group))]
    dist.all_gather(parts, partition.detach().contiguous(), group=process_group)
    return cut(torch.cat(parts))


def _link_states(parameters: list[Any], flat: Tensor, inner: Any) -> None:
    """Link optimizer states for the getters of stages 1 and 2, as the first step does."""
    for parameter in parameters:
        mapping = getattr(parameter, "_hp_mapping", None)
        if mapping is not None and not mapping.optim_fragment:
            mapping.set_optim_state_fragment(flat, inner.state.get(flat, {}))


def _cutter(parameter: Tensor, start: int) -> Whole:
    shape, count = parameter.shape, parameter.numel()
    return lambda flat: flat.flatten().narrow(0, start, count).view(shape)


def _fill_states(state: CapturedParameter, parameter: Any, home: _Source) -> None:
    tensors = {key: value for key, value in home.state.items() if torch.is_tensor(value) and value.dim() > 0}
    elementwise = [key for key, value in tensors.items() if value.shape == home.master.shape]
    state.scalars = {key: float(value) for key, value in home.state.items() if _is_scalar(value, elementwise, key)}
    state.hyper = home.hyper
    if home.whole is not None:
        state.fp32 = _copy(home.whole(home.master))
        state.tensors = {key: _copy(home.whole(home.state[key])) for key in elementwise}
        return
    # These functions return fp32; the cast back is exact.
    state.fp32 = _copy(safe_get_full_fp32_param(parameter)).to(home.master.dtype)
    states = {key: safe_get_full_optimizer_state(parameter, key) for key in elementwise}
    state.tensors = {key: _copy(tensor).to(home.state[key].dtype) for key, tensor in states.items()}


def _is_scalar(value: Any, elementwise: list[str], key: str) -> bool:
    if key in elementwise or isinstance(value, bool):
        return False
    return isinstance(value, int | float) or (torch.is_tensor(value) and value.numel() == 1)


def _read_loss_scale(engine: Any) -> float | None:
    if not engine.fp16_enabled() or engine.optimizer is None:
        return None
    wrapped = engine.optimizer  # up to 0.17 the wrapper itself has the scale
    scaler = getattr(wrapped, "loss_scaler", None) or getattr(wrapped, "loss_scale_config", None) or wrapped
    return float(scaler.cur_scale)


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)
