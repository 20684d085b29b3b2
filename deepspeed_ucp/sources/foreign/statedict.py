"""A state dict in ``torch.save`` files: ``pytorch_model.bin``, whole or sharded, or what ``zero_to_fp32.py`` writes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

from ...atoms import ITEMSIZE
from ...comm import Comm
from ...errors import CheckpointError, UnsupportedError, shorten
from ...io.memory import pause_collection
from ...io.store import read_small
from ...torchsave import torchfile
from ...torchsave.objects import TensorRef, describe
from ..findings import Finding
from ..reading import explain_damage
from ..table import FileTable
from .contents import Chunk, Contents, StoredTensor
from .names import STATE_DICT

_INDEX = ".bin.index.json"
_LONGEST = 100_000_000
_INSIDE = ("state_dict", "model_state_dict", "model", "module")
"""Keys under which scripts keep a state dict among other things."""


def read_contents(where: FileTable, comm: Comm) -> tuple[Contents, list[Finding]]:
    """Read the headers of the files; collective.

    Raises:
        CheckpointError: a file is damaged or missing.
        UnsupportedError: a file holds something else than a state dict, or there are several models.
    """
    indexes = sorted(name for name in where.entries if name.endswith(_INDEX))
    files = sorted(name for name in where.entries if not name.endswith(_INDEX))
    if indexes:
        files = where.once(indexes[0], lambda: _read_files(where, indexes[0]), comm)

    def check() -> None:
        missing = [name for name in files if name not in where.entries]
        if missing:
            raise CheckpointError(f"{shorten(missing)} missing, which the index names.", path=where.folder)
        if len(indexes) > 1 or (not indexes and len(files) > 1):
            raise UnsupportedError(
                f"holds several models ({shorten(indexes or files)}). Put the wanted one into a folder of its own.",
                path=where.folder,
            )

    comm.alike(check)
    found = where.share(files, lambda name: read_header(where, name), comm)
    weights = {name: tensor for tensors, _ in found for name, tensor in tensors.items()}
    aliases = {alias: name for _, tied in found for alias, name in tied.items()}
    head = indexes[0] if indexes else files[0]
    return Contents(STATE_DICT, head, weights, aliases=aliases), []


def _read_files(where: FileTable, name: str) -> list[str]:
    def read(folder: str) -> list[str]:
        path = os.path.join(folder, name)
        with explain_damage(path):
            files = sorted({str(file) for file in json.loads(read_small(path, _LONGEST))["weight_map"].values()})
            if any("/" in file or not file.endswith(".bin") for file in files):
                raise CheckpointError("names files outside of its folder, or of another kind.", path=path)
            return files

    return where.read(name, read)


def read_header(where: FileTable, name: str) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """A file's tensors, and those names that are views of the same bytes as an earlier one."""

    def read(folder: str) -> tuple[dict[str, StoredTensor], dict[str, str]]:
        path = os.path.join(folder, name)
        with explain_damage(path), pause_collection():
            file = torchfile.read_header(path)
            found: dict[str, StoredTensor] = {}
            aliases, seen = dict[str, str](), dict[tuple[Any, ...], str]()
            for key, ref in _list_tensors(file.tree, path):
                record = file.storages.get(ref.storage.key)
                if ref.dtype not in ITEMSIZE or not ref.is_contiguous() or (record is None and ref.numel):
                    raise UnsupportedError(f"{key} ({describe(ref)}) is not contiguous, or of another type.", path=path)
                same = (ref.storage.key, ref.offset, ref.shape, ref.dtype)
                if ref.numel and seen.setdefault(same, key) != key:
                    aliases[key] = seen[same]
                    continue
                begin = ref.offset * ITEMSIZE[ref.dtype]
                chunks = (Chunk((0,) * len(ref.shape), ref.shape, name, record, begin),) if record else ()
                found[key] = StoredTensor(ref.dtype, ref.shape, chunks)
            return found, aliases

    return where.read(name, read)


def _list_tensors(tree: Any, path: str) -> Iterator[tuple[str, TensorRef]]:
    if not isinstance(tree, dict):
        raise UnsupportedError(f"holds {describe(tree)}, not a state dict.", path=path)
    inside = [key for key in _INSIDE if isinstance(tree.get(key), dict)]
    held = tree[inside[0]] if inside else tree
    for key, value in held.items():
        if isinstance(value, TensorRef):
            yield str(key), value
        elif not inside and not str(key).endswith("_extra_state"):
            raise UnsupportedError(f"holds {describe(value)} under {describe(key)}: it is no state dict.", path=path)
