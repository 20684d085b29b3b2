"""Files written without torch load like those of ``torch.save``. Rewriting runs no code of a file."""

from __future__ import annotations

import argparse
import array
import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import math
import os
import pathlib
import pickle
import pickletools
import sys
import types
import uuid
import zipfile
import zlib
from contextlib import nullcontext
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from isal import isal_zlib

from deepspeed_ucp.errors import CheckpointError, UcpError
from deepspeed_ucp.model.storage import ITEMSIZE
from deepspeed_ucp.torchsave import rewrite as rewriting
from deepspeed_ucp.torchsave import unpickle
from deepspeed_ucp.torchsave.objects import Global, call, make_instance
from deepspeed_ucp.torchsave.repickle import write_pickle
from deepspeed_ucp.torchsave.rewrite import save_parts
from deepspeed_ucp.torchsave.torchfile import read_header
from deepspeed_ucp.torchsave.unpickle import read_pickle
from deepspeed_ucp.torchsave.zipframe import PAGE, RecordWriter, Stream, dump_value, make_image, make_tensor
from tests.support.damage import flip, write_checksums
from tests.torchsave.inputs import assert_same


class Colour(enum.Enum):
    RED = 1


class Level(enum.IntFlag):
    LOW = 1
    HIGH = 4


Point = collections.namedtuple("Point", "x y")


@dataclasses.dataclass
class Settings:
    lr: float
    names: list[str] = dataclasses.field(default_factory=list)
    parent: Settings | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    a: int
    b: tuple[int, ...]


class Named(dict):
    """A dictionary with attributes."""


class Stack(list):
    """A list with attributes."""


class Custom:
    """An object whose state is not a dictionary."""

    def __init__(self, value):
        self.value = value

    def __getstate__(self):
        return [self.value]

    def __setstate__(self, state):
        (self.value,) = state


class Keyed:
    """An object created with keyword arguments (NEWOBJ_EX)."""

    def __new__(cls, *, value):
        made = super().__new__(cls)
        made.value = value
        return made

    def __getnewargs_ex__(self):
        return (), {"value": self.value}


class Refilled:
    """An object whose __reduce__ returns all five parts."""

    def __init__(self, first):
        self.first, self.items, self.pairs = first, [], {}

    def append(self, item):
        self.items.append(item)

    def __setitem__(self, key, value):
        self.pairs[key] = value

    def __reduce__(self):
        return Refilled, (self.first,), {"marked": True}, iter(self.items), iter(self.pairs.items())


def make_refilled():
    refilled = Refilled((1, 2))
    refilled.items, refilled.pairs, refilled.marked = [3, [4]], {"a": 5, (6,): 7}, True
    return refilled


def make_attributed(kind, *args, **attributes):
    instance = kind(*args)
    instance.__dict__.update(attributes)
    return instance


def make_odd_uuid():
    """Make a UUID whose hash does not read a number."""
    odd = uuid.UUID(int=1)
    object.__setattr__(odd, "int", (len,))
    return odd


def make_cycles():
    shared, loop, table, knot = ["shared"], [], {}, ([],)
    loop.append(loop)
    knot[0].append(knot)
    table["self"] = (table, [table], shared)
    owner = argparse.Namespace(children=[])
    owner.children.append(argparse.Namespace(parent=owner, held=shared))
    owner.me = owner
    pair = (shared, (shared,))
    return {"twice": [shared, shared], "loop": loop, "table": table, "owner": owner, "pair": pair, "knot": knot}


def make_tensors():
    base = torch.arange(24.0)
    return {
        "views": [base[3:9], base.view(4, 6).t(), base[::2]],
        "parameter": torch.nn.Parameter(torch.ones(2, 3)),
        "attributed": make_attributed(torch.nn.Parameter, torch.ones(2), tensor_model_parallel=True),
        "grad": torch.ones(2, requires_grad=True),
        "sparse": torch.sparse_coo_tensor([[0, 2]], [1.0, 2.0], (4,)),
        "csr": torch.eye(3).to_sparse_csr(),
        "quantized": torch.quantize_per_tensor(torch.ones(3), 0.1, 2, torch.qint8),
        "complex": torch.view_as_complex(torch.ones(2, 2)).conj(),
        "meta": torch.empty(3, device="meta"),
        "dtypes": [torch.zeros(3).to(dtype) for dtype in (torch.bfloat16, torch.bool, torch.complex64, torch.int64)],
        "empty": [torch.empty(0, 3), torch.tensor(5.0), torch.empty(0)],
        "typed": torch.FloatStorage([1.0, 2.0]),
        "expanded": torch.ones(1).expand(1000),
    }


CASES = {
    "plain": lambda: [None, True, -1, 2**80, -(2**4000), 1.5, float("inf"), "ä\n", "", b"\x00\xff", bytearray(b"ab")],
    "integers of any length": lambda: [
        *(sign * 2**bits for bits in (8, 16, 31, 32, 63, 64, 1400) for sign in (-1, 1)),
        255,
    ],
    "text of any length": lambda: [0.1, -0.0, "ä\ud800\n", "x" * 300, b"\xff" * 300],
    "containers": lambda: ((), (1,), (1, 2, 3, 4), {1: 2, "1": [], (1, 2): {}}, set(), {1, 2}, frozenset("ab"), []),
    "dicts": lambda: [collections.OrderedDict(a=1), collections.defaultdict(list, a=[1]), collections.Counter("aab")],
    "sequences": lambda: [collections.deque([1, 2], maxlen=3), Point(1, [2]), array.array("d", [1.0])],
    "builtins": lambda: [range(3), slice(1, 2), types.SimpleNamespace(a=1), ...],
    "equal keys": lambda: [{1: "int"}, {True: "bool"}, {1.0: "float"}],
    "namespace": lambda: argparse.Namespace(lr=1e-3, betas=(0.9, 0.99), path=pathlib.Path("a/b")),
    "numbers": lambda: [1 + 2j, decimal.Decimal("0.1"), fractions.Fraction(1, 3)],
    "uuids": lambda: [uuid.UUID(int=7), {uuid.UUID(int=9): 1}, make_odd_uuid()],
    "times": lambda: [datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC), datetime.timedelta(1, 2)],
    "enums": lambda: [Colour.RED, Level.LOW | Level.HIGH, {Colour.RED: 1}],
    "dataclasses": lambda: [Settings(0.1, ["a"], Settings(0.2)), Slotted(1, (2, 3))],
    "own classes": lambda: [Custom([1]), Keyed(value=[2]), make_refilled()],
    "classes themselves": lambda: [Settings, Colour, len, torch.nn.Linear, np.float32, functools.partial(int, base=2)],
    "attributes": lambda: [make_attributed(Named, {"a": 1}, mark=[1]), make_attributed(Stack, [1, 2], mark=(1,))],
    "ordered attributes": lambda: make_attributed(collections.OrderedDict, {"a": 1}, _metadata={"version": 1}),
    "arrays": lambda: [
        np.arange(6.0).reshape(2, 3),
        np.asfortranarray(np.arange(6).reshape(2, 3)),
        np.array(["a", "bc"]),
    ],
    "arrays of objects": lambda: [np.array([None, [1]], dtype=object), np.array([(1, 2.0)], dtype="i4, f8")],
    "numpy": lambda: [np.float32(1.5), np.int64(3), np.dtype("f4"), np.datetime64("2026-01-02")],
    "numpy's generators": lambda: [np.random.RandomState(0).get_state(), np.random.default_rng(0).bit_generator.state],
    "torch": lambda: [torch.float16, torch.Size((1, 2)), torch.device("cpu"), torch.strided, torch.get_rng_state()],
    "tensors": make_tensors,
    "untyped": lambda: [torch.ones(2).to(torch.float8_e4m3fn), torch.arange(3).to(torch.uint16)],
    "untyped storage": lambda: torch.ones(2).untyped_storage(),
    "cycles": make_cycles,
    "module": lambda: torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3)),
    "scheduler": lambda: torch.optim.lr_scheduler.StepLR(
        torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.1), 2
    ).state_dict(),
}


OBJECTS = ("own classes", "attributes", "uuids", "namespace", "builtins", "ordered attributes", "dataclasses", "enums")


def rewrite_file(folder):
    file = read_header(str(folder / "old.pt"))
    return save_parts(file, file.tree, str(folder / "new.pt"), {})


def rewrite(folder, value, **options):
    torch.save(value, folder / "old.pt", **options)
    rewrite_file(folder)
    return [torch.load(folder / name, weights_only=False) for name in ("old.pt", "new.pt")]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
@pytest.mark.parametrize("case", CASES)
def test_a_rewritten_file_loads_every_type_of_object(case, legacy, tmp_path):
    if not (legacy and case.startswith("untyped")):
        value = {"value": CASES[case](), "again": 1}
        assert_same(*rewrite(tmp_path, value, _use_new_zipfile_serialization=not legacy))


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("case", [name for name in CASES if name not in ("tensors", "module") and "typed" not in name])
def test_pickles_of_every_protocol_are_rewritten(case, protocol):
    value = CASES[case]()
    old = pickle.dumps(value, protocol)
    found = read_pickle(old, "x.pt")
    assert found.proto == (protocol if protocol > 1 else 0)
    assert_same(pickle.loads(old), pickle.loads(write_pickle(found.root, max(protocol, 2))))


@given(st.lists(st.sampled_from(OBJECTS), max_size=8), st.sampled_from([2, 4, 5]))
def test_the_shortcut_for_stateless_objects_changes_no_result(chosen, protocol):
    data = pickle.dumps([CASES[case]() for case in chosen], protocol)
    with mock.patch.object(unpickle, "_is_bare", return_value=False):
        slowly = read_pickle(data, "x")
    quickly = read_pickle(data, "x")
    assert quickly.list_uses() == slowly.list_uses()
    assert write_pickle(quickly.root, protocol) == write_pickle(slowly.root, protocol)


class Trap:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_rewriting_imports_and_runs_nothing(tmp_path, monkeypatch):
    module = types.ModuleType("training_script")
    exec("class Progress:\n    pass", module.__dict__)
    module.Progress.__module__ = "training_script"
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "training_script", module)
        progress = make_attributed(module.Progress, epoch=3)
        torch.save({"trap": Trap(str(tmp_path / "sprung")), "progress": progress}, tmp_path / "old.pt")
    rewrite_file(tmp_path)
    assert not (tmp_path / "sprung").exists()
    monkeypatch.setitem(sys.modules, "training_script", module)
    assert torch.load(tmp_path / "new.pt", weights_only=False)["progress"].epoch == 3
    assert (tmp_path / "sprung").exists()  # like the old file


@pytest.mark.parametrize("checked", [True, False], ids=["crc", "nocrc"])
def test_storages_are_copied_in_pieces_and_verified(checked, tmp_path, monkeypatch):
    monkeypatch.setattr(rewriting, "CHUNK", 7)
    with write_checksums(checked):
        old, new = rewrite(tmp_path, {"a": torch.arange(100.0)})
    assert_same(old, new)
    offset = read_header(str(tmp_path / "old.pt")).storages["0"].offset
    flip(tmp_path / "old.pt", offset + 50)
    with pytest.raises(CheckpointError, match=r"old\.pt: data/0 has CRC32") if checked else nullcontext():
        rewrite_file(tmp_path)


# -- files written without torch equal those of torch.save for torch, zipfile and the package's reader -----------------

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
            param = loaded["param"]
            assert (loaded["cat_dim"], param.dtype, param.shape) == (0, getattr(torch, dtype), shape)
            assert param.is_contiguous() and bytes(param.untyped_storage()) == data
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


PLAIN = (7, 2.5, 2**70, None, True, "x", (1, [2.0, {"a": -1}]))


@pytest.mark.parametrize(
    ("dtype", "value"), [*((dtype, EXACT.get(dtype, 7)) for dtype in ITEMSIZE), *((None, value) for value in PLAIN)]
)
def test_a_step_is_written_like_by_torch(dtype, value, tmp_path):
    (tmp_path / "step.pt").write_bytes(dump_value(value, dtype)[0])
    loaded = torch.load(tmp_path / "step.pt", weights_only=True)
    found = read_header(str(tmp_path / "step.pt")).tree
    if dtype is not None:
        assert (loaded.shape, loaded.dtype) == ((), getattr(torch, dtype))
        loaded, found = loaded.item(), found.item()
    assert loaded == found == value
    assert type(loaded) is type(found)


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
