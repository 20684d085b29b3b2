"""Forged pickles, readers of hostile input that raise only errors of the package, and a comparison of objects."""

from __future__ import annotations

import io
import pickle
import struct
import tempfile
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

from deepspeed_ucp.errors import UcpError
from deepspeed_ucp.formats.deepspeed.reading import read_file
from deepspeed_ucp.load.client import read_objects
from deepspeed_ucp.torchsave.repickle import write_pickle
from deepspeed_ucp.torchsave.torchfile import list_records, name_storages
from deepspeed_ucp.torchsave.unpickle import read_pickle

MODEL_FILE = "mp_rank_00_model_states.pt"
OPTIM_FILE = "zero_pp_rank_0_mp_rank_00_optim_states.pt"


def forge(*opcodes: bytes) -> bytes:
    return b"\x80\x04" + b"".join(opcodes) + b"."


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def rebuild_zip(old: bytes, pickled: bytes) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(old)) as given, zipfile.ZipFile(stream, "w") as made:
        for info in given.infolist():
            made.writestr(info.filename, pickled if info.filename.endswith("data.pkl") else given.read(info))
    return stream.getvalue()


def look_at_pickle(data: bytes) -> None:
    """Read a pickle and, if it is valid, write it again."""
    with suppress(UcpError):
        found = read_pickle(data, "x.pt")
        write_pickle(found.root, max(found.proto, 2))


def look_at_file(data: bytes, name: str = MODEL_FILE) -> None:
    """Read a state file of either format: its records, its header and its client state."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, name)
        path.write_bytes(data)
        looks: tuple[Callable[[], object], ...] = (
            lambda: list_records(str(path)),
            lambda: name_storages(str(path)),
            lambda: read_file(folder, name),
            lambda: read_objects(str(path), trust_pickle=False),
        )
        for look in looks:
            with suppress(UcpError):
                look()


class Canonical(pickle._Pickler):
    """Writes each string in full, because equal strings may or may not be shared, and sets in one order."""

    def save_str(self, value: str) -> None:
        data = value.encode("utf-8", "surrogatepass")
        self.write(pickle.BINUNICODE + struct.pack("<I", len(data)) + data)

    def save_set(self, items: Any) -> None:
        self.save_reduce(type(items), (sorted(items, key=repr),), obj=items)

    dispatch: ClassVar[Any] = {**pickle._Pickler.dispatch, str: save_str, set: save_set, frozenset: save_set}


def assert_same(old: object, new: object) -> None:
    """Check types, values, storages, and the sharing of parts."""
    dumps = []
    for value in (old, new):
        stream = io.BytesIO()
        torch.save(value, stream, pickle_module=SimpleNamespace(__name__="pickle", Pickler=Canonical))
        with zipfile.ZipFile(stream) as archive:
            dumps.append({name: archive.read(name) for name in archive.namelist()})
    assert dumps[0] == dumps[1]
