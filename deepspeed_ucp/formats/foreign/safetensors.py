"""Weights of Hugging Face as safetensors, whole or sharded with an index."""

from __future__ import annotations

from typing import Any

from ...comm import Comm
from ...errors import CheckpointError, UnsupportedError
from ...io.jsonfile import parse_json
from ...model import ITEMSIZE, count
from ...torchsave.records import FileRecord, open_file
from ..findings import Finding
from ..places import FileTable
from .contents import Contents, StoredTensor, TensorBlock, read_shape, read_with
from .names import SAFETENSORS
from .weights import LONGEST, find_shards

DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "C64": "complex64",
    "F64": "float64",
    "I64": "int64",
    "U64": "uint64",
}
"""Element types by the format's names, in its order: tensors of later types come first in a file."""


def read_contents(where: FileTable, comm: Comm) -> tuple[Contents, list[Finding]]:
    """Read the headers of the files; collective."""
    shards = find_shards(where, ".safetensors", comm)
    headers = where.share(shards.files, lambda name: read_header(where, name), comm)
    return Contents(SAFETENSORS, shards.head, comm.alike(lambda: shards.unite(headers, where))), []


def read_header(where: FileTable, name: str) -> dict[str, StoredTensor]:
    """Read the tensors of a file."""

    def parse(path: str) -> dict[str, StoredTensor]:
        with open_file(path) as stream:
            size = stream.size
            length = int.from_bytes(stream.read_at(8, 0), "little")
            if not 2 <= length <= min(size - 8, LONGEST):
                raise CheckpointError(
                    f"declares a header of {length} bytes in a file of {size}; it is truncated, or no safetensors "
                    "file.",
                    path=path,
                )
            header = parse_json(stream.read_at(length, 8), path, strict=True)
            return _parse_header(header, name, path, 8 + length, size)

    return read_with(parse, where, name)


def _parse_header(header: dict[str, Any], name: str, path: str, begin: int, size: int) -> dict[str, StoredTensor]:
    tensors, spans = {}, []
    for key, entry in header.items():
        if key == "__metadata__":
            continue
        dtype, shape = DTYPES.get(entry["dtype"]), read_shape(entry["shape"])
        low, high = entry["data_offsets"]
        if dtype is None:
            raise UnsupportedError(f"{key} has elements of type {entry['dtype']}, which is not read here.", path=path)
        if not type(low) is type(high) is int or not 0 <= low <= high <= size - begin:
            raise CheckpointError(
                f"{key} is to lie at {low} to {high} of {size - begin} bytes; it is truncated.", path=path
            )
        if high - low != count(shape) * ITEMSIZE[dtype]:
            raise CheckpointError(
                f"{key} has {high - low} bytes for shape {shape} of {dtype}; it is damaged.", path=path
            )
        spans.append((low, high, key))
        record = FileRecord(key, begin + low, high - low, None)
        tensors[key] = StoredTensor(dtype, shape, (TensorBlock((0,) * len(shape), shape, name, record),))
    _check_cover(sorted(spans), size - begin, path)
    return tensors


def _check_cover(spans: list[tuple[int, int, str]], size: int, path: str) -> None:
    """Check that tensors fill the file without gaps and overlaps."""
    position, before = 0, "the header"
    for low, high, name in [*spans, (size, size, "the end")]:
        if low < position:
            raise CheckpointError(f"{before} and {name} overlap; its header is damaged.", path=path)
        if low > position:
            raise CheckpointError(
                f"{low - position} bytes between {before} and {name} are no tensor's, and the format has no holes; its "
                "header is damaged, or of another file.",
                path=path,
            )
        position, before = high, name
