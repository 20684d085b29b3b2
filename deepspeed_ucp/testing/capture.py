"""The state of a live engine, parameter by parameter and whole, for comparison. Test code: it gathers everything.

What DeepSpeed's public `safe_get_full_fp32_param` and `safe_get_full_optimizer_state` can tell is asked of them.
They know nothing of stage 0 and go wrong with round_robin_gradients; there the optimizer wrapper is asked.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

Tensor = torch.Tensor


@dataclass
class ParameterState:
    """One parameter, whole, on the CPU.

    Attributes:
        value: the parameter that the model computes with, in the engine's dtype.
        fp32: its fp32 master; None for a frozen parameter.
        tensors: the element-wise optimizer states by the optimizer's names; empty where there are none yet.
        scalars: the other optimizer states (`step`), as floats.
        hyper: the parameter group's hyper-parameters.
    """

    value: Tensor
    fp32: Tensor | None = None
    tensors: dict[str, Tensor] = field(default_factory=dict)
    scalars: dict[str, float] = field(default_factory=dict)
    hyper: dict[str, Any] = field(default_factory=dict)


@dataclass
class EngineState:
    """Everything that a resume has to bring back.

    Attributes:
        parameters: by name, without the prefix that torch.compile adds; a tied parameter under its first name.
        buffers: the persistent buffers by name.
        counters: global_steps, global_samples, skipped_steps.
        scheduler: the scheduler's state dict; None without a scheduler.
        loss_scale: the current loss scale; None where the engine has none.
    """

    parameters: dict[str, ParameterState]
    buffers: dict[str, Tensor]
    counters: dict[str, int]
    scheduler: dict[str, Any] | None
    loss_scale: float | None


def capture(engine: Any) -> EngineState:
    """Copy the state of `engine`. Collective: all ranks of the engine call it together."""
    homes = dict(_homes(engine))
    values = _values(engine)
    parameters = {}
    for name, parameter in _named_parameters(engine):
        state = ParameterState(value=values[name])
        if id(parameter) in homes:
            _fill(state, parameter, homes[id(parameter)])
        parameters[name] = state
    scheduler = engine.lr_scheduler
    return EngineState(
        parameters=parameters,
        buffers=_buffers(engine),
        counters={key: int(getattr(engine, key)) for key in ("global_steps", "global_samples", "skipped_steps")},
        scheduler=dict(scheduler.state_dict()) if hasattr(scheduler, "state_dict") else None,
        loss_scale=_loss_scale(engine),
    )


@dataclass
class _Home:
    """Where a trainable parameter's state lives: its group and the state dict of the tensor that the optimizer steps.

    `whole` makes the whole parameter of a tensor of the master's shape; None leaves it to DeepSpeed's public functions.
    """

    master: Tensor
    state: dict[str, Any]
    hyper: dict[str, Any]
    whole: Callable[[Tensor], Tensor] | None = None


_WRAPPERS = {
    "fp32_partitioned_groups_flat": "fp16_groups",  # stage 3, per sub-group
    "single_partition_of_fp32_groups": "bit16_groups",  # stages 1 and 2
    "fp32_groups_flat_partition": "bf16_groups",  # BF16_Optimizer
    "fp32_groups_flat": "fp16_groups",  # FP16_Optimizer, fused
    "fp32_groups": "fp16_groups",  # FP16_UnfusedOptimizer
}
"""Where each of DeepSpeed's optimizer wrappers keeps its masters, and the parameters they belong to, group by group."""


def _homes(engine: Any) -> Iterator[tuple[int, _Home]]:
    wrapper = engine.optimizer
    inner = getattr(wrapper, "optimizer", wrapper)
    kind = next((name for name in _WRAPPERS if hasattr(wrapper, name)), None)
    if kind is None:  # the raw torch optimizer
        for group in inner.param_groups:
            yield from _own_homes(group["params"], group["params"], inner, group)
        return
    for index, (masters, parameters) in enumerate(
        zip(getattr(wrapper, kind), getattr(wrapper, _WRAPPERS[kind]), strict=True)
    ):
        group = inner.param_groups[_group_number(wrapper, inner, index)]
        if kind == "fp32_groups":
            yield from _own_homes(parameters, masters, inner, group)
        elif kind == "fp32_groups_flat":
            yield from _cut_homes(parameters, masters, inner, group)
        elif getattr(wrapper, "round_robin_gradients", False):
            yield from _gathered_homes(wrapper, index, masters, inner, group)
        else:
            yield from _flat_homes(parameters, masters, inner, group)


def _group_number(wrapper: Any, inner: Any, index: int) -> int:
    """The optimizer's group of a flat buffer. DeepSpeed rebuilds torch's Adagrad with all of them in one group."""
    number = wrapper.sub_group_to_group_id[index] if hasattr(wrapper, "sub_group_to_group_id") else index
    return min(number, len(inner.param_groups) - 1)


def _own_homes(
    parameters: list[Any], masters: list[Any], inner: Any, group: dict[str, Any]
) -> Iterator[tuple[int, _Home]]:
    for parameter, master in zip(parameters, masters, strict=True):
        yield id(parameter), _Home(master, inner.state.get(master, {}), _hyper(group), _identity)


def _flat_homes(parameters: list[Any], flat: Tensor, inner: Any, group: dict[str, Any]) -> Iterator[tuple[int, _Home]]:
    _link(parameters, flat, inner)
    for parameter in parameters:
        yield id(parameter), _Home(flat, inner.state.get(flat, {}), _hyper(group))


def _gathered_homes(
    wrapper: Any, index: int, flat: Tensor, inner: Any, group: dict[str, Any]
) -> Iterator[tuple[int, _Home]]:
    """With round_robin_gradients DeepSpeed's getters look in the wrong places: they assume the group's own order.

    The 16-bit parameters are views of the flat 16-bit buffer, so they tell where in the flat buffer they lie.
    """
    lowered = wrapper.bit16_groups_flat[index]
    process_group = wrapper.real_dp_process_group[index]
    for parameter in wrapper.bit16_groups[index]:
        start = (parameter.data_ptr() - lowered.data_ptr()) // lowered.element_size() if parameter.numel() else 0
        cut = _cut(parameter, start)
        whole = functools.partial(_gather_and_cut, process_group, cut)
        yield id(parameter), _Home(flat, inner.state.get(flat, {}), _hyper(group), whole)


def _gather_and_cut(process_group: Any, cut: Callable[[Tensor], Tensor], partition: Tensor) -> Tensor:
    parts = [torch.empty_like(partition) for _ in range(dist.get_world_size(process_group))]
    dist.all_gather(parts, partition.detach().contiguous(), group=process_group)
    return cut(torch.cat(parts))


def _link(parameters: list[Any], flat: Tensor, inner: Any) -> None:
    """Make the getters of stages 1 and 2 see the optimizer states, where DeepSpeed has not done so yet.

    It links them in the first step after the load, and then only those that exist once the first group has stepped.
    """
    unlinked = [p for p in parameters if _mapping(p) is not None and not _mapping(p).optim_fragment]
    for parameter in unlinked:
        _mapping(parameter).set_optim_state_fragment(flat, inner.state.get(flat, {}))


def _mapping(parameter: Any) -> Any:
    return getattr(parameter, "_hp_mapping", None)


def _cut_homes(parameters: list[Any], flat: Tensor, inner: Any, group: dict[str, Any]) -> Iterator[tuple[int, _Home]]:
    start = 0
    for parameter in parameters:
        yield id(parameter), _Home(flat, inner.state.get(flat, {}), _hyper(group), _cut(parameter, start))
        start += parameter.numel()


def _cut(parameter: Tensor, start: int) -> Callable[[Tensor], Tensor]:
    shape, count = parameter.shape, parameter.numel()
    return lambda flat: flat.flatten().narrow(0, start, count).view(shape)


def _identity(tensor: Tensor) -> Tensor:
    return tensor


def _hyper(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _fill(state: ParameterState, parameter: Any, home: _Home) -> None:
    elementwise = [key for key, value in home.state.items() if _like(value, home.master)]
    state.scalars = {key: float(value) for key, value in home.state.items() if _is_scalar(value, elementwise, key)}
    state.hyper = home.hyper
    if home.whole is not None:
        state.fp32 = _copy(home.whole(home.master)).float()
        state.tensors = {key: _copy(home.whole(home.state[key])) for key in elementwise}
        return
    state.fp32 = _copy(safe_get_full_fp32_param(parameter))
    state.tensors = {key: _copy(safe_get_full_optimizer_state(parameter, key)) for key in elementwise}


def _like(value: Any, master: Tensor) -> bool:
    return torch.is_tensor(value) and value.shape == master.shape and value.dim() > 0


def _is_scalar(value: Any, elementwise: list[str], key: str) -> bool:
    if key in elementwise or isinstance(value, bool):
        return False
    return isinstance(value, int | float) or (torch.is_tensor(value) and value.numel() == 1)


def _values(engine: Any) -> dict[str, Tensor]:
    """The parameters that the model computes with; gathered one by one at stage 3."""
    values = {}
    for name, parameter in _named_parameters(engine):
        if hasattr(parameter, "ds_id"):
            import deepspeed

            with deepspeed.zero.GatheredParameters([parameter]):
                values[name] = _copy(parameter.data)
        else:
            values[name] = _copy(parameter.data)
    return values


def _named_parameters(engine: Any) -> list[tuple[str, Any]]:
    return [(_plain(name), parameter) for name, parameter in engine.module.named_parameters()]


def _buffers(engine: Any) -> dict[str, Tensor]:
    found = {}
    for prefix, module in engine.module.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                found[_plain(f"{prefix}.{name}" if prefix else name)] = _copy(buffer)
    return found


def _loss_scale(engine: Any) -> float | None:
    if not engine.fp16_enabled() or engine.optimizer is None:
        return None
    scaler = getattr(engine.optimizer, "loss_scaler", None) or engine.optimizer.loss_scale_config
    return float(scaler.cur_scale)


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def _plain(name: str) -> str:
    return name.replace("_orig_mod.", "")
