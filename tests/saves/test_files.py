"""``torch.save`` into memory: equal content by every path, and freed memory."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from deepspeed_ucp.saves import files
from deepspeed_ucp.saves.files import MappedFiles, save_in_place


def make_state(numel: int = 100_000) -> dict[str, Any]:
    weights = torch.arange(numel, dtype=torch.float32)
    return {"weights": weights, "view": weights[5:10], "other": torch.ones(7, dtype=torch.bfloat16), "step": 3}


def check(path: Path, state: dict[str, Any]) -> None:
    found = torch.load(path, weights_only=True)
    assert found.keys() == state.keys() and found["step"] == state["step"]
    assert all(torch.equal(found[name], state[name]) for name in ("weights", "view", "other"))
    assert found["view"].untyped_storage().data_ptr() == found["weights"].untyped_storage().data_ptr()


def test_a_file_is_overwritten_through_its_mapping_until_it_is_deleted() -> None:
    """The new content may be longer than the mapping, or shorter. The mapping holds the memory of a deleted file."""
    mapped = MappedFiles(wanted=True)
    with tempfile.TemporaryDirectory(prefix="ucp-test-", dir="/dev/shm") as folder:
        path = Path(folder, "state.pt")
        save_in_place(make_state(), str(path), mapped)
        mapped.settle()
        with open(path) as file:
            assert mapped.find(file.fileno()) is not None
        for numel in (100_000, 150_000, 30_000):
            state = make_state(numel)
            with mock.patch.object(os, "pwrite", side_effect=os.pwrite) as written:
                save_in_place(state, str(path), mapped)
            assert (written.call_count == 0) == (numel != 150_000)
            check(path, state)

    def list_held() -> list[str]:
        opened = [os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]
        lines = [*opened, *Path("/proc/self/maps").read_text().splitlines()]
        return [each for each in lines if str(path) in each]

    assert list_held()
    mapped.release()
    assert list_held() == []


def test_storages_of_devices_are_copied_in_pieces(tmp_path: Path) -> None:
    """On a machine with a GPU torch would copy each storage whole before it is written."""
    state, path = make_state(), tmp_path / "state.pt"
    with (
        mock.patch.object(torch.cuda, "is_available", return_value=True),
        mock.patch.object(files, "_read_pieces", side_effect=files._read_pieces) as read_pieces,
    ):
        save_in_place(state, str(path), MappedFiles(wanted=False))
    assert [call.args[0].nbytes() for call in read_pieces.call_args_list] == [400_000, 14]
    check(path, state)
    quantized = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8)  # more than a storage and a shape
    with mock.patch.object(torch.cuda, "is_available", return_value=True):
        save_in_place({"q": quantized, **state}, str(path), MappedFiles(wanted=False))
    found = torch.load(path, weights_only=False)
    assert torch.equal(found["weights"], state["weights"])
    assert torch.equal(found["q"].dequantize(), quantized.dequantize())
