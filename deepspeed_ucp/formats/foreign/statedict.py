"""State dicts in ``torch.save`` files: ``pytorch_model.bin``, whole or sharded, and ``optimizer.bin`` of Accelerate."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from ...comm import Comm
from ...errors import CheckpointError, UnsupportedError
from ...model import ITEMSIZE
from ...torchsave import torchfile
from ...torchsave.objects import TensorRef, describe, is_short, to_number
from ...torchsave.records import FileRecord
from ..deepspeed.reading import read_hyper
from ..findings import Finding
from ..places import FileTable
from .contents import Contents, StoredTensor, TensorBlock, count_steps, is_number, read_name, read_once, read_with
from .names import OPTIMIZER, STATE_DICT
from .weights import find_shards

_UNNAMED = (
    "its optimizer states have numbers, not names, as without FSDP, so their parameters are unknown. Load only the "
    "weights (load_optimizer_states=False)"
)

_INSIDE = ("state_dict", "model_state_dict", "model", "module")
"""Keys under which scripts store a state dict."""


def read_contents(where: FileTable, comm: Comm) -> tuple[Contents, list[Finding]]:
    """Read the headers of the files; collective."""
    shards = find_shards(where, ".bin", comm)
    headers = where.share(shards.files, lambda name: read_header(where, name), comm)
    weights, ties = split_ties(comm.alike(lambda: shards.unite(headers, where)))
    return Contents(STATE_DICT, shards.head, weights, aliases=ties), []


NamedTensors = dict[str, tuple[StoredTensor, str]]
"""Name → tensor, and an earlier name of the same bytes (empty without one)."""


def split_ties(tensors: NamedTensors) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """Split tensors into those with data, and tied name → name with the data."""
    ties = {
        name: first for name, (tensor, first) in tensors.items() if first in tensors and tensors[first][0] == tensor
    }
    return {name: tensor for name, (tensor, _) in tensors.items() if name not in ties}, ties


def read_header(where: FileTable, name: str) -> NamedTensors:
    """Read the tensors of a file."""

    def parse(path: str) -> NamedTensors:
        file = torchfile.read_header(path)
        tensors, seen = NamedTensors(), dict[tuple[Any, ...], str]()
        for key, ref in _list_tensors(file.tree, path):
            if key in tensors:
                raise CheckpointError(f"holds two tensors under {key}; it is damaged.", path=path)
            first = seen.setdefault((ref.storage.key, ref.offset, ref.shape, ref.dtype), key)
            tensor = store_tensor(key, ref, file.storages, name, path)
            tensors[key] = tensor, first if ref.numel and first != key else ""
        return tensors

    return read_with(parse, where, name)


def store_tensor(key: str, ref: TensorRef, storages: Mapping[str, FileRecord], name: str, path: str) -> StoredTensor:
    """Return a tensor of a ``torch.save`` file as one block."""
    if ref.dtype not in ITEMSIZE or not ref.is_contiguous():
        raise UnsupportedError(f"{key} ({describe(ref)}) is not contiguous, or of another type.", path=path)
    record = storages.get(ref.storage.key)
    if record is None and ref.numel:
        raise CheckpointError(f"has no bytes of {key} ({describe(ref)}); it is damaged.", path=path)
    begin = ref.offset * ITEMSIZE[ref.dtype]
    chunks = (TensorBlock((0,) * len(ref.shape), ref.shape, name, record, begin),) if record else ()
    return StoredTensor(ref.dtype, ref.shape, chunks)


def _list_tensors(tree: Any, path: str) -> Iterator[tuple[str, TensorRef]]:
    if not isinstance(tree, dict):
        raise UnsupportedError(f"holds {describe(tree)}, not a state dict.", path=path)
    inside = [key for key in _INSIDE if isinstance(tree.get(key), dict)]
    content = tree[inside[0]] if inside else tree
    for key, value in content.items():
        if isinstance(value, TensorRef):
            yield str(key), value
        elif not inside and not str(key).endswith("_extra_state"):
            raise UnsupportedError(f"holds {describe(value)} under {describe(key)}: it is no state dict.", path=path)


def add_states(contents: Contents, where: FileTable, comm: Comm) -> Contents:
    """Add the states of the optimizer's file to contents; collective."""

    def parse(path: str) -> Contents:
        file = torchfile.read_header(path)
        tree = file.tree
        if not (isinstance(tree, dict) and isinstance(tree.get("state"), dict) and "param_groups" in tree):
            raise UnsupportedError(f"holds {describe(tree)}, not an optimizer's state dict.", path=path)
        members = (name for group in tree["param_groups"] for name in group["params"])
        if any(isinstance(name, int) for name in (*tree["state"], *members)):
            return replace(contents, stateless=f"{where.path(OPTIMIZER)}: {_UNNAMED}.")
        return _take_apart(contents, tree, file, path)

    return read_once(parse, where, OPTIMIZER, comm)


def _take_apart(contents: Contents, tree: Mapping[str, Any], file: torchfile.TorchFile, path: str) -> Contents:
    states: dict[str, dict[str, StoredTensor]] = defaultdict(dict)
    scalars: dict[str, dict[str, Any]] = defaultdict(dict)
    dtypes: dict[str, str] = {}
    for name, values in tree["state"].items():
        weight = contents.weights.get(name)
        for state, value in values.items():
            if isinstance(value, TensorRef) and not is_number(state, value.shape, weight.shape if weight else None):
                states[name][state] = store_tensor(f"{name}: {state}", value, file.storages, OPTIMIZER, path)
                continue
            scalars[name][state] = _read_number(value)
            dtypes |= {state: value.dtype} if isinstance(value, TensorRef) else {}
    groups = [
        (
            tuple(map(read_name, group["params"])),
            {str(key): read_hyper(value, path) for key, value in group.items() if key != "params"},
        )
        for group in tree["param_groups"]
    ]
    counters = count_steps(values["step"] for values in scalars.values() if "step" in values)
    return replace(contents, states=states, scalars=scalars, groups=groups, counters=counters, scalar_dtypes=dtypes)


def _read_number(value: Any) -> int | float:
    number = to_number(value)
    if not (isinstance(number, float) or is_short(number)):
        raise ValueError(f"{describe(value)} for a number of the optimizer's")
    return number  # type: ignore[no-any-return]
