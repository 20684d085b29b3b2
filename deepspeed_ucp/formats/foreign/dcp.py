"""Checkpoints of ``torch.distributed.checkpoint``.

FSDP, Accelerate, Lightning and torchtitan write them. ``.metadata`` is a pickle, which is read as inert data. A
``.distcp`` file is a concatenation of ``torch.save`` files, one for each block of a tensor and each other value, with a
CRC32 for each block (torch 2.13, ``distributed/checkpoint/{metadata,filesystem}.py``).

Keys of the nested state dict are joined by dots. Model and optimizer are separated by the form that
``torch.distributed.checkpoint.state_dict`` gives them.
"""

from __future__ import annotations

import posixpath
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import islice
from typing import Any, NamedTuple

from ...comm import Comm
from ...errors import CheckpointError, UnsupportedError, shorten
from ...io.jsonfile import read_bounded
from ...model.flat import Shape
from ...model.storage import ITEMSIZE
from ...torchsave.objects import Global, PickledObject, TensorRef, describe, is_int64, is_setting_int
from ...torchsave.torchfile import Header, read_parts
from ...torchsave.unpickle import read_pickle
from ..deepspeed.gather import find_step_mismatch
from ..deepspeed.headers import Piece
from ..deepspeed.reading import locate
from ..findings import Finding, explain_form
from ..locations import FileTable
from .contents import (
    NEITHER,
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
from .names import DCP, REFUSAL, holds

_LARGEST = 1 << 30  # maximum bytes of a metadata file; a million blocks take a tenth of it

_UNCHECKED = "its metadata has no checksum: names and places that are damaged in it may go unnoticed"

_STATE, _GROUPS, _MEMBERS = "state.", "param_groups.", "params"
_IN_GROUPS = re.compile(r"(?:(?<=\.)|^)param_groups\.")
_IN_OPTIMIZER = re.compile(r"(?:(?<=\.)|^)(?:state|param_groups)\.")
_MODEL = re.compile(r"(?:^|\.)model\.$")
_DOT, _DEEPEST = re.compile(r"\."), 64
"""Separator of a key, and the maximum number of words in the prefix of the model's keys."""

_OTHER_PREFIXES = ("dataloader.", "lr_scheduler.", "optimizer.", "train_state.")
"""Prefixes of other keys if the model's keys have no common prefix (torchtitan)."""

_STEP = "train_state.step"  # key of torchtitan's step counter

_UNNAMED = (
    "its optimizer states have numbers, not names, so their parameters are unknown. Save with "
    "torch.distributed.checkpoint.state_dict.get_state_dict, or load only the weights (load_optimizer_states=False)"
)

_MEGATRON = "param_to_group_meta."
_BY_MEGATRON = (
    "its optimizer states are those of Megatron-FSDP (fsdp_dtensor), which are not read. Load only the weights "
    "(load_optimizer_states=False)"
)


def read_contents(where: FileTable, comm: Comm) -> tuple[Contents, list[Finding]]:
    """Read metadata files and the headers of all blocks in data files (collective)."""
    head, metadata, entries = _read_blocks(where, comm)

    def interpret() -> tuple[Contents, list[Finding]]:
        with explain_form(where.path(head)):
            return _Interpreter(where, head, metadata, entries).make()

    return comm.run_replicated(interpret)


class _Interpreter:
    """Separate model and optimizer by their keys; assemble tensors from their blocks."""

    def __init__(self, where: FileTable, head: str, metadata: Metadata, entries: Mapping[Key, BlockEntry]) -> None:
        self.where, self.head, self.metadata, self.entries = where, head, metadata, entries
        keys = [*metadata.tensors, *metadata.values]
        roots = {key[: at.start()] for key in keys for at in islice(_IN_GROUPS.finditer(key), _DEEPEST)}
        matches = ((key, at) for key in keys for at in reversed([*islice(_IN_OPTIMIZER.finditer(key), _DEEPEST)]))
        begins = ((key, key[: at.start()]) for key, at in matches)
        self.roots = {key: begin for key, begin in begins if begin in roots}  # the shortest prefix of each
        self.names: dict[str, tuple[str, str]] = {}
        self.values: dict[str, tuple[str, str]] = {}
        for named, listed in ((self.names, metadata.tensors), (self.values, metadata.values)):
            for key in listed:
                if (root := self.roots.get(key)) is not None and key[len(root) :].startswith(_STATE):
                    named[key] = self._split_key(key, root)

    def make(self) -> tuple[Contents, list[Finding]]:
        """Return the contents, and warnings of ignored contents."""
        if any("/shard_" in key for key in self.metadata.values):
            raise UnsupportedError(REFUSAL, path=self.where.folder)
        prefix = self._find_model()
        keys = [key for key in self.metadata.tensors if key not in self.roots and key.startswith(prefix)]
        weights = {key[len(prefix) :]: key for key in keys if prefix or not key.startswith(_OTHER_PREFIXES)}
        if not weights:
            text = f"holds no model's tensors by name, only {shorten(self.metadata.tensors)}."
            raise UnsupportedError(text, path=self.where.path(self.head))
        groups = list(self._list_groups())
        owners = {name for name, _ in self.names.values()}.union(*(members for members, _ in groups))
        unnamed = owners - weights.keys()
        numbered = bool(unnamed) and all(name.isdecimal() for name in unnamed)
        if numbered:
            self.names.clear()
            self.values.clear()
            groups.clear()
        counted = Counter([*self.names.values(), *self.values.values()])
        if twice := {name for (name, _), number in counted.items() if number > 1}:
            text = f"several optimizers in it hold states of {shorten(sorted(twice))}. Save one of them alone."
            raise UnsupportedError(text, path=self.where.path(self.head))
        states, scalars, dtypes, rest = self._read_states(weights)
        steps = [values["step"] for values in scalars.values() if "step" in values]
        steps += [hyper["step"] for _, hyper in groups if "step" in hyper]
        by_megatron = any(_MEGATRON in key for key in (*self.metadata.tensors, *self.metadata.values))
        reason = (
            _UNNAMED if numbered else _BY_MEGATRON if by_megatron else ODD_STATES.format(shorten(rest)) if rest else ""
        )
        contents = Contents(
            DCP,
            self.head,
            {name: self.make_tensor(key) for name, key in weights.items()},
            states,
            scalars,
            groups,
            counters=derive_counters(steps),
            stateless=f"{self.where.path(self.head)}: {reason}." if reason else "",
            scalar_dtypes=dtypes,
            unchecked=_UNCHECKED,
        )
        others = [*self.metadata.tensors, *self.metadata.values]
        taken = {*weights.values(), *self.names, *self.roots}
        ignored = dict.fromkeys(".".join(key.split(".")[:2]) for key in others if key not in taken)
        findings = list_ignored(ignored, NEITHER, self.where.path(self.head), self.head)
        run = contents.counters.get("global_steps")
        for key in (key for key, (_, shape, _) in self.metadata.tensors.items() if key.endswith(_STEP) and not shape):
            findings += find_step_mismatch(self.where.path(self.head), run, self.find_value(key))
        return contents, findings

    def _read_states(
        self, weights: Mapping[str, str]
    ) -> tuple[dict[str, dict[str, StoredTensor]], dict[str, dict[str, Any]], dict[str, str], list[str]]:
        """Return the optimizer's states, numbers, their dtypes, and keys of other values.

        Args:
            weights: name → key of the model's tensors.
        """
        states: dict[str, dict[str, StoredTensor]] = defaultdict(dict)
        scalars: dict[str, dict[str, Any]] = defaultdict(dict)
        dtypes, rest = dict[str, str](), list[str]()
        for key, (name, state) in self.names.items():
            dtype, shape, _ = self.metadata.tensors[key]
            if is_number(state, shape, self.metadata.tensors[weights[name]][1] if name in weights else None):
                scalars[name][state], dtypes[state] = self.find_value(key), dtype
            else:
                states[name][state] = self.make_tensor(key)
        for key, (name, state) in self.values.items():
            value: Any = key
            with suppress(UnsupportedError):
                value = self.find_value(key)
            if isinstance(value, (int, float)):
                scalars[name][state] = value
            elif value is not None:
                rest.append(key)
        return states, scalars, dtypes, rest

    def _split_key(self, key: str, root: str) -> tuple[str, str]:
        """Return the parameter and the state of an optimizer's key."""
        path = self.metadata.paths.get(key, ())
        if len(path) > 2 and path[-3] == _STATE[:-1]:
            return str(path[-2]), str(path[-1])
        name, _, state = key[len(root) + len(_STATE) :].rpartition(".")
        return name, state

    def _find_model(self) -> str:
        """Return the prefix of the model's keys."""
        keys = [key for key in self.metadata.tensors if key not in self.roots]
        named = {name for name, _ in self.names.values()}
        begins = ((key, at) for key in keys for at in [0, *(dot.end() for dot in islice(_DOT.finditer(key), _DEEPEST))])
        votes = Counter(key[:at] for key, at in begins if key[at:] in named)
        if fit := [prefix for prefix, number in votes.items() if number * 2 > len(named)]:
            most = [prefix for prefix in fit if votes[prefix] == max(votes.values())]
            picked = [prefix for prefix in most if _MODEL.search(prefix)] if most[1:] else most
            if len(picked) != 1:
                raise UnsupportedError(
                    f"holds several models under the names that its optimizer has: {shorten(sorted(most))}. Save one "
                    "of them without the others.",
                    path=self.where.path(self.head),
                )
            return picked[0]
        nested = {key: str(path[0]) for key in keys if len(path := self.metadata.paths.get(key, ())) > 1}
        firsts = {*nested.values()}
        if len(nested) == len(keys) and len(firsts) == 1:
            return f"{firsts.pop()}."
        return "model." if any(key.startswith("model.") for key in nested) else ""

    def _list_groups(self) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
        """Yield param groups as saved, or join parameters with equal hyper-parameters."""
        optimizers = defaultdict[str, dict[str, dict[str, Any]]](lambda: defaultdict(dict))
        for key in [*self.metadata.values, *self.metadata.tensors]:
            root = self.roots.get(key)
            if root is not None and key.startswith(_GROUPS, len(root)):
                owner, _, name = key[len(root) + len(_GROUPS) :].rpartition(".")
                optimizers[root][owner][name] = self.find_value(key)
        for _, groups in sorted(optimizers.items()):
            if all(isinstance(hyper.get(_MEMBERS), (list, tuple)) for hyper in groups.values()):
                for number in sorted(groups, key=int):
                    hyper = groups[number]
                    members = hyper.pop(_MEMBERS)
                    yield tuple(map(str, members)), hyper
                continue
            alike: dict[str, list[str]] = defaultdict(list)
            for owner, hyper in groups.items():
                alike[repr(sorted(hyper.items()))].append(owner)
            for owners in alike.values():
                yield tuple(owners), groups[owners[0]]

    def find_value(self, key: str) -> Any:
        shape: Shape | None = () if key in self.metadata.tensors else None
        entry = self.entries.get((key, shape)) or self.entries.get((key, None))
        if entry is None:
            raise CheckpointError(f"lists {key} without its place.", path=self.where.path(self.head))
        if entry.fault:
            text = f"{key} {entry.fault}, where a plain value is wanted."
            raise UnsupportedError(text, path=self.where.path(entry.file))
        if entry.piece and not isinstance(entry.value, (int, float)):
            kind = f"a tensor of shape {entry.piece.shape} of {entry.piece.dtype}"
            raise UnsupportedError(f"{key} is {kind}, where a number is wanted.", path=self.where.path(entry.file))
        return entry.value

    def make_tensor(self, key: str) -> StoredTensor:
        dtype, shape, blocks = self.metadata.tensors[key]
        chunks = []
        for offsets, size in blocks:
            entry = self.entries.get((key, offsets))
            if entry is None:
                text = f"lists the block of {key} at {offsets} without its place; it is damaged."
                raise CheckpointError(text, path=self.where.path(self.head))
            if entry.fault:
                raise UnsupportedError(f"{key} {entry.fault}; save it contiguous.", path=self.where.path(entry.file))
            piece = entry.piece
            if piece is None or (piece.dtype, piece.shape) != (dtype, size):
                actual = f"{piece.dtype} of shape {piece.shape}" if piece else "no tensor"
                raise CheckpointError(
                    f"holds {actual} for the block of {key} at {offsets}, "
                    f"of {dtype} and shape {size} by the metadata. The folder mixes files of several saves.",
                    path=self.where.path(entry.file),
                )
            chunks.append(TensorBlock(offsets, entry.file, piece))
        return StoredTensor(dtype, shape, tuple(chunks))


# -- files and their blocks --------------------------------------------------------------------------------------------


Key = tuple[str, Shape | None]
"""Key and offsets of a tensor's block, or key of another value and None."""


@dataclass(slots=True)
class Metadata:
    """Content of the metadata files.

    Attributes:
        tensors: key → dtype, shape, and blocks as (offsets, shape).
        values: keys of other values.
        places: file, first byte and number of bytes of each block or other value.
        paths: key → keys of the nested state dict, if stored.
    """

    tensors: dict[str, tuple[str, Shape, list[tuple[Shape, Shape]]]] = field(default_factory=dict)
    values: list[str] = field(default_factory=list)
    places: dict[Key, tuple[str, int, int]] = field(default_factory=dict)
    paths: dict[str, tuple[Any, ...]] = field(default_factory=dict)


class BlockEntry(NamedTuple):
    """The content of one of the ``torch.save`` files inside a data file.

    Attributes:
        file: path of the data file in the folder.
        piece: the tensor; None for another value.
        value: a plain value, or the number in a tensor of one element.
        fault: why it is not supported; empty if it is.
    """

    file: str
    piece: Piece | None = None
    value: Any = None
    fault: str = ""


def _read_blocks(where: FileTable, comm: Comm) -> tuple[str, Metadata, dict[Key, BlockEntry]]:
    """Return the first metadata file, joined metadata, and block entries (collective)."""
    heads = sorted(name for name in where.entries if holds(DCP, name, heads=True))
    comm.run_replicated(lambda: _check_heads(where, heads))
    metadata = Metadata()
    for head in heads:
        _merge_metadata(metadata, read_once(partial(_read_metadata, folder=posixpath.dirname(head)), where, head, comm))
    by_file: dict[str, list[Key]] = defaultdict(list)
    for key, (file, *_) in metadata.places.items():
        by_file[file].append(key)
    names = sorted(by_file)
    missing = [name for name in names if name not in where.entries]
    if missing:
        text = f"names files that do not exist: {shorten(missing)}. Copy them here, or take another checkpoint."
        raise comm.common(CheckpointError(text, path=where.path(heads[0])))

    def read(name: str) -> list[BlockEntry]:
        places = [metadata.places[key][1:] for key in by_file[name]]
        return read_with(lambda path: [_read_entry(name, part) for part in read_parts(path, places)], where, name)

    lists = where.share(names, read, comm)
    pairs = (zip(by_file[name], entries, strict=True) for name, entries in zip(names, lists, strict=True))
    return heads[0], metadata, {key: entry for file_pairs in pairs for key, entry in file_pairs}


def _check_heads(where: FileTable, heads: Sequence[str]) -> None:
    folders = {
        posixpath.dirname(name) for name in where.entries if not holds(DCP, name, heads=True) and holds(DCP, name)
    }
    for folder in sorted(folders.difference(map(posixpath.dirname, heads))):
        raise CheckpointError(
            "is missing, which is written last: the save was interrupted, or a copy was cut short. Take another "
            "checkpoint.",
            path=where.path(posixpath.join(folder, ".metadata")),
        )


def _read_metadata(path: str, *, folder: str) -> Metadata:
    root = read_pickle(read_bounded(path, _LARGEST), path).root
    if not isinstance(root, PickledObject) or not root.kind.endswith("checkpoint.metadata.Metadata"):
        raise CheckpointError(f"holds {describe(root)}, not the metadata of torch.distributed.checkpoint.", path=path)
    metadata = Metadata()
    for name, item in root.get("state_dict_metadata", {}).items():
        key = read_name(name)
        if item.kind.endswith(".TensorStorageMetadata"):
            fields = _get_attributes(item)
            properties = fields["properties"].state
            dtype = properties[0] if isinstance(properties, tuple) else properties["dtype"]
            chunks = map(_get_attributes, fields["chunks"])
            blocks = [(read_shape(chunk["offsets"]), read_shape(chunk["sizes"])) for chunk in chunks]
            metadata.tensors[key] = _name_dtype(dtype), read_shape(fields["size"]), blocks
        elif item.kind.endswith(".BytesStorageMetadata"):
            metadata.values.append(key)
        else:
            raise UnsupportedError(f"{key} is stored as {describe(item)}, which is not read here.", path=path)
    for index, info in (root.get("storage_data") or {}).items():
        named = _get_attributes(index)
        begin = named.get("offset")
        block = read_name(named["fqn"]), None if begin is None else read_shape(begin)
        metadata.places[block] = _read_place(_get_attributes(info), path, folder)
    paths = root.get("planner_data") or {}
    metadata.paths = {
        read_name(name): tuple(key if is_int64(key) else read_name(key) for key in keys)
        for name, keys in paths.items()
        if isinstance(keys, tuple)
    }
    return metadata


def _get_attributes(value: Any) -> dict[str, Any]:
    if not isinstance(value, PickledObject) or not isinstance(fields := value.state, dict):
        raise ValueError(f"{describe(value)} for an object with attributes")
    return fields


@lru_cache
def _join_path(folder: str, name: str) -> str:
    """Join and normalise a path; cached, since a few files occur thousands of times."""
    return posixpath.normpath(posixpath.join(folder, name))


def _read_place(info: Mapping[str, Any], path: str, folder: str) -> tuple[str, int, int]:
    """Return the file, first byte and number of bytes of a block."""
    if info.get("transform_descriptors"):
        raise UnsupportedError(
            "its blocks were transformed when they were written (compressed or encrypted), which is not read here. "
            "Save without transforms.",
            path=path,
        )
    file = _join_path(folder, read_name(info["relative_path"]))
    if posixpath.isabs(file) or file.split("/")[0] == "..":
        raise CheckpointError(f"names {file!r}, which lies outside of the folder; it is malicious.", path=path)
    offset, nbytes = info["offset"], info["length"]
    if not (is_int64(offset) and is_int64(nbytes) and offset >= 0 < nbytes):
        raise CheckpointError(f"declares {nbytes} bytes at byte {offset}; it is damaged.", path=path)
    return file, offset, nbytes


def _name_dtype(value: Any) -> str:
    name = value.name if isinstance(value, Global) else ""
    if name not in ITEMSIZE:
        raise ValueError(f"{describe(value)} for an element type")
    return name


def _merge_metadata(metadata: Metadata, more: Metadata) -> None:
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
        folders = [posixpath.dirname(source.places[part][0]) for source in (metadata, more) if part in source.places]
        if len({*folders}) > 1:  # several ranks of one save may write equal data
            raise CheckpointError(
                f"{' and '.join(source or 'the folder' for source in folders)} both hold {part[0]}: they are several "
                "models or saves. Put a model and its optimizer into a separate folder."
            )
    metadata.values[:] = dict.fromkeys([*metadata.values, *more.values])
    metadata.places |= more.places
    metadata.paths |= more.paths


def _read_entry(file: str, part: Header) -> BlockEntry:
    tree = part.tree
    if not isinstance(tree, TensorRef):
        return BlockEntry(file, value=tree) if _is_plain(tree) else BlockEntry(file, fault=f"holds {describe(tree)}")
    piece = locate(tree, part.storages)
    value = tree.item() if tree.data is not None and not piece.fault else None
    return BlockEntry(file, piece, value, piece.fault and f"cannot be cut: {piece.fault}")


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(not isinstance(part, (list, tuple)) and _is_plain(part) for part in value)
    return value is None or isinstance(value, (str, float)) or is_setting_int(value)
