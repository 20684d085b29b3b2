"""Read folders of ``torch.distributed.checkpoint``: their metadata, and the places of all blocks.

``.metadata`` is a pickle, which is read as inert data. A ``.distcp`` file is a concatenation of ``torch.save`` files,
one for each block of a tensor and each other value, with a CRC32 for each block (torch 2.13,
``distributed/checkpoint/{metadata,filesystem}.py``).
"""

from __future__ import annotations

import posixpath
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, NamedTuple

from ...comm import Comm
from ...errors import CheckpointError, UnsupportedError, shorten
from ...io.jsonfile import read_bounded
from ...model import ITEMSIZE
from ...model.flat import Shape
from ...torchsave.objects import Global, PickledObject, TensorRef, describe, is_setting, is_short
from ...torchsave.records import FileRecord
from ...torchsave.torchfile import Header, read_parts
from ...torchsave.unpickle import read_pickle
from ..places import FileTable
from .contents import read_name, read_once, read_shape, read_with
from .names import DCP, holds

_LARGEST = 1 << 30
"""Maximum bytes of a metadata file; a million blocks take a tenth of it."""

UNCHECKED = "its metadata has no checksum: names and places that are damaged in it may go unnoticed"


class BlockPlace(NamedTuple):
    """The place of a block: path of the file in the folder, first byte, number of bytes."""

    file: str
    offset: int
    nbytes: int


@dataclass(slots=True)
class Metadata:
    """Content of the metadata files.

    Attributes:
        tensors: key → dtype, shape, and blocks as (offsets, shape).
        values: keys of other values.
        places: (key, offsets) of a block, or (key, None) of another value → place.
        paths: key → keys of the nested state dict, if stored.
    """

    tensors: dict[str, tuple[str, Shape, list[tuple[Shape, Shape]]]] = field(default_factory=dict)
    values: list[str] = field(default_factory=list)
    places: dict[tuple[str, Shape | None], BlockPlace] = field(default_factory=dict)
    paths: dict[str, tuple[Any, ...]] = field(default_factory=dict)


class BlockEntry(NamedTuple):
    """The content of one of the ``torch.save`` files inside a data file.

    Attributes:
        record: the tensor's bytes; None for another value.
        begin: byte of the record at which the tensor begins.
        dtype, shape: of the tensor.
        value: a plain value, or the number in a tensor of one element.
        fault: why it is not supported; empty if it is.
    """

    record: FileRecord | None = None
    begin: int = 0
    dtype: str = ""
    shape: Shape = ()
    value: Any = None
    fault: str = ""


def read_blocks(where: FileTable, comm: Comm) -> tuple[str, Metadata, dict[tuple[str, Shape | None], BlockEntry]]:
    """Read the metadata files, and the headers of all blocks in the data files; collective.

    Returns:
        Name of the first metadata file, the joined metadata, and the entry of each of their keys.
    """
    heads = sorted(name for name in where.entries if holds(DCP, name, heads=True))
    comm.alike(lambda: _check_heads(where, heads))
    metadata = Metadata()
    for head in heads:
        _join(metadata, read_once(partial(_read_metadata, folder=posixpath.dirname(head)), where, head, comm))
    by_file: dict[str, list[tuple[str, Shape | None]]] = defaultdict(list)
    for key, place in metadata.places.items():
        by_file[place.file].append(key)
    names = sorted(by_file)
    comm.alike(lambda: _check_files(where, names, heads[0]))
    lists = where.share(names, lambda name: _read_entries(where, name, by_file[name], metadata), comm)
    pairs = (zip(by_file[name], entries, strict=True) for name, entries in zip(names, lists, strict=True))
    return heads[0], metadata, {key: entry for file_pairs in pairs for key, entry in file_pairs}


def _check_heads(where: FileTable, heads: Sequence[str]) -> None:
    """Raise CheckpointError if a folder has data without metadata."""
    folders = {
        posixpath.dirname(name) for name in where.entries if not holds(DCP, name, heads=True) and holds(DCP, name)
    }
    for folder in sorted(folders.difference(map(posixpath.dirname, heads))):
        raise CheckpointError(
            "is missing, which is written last: the save was interrupted, or a copy was cut short. Take another "
            "checkpoint.",
            path=where.path(posixpath.join(folder, ".metadata")),
        )


def _check_files(where: FileTable, names: Iterable[str], head: str) -> None:
    """Raise CheckpointError if files are missing."""
    missing = sorted(name for name in names if name not in where.entries)
    if missing:
        raise CheckpointError(
            f"names files that do not exist: {shorten(missing)}. Copy them here, or take another checkpoint.",
            path=where.path(head),
        )


def _read_metadata(path: str, *, folder: str) -> Metadata:
    root = read_pickle(read_bounded(path, _LARGEST), path).root
    if not isinstance(root, PickledObject) or not root.kind.endswith("checkpoint.metadata.Metadata"):
        raise CheckpointError(f"holds {describe(root)}, not the metadata of torch.distributed.checkpoint.", path=path)
    metadata = Metadata()
    for name, item in root.get("state_dict_metadata", {}).items():
        key = read_name(name)
        if item.kind.endswith(".TensorStorageMetadata"):
            fields = _read_fields(item)
            properties = fields["properties"].state
            dtype = properties[0] if isinstance(properties, tuple) else properties["dtype"]
            chunks = map(_read_fields, fields["chunks"])
            blocks = [(read_shape(chunk["offsets"]), read_shape(chunk["sizes"])) for chunk in chunks]
            metadata.tensors[key] = _name_dtype(dtype), read_shape(fields["size"]), blocks
        elif item.kind.endswith(".BytesStorageMetadata"):
            metadata.values.append(key)
        else:
            raise UnsupportedError(f"{key} is stored as {describe(item)}, which is not read here.", path=path)
    for index, info in (root.get("storage_data") or {}).items():
        named = _read_fields(index)
        begin = named.get("offset")
        block = read_name(named["fqn"]), None if begin is None else read_shape(begin)
        metadata.places[block] = _read_place(_read_fields(info), path, folder)
    paths = root.get("planner_data") or {}
    metadata.paths = {
        read_name(name): tuple(key if is_short(key) else read_name(key) for key in keys)
        for name, keys in paths.items()
        if isinstance(keys, tuple)
    }
    return metadata


def _read_fields(value: Any) -> dict[str, Any]:
    """Return the attributes of an object."""
    if not isinstance(value, PickledObject) or not isinstance(fields := value.state, dict):
        raise ValueError(f"{describe(value)} for an object with attributes")
    return fields


@lru_cache
def _join_path(folder: str, name: str) -> str:
    """Join and normalise a path; cached, since a few files occur thousands of times."""
    return posixpath.normpath(posixpath.join(folder, name))


def _read_place(info: Mapping[str, Any], path: str, folder: str) -> BlockPlace:
    if info.get("transform_descriptors"):
        raise UnsupportedError(
            "its blocks were transformed when they were written (compressed or encrypted), which is not read here. "
            "Save without transforms.",
            path=path,
        )
    file = _join_path(folder, read_name(info["relative_path"]))
    if posixpath.isabs(file) or file.split("/")[0] == "..":
        raise CheckpointError(f"names {file!r}, which lies outside of the folder; it is made to harm.", path=path)
    offset, nbytes = info["offset"], info["length"]
    if not (is_short(offset) and is_short(nbytes) and offset >= 0 < nbytes):
        raise CheckpointError(f"declares {nbytes} bytes at byte {offset}; it is damaged.", path=path)
    return BlockPlace(file, offset, nbytes)


def _name_dtype(value: Any) -> str:
    name = value.name if isinstance(value, Global) else ""
    if name not in ITEMSIZE:
        raise ValueError(f"{describe(value)} for an element type")
    return name


def _join(metadata: Metadata, more: Metadata) -> None:
    """Merge the metadata of another rank or folder into ``metadata``."""
    for key, (dtype, shape, blocks) in more.tensors.items():
        known = metadata.tensors.setdefault(key, (dtype, shape, []))
        if known[:2] != (dtype, shape):
            raise CheckpointError(
                f"its files declare {key} as {known[0]} of shape {known[1]} and as {dtype} of shape {shape}; they "
                "belong to several saves."
            )
        known[2][:] = dict.fromkeys([*known[2], *blocks])
    for part in more.places:
        folders = [posixpath.dirname(source.places[part].file) for source in (metadata, more) if part in source.places]
        if len({*folders}) > 1:  # several ranks of one save may write equal data
            raise CheckpointError(
                f"{' and '.join(source or 'the folder' for source in folders)} both hold {part[0]}: they are several "
                "models or saves. Put a model and its optimizer into a separate folder."
            )
    metadata.values[:] = dict.fromkeys([*metadata.values, *more.values])
    metadata.places |= more.places
    metadata.paths |= more.paths


def _read_entries(
    where: FileTable, name: str, keys: list[tuple[str, Shape | None]], metadata: Metadata
) -> list[BlockEntry]:
    """Read the entries of some keys from a data file."""
    places = [metadata.places[key][1:] for key in keys]
    return read_with(lambda path: [*map(_read_entry, read_parts(path, places))], where, name)


def _read_entry(part: Header) -> BlockEntry:
    tree = part.tree
    if not isinstance(tree, TensorRef):
        return BlockEntry(value=tree) if _is_plain(tree) else BlockEntry(fault=f"holds {describe(tree)}")
    value = tree.item() if tree.data is not None else None
    if tree.dtype not in ITEMSIZE:
        return BlockEntry(fault=f"element type {tree.dtype}")
    if not tree.is_contiguous():
        return BlockEntry(fault=f"is not contiguous (strides {tree.stride})", dtype=tree.dtype, shape=tree.shape)
    record = part.storages.get(tree.storage.key)
    if record is None:
        return BlockEntry(FileRecord("", 0, 0, None), 0, tree.dtype, tree.shape, value)
    return BlockEntry(record, tree.offset * ITEMSIZE[tree.dtype], tree.dtype, tree.shape, value)


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(not isinstance(part, (list, tuple)) and _is_plain(part) for part in value)
    return value is None or isinstance(value, (str, float)) or is_setting(value)
