"""Find the files of a model: one file, or several with an index."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ...comm import Comm
from ...errors import CheckpointError, UnsupportedError, shorten
from ...io.jsonfile import read_json
from ..places import FileTable
from .contents import read_once

T = TypeVar("T")

LONGEST = 100_000_000
"""Maximum bytes of a header or an index, as in the safetensors library."""

_INDEX = ".index.json"
_NUMBERED = re.compile(r"(.+-)(\d{1,9})(-of-(\d{1,9})\.[^.]+)")


@dataclass(frozen=True, slots=True)
class Shards:
    """The files of one model.

    Attributes:
        head: the index, else the first file.
        files: files with tensors, in order.
        weight_map: tensor → file; None without an index.
    """

    head: str
    files: tuple[str, ...]
    weight_map: Mapping[str, str] | None = None

    def unite(self, headers: Sequence[Mapping[str, T]], where: FileTable) -> dict[str, T]:
        """Merge the tensors of all files.

        Args:
            headers: tensors by file, in the order of ``files``.
        """
        merged: dict[str, T] = {}
        for file, tensors in zip(self.files, headers, strict=True):
            for name, tensor in tensors.items():
                if self.weight_map is not None and self.weight_map.get(name) != file:
                    continue  # Hugging Face's libraries look up each name in the index too
                if name in merged:
                    raise CheckpointError(f"{name} is in {file} and in another file.", path=where.folder)
                merged[name] = tensor
        missing = [name for name in self.weight_map or () if name not in merged]
        if missing:
            raise CheckpointError(
                f"tells of {shorten(missing)}, which the named files do not contain. The folder mixes files of "
                "several saves, or a copy was cut short.",
                path=where.path(self.head),
            )
        return merged


def find_shards(where: FileTable, ending: str, comm: Comm) -> Shards:
    """Find the files of the model in a folder; collective.

    Args:
        ending: suffix of files that an index may name.

    Raises:
        CheckpointError: a file is missing, or the index is damaged.
        UnsupportedError: there are several models.
    """
    indexes = sorted(name for name in where.entries if name.endswith(_INDEX))
    files = sorted(name for name in where.entries if not name.endswith(_INDEX))
    weight_map: dict[str, str] | None = None
    if len(indexes) == 1:
        weight_map = read_once(lambda path: _read_index(path, ending), where, indexes[0], comm)
        files = sorted(set(weight_map.values()))
    comm.alike(lambda: _check(where, files, indexes))
    return Shards(next(iter([*indexes, *files])), tuple(files), weight_map)


def _read_index(path: str, ending: str) -> dict[str, str]:
    files = {key: str(file) for key, file in read_json(path, most=LONGEST, strict=True)["weight_map"].items()}
    if any("/" in file or not file.endswith(ending) for file in files.values()):
        raise CheckpointError("names files outside of its folder, or of another kind.", path=path)
    if not files:
        raise CheckpointError("names no files; it is damaged.", path=path)
    return files


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
            f"holds several models ({shorten(indexes or files)}). Move the wanted one into a separate folder.",
            path=where.folder,
        )
