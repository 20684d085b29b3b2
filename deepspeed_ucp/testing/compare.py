"""Bitwise comparison of a saved engine with a loaded one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from deepspeed_ucp.testing.capture import CapturedEngine, CapturedParameter

Tensor = torch.Tensor


def compare(saved: CapturedEngine, loaded: CapturedEngine, *, optimizer_states: bool = True) -> tuple[int, list[str]]:
    """Compare the state of an engine at its save with the state that was loaded.

    Element-wise states are compared bit by bit. A state that only one side has must be zero, because optimizers make
    their states before or in the first step. Tensors are cast to the loaded engine's dtype first.

    Args:
        optimizer_states: False ignores the optimizer's tensors and scalars.

    Returns:
        The number of compared tensors, and one line for each difference.
    """
    differences = list(_compare_names("parameter", saved.parameters, loaded.parameters))
    differences += _compare_names("buffer", saved.buffers, loaded.buffers)
    count = 0
    for name in saved.parameters.keys() & loaded.parameters.keys():
        pairs = list(_pair_tensors(saved.parameters[name], loaded.parameters[name], optimizer_states))
        count += len(pairs)
        for state, want, got in pairs:
            differences += _describe_difference(f"parameter {name}, state {state}", want, got)
        differences += _diff_settings(name, saved.parameters[name], loaded.parameters[name], optimizer_states)
    for name in saved.buffers.keys() & loaded.buffers.keys():
        count += 1
        got = loaded.buffers[name]
        differences += _describe_difference(f"buffer {name}", saved.buffers[name].to(got.dtype), got)
    differences += _compare_mappings("counter", saved.counters, loaded.counters)
    if saved.scheduler is None or loaded.scheduler is None:
        schedulers = ({"scheduler": 1} if side.scheduler is not None else {} for side in (saved, loaded))
        differences += _compare_names("lr", *schedulers)
    else:
        # Releases of torch add and drop fields (`verbose`, `_is_initial`): ignore fields that were not saved.
        known = {key: value for key, value in loaded.scheduler.items() if key in saved.scheduler}
        differences += _compare_mappings("lr scheduler", saved.scheduler, known)
    if saved.loss_scale is not None and loaded.loss_scale is not None and saved.loss_scale != loaded.loss_scale:
        differences.append(f"loss scale: saved {saved.loss_scale}, loaded {loaded.loss_scale}")
    return count, differences


def _compare_names(kind: str, saved: Mapping[str, Any], loaded: Mapping[str, Any]) -> Iterator[str]:
    for name in sorted(saved.keys() - loaded.keys()):
        yield f"{kind} {name}: saved, but the engine that loads has none"
    for name in sorted(loaded.keys() - saved.keys()):
        yield f"{kind} {name}: not in the engine that saved"


def _pair_tensors(
    saved: CapturedParameter, loaded: CapturedParameter, optimizer_states: bool
) -> Iterator[tuple[str, Any, Any]]:
    master = saved.fp32 if saved.fp32 is not None else saved.value
    if loaded.fp32 is not None:
        yield "fp32", master.to(loaded.fp32.dtype), loaded.fp32
    yield "value", master.to(loaded.value.dtype), loaded.value
    if not optimizer_states:
        return
    for state in sorted(saved.tensors.keys() | loaded.tensors.keys()):
        zeros = torch.zeros_like(saved.tensors[state] if state in saved.tensors else loaded.tensors[state])
        got = loaded.tensors.get(state, zeros)
        yield state, saved.tensors.get(state, zeros).to(got.dtype), got


def _diff_settings(name: str, saved: CapturedParameter, loaded: CapturedParameter, optimizer_states: bool) -> list[str]:
    if saved.fp32 is None or loaded.fp32 is None or not optimizer_states:
        return []
    # Some optimizers add defaults when they load; a parameter without gradients has no step at stage 0.
    differences = _compare_shared(f"parameter {name}, group's", saved.hyper, loaded.hyper)
    differences += _compare_shared(f"parameter {name}, state", saved.scalars, loaded.scalars)
    lost = saved.scalars.keys() - loaded.scalars.keys() - loaded.hyper.keys() if loaded.tensors else ()
    texts = (f"parameter {name}, state {key}: saved {saved.scalars[key]!r}, not loaded" for key in sorted(lost))
    return [*differences, *texts]


def _compare_shared(kind: str, saved: Mapping[str, Any], loaded: Mapping[str, Any]) -> list[str]:
    return _compare_mappings(
        kind, *({key: side[key] for key in saved.keys() & loaded.keys()} for side in (saved, loaded))
    )


def _compare_mappings(kind: str, saved: Mapping[str, Any], loaded: Mapping[str, Any]) -> list[str]:
    return [
        f"{kind} {key}: saved {saved.get(key)!r}, loaded {loaded.get(key)!r}"
        for key in sorted(saved.keys() | loaded.keys(), key=str)
        if not _is_equal(saved.get(key), loaded.get(key))
    ]


def _is_equal(left: Any, right: Any) -> bool:
    if torch.is_tensor(left) or torch.is_tensor(right):
        return torch.is_tensor(left) and torch.is_tensor(right) and torch.equal(left, right)
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(map(_is_equal, left, right))
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_is_equal(left[key], right[key]) for key in left)
    if isinstance(left, float) and isinstance(right, float) and math.isnan(left):
        return math.isnan(right)
    return bool(left == right)


def _describe_difference(name: str, want: Tensor, got: Tensor) -> list[str]:
    """Describe the first difference of two tensors; empty if all bits are equal."""
    if want.shape != got.shape or want.dtype != got.dtype:
        return [f"{name}: saved {tuple(want.shape)} {want.dtype}, loaded {tuple(got.shape)} {got.dtype}"]
    if want.numel() == 0:
        return []
    differs = (_view_bytes(want) != _view_bytes(got)).view(want.numel(), -1).any(dim=1)
    if not differs.any():
        return []
    first = int(differs.nonzero()[0])
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(first), want.shape)) if want.dim() else ()
    values = f"saved {want.flatten()[first].item()!r}, loaded {got.flatten()[first].item()!r}"
    return [f"{name}: {int(differs.sum())} of {want.numel()} elements differ, first at {index}: {values}"]


def _view_bytes(tensor: Tensor) -> Tensor:
    # Adding zero turns -0.0 into 0.0: DeepSpeed's getters lose that sign when they add fragments to zeros.
    tensor = tensor + 0 if tensor.is_floating_point() else tensor
    return tensor.contiguous().flatten().view(torch.uint8)
