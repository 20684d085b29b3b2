"""Weights in one file, or in several with an index: what readers of safetensors and of state dicts have in common."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ...comm import Comm
from ...errors import CheckpointError, UnsupportedError, shorten
from ..table import FileTable
from .headers import load_json, read_all, read_once

T = TypeVar("T")

LONGEST = 100_000_000
"""Bytes of a header or an index, as the safetensors library has it."""

_INDEX = ".index.json"
_NUMBERED = re.compile(r"(.+-)(\d{1,9})(-of-(\d{1,9})\.[^.]+)")


@dataclass(frozen=True, slots=True)
class Shards:
    """The files of one model.

    Attributes:
        head: the index, or else the first file.
        files: those with tensors, in order.
        weight_map: by tensor the file that has it; None without an index.
    """

    head: str
    files: tuple[str, ...]
    weight_map: Mapping[str, str] | None = None

    def unite(self, found: Sequence[Mapping[str, T]], where: FileTable) -> dict[str, T]:
        """What lies in the files, by tensor.

        Args:
            found: by file what it holds.

        Raises:
            CheckpointError: a tensor is in two files, or not in the file that the index names.
        """
        held: dict[str, T] = {}
        for file, tensors in zip(self.files, found, strict=True):
            for name, tensor in tensors.items():
                if self.weight_map is not None and self.weight_map.get(name) != file:
                    continue  # as the libraries do, which look up each name in the index
                if name in held:
                    raise CheckpointError(f"{name} is in {file} and in another file.", path=where.folder)
                held[name] = tensor
        missing = [name for name in self.weight_map or () if name not in held]
        if missing:
            raise CheckpointError(
                f"tells of {shorten(missing)}, which the named files do not hold. The folder mixes files of "
                "several saves, or a copy was cut short.",
                path=where.path(self.head),
            )
        return held


def find_shards(where: FileTable, ending: str, comm: Comm) -> Shards:
    """The files of the model in a folder; collective.

    Args:
        ending: of files that an index may name.

    Raises:
        CheckpointError: a file is missing, or the index is damaged.
        UnsupportedError: there are several models.
    """
    indexes = sorted(name for name in where.entries if name.endswith(_INDEX))
    files = sorted(name for name in where.entries if not name.endswith(_INDEX))
    told: dict[str, str] | None = None
    if len(indexes) == 1:
        told = read_once(lambda path: _read_index(path, ending), where, indexes[0], comm)
        files = sorted(set(told.values()))
    comm.alike(lambda: _check(where, files, indexes))
    return Shards(next(iter([*indexes, *files])), tuple(files), told)


def _read_index(path: str, ending: str) -> dict[str, str]:
    found = {key: str(file) for key, file in load_json(read_all(path, LONGEST), path)["weight_map"].items()}
    if any("/" in file or not file.endswith(ending) for file in found.values()):
        raise CheckpointError("names files outside of its folder, or of another kind.", path=path)
    if not found:
        raise CheckpointError("names no files; it is damaged.", path=path)
    return found


def _check(where: FileTable, files: Sequence[str], indexes: Sequence[str]) -> None:
    numbers = [match for name in files if (match := _NUMBERED.fullmatch(name))]
    wanted = list(files)
    if not indexes and len({(first, last) for first, _, last, _ in map(re.Match.groups, numbers)}) == 1:
        first, number, last, total = numbers[0].groups()
        if int(total) > len(files):
            wanted += [f"{first}{at:0{len(number)}}{last}" for at in range(1, min(int(total), len(files) + 8) + 1)]
    missing = [name for name in wanted if name not in where.entries]
    if missing:
        raise CheckpointError(f"{shorten(missing)} missing, of the model's files. Copy it here.", path=where.folder)
    if len(indexes) > 1 or (not indexes and len(files) > 1 and len(numbers) < len(files)):
        raise UnsupportedError(
            f"holds several models ({shorten(indexes or files)}). Put the wanted one into a folder of its own.",
            path=where.folder,
        )
