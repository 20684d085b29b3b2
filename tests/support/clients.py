"""Classes of client states that note when their code runs, and saves with such states."""

from __future__ import annotations

import dataclasses
import enum
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deepspeed_ucp.formats.deepspeed.reading import list_globals
from deepspeed_ucp.load.client import check_trusted, read_objects
from deepspeed_ucp.torchsave.torchfile import read_header
from tests.synth import Model, Param, Run, Topology, build_files, random_state, write_files
from tests.torchsave.inputs import rebuild_zip

MODEL = Model((Param("a", (3, 5)), Param("b", (7,), group=1)))

RUNS: list[str] = []
"""Calls of code of these classes."""


class Colour(enum.Enum):
    RED = 1


class Attributes(dict[str, Any]):
    """A dict with attributes, such as Lightning's ``AttributeDict``."""

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(name)


@dataclasses.dataclass
class Settings:
    """A value class of a training script, such as its arguments."""

    name: str
    widths: list[int] = dataclasses.field(default_factory=list)
    inner: Any = None

    def __post_init__(self) -> None:
        assert RUNS.append(self.name) is None

    def __call__(self, *_: Any) -> None:
        RUNS.append("called")

    append = extend = __setitem__ = add = __call__

    def __index__(self) -> int:
        RUNS.append("asked for a number")
        return 1


@dataclasses.dataclass(frozen=True)
class Frozen:
    value: int

    def __hash__(self) -> int:
        RUNS.append("hashed")
        return self.value


def write(
    folder: Path, client_state: dict[str, Any], topology: Topology | None = None, legacy: bool = False, **run: Any
) -> str:
    topology = topology or Topology(2, 2, "fp16")
    state = random_state(MODEL, 0, precision=topology.precision)
    files = build_files(MODEL, state, topology, Run(client_state=client_state, **run))
    write_files(folder, files, legacy=legacy)
    return str(folder / next(name for name in files if "model_states" in name))


def check_names(path: str) -> None:
    """Check the classes that a file names, as before DeepSpeed's load."""
    check_trusted(dict.fromkeys(list_globals(read_header(path)), path))


def read_trusting_nothing(path: str) -> dict[str, Any]:
    """Read the objects of a file without consent to any class."""
    return read_objects(path, trust_pickle=False)


def edit_pickle(path: str, edit: Callable[[bytes], bytes]) -> None:
    with zipfile.ZipFile(path) as archive:
        (pickled,) = (each for each in archive.namelist() if each.endswith("data.pkl"))
        data = archive.read(pickled)
    Path(path).write_bytes(rebuild_zip(Path(path).read_bytes(), edit(data)))
