"""Keys and tensors of a module's state dict, which overrides and hooks may change."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..engine import Target
from ..errors import shorten
from ..model import strip_compiled
from ..model.view import EngineBuffer
from .registry import Extension


class ModuleStateDict(Extension):
    """A module with a state dict that is not torch's own.

    Attributes:
        state_dict: its differences before the load.
    """

    state_dict: StateDict | None = None

    def _ask(self, target: Target) -> StateDict:
        self.state_dict = self.state_dict or ask_state_dict(target.engine.module)
        return self.state_dict

    def list_keys(self, target: Target) -> dict[str, str]:
        """Map keys to names of parameters or buffers, if they differ; a rank's own names of experts are omitted."""
        keys = self._ask(target).keys.items()
        return {strip_compiled(key): strip_compiled(name) for key, name in keys if name not in target.shares}

    def complete_extras(self, target: Target, extras: list[EngineBuffer]) -> list[EngineBuffer]:
        """Add the tensors that are neither parameters nor buffers."""
        others = self._ask(target).others.items()
        return extras + [target.make_whole(strip_compiled(key), tensor, is_buffer=True) for key, tensor in others]

    def describe_differences(self, target: Target) -> str:
        """Describe tensors that the state dict computes with another result than the saved one."""
        changed = find_changed(target.engine.module, self._ask(target))
        return f"{shorten(changed)}: the module computes them, with other values than saved" if changed else ""


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
    """Inspect the state dict of a live module."""
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


def _list_tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for key, value in module.state_dict(keep_vars=True).items():
        if isinstance(value, torch.Tensor) and not key.endswith("_extra_state"):
            yield key, value


def _mark(tensor: torch.Tensor) -> Iterator[Any]:
    """Yield identities of a tensor: its id, and its memory, since a state dict may contain a detached tensor."""
    yield id(tensor)
    if tensor.numel():
        yield tensor.data_ptr(), tuple(tensor.shape), tensor.dtype
