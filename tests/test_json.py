"""Invalid JSON in any file that the package reads raises a `UcpError` with the file's name."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from deepspeed_ucp.cli.common import read_groups
from deepspeed_ucp.comm import Comm
from deepspeed_ucp.errors import CheckpointError, UcpError
from deepspeed_ucp.examine import settings
from deepspeed_ucp.export.like import LikeModel
from deepspeed_ucp.formats import open_checkpoint
from deepspeed_ucp.formats.deepspeed import seal
from deepspeed_ucp.formats.deepspeed.gather import find_step_mismatch
from deepspeed_ucp.formats.foreign.adapter import read_config
from deepspeed_ucp.formats.universal.index import read_manifest
from deepspeed_ucp.io import jsonfile, staging
from deepspeed_ucp.saves import memory
from deepspeed_ucp.tensor_parallel.rules import read_rules
from deepspeed_ucp.trainers import megatron
from deepspeed_ucp.trainers.hffolders import read_trainer_state

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

NO_OBJECTS = {
    "array": b"[1]",
    "number": b"3",
    "null": b"null",
    "text": b'"x"',
    "deep": b"[" * 60_000,
    "deep-objects": b'{"a":' * 60_000,
    "no-text": b"\xff\xfe{}",
    "empty": b"",
    "cut": b'{"a": 1',
    "long-number": b'{"a": ' + b"1" * 5000 + b"}",
}
OBJECTS = {"twice": b'{"a": 1, "a": 2}', "nan": b'{"a": NaN}', "no-keys": b"{}"}
DOCUMENTS = {**NO_OBJECTS, **OBJECTS}


def with_weights(folder: str) -> Any:
    save_file({"a": torch.zeros(2)}, os.path.join(folder, "model.safetensors"))
    return open_checkpoint(folder, Comm())


def put_header(path: Path, document: bytes) -> None:
    path.write_bytes(len(document).to_bytes(8, "little") + document)


READERS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "trainer's state": ("trainer_state.json", read_trainer_state),
    "adapter": ("adapter_config.json", lambda folder: read_config(None, folder)),
    "--like": ("config.json", lambda folder: LikeModel(folder).config),
    "seal": (seal.SEAL, lambda folder: seal.read_seal(os.path.join(folder, seal.SEAL))),
    "manifest": ("ucp_manifest.json", read_manifest),
    "header of safetensors": ("model.safetensors", lambda folder: open_checkpoint(folder, Comm())),
    "index of safetensors": ("model.safetensors.index.json", lambda folder: open_checkpoint(folder, Comm())),
    "configuration beside weights": ("config.json", with_weights),
    "Megatron's ds_config": ("ds.json", lambda folder: read_given(os.path.join(folder, "ds.json"))),
    "ds_config": ("ds.json", lambda folder: settings.read_config(os.path.join(folder, "ds.json"))),
    "snapshots": ("written", lambda folder: memory.Job(folder).read("written")),
    "rules": ("rules.json", lambda folder: read_rules(os.path.join(folder, "rules.json"))),
    "groups": ("groups.json", lambda folder: read_groups(os.path.join(folder, "groups.json"))),
}
"""Reader → name of its file in a folder, function of the folder."""

OF_ANY_FORM = ("rules", "groups")
"""Readers whose callers check the form."""


def read_given(path: str) -> Any:
    def get_args() -> Any:
        return SimpleNamespace(deepspeed_config=path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(megatron, "_get_args", get_args)
        return megatron.create_ds_config(lambda *_: {})


def is_refused(reader: str, folder: Path, document: bytes) -> bool:
    """Return True if a reader raises an error of the package; it must name the file."""
    name, read = READERS[reader]
    put = put_header if name == "model.safetensors" else Path.write_bytes
    put(folder / name, document)
    try:
        read(str(folder))
    except UcpError as error:
        assert name in str(error)  # noqa: PT017 - some documents are read
        return True
    return False


@pytest.mark.parametrize("document", DOCUMENTS)
@pytest.mark.parametrize("reader", READERS)
def test_documents_without_an_object_are_refused(tmp_path: Path, reader: str, document: str) -> None:
    """Other documents are read or refused."""
    is_taken = reader in OF_ANY_FORM or (reader, document) == ("ds_config", "empty")  # like DeepSpeed
    assert is_refused(reader, tmp_path, DOCUMENTS[document]) or is_taken or document in OBJECTS


@pytest.mark.parametrize("document", DOCUMENTS)
def test_invalid_hints_are_ignored(tmp_path: Path, document: str) -> None:
    path = tmp_path / "it.json"
    path.write_bytes(DOCUMENTS[document])
    assert find_step_mismatch(str(path), 3) == []
    with path.open("rb") as file:
        assert "not written its name" in staging._read_holder(file.fileno())


def test_a_document_beyond_the_limit_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "it.json"
    path.write_bytes(b'{"a": 1}')
    assert jsonfile.read_json(str(path), most=8) == {"a": 1}
    with pytest.raises(CheckpointError, match=r"it.json: has more than 7 bytes"):
        jsonfile.read_json(str(path), most=7)


@pytest.mark.parametrize("document", ["twice", "nan"])
def test_duplicate_keys_and_nan_are_refused_in_strict_documents(tmp_path: Path, document: str) -> None:
    """Files of other libraries may have both. For example, the Trainer writes a loss of NaN."""
    path = tmp_path / "it.json"
    path.write_bytes(OBJECTS[document])
    assert jsonfile.read_json(str(path)).keys() == {"a"}
    with pytest.raises(CheckpointError, match="it.json: is no valid JSON"):
        jsonfile.read_json(str(path), strict=True)
