"""Optimizer states by name in ``optimizer.bin``, as Accelerate writes them with FULL_STATE_DICT."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...comm import Comm
from ...errors import UnsupportedError
from ...torchsave import torchfile
from ...torchsave.objects import TensorRef, describe, is_short, to_number
from ..reading import read_hyper
from ..table import FileTable
from .contents import Contents, StoredTensor, count_steps, is_number, read_name
from .headers import read_once
from .names import OPTIMIZER
from .statedict import store_tensor

_UNNAMED = (
    "its optimizer states have numbers, not names, as without FSDP, so their parameters are unknown. Load only the "
    "weights (load_optimizer_states=False)"
)


def add_states(contents: Contents, where: FileTable, comm: Comm) -> Contents:
    """Add the states of the optimizer's file to contents; collective.

    Raises:
        CheckpointError: the file is damaged.
        UnsupportedError: the file holds no optimizer's state dict.
    """

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
    for name, held in tree["state"].items():
        weight = contents.weights.get(name)
        for state, value in held.items():
            if isinstance(value, TensorRef) and not is_number(state, value.shape, weight.shape if weight else None):
                states[name][state] = store_tensor(f"{name}: {state}", value, file.storages, OPTIMIZER, path)
                continue
            scalars[name][state] = _read_number(value)
            dtypes |= {state: value.dtype} if isinstance(value, TensorRef) else {}
    groups = [
        (
            tuple(map(read_name, group["params"])),
            {str(key): read_hyper(each, path) for key, each in group.items() if key != "params"},
        )
        for group in tree["param_groups"]
    ]
    counters = count_steps(held["step"] for held in scalars.values() if "step" in held)
    return replace(contents, states=states, scalars=scalars, groups=groups, counters=counters, scalar_dtypes=dtypes)


def _read_number(value: Any) -> int | float:
    number = to_number(value)
    if not (isinstance(number, float) or is_short(number)):
        raise ValueError(f"{describe(value)} for a number of the optimizer's")
    return number  # type: ignore[no-any-return]
