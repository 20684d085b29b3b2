"""Checkpoints of other libraries, written in one process: each format of a model and its state."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from tests.synth import Model, Param, State

Writer = Callable[[Path, Model, State], object]
"""Writes a format into an existing folder."""


@dataclass(frozen=True)
class Format:
    """A format of another library.

    Attributes:
        alone: weights without optimizer states.
        unchecked: no checksums of tensors.
        model: the only model that the format can hold.
    """

    name: str
    write: Writer
    alone: bool = False
    unchecked: bool = False
    model: Model | None = None


# -- contents ---------------------------------------------------------------------------------------------------------


def list_weights(model: Model, state: State) -> dict[str, torch.Tensor]:
    """Return a module's state dict: parameters, tied ones under each of their names, and buffers."""
    held = {param.name: state.atoms[param.alias_of or param.name]["fp32"] for param in model.params}
    return {**held, **model.buffers}


def make_tree(model: Model, state: State, *, flat: bool = False) -> dict[str, Any]:
    """Return the tree of ``get_state_dict``; `flat`: with a flattened optimizer."""
    trained = {name: held for name, held in state.atoms.items() if len(held) > 1}
    states = {
        name: {**{key: value for key, value in held.items() if key != "fp32"}, **state.scalars[name]}
        for name, held in trained.items()
    }
    groups = [
        {**hyper, "params": [param.name for param in group if param.name in trained]}
        for group, hyper in zip(model.groups, state.groups, strict=True)
    ]
    optim: dict[str, Any] = {"state": states, "param_groups": groups}
    if flat:
        optim = {f"state.{name}.{key}": value for name, held in states.items() for key, value in held.items()}
        for group in groups:
            hyper = {key: value for key, value in group.items() if key != "params"}
            optim |= {f"param_groups.{name}.{key}": each for name in group["params"] for key, each in hyper.items()}
    return {"model": list_weights(model, state), "optim": optim}


def write_dcp(folder: Path, tree: Any, cut: Callable[[torch.Tensor], Sequence[int]]) -> None:
    """Write files of torch.distributed.checkpoint like ranks with cut tensors.

    Args:
        cut: number of parts of a tensor by dimension; part n of the tensor is in the file of rank n.
    """
    flat, paths = flatten_state_dict(tree)
    metadata, files = Metadata({}, paths, {}), dict[str, io.BytesIO]()

    def put(key: str, rank: int, value: Any, begins: tuple[int, ...] | None) -> None:
        name = f"__{rank}_0.distcp"
        file = files.setdefault(name, io.BytesIO())
        begin = file.tell()
        torch.save(value, file)
        index = MetadataIndex(key, None if begins is None else torch.Size(begins))
        metadata.storage_data[index] = _StorageInfo(name, begin, file.tell() - begin)

    for key, value in flat.items():
        if not isinstance(value, torch.Tensor):
            metadata.state_dict_metadata[key] = BytesStorageMetadata()
            put(key, 0, value, None)
            continue
        blocks = []
        sizes = [
            [len(part) for part in torch.arange(size).tensor_split(n)]
            for size, n in zip(value.shape, cut(value), strict=True)
        ]
        spans = [[(sum(widths[:at]), width) for at, width in enumerate(widths) if width] for widths in sizes]
        for rank, box in enumerate(product(*spans)):
            begins, shape = tuple(at for at, _ in box), tuple(width for _, width in box)
            block = value[tuple(slice(at, at + width) for at, width in box)].clone()
            put(key, rank, block, begins)
            blocks.append(ChunkStorageMetadata(torch.Size(begins), torch.Size(shape)))
        properties = TensorProperties(dtype=value.dtype)
        metadata.state_dict_metadata[key] = TensorStorageMetadata(properties, value.shape, blocks)
    for name, file in files.items():
        (folder / name).write_bytes(file.getvalue())
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


# -- writers ----------------------------------------------------------------------------------------------------------


def _save(tree: dict[str, Any], folder: Path) -> None:
    dcp.save(tree, checkpoint_id=folder, no_dist=True)


def _accelerate(folder: Path, model: Model, state: State) -> None:
    tree = make_tree(model, state)
    _save({"model": tree["model"]}, folder / "pytorch_model_fsdp_0")
    _save({"optimizer": tree["optim"]}, folder / "optimizer_0")


def _full(folder: Path, model: Model, state: State) -> None:
    """Write like Accelerate under FSDP with FULL_STATE_DICT."""
    tree = make_tree(model, state)
    torch.save(tree["model"], folder / "pytorch_model_fsdp.bin")
    torch.save(tree["optim"], folder / "optimizer.bin")


def _cut(*parts: int) -> Writer:
    """Return a writer of tensors that are cut into so many parts by dimension."""
    return lambda folder, model, state: write_dcp(folder, make_tree(model, state), lambda tensor: parts[: tensor.dim()])


def _untie(model: Model, state: State) -> dict[str, torch.Tensor]:
    tied = {param.name for param in model.params if param.alias_of}
    return {name: tensor for name, tensor in list_weights(model, state).items() if name not in tied}


def _sharded(folder: Path, model: Model, state: State) -> None:
    from huggingface_hub import save_torch_state_dict

    save_torch_state_dict(_untie(model, state), folder, max_shard_size=1000)


def _peft(folder: Path, model: Model, state: State) -> None:
    weights = list_weights(model, state)
    for part, short in ((".default", ""), ("vector.weight", "vector"), (".modules_to_save", "")):
        weights = {name.replace(part, short): tensor for name, tensor in weights.items()}
    save_file(weights, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')


ADAPTER = Model(
    (
        Param("m.q.lora_A.default.weight", (4, 17)),
        Param("m.q.lora_B.default.weight", (12, 4)),
        Param("m.q.lora_magnitude_vector.default.weight", (12,)),
        Param("m.e.lora_embedding_A.default", (3, 5)),
        Param("head.modules_to_save.default.weight", (6, 7)),
    )
)
"""The part of a live model that PEFT saves."""

FORMATS = [
    Format("dcp-nested", lambda folder, *args: _save(make_tree(*args), folder)),
    Format("dcp-flattened", lambda folder, *args: _save(make_tree(*args, flat=True), folder)),
    Format("dcp-accelerate", _accelerate),
    Format("dcp-rows", _cut(3, 1, 1)),
    Format("dcp-tiles", _cut(2, 3, 2)),
    Format("accelerate-full", _full),
    Format(
        "safetensors",
        lambda folder, *args: save_file(_untie(*args), folder / "model.safetensors"),
        alone=True,
        unchecked=True,
    ),
    Format("safetensors-sharded", _sharded, alone=True, unchecked=True),
    Format("bin", lambda folder, *args: torch.save(list_weights(*args), folder / "pytorch_model.bin"), alone=True),
    Format(
        "legacy-pt",
        lambda folder, *args: torch.save(
            list_weights(*args), folder / "model.pt", _use_new_zipfile_serialization=False
        ),
        alone=True,
        unchecked=True,
    ),
    Format("peft", _peft, alone=True, unchecked=True, model=ADAPTER),
]
