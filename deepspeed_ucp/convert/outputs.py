"""The files of an atomic checkpoint: which atom goes where, and what surrounds its bytes."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from itertools import accumulate

from ..atoms import AtomicIndex, AtomKey
from ..errors import UnsupportedError
from ..io.disk import explain_full, write_at
from ..io.staging import MANIFEST, OutputKind
from ..patterns import Partial, Replicate, Unique
from ..plan.conversion import Output
from ..stream.wholes import Whole, Wholes
from ..torchsave.zipframe import dump_value, make_image
from .execute import OutputFile, create
from .states import OPTIMIZER_STATE
from .upstream import upstream_keys

ZERO = "zero"
STEP = "step"

_LONGEST = 255
"""Bytes of a file's name, on every file system that is in use."""


def _is_output(folder: str) -> bool:
    """Whether a folder is an atomic checkpoint, ours or upstream's."""
    marks = (MANIFEST, os.path.join(ZERO, "optimizer_state.pt"))
    return os.path.isdir(os.path.join(folder, ZERO)) and any(os.path.exists(os.path.join(folder, m)) for m in marks)


CONVERSION = OutputKind(
    name="an atomic checkpoint",
    maker="conversion",
    is_one=_is_output,
    parts=re.compile(r"zero(\.\d+)?|tmp|ucp_manifest\.json|.*_model_states\.pt"),
    resumable=True,
)
"""What may be replaced: nothing but what conversions write, ours and upstream's."""


def list_files(wholes: Wholes) -> list[OutputFile]:
    """The atoms' files, in a fixed order."""
    return [_make_file(wholes, wholes.atoms[key]) for key in sorted(wholes.atoms)]


def find_formless(wholes: Wholes) -> list[str]:
    """Parameters whose cut upstream's files cannot tell: its loader takes them whole, or cuts them wrongly."""
    shapes = {key.name: whole.shape for key, whole in wholes.atoms.items()}
    return sorted(
        name
        for name, pattern in wholes.patterns.items()
        if not isinstance(pattern, (Unique, Replicate, Partial)) and not upstream_keys(pattern, shapes.get(name, ()))
    )


def _make_file(wholes: Wholes, whole: Whole) -> OutputFile:
    pattern = wholes.patterns.get(whole.name)
    shape = whole.shape
    if pattern is not None and pattern.vocab is not None:  # upstream sees the vocabulary, we the padding rows as well
        shape = (min(pattern.vocab, shape[0]), *shape[1:])
    image = make_image(upstream_keys(pattern, whole.shape, whole.name), whole.dtype, whole.numel, shape)
    return OutputFile(whole, place_file(whole.atom.key), image)


def place_file(key: AtomKey) -> str:
    """An atom's path in the output: of a later pipeline stage's own copy beside the folder that upstream looks into."""
    return f"{f'{ZERO}.{key.instance}' if key.instance else ZERO}/{key.name}/{key.state}.pt"


def check_paths(paths: Iterable[str]) -> None:
    """Refuse files that cannot lie beside each other; names of parameters and states are not trusted.

    Raises:
        UnsupportedError: a path leads out of its folder, cannot be a path, or is that of two files.
    """
    seen = {OPTIMIZER_STATE: True}  # path → whether it is a file
    for path in paths:
        folders = list(accumulate(path.split("/"), lambda left, right: f"{left}/{right}"))[:-1]
        if not all(map(_can_be_a_name, path.split("/"))):
            raise UnsupportedError(f"{_NAMED}: {path!r} cannot be a path of at most {_LONGEST} bytes per name.")
        if path in seen or any(seen.get(folder) for folder in folders):
            raise UnsupportedError(f"{_NAMED}: {path!r} is the path of another file or folder as well.")
        seen.update(dict.fromkeys(folders, False), **{path: True})


_NAMED = "An atomic checkpoint has a folder for each parameter, named like it, which upstream's loader looks for"


def _can_be_a_name(name: str) -> bool:
    try:
        return 0 < len(name.encode()) <= _LONGEST and name not in (".", "..") and "\0" not in name
    except UnicodeEncodeError:
        return False


def list_outputs(files: Iterable[OutputFile]) -> list[Output]:
    """The files as the plan sees them."""
    return [Output(file.whole.numel, file.whole.itemsize, file.whole.place) for file in files]


def list_steps(index: AtomicIndex) -> dict[str, tuple[bytes, int]]:
    """Relative path → content of every parameter's ``step.pt``, and the CRC32 of its zip directory."""
    made: dict[tuple[type, object], tuple[bytes, int]] = {}
    found = {}
    for param, scalars in sorted(index.run.scalars.items()):
        if STEP not in scalars:
            continue
        step = scalars[STEP]
        kind = type(step), step
        if kind not in made:
            made[kind] = dump_value(step, index.run.scalar_dtypes.get(STEP))
        found[place_file(AtomKey(param.name, STEP, param.instance))] = made[kind]
    return found


def make_folders(folder: str, paths: Iterable[str]) -> None:
    """The folders that files lie in.

    Raises:
        DiskFullError: the disk is full.
    """
    for parent in sorted({os.path.dirname(path) for path in paths}):
        with explain_full(folder):
            os.makedirs(os.path.join(folder, parent), exist_ok=True)


def write_file(folder: str, path: str, data: bytes) -> None:
    """Write a small file.

    Raises:
        DiskFullError: the disk is full.
    """
    fd = create(os.path.join(folder, path))
    try:
        write_at(fd, data, 0)
        os.ftruncate(fd, len(data))
    finally:
        os.close(fd)
