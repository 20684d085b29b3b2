"""Keys and tensors of a module's state dict, which overrides and hooks may change."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

_BASE = torch.nn.Module


@dataclass(frozen=True, slots=True)
class StateDict:
    """Differences of a state dict from the parameters and buffers of its module.

    Attributes:
        keys: key → name of the parameter or buffer, if they differ.
        others: tensors that are neither, such as scales of quantized weights.
        made: keys of others that each call computes, so that writing into them has no effect.
    """

    keys: Mapping[str, str] = field(default_factory=dict)
    others: Mapping[str, torch.Tensor] = field(default_factory=dict)
    made: frozenset[str] = frozenset()


def ask_state_dict(module: torch.nn.Module) -> StateDict:
    """Inspect the state dict of a live module, unless it is torch's own."""
    if not any(map(_is_custom, module.modules())):
        return StateDict()
    tensors: dict[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=False))
    tensors.update(module.named_buffers(remove_duplicate=False))
    names: dict[Any, list[str]] = defaultdict(list)
    for name, tensor in tensors.items():
        for mark in _mark(tensor):
            names[mark].append(name)
    keys, others = dict[str, str](), dict[str, torch.Tensor]()
    for key, value in _list_tensors(module):
        same = next((names[mark] for mark in _mark(value) if mark in names), [])
        if same and key not in same:
            keys[key] = next((name for name in same if name not in keys.values()), same[0])
        elif not same and key not in tensors and value.numel():
            others[key] = value.detach()
    again = dict(_list_tensors(module)) if others else {}
    made = (key for key, value in others.items() if key not in again or again[key].data_ptr() != value.data_ptr())
    return StateDict(keys, others, frozenset(made))


def find_changed(module: torch.nn.Module, before: StateDict) -> list[str]:
    """List computed tensors whose values differ from those written by a load."""
    now = dict(_list_tensors(module)) if before.made else {}
    return sorted(key for key in before.made if key in now and not torch.equal(now[key].detach(), before.others[key]))


def _is_custom(module: torch.nn.Module) -> bool:
    kind = type(module)
    overridden = kind.state_dict is not _BASE.state_dict or kind._save_to_state_dict is not _BASE._save_to_state_dict
    return overridden or "state_dict" in vars(module) or bool(module._state_dict_hooks or module._state_dict_pre_hooks)


def _list_tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for key, value in module.state_dict(keep_vars=True).items():
        if isinstance(value, torch.Tensor) and not key.endswith("_extra_state"):
            yield key, value


def _mark(tensor: torch.Tensor) -> Iterator[Any]:
    """Yield identities of a tensor: its id, and its memory, since a state dict may contain a detached tensor."""
    yield id(tensor)
    if tensor.numel():
        yield tensor.data_ptr(), tuple(tensor.shape), tensor.dtype
