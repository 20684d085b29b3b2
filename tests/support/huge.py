"""Sparse checkpoints of any size: DeepSpeed's files and formats with holes instead of the tensors' bytes."""

from __future__ import annotations

import io
import os
import pickle
import struct
import zlib
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch

from tests.synth import Layer, Model, Param, Run, State, Topology, build_local_files, split

ALIGNMENT = 64
SMALL = 64
"""Largest record that is written in full, so 0-dim tensors are readable."""


class _Storage:
    """A storage by its key, as in a persistent id."""

    def __init__(self, key: str, dtype: torch.dtype, numel: int) -> None:
        kind = getattr(torch, torch.storage._dtype_to_storage_type_map()[dtype])
        self.persistent_id = ("storage", kind, key, "cpu", numel)


class _Pickler(pickle.Pickler):
    """Pickles as `torch.save` does, tensors of the meta device included."""

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, protocol=2)
        self.storages: dict[int, _Storage] = {}
        self.records: dict[str, bytes | int] = {}
        self.kept: list[Any] = []

    def persistent_id(self, value: Any) -> Any:
        return value.persistent_id if isinstance(value, _Storage) else None

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return NotImplemented
        arguments = (
            self._store(value),
            value.storage_offset(),
            tuple(value.shape),
            value.stride(),
            False,
            OrderedDict(),
        )
        return torch._utils._rebuild_tensor_v2, arguments

    def _store(self, tensor: torch.Tensor) -> _Storage:
        held = tensor.untyped_storage()
        if held._cdata not in self.storages:
            key = str(len(self.storages))
            self.kept.append(held)  # so that no other storage gets its address
            self.storages[held._cdata] = _Storage(key, tensor.dtype, held.nbytes() // tensor.dtype.itemsize)
            known = tensor.device.type == "cpu"
            self.records[key] = bytes(held.tolist()) if known else held.nbytes()  # type: ignore[arg-type]
        return self.storages[held._cdata]


def save_sparse(content: Any, path: Path) -> None:
    """`torch.save(content, path)`, with a hole for every storage on the meta device."""
    stream = io.BytesIO()
    pickler = _Pickler(stream)
    pickler.dump(content)
    with path.open("wb") as file:
        directory = [
            _add(file, path.stem, "data.pkl", stream.getvalue()),
            _add(file, path.stem, "byteorder", b"little"),
        ]
        directory += [_add(file, path.stem, f"data/{key}", data) for key, data in pickler.records.items()]
        directory.append(_add(file, path.stem, "version", b"3\n"))
        _finish(file, directory)


def _add(file: Any, root: str, name: str, data: bytes | int) -> bytes:
    """Write a record, aligned as torch does. Returns its entry of the directory."""
    size = data if isinstance(data, int) else len(data)
    if isinstance(data, int) and data <= SMALL:
        data = bytes(data)
    crc = 0 if isinstance(data, int) else zlib.crc32(data)
    begin, path = file.tell(), f"{root}/{name}".encode()
    room = -(begin + 30 + len(path) + 4) % ALIGNMENT
    extra = b"FB" + struct.pack("<H", room) + b"Z" * room
    file.write(struct.pack("<IHHHHHIIIHH", 0x04034B50, 0, 0, 0, 0, 0, crc, _cap(size), _cap(size), len(path), 4 + room))
    file.write(path + extra)
    file.seek(size, os.SEEK_CUR) if isinstance(data, int) else file.write(data)
    wide = struct.pack("<HHQQQ", 1, 24, size, size, begin)
    head = struct.pack("<IHHHHHHIIIHHHHHII", 0x02014B50, 0, 45, 0, 0, 0, 0, crc, 2**32 - 1, 2**32 - 1, len(path), 28,
                       0, 0, 0, 0, 2**32 - 1)  # fmt: skip
    return head + path + wide


def _cap(size: int) -> int:
    return min(size, 2**32 - 1)


def _finish(file: Any, directory: list[bytes]) -> None:
    begin, listed = file.tell(), b"".join(directory)
    count = len(directory)
    file.write(listed)
    wide = struct.pack("<IQHHIIQQQQ", 0x06064B50, 44, 45, 45, 0, 0, count, count, len(listed), begin)
    file.write(wide + struct.pack("<IIQI", 0x07064B50, 0, begin + len(listed), 1))
    file.write(struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, count, count, _cap(len(listed)), _cap(begin), 0))


COLUMNS = {"self_attention.query_key_value": 3, "mlp.dense_h_to_4h": 4}
ROWS = {"self_attention.dense": 1, "mlp.dense_4h_to_h": 4}


def make_gpt(layers: int, hidden: int, vocabulary: int) -> Model:
    """Describe Megatron-DeepSpeed's GPT as a pipeline; biases and norms are in a second group."""
    held = [
        Param("tied_modules.embed.word_embeddings.weight", (vocabulary, hidden), tied=True),
        Param("tied_modules.embed.position_embeddings.weight", (2048, hidden)),
    ]
    for layer in range(1, layers + 1):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            held += [Param(f"{layer}.{norm}.{kind}", (hidden,), 1) for kind in ("weight", "bias")]
        for name, times in COLUMNS.items():
            held.append(Param(f"{layer}.{name}.weight", (times * hidden, hidden)))
            held.append(Param(f"{layer}.{name}.bias", (times * hidden,), 1))
        for name, times in ROWS.items():
            held.append(Param(f"{layer}.{name}.weight", (hidden, times * hidden)))
            held.append(Param(f"{layer}.{name}.bias", (hidden,), 1))
    held += [Param(f"{layers + 1}.{kind}", (hidden,), 1) for kind in ("weight", "bias")]
    ends = Layer("embed"), Layer("embed", file=False)
    return Model(tuple(held), {}, (ends[0], *[Layer()] * (layers + 1), ends[1]))


def cut_gpt(name: str, tensor: torch.Tensor, tp: int, rank: int) -> torch.Tensor:
    """Cut as Megatron does (on the meta device: only shapes count)."""
    if "word_embeddings" in name or any(f".{column}." in name for column in COLUMNS):
        return tensor.chunk(tp, 0)[rank]
    if name.endswith("weight") and any(f".{row}." in name for row in ROWS):
        return tensor.chunk(tp, 1)[rank]
    return tensor


def write_gpt(folder: Path, model: Model, topology: Topology) -> Path:
    """Write `folder/global_step1000` and `latest`, as if AdamW had trained it."""
    (hidden,) = next(param.shape for param in model.params if param.name == "1.input_layernorm.weight")
    args = {"hidden_size": hidden, "num_attention_heads": hidden // 160, "make_vocab_size_divisible_by": 128}
    config = {**topology.ds_config(), "train_batch_size": 1536, "train_micro_batch_size_per_gpu": 1}
    client = {"args": args, "checkpoint_version": 3.0, "iteration": 1000}
    run = Run(global_steps=1000, ds_config=config, client_state=client)
    with torch.device("meta"):
        atoms = {p.name: {key: torch.empty(p.shape) for key in ("fp32", "exp_avg", "exp_avg_sq")} for p in model.params}
        scalars = {name: {"step": torch.tensor(1000.0, device="cpu")} for name in atoms}
        local = split(
            model, State(atoms, scalars, ({"lr": 1e-4}, {"lr": 1e-4, "weight_decay": 0.0})), topology, cut_gpt
        )
        tag = folder / "global_step1000"
        tag.mkdir(parents=True)
        for rank in local:
            for name, content in build_local_files({rank: local[rank]}, topology, run).items():
                save_sparse(content, tag / name)
    (folder / "latest").write_text(tag.name)
    return folder
