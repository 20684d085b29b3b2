"""Hugging Face's weights (safetensors, state dicts), and Accelerate's optimizer."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from ...comm import Comm
from ...errors import CheckpointError, UnsupportedError, shorten
from ...io.jsonfile import parse_json, read_json
from ...model.records import Record
from ...model.storage import ITEMSIZE, count
from ...torchsave import torchfile
from ...torchsave.objects import TensorRef, describe, is_int64, to_number
from ...torchsave.records import open_file
from ..deepspeed.headers import Piece
from ..deepspeed.reading import locate, read_hyper
from ..findings import Finding
from ..locations import FileTable
from .contents import (
    ODD_STATES,
    Contents,
    StoredTensor,
    TensorBlock,
    derive_counters,
    is_number,
    list_ignored,
    read_name,
    read_once,
    read_shape,
    read_with,
)
from .names import OPTIMIZER, SAFETENSORS

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

_LONGEST = 100_000_000  # maximum bytes of a header or an index, as in the safetensors library

_INDEX = ".index.json"
_NUMBERED = re.compile(r"(.+-)(\d{1,9})(-of-(\d{1,9})\.[^.]+)")

_SHARD = re.compile(r"shard-\d{1,9}-model-.*")
"""Files of ``torch.distributed.checkpoint.HuggingFaceStorageWriter``: each rank's shards (``_hf_utils.py``)."""

_SHARDING = "DCP_SHARDING_INFO"  # entry of their metadata: name → place of the shard in the tensor, as JSON

_UNNAMED = (
    "its optimizer states have numbers, not names, as without FSDP, so their parameters are unknown. Load only the "
    "weights (load_optimizer_states=False)"
)

_INSIDE = ("state_dict", "model_state_dict", "model", "module")  # keys under which scripts store a state dict

_OUTSIDE = "not in the model's state dict"

NamedTensors = dict[str, StoredTensor]


def read_contents(kind: str, where: FileTable, comm: Comm) -> tuple[Contents, list[Finding]]:
    """Read the headers of the model's files: one, indexed or numbered (collective)."""
    indexes = sorted(name for name in where.entries if name.endswith(_INDEX))
    files = sorted(name for name in where.entries if not name.endswith(_INDEX))
    weight_map: dict[str, str] | None = None
    if len(indexes) == 1:
        ending = ".safetensors" if kind == SAFETENSORS else ".bin"
        weight_map = read_once(lambda path: _read_index(path, ending), where, indexes[0], comm)
        files = sorted(set(weight_map.values()))
    comm.run_replicated(lambda: _check_files(where, files, indexes))
    head = next(iter([*indexes, *files]))
    read = where.share(files, lambda name: read_tensors(where, name), comm)
    headers = {file: tensors for file, (tensors, _) in zip(files, read, strict=True)}
    weights, ties = split_ties(comm.run_replicated(lambda: _merge_files(where, head, headers, weight_map)))
    ignored = (
        list_ignored(others, _OUTSIDE, where.path(file), file) for file, (_, others) in zip(files, read, strict=True)
    )
    return Contents(kind, head, weights, aliases=ties), [*chain.from_iterable(ignored)]


def _read_index(path: str, ending: str) -> dict[str, str]:
    files = {key: str(file) for key, file in read_json(path, most=_LONGEST, strict=True)["weight_map"].items()}
    if any("/" in file or not file.endswith(ending) for file in files.values()):
        raise CheckpointError("names files outside of its folder, or of another kind.", path=path)
    if not files:
        raise CheckpointError("names no files; it is damaged.", path=path)
    return files


def _check_files(where: FileTable, files: Sequence[str], indexes: Sequence[str]) -> None:
    numbers = [match for name in files if (match := _NUMBERED.fullmatch(name))]
    wanted, totals = list(files), defaultdict[str, set[str]](set)
    for first, _, last, _ in map(re.Match.groups, numbers):
        totals[first].add(last)
    is_several = any(len(ends) > 1 for ends in totals.values())
    if not indexes and len(totals) == 1 and not is_several:
        first, number, last, total = numbers[0].groups()
        if int(total) > len(files):
            wanted += [f"{first}{at:0{len(number)}}{last}" for at in range(1, min(int(total), len(files) + 8) + 1)]
    missing = [name for name in wanted if name not in where.entries]
    if missing:
        raise CheckpointError(f"{shorten(missing)} missing, of the model's files. Copy it here.", path=where.folder)
    if len(indexes) > 1 or (not indexes and (is_several or 1 < len(files) > len(numbers))):
        text = f"holds several models ({shorten(indexes or files)}). Move the wanted one into a separate folder."
        raise UnsupportedError(text, path=where.folder)


def _merge_files(
    where: FileTable, head: str, headers: Mapping[str, NamedTensors], weight_map: Mapping[str, str] | None
) -> NamedTensors:
    merged: NamedTensors = {}
    for file, tensors in headers.items():
        for name, tensor in tensors.items():
            if weight_map is not None and weight_map.get(name) != file:
                continue  # Hugging Face's libraries look up each name in the index too
            if name not in merged:
                merged[name] = tensor
            elif (joined := _join_shards(merged[name], tensor)) is not None:
                merged[name] = joined
            else:
                raise CheckpointError(f"{name} is in {file} and in another file.", path=where.folder)
    missing = [name for name in weight_map or () if name not in merged]
    if missing:
        raise CheckpointError(
            f"lists {shorten(missing)}, which the named files do not contain. The folder mixes files of "
            "several saves, or a copy was cut short.",
            path=where.path(head),
        )
    return merged


def _join_shards(one: StoredTensor, other: StoredTensor) -> StoredTensor | None:
    """Join two shards of a tensor (the index checks coverage); None for other tensors."""
    chunks = (*one.chunks, *other.chunks)
    is_cut = all(_SHARD.fullmatch(chunk.file) for chunk in chunks)
    if not is_cut or (one.dtype, len(one.shape)) != (other.dtype, len(other.shape)):
        return None
    return StoredTensor(one.dtype, tuple(map(max, one.shape, other.shape)), chunks)


def split_ties(tensors: NamedTensors) -> tuple[NamedTensors, dict[str, str]]:
    """Return the first tensors with their bytes, and tied name → name with the data."""
    firsts, ties = dict[StoredTensor, str](), dict[str, str]()
    for name, tensor in tensors.items():
        first = firsts.setdefault(tensor, name) if count(tensor.shape) else name
        if first != name:
            ties[name] = first
    return {name: tensor for name, tensor in tensors.items() if name not in ties}, ties


def read_tensors(where: FileTable, name: str) -> tuple[NamedTensors, list[str]]:
    """Read the tensors of a file, and the keys of other contents."""
    is_dict = not name.endswith(".safetensors")
    return read_with(lambda path: (_read_state_dict if is_dict else _read_safetensors)(path, name), where, name)


def _read_safetensors(path: str, name: str) -> tuple[NamedTensors, list[str]]:
    with open_file(path) as stream:
        size = stream.size
        length = int.from_bytes(stream.read_at(8, 0), "little")
        if not 2 <= length <= min(size - 8, _LONGEST):
            text = f"declares a header of {length} bytes in a file of {size}; it is truncated, or no safetensors file."
            raise CheckpointError(text, path=path)
        header = parse_json(stream.read_at(length, 8), path, strict=True)
        return _parse_header(header, name, path, 8 + length, size), []


def _parse_header(header: dict[str, Any], name: str, path: str, begin: int, size: int) -> NamedTensors:
    tensors, spans, sharding = NamedTensors(), [], (header.pop("__metadata__", None) or {}).get(_SHARDING)
    places = parse_json(sharding.encode(), path, strict=True) if sharding else {}
    for key, entry in header.items():
        dtype, shape = DTYPES.get(entry["dtype"]), read_shape(entry["shape"])
        low, high = entry["data_offsets"]
        if dtype is None:
            raise UnsupportedError(f"{key} has elements of type {entry['dtype']}, which is not read here.", path=path)
        if not type(low) is type(high) is int or not 0 <= low <= high <= size - begin:
            raise CheckpointError(
                f"declares {key} at bytes {low} to {high} of {size - begin}; it is truncated.", path=path
            )
        if high - low != count(shape) * ITEMSIZE[dtype]:
            raise CheckpointError(
                f"{key} has {high - low} bytes for shape {shape} of {dtype}; it is damaged.", path=path
            )
        spans.append((low, high, key))
        piece = Piece(Record(begin + low, high - low, None), 0, shape, dtype)
        offsets = read_shape(places[key]["saved_offsets"]) if sharding else (0,) * len(shape)
        whole = tuple(begin + size for begin, size in zip(offsets, shape, strict=True))
        tensors[key] = StoredTensor(dtype, whole, (TensorBlock(offsets, name, piece),))
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


def _read_state_dict(path: str, name: str) -> tuple[NamedTensors, list[str]]:
    file, tensors = torchfile.read_header(path), NamedTensors()
    listed, others = _list_tensors(file.tree, path)
    for key, ref in listed:
        if key in tensors:
            raise CheckpointError(f"holds two tensors under {key}; it is damaged.", path=path)
        tensors[key] = _store_tensor(key, ref, file.storages, name, path)
    return tensors, others


def _store_tensor(key: str, ref: TensorRef, storages: Mapping[str, Record], name: str, path: str) -> StoredTensor:
    """Return a tensor of a ``torch.save`` file as one block."""
    piece = locate(ref, storages)
    if piece.fault:
        raise UnsupportedError(f"{key} ({describe(ref)}): {piece.fault}.", path=path)
    if ref.numel and not piece.record.nbytes:
        raise CheckpointError(f"has no bytes of {key} ({describe(ref)}); it is damaged.", path=path)
    return StoredTensor(ref.dtype, ref.shape, (TensorBlock((0,) * len(ref.shape), name, piece),))


def _list_tensors(tree: Any, path: str) -> tuple[list[tuple[str, TensorRef]], list[str]]:
    """List the tensors of a state dict or its entry, and the keys of other contents."""
    if not isinstance(tree, dict):
        raise UnsupportedError(f"holds {describe(tree)}, not a state dict.", path=path)
    inside = next((key for key in _INSIDE if isinstance(tree.get(key), dict)), None)
    content = tree if inside is None else tree[inside]
    tensors = [(str(key), value) for key, value in content.items() if isinstance(value, TensorRef)]
    others = [key for key, value in content.items() if not isinstance(value, TensorRef)]
    others = [key for key in others if not str(key).endswith("_extra_state")]
    if inside is None and others:
        value, key = describe(tree[others[0]]), describe(others[0])
        raise UnsupportedError(f"holds {value} under {key}: it is no state dict.", path=path)
    others += [] if inside is None else [key for key in tree if key != inside]
    return tensors, list(map(describe, others))


def add_states(contents: Contents, where: FileTable, comm: Comm) -> tuple[Contents, list[Finding]]:
    """Return contents with the optimizer file's states, and warnings (collective)."""

    def parse(path: str) -> tuple[Contents, list[str]]:
        file = torchfile.read_header(path)
        tree = file.tree
        if not (isinstance(tree, dict) and isinstance(tree.get("state"), dict) and "param_groups" in tree):
            raise UnsupportedError(f"holds {describe(tree)}, not an optimizer's state dict.", path=path)
        others = [describe(key) for key in tree if key not in ("state", "param_groups")]
        members = (name for group in tree["param_groups"] for name in group["params"])
        if any(isinstance(name, int) for name in (*tree["state"], *members)):
            return replace(contents, stateless=f"{where.path(OPTIMIZER)}: {_UNNAMED}."), others
        return _parse_optimizer(contents, tree, file, path), others

    added, others = read_once(parse, where, OPTIMIZER, comm)
    return added, list_ignored(others, "neither states nor param groups", where.path(OPTIMIZER), OPTIMIZER)


def _parse_optimizer(contents: Contents, tree: Mapping[str, Any], file: torchfile.TorchFile, path: str) -> Contents:
    states: dict[str, dict[str, StoredTensor]] = defaultdict(dict)
    scalars: dict[str, dict[str, Any]] = defaultdict(dict)
    dtypes, unsupported = dict[str, str](), list[str]()
    for name, values in tree["state"].items():
        weight = contents.weights.get(name)
        for state, value in values.items():
            if isinstance(value, TensorRef) and not is_number(state, value.shape, weight.shape if weight else None):
                states[name][state] = _store_tensor(f"{name}: {state}", value, file.storages, OPTIMIZER, path)
                continue
            if value is None:
                continue
            number = to_number(value)
            if not (isinstance(number, float) or is_int64(number)):
                unsupported.append(f"{name}.{state} ({describe(value)})")
                continue
            scalars[name][state] = number
            dtypes |= {state: value.dtype} if isinstance(value, TensorRef) else {}
    groups = [
        (
            tuple(map(read_name, group["params"])),
            {str(key): read_hyper(value, path) for key, value in group.items() if key != "params"},
        )
        for group in tree["param_groups"]
    ]
    counters = derive_counters(values["step"] for values in scalars.values() if "step" in values)
    stateless = f"{path}: {ODD_STATES.format(shorten(unsupported))}." if unsupported else ""
    return replace(
        contents,
        states=states,
        scalars=scalars,
        groups=groups,
        counters=counters,
        scalar_dtypes=dtypes,
        stateless=stateless,
    )
