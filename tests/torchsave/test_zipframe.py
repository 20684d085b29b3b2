"""Files written without torch equal those of ``torch.save`` for torch, zipfile and the package's reader."""

import math
import os
import pickle
import pickletools
import zipfile
import zlib

import pytest
import torch
from isal import isal_zlib

from deepspeed_ucp.errors import CheckpointError, UcpError
from deepspeed_ucp.model.storage import ITEMSIZE
from deepspeed_ucp.torchsave.objects import Global, call, make_instance
from deepspeed_ucp.torchsave.repickle import write_pickle
from deepspeed_ucp.torchsave.torchfile import read_header
from deepspeed_ucp.torchsave.zipframe import (
    PAGE,
    RecordWriter,
    Stream,
    dump_value,
    make_image,
    make_tensor,
)

SHAPES = [((), 1), ((0, 3), 0), ((0, 3), 5), ((2, 3), 6), ((2, 3), 9), ((5,), 5)]


def write_torch_file(path, pickled, storages):
    with open(path, "wb", buffering=0) as file:
        RecordWriter(file.fileno()).write_all(pickled, storages)


def write_image(path, image, data):
    """Write head, tail and data, in an unusual order."""
    with open(path, "wb") as file:
        file.write(image.head)
        file.seek(image.data_offset + image.nbytes)
        file.write(image.tail(zlib.crc32(data)))
        file.seek(image.data_offset)
        file.write(data)


@pytest.mark.parametrize("dtype", ITEMSIZE)
def test_written_files_of_every_dtype_and_shape_load_in_torch(dtype, tmp_path):
    path = tmp_path / "fp32.pt"
    for shape, numel in SHAPES:
        data = bytes(i % 2 for i in range(numel * ITEMSIZE[dtype]))
        image = make_image({"cat_dim": 0}, dtype, numel, shape)
        write_image(path, image, data)
        assert image.data_offset % PAGE == 0
        assert path.stat().st_size == image.size
        for options in ({"weights_only": True, "mmap": True}, {"weights_only": True}, {"weights_only": False}):
            loaded = torch.load(path, **options)
            assert loaded["cat_dim"] == 0
            assert loaded["param"].dtype == getattr(torch, dtype)
            assert loaded["param"].shape == shape
            assert loaded["param"].is_contiguous()
            assert bytes(loaded["param"].untyped_storage()) == data
        header = read_header(str(path))
        closing = image.tail(zlib.crc32(data))
        assert header.header_crc == zlib.crc32(closing[closing.index(b"PK\x01\x02") :])
        ref = header.tree["param"]
        assert (ref.dtype, ref.shape) == (dtype, shape)


@pytest.mark.parametrize("dtype", ["float32", "bool", "uint16", "float8_e5m2"])
def test_the_written_pickle_equals_torch_saves(dtype, tmp_path):
    """Instructions and arguments are equal, except memo indices."""
    tensor = torch.zeros(9).to(getattr(torch, dtype))[:6].view(2, 3)
    torch.save({"param": tensor, "cat_dim": 1}, tmp_path / "theirs.pt")
    image = make_image({"cat_dim": 1}, dtype, 9, (2, 3))
    write_image(tmp_path / "ours.pt", image, bytes(image.nbytes))
    theirs, ours = (zipfile.ZipFile(tmp_path / name) for name in ("theirs.pt", "ours.pt"))
    wanted = list_instructions(theirs.read("theirs/data.pkl"))
    assert list_instructions(ours.read("archive/data.pkl")) == wanted


def list_instructions(data):
    found = [(op.name, arg) for op, arg, _ in pickletools.genops(data)]
    return [(name, arg) for name, arg in found if "PUT" not in name]


def test_files_beyond_4_gib_are_written_as_zip64(tmp_path):
    """Sizes and the directory's offset do not fit into 32 bits. The file is sparse."""
    numel = (4 << 30) // 4 + 3
    image = make_image({}, "float32", numel, (numel,))
    chunk = 1 << 20
    crc, one = 0, zlib.crc32(bytes(chunk))
    for _ in range(image.nbytes // chunk):
        crc = isal_zlib.crc32_combine(crc, one, chunk) if crc else one
    crc = zlib.crc32(bytes(8) + b"\0\0\x80\x3f", crc)
    with open(tmp_path / "fp32.pt", "wb") as file:
        file.write(image.head)
        file.seek(image.data_offset + image.nbytes - 4)
        file.write(b"\0\0\x80\x3f" + image.tail(crc))
    assert os.path.getsize(tmp_path / "fp32.pt") == image.size
    loaded = torch.load(tmp_path / "fp32.pt", weights_only=True, mmap=True)["param"]
    assert loaded.shape == (numel,)
    assert loaded[-2:].tolist() == [0.0, 1.0]
    (blob,) = read_header(str(tmp_path / "fp32.pt")).storages.values()
    assert (blob.offset, blob.nbytes, blob.crc) == (image.data_offset, image.nbytes, crc)
    with zipfile.ZipFile(tmp_path / "fp32.pt") as archive, archive.open("archive/data/0") as record:
        assert record.read(4) == bytes(4)


def test_a_record_after_4_gib_is_written_as_zip64(tmp_path, monkeypatch):
    """A small storage follows a large one. The limit of zip64 is patched to 1000 bytes."""
    monkeypatch.setattr("deepspeed_ucp.torchsave.zipframe._ZIP64_LIMIT", 1000)
    pickled = write_pickle([make_tensor("a", "uint8", 3000, (3000,)), make_tensor("b", "float32", 2, (2,))])
    write_torch_file(tmp_path / "x.pt", pickled, {"a": bytes(3000), "b": b"\0\0\x80\x3f" * 2})
    first, second = torch.load(tmp_path / "x.pt", weights_only=True)
    assert first.tolist() == [0] * 3000
    assert second.tolist() == [1.0, 1.0]
    assert zipfile.ZipFile(tmp_path / "x.pt").testzip() is None


EXACT = {"float64": 0.1, "int64": 2**40, "int8": -3, "bool": True, "complex64": 1.5 - 2j, "complex128": 0.1j}


@pytest.mark.parametrize("dtype", ITEMSIZE)
def test_a_step_tensor_is_written_like_by_torch(dtype, tmp_path):
    value = EXACT.get(dtype, 7)
    (tmp_path / "step.pt").write_bytes(dump_value(value, dtype)[0])
    loaded = torch.load(tmp_path / "step.pt", weights_only=True)
    assert loaded.shape == ()
    assert loaded.dtype == getattr(torch, dtype)
    assert loaded.item() == value
    found = read_header(str(tmp_path / "step.pt")).tree.item()
    assert found == value
    assert type(found) is type(loaded.item())


@pytest.mark.parametrize("value", [7, 2.5, 2**70, None, True, "x", (1, [2.0, {"a": -1}])])
def test_a_plain_step_is_written_like_by_torch(value, tmp_path):
    (tmp_path / "step.pt").write_bytes(dump_value(value)[0])
    assert torch.load(tmp_path / "step.pt", weights_only=True) == value


SHORT = {"0": Stream(4, [b"ab", b"c"])}


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (lambda _: make_image({}, "float31", 4, (4,)), "float31 .* cannot be written"),
        (lambda _: make_image({}, "float32", 3, (2, 2)), "cannot be written"),
        (lambda _: dump_value(1, "float31"), "float31"),
        (lambda _: dump_value(256, "uint8"), "uint8"),
        (lambda _: dump_value(0.5, "int64"), "int64"),
        (lambda _: dump_value("x", "float32"), "float32"),
        (
            lambda path: write_torch_file(path, write_pickle(make_tensor("0", "uint8", 4, (4,))), SHORT),
            r"record archive/data/0 has 3 bytes instead of 4",
        ),
    ],
)
def test_values_that_cannot_be_written_are_refused(write, words, tmp_path):
    with pytest.raises(CheckpointError, match=words):
        write(str(tmp_path / "x.pt"))


def test_deep_values_are_written_without_recursion():
    deep: list = []
    for _ in range(5000):
        deep = [deep]
    assert len(write_pickle(deep)) > 15_000


def test_calls_and_instances_are_written():
    found = pickle.loads(write_pickle([call("builtins", "complex", 1.0, 2.0), Global("math", "inf")]))
    assert found == [1 + 2j, math.inf]
    instance = pickle.loads(write_pickle(make_instance("types", "SimpleNamespace", {"a": (1, 2)})))
    assert instance.a == (1, 2)
    with pytest.raises(UcpError, match="type range"):
        write_pickle({"a": range(2)})
