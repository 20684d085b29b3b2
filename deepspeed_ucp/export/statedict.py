"""State dicts of an export to ``torch.distributed.checkpoint``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..formats.foreign.names import MODEL_FOLDER, OPTIMIZER_FOLDER
from ..model.index import AtomicIndex
from ..model.storage import ParamKey
from .tensors import Selection, Tensor

logger = logging.getLogger("deepspeed_ucp")

_DECOUPLED = "decoupled_weight_decay"

LAYOUTS = ("torch", "flattened", "torchtitan", "accelerate")
"""Layouts of keys: {"model", "optim"} as in get_state_dict; with a flattened optimizer; as in torchtitan; as in
Accelerate and Hugging Face's Trainer, with a folder each for model and optimizer."""

Trees = dict[str, dict[str, Any]]
"""Subfolder → state dict; an empty name is the export's folder."""

Placeholders = dict[int, tuple[Tensor, bool]]
"""``id`` of a placeholder → its tensor, and whether its name is a tied one."""


def make_trees(selection: Selection, *, weights_only: bool, layout: str) -> tuple[Trees, Placeholders]:
    """Return state dicts with placeholders for tensors, and the placeholders' tensors."""
    placeholders: Placeholders = {}

    def stand_in(tensor: Tensor, name: str = "") -> torch.Tensor:
        placeholder = torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype), device="meta")
        placeholders[id(placeholder)] = tensor, name in tensor.names[1:]
        return placeholder

    model = {name: stand_in(tensor, name) for name, tensor in selection.by_name.items()}
    optimizer = {} if weights_only else _make_optimizer(selection, stand_in)
    if optimizer and layout in ("flattened", "torchtitan"):
        optimizer = flatten_optimizer(optimizer)
    if layout == "accelerate":
        trees = {MODEL_FOLDER: {"model": model}, OPTIMIZER_FOLDER: {"optimizer": optimizer}}
        return {folder: tree for folder, tree in trees.items() if optimizer or folder == MODEL_FOLDER}, placeholders
    weights, name = (model, "optimizer") if layout == "torchtitan" else ({"model": model}, "optim")
    return {"": {**weights, name: optimizer} if optimizer else weights}, placeholders


def _make_optimizer(selection: Selection, stand_in: Callable[[Tensor], torch.Tensor]) -> dict[str, Any]:
    """Return the optimizer's state as ``torch.distributed.checkpoint`` expects it."""
    index = selection.index
    states: dict[str, dict[str, Any]] = {}
    for key, tensor in selection.states.items():
        states.setdefault(key.name, {})[key.state] = stand_in(tensor)
    for name, values_of in states.items():
        scalars = index.scalars.get(ParamKey(name), {})
        values_of.update({scalar: _convert_scalar(index, scalar, value) for scalar, value in scalars.items()})
    # DeepSpeed's Adam decouples weight decay unless its ds_config has adam_w_mode=False.
    is_plain = str(index.optimizer).lower() == "adam" and index.optimizer_params.get("adam_w_mode") is False
    groups, assumed = list[dict[str, Any]](), False
    for group in index.groups:
        names = [selection.names[name] for name in group.names if name in selection.names]
        hyper = {**({_DECOUPLED: False} if is_plain else {}), **group.hyper}
        groups.append({**complete_group(hyper, states, group.names), "params": names})
        assumed |= bool(_DECOUPLED in groups[-1].keys() - hyper.keys() and hyper.get("weight_decay"))
    if assumed and index.optimizer is None:  # the script has made the optimizer
        logger.warning(
            "%s: does not record whether its Adam decouples the weight decay, so it is written as decoupled, as AdamW "
            "does it. If it was L2 regularization, set %s=False in the param groups after the load.",
            *(index.state_file, _DECOUPLED),
        )
    return {"state": {selection.names[name]: values_of for name, values_of in states.items()}, "param_groups": groups}


def _convert_scalar(index: AtomicIndex, name: str, value: Any) -> Any:
    """Convert a scalar; torch stores ``step`` as 0-dim float32, DeepSpeed as a number."""
    dtype = index.scalar_dtypes.get(name, "float32" if name == "step" else None)
    return value if dtype is None else torch.tensor(value, dtype=getattr(torch, dtype))


def complete_group(hyper: Mapping[str, Any], states: Mapping[str, Mapping[str, Any]], names: Sequence[str]) -> Any:
    """Add torch's defaults for AdamW's hyper-parameters that DeepSpeed's Adam lacks.

    ``initial_lr`` is always added: a load requires it if one of torch's schedulers was created before. The ``states``
    of all parameters identify Adam-like optimizers.
    """
    kept = {key: value for key, value in hyper.items() if key not in ("params", "param_names")}
    kept |= {"initial_lr": kept["lr"]} if "lr" in kept and "initial_lr" not in kept else {}
    example = next((states[name] for name in names if name in states), {})
    if not {"exp_avg", "exp_avg_sq"} <= set(example):
        return kept
    defaults = torch.optim.AdamW([torch.zeros(1)]).param_groups[0]
    missing = {key: value for key, value in defaults.items() if key not in kept and key != "params"}
    if "max_exp_avg_sq" in example:
        missing = {**missing, "amsgrad": True} if "amsgrad" in missing else missing
    return {**kept, **missing}


def flatten_optimizer(optimizer: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten as with ``StateDictOptions(flatten_optimizer_state_dict=True)``."""
    flat = {
        f"state.{name}.{state}": value
        for name, by_state in optimizer["state"].items()
        for state, value in by_state.items()
    }
    for group in optimizer["param_groups"]:
        for name in group["params"]:
            flat.update({f"param_groups.{name}.{key}": value for key, value in group.items() if key != "params"})
    return flat
