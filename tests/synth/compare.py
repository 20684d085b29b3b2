"""Compares two checkpoints' contents in everything that a loader can see."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from .description import Model, Topology
from .layout import Flat, partition_layout, stage3_slice


def differences(left: Any, right: Any, path: str = "") -> Iterator[str]:
    """Yield a line per difference of types, keys (with their order in an OrderedDict), tensors, storages, values."""
    if type(left) is not type(right):
        yield f"{path}: {type(left).__name__} {left!r} is not {type(right).__name__} {right!r}"
    elif torch.is_tensor(left):
        yield from _tensor_differences(left, right, path)
    elif isinstance(left, Mapping):
        yield from _mapping_differences(left, right, path)
    elif isinstance(left, list | tuple):
        if len(left) != len(right):
            yield f"{path}: {len(left)} items are not {len(right)}"
        for index, pair in enumerate(zip(left, right, strict=False)):
            yield from differences(*pair, f"{path}[{index}]")
    elif _plain(left) != _plain(right):
        yield f"{path}: {_plain(left)!r} is not {_plain(right)!r}"


def storage_sharing(content: Any) -> list[tuple[str, ...]]:
    """Return the sorted sets of tensors, by path, that share a storage; a set may have one tensor."""
    shared: dict[int, list[str]] = {}
    for path, tensor in _tensors(content, ""):
        if tensor.untyped_storage().nbytes():
            shared.setdefault(tensor.untyped_storage().data_ptr(), []).append(path)
    return sorted(tuple(sorted(paths)) for paths in shared.values())


def clear_garbage(content: Mapping[str, Any], model: Model, topology: Topology, rank: int) -> None:
    """Remove arbitrary data from one rank's file in place.

    These are the uninitialised padding of ZeRO 3's partitions, and the last writer of a file that several of AutoEP's
    ranks under AutoTP write.
    """
    if (content.get("folding") or {}).get("family") == "routed_expert":
        del content["folding"]["zero_partition_rank"]
    if topology.stage != 3:
        return
    for name, fragment in (content.get("frozen_param_fragments") or {}).items():
        param = next(param for param in model.params if param.name == name)
        fragment[stage3_slice(param, topology.dp, rank).numel :] = 0
    if "optimizer_state_dict" not in content:
        return
    optimizer = content["optimizer_state_dict"]
    for index, flat in enumerate(partition_layout(model, topology)[rank]):
        states = optimizer["optimizer_state_dict"]["state"].get(index, {})
        for tensor in (optimizer["fp32_flat_groups"][index], *states.values()):
            if torch.is_tensor(tensor) and tensor.dim():
                tensor.detach()[_padding(flat)] = 0


def _padding(flat: Flat) -> torch.Tensor:
    mask = torch.ones(flat.numel, dtype=torch.bool)
    for part in flat.slices:
        mask[part.offset : part.offset + part.numel] = False
    return mask


def _tensor_differences(left: torch.Tensor, right: torch.Tensor, path: str) -> Iterator[str]:
    for what in ("shape", "dtype", "requires_grad"):
        if getattr(left, what) != getattr(right, what):
            yield f"{path}.{what}: {getattr(left, what)} is not {getattr(right, what)}"
    places = [(tensor.storage_offset(), tensor.untyped_storage().nbytes()) for tensor in (left, right)]
    for what, *pair in zip(("storage offset", "storage size"), *places, strict=True):
        if pair[0] != pair[1]:
            yield f"{path}: {what} {pair[0]} is not {pair[1]}"
    if (left.shape, left.dtype) == (right.shape, right.dtype) and not torch.equal(_bytes(left), _bytes(right)):
        yield f"{path}: values {left} are not {right}"


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def _mapping_differences(left: Mapping[str, Any], right: Mapping[str, Any], path: str) -> Iterator[str]:
    for key in sorted(left.keys() ^ right.keys(), key=str):
        yield f"{path}.{key}: only in the {'first' if key in left else 'second'}"
    for key in left.keys() & right.keys():
        yield from differences(left[key], right[key], f"{path}.{key}")
    module = path.endswith(".module")  # buffers and parameters alternate in a real one, module by module
    if type(left).__name__ == "OrderedDict" and not module and list(left) != list(right):
        yield f"{path}: order {list(left)} is not {list(right)}"


def _plain(value: Any) -> Any:
    """Convert loss scalers, which define no equality, to dicts."""
    return vars(value) if type(value).__name__.endswith("LossScaler") else value


def _tensors(content: Any, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    if torch.is_tensor(content):
        yield path, content
    elif isinstance(content, Mapping):
        for key, value in content.items():
            yield from _tensors(value, f"{path}.{key}")
    elif isinstance(content, list | tuple):
        for index, value in enumerate(content):
            yield from _tensors(value, f"{path}[{index}]")
