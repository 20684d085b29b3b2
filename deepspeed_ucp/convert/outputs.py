"""The files of an atomic checkpoint: their paths, zip frames and contents."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate

from ..errors import UnsupportedError
from ..extensions.registry import find_for_names
from ..formats.deepspeed.files import ZERO
from ..formats.deepspeed.seal import SealedFile
from ..formats.universal.index import LONGEST, SealedAtom, is_path, name_atom_file
from ..formats.universal.upstream import upstream_keys
from ..io.disk import open_to_write, write_at, write_parts
from ..io.staging import MANIFEST, OutputKind
from ..io.store import exists, is_folder
from ..model.index import AtomicIndex
from ..model.storage import AtomKey
from ..stream.full_tensors import FullTensor, FullTensors
from ..tensor_parallel.kinds import Partial, Replicate, Unique
from ..torchsave.zipframe import ZipImage, dump_value, make_image
from .states import OPTIMIZER_STATE

STEP = "step"


def _is_output(folder: str) -> bool:
    """Return True if a folder is an atomic checkpoint, ours or upstream's."""
    marks = (MANIFEST, OPTIMIZER_STATE)
    return is_folder(os.path.join(folder, ZERO)) and any(exists(os.path.join(folder, m)) for m in marks)


CONVERSION = OutputKind(
    name="an atomic checkpoint",
    maker="conversion",
    is_output=_is_output,
    parts=re.compile(r"zero(\.\d+)?|client|tmp|ucp_manifest\.json|.*_model_states\.pt"),
    last=(OPTIMIZER_STATE, MANIFEST),
)
"""Outputs of conversions, ours and upstream's; nothing else is replaced."""


@dataclass(frozen=True, slots=True)
class OutputFile:
    """A file of an atomic checkpoint: its atom, relative path, and zip frame."""

    atom: FullTensor
    path: str
    image: ZipImage

    def write(self, folder: str, start: int, data: memoryview, crc: int) -> None:
        """Write data from element ``start`` on; a whole file at once with its zip frame."""
        with open_to_write(os.path.join(folder, self.path)) as fd:
            if data.nbytes == self.image.nbytes:
                write_parts(fd, [self.image.head, data, self.image.tail(crc)], 0)
            else:
                write_at(fd, data, self.image.data_offset + start * self.atom.itemsize)

    def seal(self, crc: int) -> SealedFile:
        """Return its entry in a seal; ``crc`` is the CRC32 of the data."""
        return SealedFile(size=self.image.size, crc=self.image.checksum_directory(crc))

    def seal_atom(self, crc: int) -> SealedAtom:
        """Return its atom's entry in the index; ``crc`` is the CRC32 of the data."""
        name, state, instance = self.atom.atom.key
        return SealedAtom(name, state, instance, self.atom.dtype, self.atom.shape, self.image.data_offset, crc)

    def close(self, folder: str, crc: int) -> None:
        """Write the zip frame of data with the CRC32 ``crc``, written in several parts."""
        with open_to_write(os.path.join(folder, self.path)) as fd:
            write_at(fd, self.image.head, 0)
            write_at(fd, self.image.tail(crc), self.image.data_offset + self.image.nbytes)


def list_files(full: FullTensors, fused: Mapping[str, int]) -> list[OutputFile]:
    """Return the files of the atoms in a fixed order.

    Args:
        fused: name → number of atoms that are joined in a parameter.
    """
    extensions, files = find_for_names([key.name for key in full.tensors]), []
    for key, atom in sorted(full.tensors.items()):
        keys = upstream_keys(full.patterns.get(atom.name), atom.shape, atom.name)  # by which upstream's loader cuts it
        for extension in extensions:
            keys = extension.make_upstream_keys(atom.name, fused.get(key.name, 0)) or keys
        image = make_image(keys, atom.dtype, atom.numel, full.cut_padding(atom))
        files.append(OutputFile(atom, name_atom_file(atom.atom.key), image))
    return files


def find_uncuttable(full: FullTensors) -> list[str]:
    """Return parameters that upstream's loader cannot cut as they are cut."""
    shapes = {key.name: atom.shape for key, atom in full.tensors.items()}
    return sorted(
        name
        for name, pattern in full.patterns.items()
        if not isinstance(pattern, (Unique, Replicate, Partial)) and not upstream_keys(pattern, shapes.get(name, ()))
    )


def check_paths(paths: Iterable[str]) -> None:
    """Raise UnsupportedError for conflicting paths, which untrusted names may give."""
    files = {OPTIMIZER_STATE: True}  # path → True for a file
    for path in paths:
        folders = list(accumulate(path.split("/"), lambda left, right: f"{left}/{right}"))[:-1]
        if not is_path(path):
            raise UnsupportedError(f"{_NAMED}: {path!r} cannot be a path of at most {LONGEST} bytes per name.")
        if path in files or any(files.get(folder) for folder in folders):
            raise UnsupportedError(f"{_NAMED}: {path!r} is the path of another file or folder as well.")
        files.update(dict.fromkeys(folders, False), **{path: True})


_NAMED = "An atomic checkpoint has a folder for each parameter, named like it, which upstream's loader looks for"


def list_steps(index: AtomicIndex) -> dict[str, tuple[bytes, int]]:
    """Return path → content and zip directory's CRC32 of every ``step.pt``."""
    encoded: dict[tuple[type, object], tuple[bytes, int]] = {}
    steps = {}
    for param, scalars in sorted(index.scalars.items()):
        if STEP not in scalars:
            continue
        step = scalars[STEP]
        kind = type(step), step
        if kind not in encoded:
            encoded[kind] = dump_value(step, index.scalar_dtypes.get(STEP))
        steps[name_atom_file(AtomKey(param.name, STEP, param.instance))] = encoded[kind]
    return steps
