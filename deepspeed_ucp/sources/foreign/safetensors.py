"""Hugging Face's folders: weights as safetensors, whole or sharded with an index."""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from itertools import pairwise
from typing import Any

from ...atoms import ITEMSIZE, count
from ...comm import Comm
from ...errors import CheckpointError, UnsupportedError, shorten
from ...io.opened import measure, read_at
from ...io.store import read_small
from ...torchsave.records import FileRecord, open_file
from ..findings import WARNING, Finding
from ..reading import explain_damage
from ..table import FileTable
from .contents import Chunk, Contents, StoredTensor
from .names import SAFETENSORS

DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "BF16": "bfloat16",
    "F16": "float16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "C64": "complex64",
}
_LONGEST_HEADER = 100_000_000
"""Bytes, as the library has it."""

_END, _INDEX = ".safetensors", ".safetensors.index.json"


def read_contents(where: FileTable, comm: Comm) -> tuple[Contents, list[Finding]]:
    """Read the headers of the files; collective.

    Raises:
        CheckpointError: a file is damaged or missing, or two hold one tensor.
        UnsupportedError: a dtype that is not known, or several models in one folder.
    """
    indexes = sorted(name for name in where.entries if name.endswith(_INDEX))
    files = sorted(name for name in where.entries if name.endswith(_END))
    weight_map: dict[str, str] | None = None
    if len(indexes) == 1:
        weight_map = where.once(indexes[0], lambda: _read_weight_map(where, indexes[0]), comm)
        files = sorted(set(weight_map.values()))
    comm.alike(lambda: _check(where, files, indexes))
    found = where.share(files, lambda name: read_header(where, name), comm)
    head = indexes[0] if weight_map is not None else files[0]
    weights: dict[str, StoredTensor] = {}

    def join() -> None:
        for file, tensors in zip(files, found, strict=True):
            for name, tensor in tensors.items():
                if weight_map is not None and weight_map.get(name) != file:
                    continue  # as the libraries do, which look up each name in the index
                if name in weights:
                    raise CheckpointError(f"{name} is in {file} and in another file.", path=where.folder)
                weights[name] = tensor
        missing = [name for name in weight_map or () if name not in weights]
        if missing:
            raise CheckpointError(
                f"tells of {shorten(missing)}, which the named files do not hold. The folder mixes files of "
                "several saves, or a copy was cut short.",
                path=where.path(head),
            )

    comm.alike(join)
    return Contents(SAFETENSORS, head, weights), [tell_unchecked(where, head)]


def tell_unchecked(where: FileTable, name: str) -> Finding:
    """That there is nothing to hold bytes against."""
    text = f"{where.path(name)}: safetensors have no checksums; what is damaged in a tensor is not noticed."
    return Finding("checksums", name, text, WARNING)


def _check(where: FileTable, files: Collection[str], indexes: Collection[str]) -> None:
    missing = [name for name in files if name not in where.entries]
    if missing:
        raise CheckpointError(f"{shorten(missing)} missing, which the index names. Copy it here.", path=where.folder)
    numbered = [name for name in files if "-of-" in name]
    if len(indexes) > 1 or (not indexes and len(files) > 1 and len(numbered) < len(files)):
        raise UnsupportedError(
            f"holds several models ({shorten(indexes or files)}). Put the wanted one into a folder of its own.",
            path=where.folder,
        )


def _read_weight_map(where: FileTable, name: str) -> dict[str, str]:
    def read(folder: str) -> dict[str, str]:
        path = os.path.join(folder, name)
        with explain_damage(path):
            held = json.loads(read_small(path, _LONGEST_HEADER))["weight_map"]
            found = {str(key): str(file) for key, file in held.items()}
            if any("/" in file or not file.endswith(_END) for file in found.values()):
                raise CheckpointError("names files outside of its folder, or of another kind.", path=path)
            return found

    return where.read(name, read)


def read_header(where: FileTable, name: str) -> dict[str, StoredTensor]:
    """The tensors of a file.

    Raises:
        CheckpointError: it is damaged, or no such file.
        UnsupportedError: an element type that is not known.
    """

    def read(folder: str) -> dict[str, StoredTensor]:
        path = os.path.join(folder, name)
        with explain_damage(path), open_file(path) as stream:
            size = measure(stream)
            length = int.from_bytes(read_at(stream, 8, 0), "little")
            if not 2 <= length <= min(size - 8, _LONGEST_HEADER):
                raise CheckpointError(
                    f"tells of a header of {length} bytes in {size}; it is truncated, or no safetensors file.",
                    path=path,
                )
            header = json.loads(read_at(stream, length, 8))
            return _take_apart(header, name, path, 8 + length, size)

    return where.read(name, read)


def _take_apart(header: dict[str, Any], name: str, path: str, begin: int, size: int) -> dict[str, StoredTensor]:
    found, ends = {}, []
    for key, told in header.items():
        if key == "__metadata__":
            continue
        dtype, shape = DTYPES.get(told["dtype"]), tuple(told["shape"])
        low, high = told["data_offsets"]
        if dtype is None:
            raise UnsupportedError(f"{key} has elements of type {told['dtype']}, which is not read here.", path=path)
        if not all(type(each) is int and each >= 0 for each in (*shape, low, high)) or not low <= high <= size - begin:
            raise CheckpointError(
                f"{key} is to lie at {low} to {high} of {size - begin} bytes; it is truncated.", path=path
            )
        if high - low != count(shape) * ITEMSIZE[dtype]:
            raise CheckpointError(
                f"{key} has {high - low} bytes for shape {shape} of {dtype}; it is damaged.", path=path
            )
        ends.append((low, high, key))
        record = FileRecord(key, begin + low, high - low, None)
        found[key] = StoredTensor(dtype, shape, (Chunk((0,) * len(shape), shape, name, record),))
    ends.sort()
    for (_, end, one), (start, _, other) in pairwise(ends):
        if start < end:
            raise CheckpointError(f"{one} and {other} overlap; its header is damaged.", path=path)
    return found
