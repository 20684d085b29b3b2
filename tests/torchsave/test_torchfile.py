"""Headers of ``torch.save`` files in both formats, and refused formats."""

from __future__ import annotations

import io
import json
import pickle
import zipfile
from collections.abc import Sequence
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deepspeed_ucp.errors import CheckpointError, UcpError, UnsupportedError
from deepspeed_ucp.formats.deepspeed.reading import read_file
from deepspeed_ucp.model.storage import ITEMSIZE
from deepspeed_ucp.torchsave import records, torchfile
from deepspeed_ucp.torchsave.objects import PickledObject, TensorRef
from deepspeed_ucp.torchsave.torchfile import read_header

FORMATS = pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
NAME = "mp_rank_00_model_states.pt"


def save(path: Path, content: Any, legacy: bool = False) -> Path:
    torch.save(content, path, _use_new_zipfile_serialization=not legacy)
    return path


@FORMATS
def test_headers_locate_tensors_and_contain_scalars_and_inert_objects(tmp_path: Path, legacy: bool) -> None:
    """One-element tensors contain their bytes, unless their dtype is unknown or the negation bit is set."""
    whole = {dtype: torch.arange(12).to(getattr(torch, dtype)) for dtype in ITEMSIZE}
    content: dict[str, Any] = {"whole": whole, "view": {key: each[4:10].view(2, 3) for key, each in whole.items()}}
    content |= {"a": torch.tensor(2.5), "b": [torch.tensor(7)], "c": (torch.ones(3)[1],), "list": []}
    content["odd"], content["bit"] = torch.tensor(1.0, dtype=torch.float8_e4m3fnuz), torch._neg_view(torch.tensor(2.0))
    content["param"], content["sparse"] = torch.nn.Parameter(torch.ones(2)), torch.eye(2).to_sparse()
    content["size"], content["self"] = torch.Size((1, 2)), content
    content["list"].append(content["list"])
    deep: list[Any] = [torch.tensor(2.0)]
    for _ in range(60):
        deep = [deep, deep]
    content["deep"] = deep
    path = save(tmp_path / "x.pt", content, legacy)
    header, data = read_header(str(path)), path.read_bytes()
    tree = header.tree
    for kind, dtype in product(("whole", "view"), ITEMSIZE):
        ref, tensor = tree[kind][dtype], content[kind][dtype]
        low = header.storages[ref.storage.key].offset + ref.offset * tensor.itemsize
        assert data[low : low + tensor.nbytes] == tensor.contiguous().view(torch.uint8).numpy().tobytes()
        assert (ref.dtype, ref.shape, ref.fault) == (dtype, tensor.shape, "")
    assert header.saved_as == ("archive" if legacy else "x")
    assert (tree["a"].data, tree["a"].item()) == (torch.tensor(2.5).numpy().tobytes(), 2.5)
    assert (tree["b"][0].dtype, tree["c"][0].data) == ("int64", torch.tensor(1.0).numpy().tobytes())
    assert all(isinstance(tree[key], TensorRef) and tree[key].data is None for key in ("odd", "bit"))
    assert tree["self"] is tree and tree["list"][0] is tree["list"]
    assert (tree["param"].shape, tree["size"]) == ((2,), (1, 2))
    assert isinstance(tree["sparse"], PickledObject)


def test_a_changed_byte_in_the_pickle_or_a_scalar_is_detected(tmp_path: Path) -> None:
    path = save(tmp_path / "x.pt", {"step": torch.tensor(3.0), "w": torch.ones(4)})
    whole = path.read_bytes()
    header = read_header(str(path))
    step = header.storages[header.tree["step"].storage.key].offset
    for position, record in (
        (whole.index(b"step"), "data.pkl"),
        (step, "data/"),
        (whole.index(b"little"), "byteorder"),
    ):
        damaged = bytearray(whole)
        damaged[position] ^= 4
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=f"{record}.*has CRC32 .* the writer stored .*damaged"):
            read_header(str(path))


@pytest.mark.parametrize(
    ("end", "change", "error", "words"),
    [
        ("byteorder", [b"big"], UnsupportedError, "saved on a big-endian machine.* save it again"),
        ("data.pkl", [], CheckpointError, "has one data.pkl, this zip has 0"),
        ("data.pkl", [b"", b""], CheckpointError, "has one data.pkl, this zip has 2"),
        ("/data/0", [bytes(16)] * 2, CheckpointError, "its directory lists record data/0 twice"),
        ("/data/0", [], CheckpointError, "the bytes of w are not all there"),
        ("/data/0", [bytes(12)], CheckpointError, "the bytes of w are not all there"),
        (None, [], UnsupportedError, "record .* is compressed.* Restore it from a copy"),
    ],
)
def test_changed_records_are_refused(
    tmp_path: Path, end: str | None, change: list[bytes], error: type[Exception], words: str
) -> None:
    path = save(tmp_path / NAME, {"module": {"w": torch.ones(4)}})
    with zipfile.ZipFile(path) as old:
        entries = [(info.filename, old.read(info)) for info in old.infolist()]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED if end else zipfile.ZIP_DEFLATED) as new:
        for name, data in entries:
            for number, changed in enumerate(change if end and name.endswith(end) else [data]):
                new.writestr(f"{number or ''}{name}", changed)
    with pytest.raises(error, match=f"{NAME}: .*{words}"):
        read_file(str(tmp_path), NAME)


def test_a_save_that_failed_to_pickle_is_refused(tmp_path: Path) -> None:
    """Such a save leaves a valid zip without a pickle."""
    path = tmp_path / "x.pt"
    with pytest.raises(TypeError, match="cannot pickle"):
        torch.save({"w": torch.ones(2), "layout": torch.channels_last}, path)
    with pytest.raises(CheckpointError, match=r"x\.pt: .*cannot be pickled \(a torch\.memory_format.*another tag"):
        read_header(str(path))


@FORMATS
def test_unsupported_tensors_are_marked_in_the_header(tmp_path: Path, legacy: bool) -> None:
    """Reading does not refuse them, because DeepSpeed's load in the same topology supports them."""
    odd, conj = torch.ones(4).to(torch.float8_e4m3fnuz), torch.ones(2, dtype=torch.complex64).conj()
    tensors = {"w": torch.ones(4, 3).t(), "v": torch.ones(2), "odd": odd, "conj": conj, "neg": conj.imag.contiguous()}
    tensors["bit"] = torch._neg_view(torch.nn.Parameter(torch.ones(2)))
    tensors |= {f"row{stride}": torch.ones(20).as_strided((1, 4), (stride, 1)) for stride in (1, 7)}
    save(tmp_path / NAME, {"module": tensors}, legacy)
    model = read_file(str(tmp_path), NAME).model
    assert model is not None and model.module is not None
    assert "not contiguous (shape (3, 4), strides (1, 3))" in model.module["w"].fault
    assert not any(model.module[name].fault for name in ("v", "neg", "row1", "row7"))
    assert model.module["conj"].fault == model.module["bit"].fault != ""
    assert model.module["odd"].fault == "dtype float8_e4m3fnuz is not covered"


@pytest.mark.parametrize("times", [1, 3])
def test_repeated_ends_of_several_ranks_are_ignored(
    tmp_path: Path, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each other writer of the file appends the bytes after the last whole block. Their size has a limit.

    DeepSpeed's fast writer leaves other bytes in a longer file, which it does not truncate.
    """
    paths = [save(tmp_path / f"{value}.pt", {"weights": torch.full((300,), value), "step": 7}) for value in (1.0, 2.0)]
    before, (whole, other) = read_header(str(paths[0])), [path.read_bytes() for path in paths]
    end, path = whole[len(whole) // 512 * 512 :], paths[0]
    path.write_bytes(whole + times * end)
    monkeypatch.setattr(records, "_MOST_REPEATED", times * len(end))
    after = read_header(str(path))
    assert (after.header_crc, after.storages, after.saved_as) == (before.header_crc, before.storages, before.saved_as)
    assert after.tree["weights"].numel == 300
    monkeypatch.setattr(records, "_MOST_REPEATED", times * len(end) - 1)
    with pytest.raises(CheckpointError):
        read_header(str(path))
    monkeypatch.undo()
    for data, words in (
        ((whole + times * end)[:-1], "no zip directory.* Restore it from a copy"),
        (whole + other[len(other) // 512 * 512 :], "no zip directory|has no header"),
    ):
        path.write_bytes(data)
        with pytest.raises(CheckpointError, match=words):
            read_header(str(path))


@pytest.mark.parametrize("front", [1, 100, 1 << 16])
def test_a_legacy_file_is_read_in_pieces(front: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchfile, "_FRONT", front)
    value = {f"{number}": torch.full((3,), float(number)) for number in range(50)}
    path = save(tmp_path / "file.pt", value, legacy=True)
    header = read_header(str(path))
    assert [*header.tree] == [*value] and len(header.storages) == 50
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(CheckpointError):
        read_header(str(path))


def test_datastates_files_are_refused(tmp_path: Path) -> None:
    """Their format: the length of a JSON header, the header, tensors, a pickle (datastates/llm/checkpointing.py)."""
    lean = pickle.dumps({"module": {"w": "TENSOR|module|w"}})
    places = {"data_offsets": [8, 8 + len(lean)]}
    weight = {"dtype": "torch.float32", "shape": [2], "data_offsets": [0, 8]}
    header = json.dumps({"module|w": weight, "datastates_metadata": places}).encode()
    path = tmp_path / "mp_rank_00_model_states.pt"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8) + lean)
    with pytest.raises(UnsupportedError, match=r"DataStates library's own format .* without datastates_ckpt"):
        read_header(str(path))


# -- the cache of forms: each form of pickle in a file is parsed once, with equal results and errors ------------------

SHAPES = ((64, 6), (7,), (1,), (), (0, 3), (900,))
Parts = list[tuple[int, int]]


@pytest.fixture(scope="module")
def written() -> tuple[bytes, Parts]:
    """Three rounds of tensors with several shapes and dtypes, and other values."""
    data, parts = b"", []
    for number in range(3):
        values = [torch.randn(shape) + number for shape in SHAPES]
        values += [values[0].bfloat16(), values[0].t(), values[0][3:5], torch.tensor(number), torch.ones(2).double()]
        for value in [*values, number, [values[1], values[1] + 1]]:
            file = io.BytesIO()
            torch.save(value, file)
            parts.append((len(data), len(file.getvalue())))
            data += file.getvalue()
    return data, parts


def read(path: Path, parts: Sequence[tuple[int, int]]) -> list[torchfile.Header]:
    return torchfile.read_parts(str(path), parts)


def test_each_form_is_parsed_once(
    written: tuple[bytes, Parts], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, parts = written
    (tmp_path / "it").write_bytes(data)
    alone = [read(tmp_path / "it", [part])[0] for part in parts]
    opened = []
    list_zip = torchfile.list_zip
    monkeypatch.setattr(torchfile, "list_zip", lambda *args: opened.append(1) or list_zip(*args))
    assert repr(read(tmp_path / "it", parts)) == repr(alone)
    kinds = len(parts) // 3
    assert len(opened) == kinds + 2 * 3  # numbers, pairs of tensors and empty tensors are not cached


def test_damage_is_detected_with_the_cache_of_forms(written: tuple[bytes, Parts], tmp_path: Path) -> None:
    """Only damage in local headers of other records, which the cache does not need, may be undetected."""
    data, parts = written
    draw = np.random.default_rng(0)
    kinds = len(parts) // 3
    refused = 0
    for turn in range(400):
        first, second = parts[turn % kinds], parts[turn % kinds + kinds]
        at = second[0] + int(draw.integers(second[1]))
        changed = bytearray(data)
        changed[at] ^= 1 << int(draw.integers(8))
        (tmp_path / "it").write_bytes(changed)
        found = None
        with suppress(UcpError):
            found = read(tmp_path / "it", [first, second])
        try:
            alone = [read(tmp_path / "it", [part])[0] for part in (first, second)]
        except UcpError:
            refused += 1
            assert not found or all(at >= each.offset + each.nbytes for each in found[1].storages.values())
        else:
            assert repr(found) == repr(alone)
    assert refused > 50


def test_a_form_whose_pickle_lies_behind_its_tensor_is_not_reused(tmp_path: Path) -> None:
    """The cache compares bytes in front of the tensor, so it would miss another shape in the pickle."""
    data, parts = b"", list[tuple[int, int]]()
    for shape in ((3, 4), (4, 3)):
        file, moved = io.BytesIO(), io.BytesIO()
        torch.save(torch.zeros(shape), file)
        with zipfile.ZipFile(file) as old, zipfile.ZipFile(moved, "w") as new:
            for name in sorted(old.namelist(), key=lambda name: not name.endswith("data/0")):
                new.writestr(zipfile.ZipInfo(name), old.read(name))
        parts.append((len(data), len(moved.getvalue())))
        data += moved.getvalue()
    (tmp_path / "it").write_bytes(data)
    assert parts[0][1] == parts[1][1]
    assert [header.tree.shape for header in read(tmp_path / "it", parts)] == [(3, 4), (4, 3)]
