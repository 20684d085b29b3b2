"""Checkpoints of other libraries, written in one process: each format of a model and its state, and what comes back."""

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
"""Writes a format into a folder that is there."""


@dataclass(frozen=True)
class Format:
    """A format of another library.

    Attributes:
        alone: it has weights alone.
        unchecked: it has no checksums of tensors.
        model: the one that it has to be of, if any.
    """

    name: str
    write: Writer
    alone: bool = False
    unchecked: bool = False
    model: Model | None = None


# -- what they hold ---------------------------------------------------------------------------------------------------


def list_weights(model: Model, state: State) -> dict[str, torch.Tensor]:
    """A module's state dict: parameters, tied ones under each of their names, and buffers."""
    held = {param.name: state.atoms[param.alias_of or param.name]["fp32"] for param in model.params}
    return {**held, **model.buffers}


def make_tree(model: Model, state: State, *, flat: bool = False) -> dict[str, Any]:
    """As ``get_state_dict`` has it, ``flat`` with a flattened optimizer."""
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
    """Files of torch.distributed.checkpoint as ranks write them whose tensors are cut.

    Args:
        cut: by dimension into how many parts a tensor is cut; the n-th one of them all is in the n-th rank's file.
    """
    flat, paths = flatten_state_dict(tree)
    told, files = Metadata({}, paths, {}), dict[str, io.BytesIO]()

    def put(key: str, rank: int, value: Any, begins: tuple[int, ...] | None) -> None:
        name = f"__{rank}_0.distcp"
        file = files.setdefault(name, io.BytesIO())
        begin = file.tell()
        torch.save(value, file)
        index = MetadataIndex(key, None if begins is None else torch.Size(begins))
        told.storage_data[index] = _StorageInfo(name, begin, file.tell() - begin)

    for key, value in flat.items():
        if not isinstance(value, torch.Tensor):
            told.state_dict_metadata[key] = BytesStorageMetadata()
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
        told.state_dict_metadata[key] = TensorStorageMetadata(properties, value.shape, blocks)
    for name, file in files.items():
        (folder / name).write_bytes(file.getvalue())
    (folder / ".metadata").write_bytes(pickle.dumps(told))


# -- writers ----------------------------------------------------------------------------------------------------------


def _nested(folder: Path, model: Model, state: State) -> None:
    dcp.save(make_tree(model, state), checkpoint_id=folder, no_dist=True)


def _flattened(folder: Path, model: Model, state: State) -> None:
    dcp.save(make_tree(model, state, flat=True), checkpoint_id=folder, no_dist=True)


def _accelerate(folder: Path, model: Model, state: State) -> None:
    tree = make_tree(model, state)
    dcp.save({"model": tree["model"]}, checkpoint_id=folder / "pytorch_model_fsdp_0", no_dist=True)
    dcp.save({"optimizer": tree["optim"]}, checkpoint_id=folder / "optimizer_0", no_dist=True)


def _rows(folder: Path, model: Model, state: State) -> None:
    write_dcp(folder, make_tree(model, state), lambda tensor: [3, 1, 1][: tensor.dim()])


def _tiles(folder: Path, model: Model, state: State) -> None:
    write_dcp(folder, make_tree(model, state), lambda tensor: [2, 3, 2][: tensor.dim()])


def _untie(model: Model, state: State) -> dict[str, torch.Tensor]:
    tied = {param.name for param in model.params if param.alias_of}
    return {name: tensor for name, tensor in list_weights(model, state).items() if name not in tied}


def _safetensors(folder: Path, model: Model, state: State) -> None:
    save_file(_untie(model, state), folder / "model.safetensors")


def _sharded(folder: Path, model: Model, state: State) -> None:
    from huggingface_hub import save_torch_state_dict

    save_torch_state_dict(_untie(model, state), folder, max_shard_size=1000)


def _bin(folder: Path, model: Model, state: State) -> None:
    torch.save(list_weights(model, state), folder / "pytorch_model.bin")


def _full(folder: Path, model: Model, state: State) -> None:
    """As Accelerate under FSDP with FULL_STATE_DICT."""
    tree = make_tree(model, state)
    torch.save(tree["model"], folder / "pytorch_model_fsdp.bin")
    torch.save(tree["optim"], folder / "optimizer.bin")


def _legacy(folder: Path, model: Model, state: State) -> None:
    torch.save(list_weights(model, state), folder / "model.pt", _use_new_zipfile_serialization=False)


def _peft(folder: Path, model: Model, state: State) -> None:
    held = {name.replace(".default", ""): tensor for name, tensor in list_weights(model, state).items()}
    held = {
        name.replace("vector.weight", "vector").replace(".modules_to_save", ""): tensor for name, tensor in held.items()
    }
    save_file(held, folder / "adapter_model.safetensors")
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
"""A live model's part that PEFT's files have."""

FORMATS = [
    Format("dcp-nested", _nested),
    Format("dcp-flattened", _flattened),
    Format("dcp-accelerate", _accelerate),
    Format("dcp-rows", _rows),
    Format("dcp-tiles", _tiles),
    Format("accelerate-full", _full),
    Format("safetensors", _safetensors, alone=True, unchecked=True),
    Format("safetensors-sharded", _sharded, alone=True, unchecked=True),
    Format("bin", _bin, alone=True),
    Format("legacy-pt", _legacy, alone=True, unchecked=True),
    Format("peft", _peft, alone=True, unchecked=True, model=ADAPTER),
]
