"""Keys and tensors of a module's state dict, changed by overrides and hooks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch

from ..engine.base import Target
from ..errors import shorten
from ..model.storage import strip_compiled
from ..model.view import EngineBuffer
from .registry import Extension


class ModuleStateDict(Extension):
    """A module with a custom state dict.

    Attributes:
        keys: key before the load → name of the parameter or buffer, if they differ; None before :meth:`inspect`.
        others: tensors that are neither, such as scales of quantized weights.
        computed: keys of others that each call computes, so that writing into them has no effect.
    """

    keys: dict[str, str] | None = None

    def inspect(self, module: torch.nn.Module) -> dict[str, str]:
        """Inspect the state dict at the first call; return ``keys``."""
        if self.keys is not None:
            return self.keys
        tensors: dict[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=False))
        tensors.update(module.named_buffers(remove_duplicate=False))
        names: dict[Any, list[str]] = defaultdict(list)
        for name, tensor in tensors.items():
            for mark in _identify(tensor):
                names[mark].append(name)
        self.keys, self.others = dict[str, str](), dict[str, torch.Tensor]()
        for key, value in _list_tensors(module):
            same = next((names[mark] for mark in _identify(value) if mark in names), [])
            if same and key not in same:
                self.keys[key] = next((name for name in same if name not in self.keys.values()), same[0])
            elif not same and key not in tensors and value.numel():
                self.others[key] = value.detach()
        again = {key: value.data_ptr() for key, value in _list_tensors(module)} if self.others else {}
        self.computed = {key for key, value in self.others.items() if again.get(key) != value.data_ptr()}
        return self.keys

    def list_keys(self, target: Target) -> dict[str, str]:
        """Map keys to differing parameter and buffer names; omit local names of experts."""
        keys = self.inspect(target.engine.module).items()
        return {strip_compiled(key): strip_compiled(name) for key, name in keys if name not in target.shares}

    def complete_extras(self, target: Target, extras: list[EngineBuffer]) -> list[EngineBuffer]:
        self.inspect(target.engine.module)
        others = self.others.items()
        return extras + [target.make_whole(strip_compiled(key), tensor, is_buffer=True) for key, tensor in others]

    def describe_differences(self, target: Target) -> str:
        self.inspect(target.engine.module)
        now = dict(_list_tensors(target.engine.module)) if self.computed else {}
        changed = [key for key in self.computed if key in now and not torch.equal(now[key].detach(), self.others[key])]
        return f"{shorten(sorted(changed))}: the module computes them, with other values than saved" if changed else ""


def _list_tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for key, value in module.state_dict(keep_vars=True).items():
        if isinstance(value, torch.Tensor) and not key.endswith("_extra_state"):
            yield key, value


def _identify(tensor: torch.Tensor) -> Iterator[Any]:
    """Yield a tensor's id, and its memory, since a state dict may have detached it."""
    yield id(tensor)
    if tensor.numel():
        yield tensor.data_ptr(), tuple(tensor.shape), tensor.dtype
