"""A rewritten state file loads the same objects as the original, and rewriting runs no code of the file."""

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
import os
import pathlib
import pickle
import sys
import types
import uuid
from contextlib import nullcontext

import numpy as np
import pytest
import torch

from deepspeed_ucp.errors import CheckpointError
from deepspeed_ucp.torchsave import rewrite as rewriting
from deepspeed_ucp.torchsave.repickle import write_pickle
from deepspeed_ucp.torchsave.rewrite import save_parts
from deepspeed_ucp.torchsave.torchfile import read_header
from deepspeed_ucp.torchsave.unpickle import read_pickle
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
    def __init__(self, value):
        self.value = value

    def __getstate__(self):
        return {"kept": self.value}

    def __setstate__(self, state):
        self.value = state["kept"]


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
    "any length": lambda: [
        *(0, 255, 256, 65535, 65536, -(2**31), 2**31, 2**63, -(2**63), 10**400, -(10**700), 0.1, -0.0),
        *("ä\ud800\n", "x" * 300, b"\xff" * 300),
    ],
    "containers": lambda: ((), (1,), (1, 2, 3, 4), {1: 2, "1": [], (1, 2): {}}, set(), {1, 2}, frozenset("ab"), []),
    "more containers": lambda: [
        collections.OrderedDict(a=1),
        collections.defaultdict(list, a=[1]),
        collections.Counter("aab"),
        collections.deque([1, 2], maxlen=3),
        Point(1, [2]),
        range(3),
        slice(1, 2),
        array.array("d", [1.0]),
        types.SimpleNamespace(a=1),
        ...,
    ],
    "equal keys": lambda: [{1: "int"}, {True: "bool"}, {1.0: "float"}],
    "namespace": lambda: argparse.Namespace(lr=1e-3, betas=(0.9, 0.99), path=pathlib.Path("a/b")),
    "numbers": lambda: [1 + 2j, decimal.Decimal("0.1"), fractions.Fraction(1, 3), uuid.UUID(int=5)],
    "times": lambda: [datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC), datetime.timedelta(1, 2)],
    "enums": lambda: [Colour.RED, Level.LOW | Level.HIGH, {Colour.RED: 1}],
    "dataclasses": lambda: [Settings(0.1, ["a"], Settings(0.2)), Slotted(1, (2, 3))],
    "own classes": lambda: [Custom([1]), Keyed(value=[2]), make_refilled()],
    "classes themselves": lambda: [Settings, Colour, len, torch.nn.Linear, np.float32, functools.partial(int, base=2)],
    "attributes": lambda: [
        make_attributed(collections.OrderedDict, {"a": 1}, _metadata={"version": 1}),
        make_attributed(Named, {"a": 1}, mark=[1]),
        make_attributed(Stack, [1, 2], mark=(1,)),
    ],
    "numpy": lambda: [
        np.arange(6.0).reshape(2, 3),
        np.asfortranarray(np.arange(6).reshape(2, 3)),
        np.array(["a", "bc"]),
        np.array([None, [1]], dtype=object),
        np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
        np.float32(1.5),
        np.int64(3),
        np.dtype("f4"),
        np.random.RandomState(0).get_state(),
        np.random.default_rng(0).bit_generator.state,
        np.datetime64("2026-01-02"),
    ],
    "torch": lambda: [torch.float16, torch.Size((1, 2)), torch.device("cpu"), torch.strided, torch.get_rng_state()],
    "tensors": make_tensors,
    "untyped": lambda: [
        torch.ones(2).to(torch.float8_e4m3fn),
        torch.arange(3).to(torch.uint16),
        torch.ones(2).untyped_storage(),
    ],
    "cycles": make_cycles,
    "module": lambda: torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3)),
    "scheduler": lambda: torch.optim.lr_scheduler.StepLR(
        torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.1), 2
    ).state_dict(),
}


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
    if not (legacy and case == "untyped"):
        value = {"value": CASES[case](), "again": 1}
        assert_same(*rewrite(tmp_path, value, _use_new_zipfile_serialization=not legacy))


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("case", [name for name in CASES if name not in ("tensors", "untyped", "module")])
def test_pickles_of_every_protocol_are_rewritten(case, protocol):
    value = CASES[case]()
    old = pickle.dumps(value, protocol)
    found = read_pickle(old, "x.pt")
    assert found.proto == (protocol if protocol > 1 else 0)
    assert found.end == len(old)
    assert_same(pickle.loads(old), pickle.loads(write_pickle(found.root, max(protocol, 2))))


class Trap:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_rewriting_runs_no_code(tmp_path):
    torch.save({"trap": Trap(str(tmp_path / "sprung"))}, tmp_path / "old.pt")
    rewrite_file(tmp_path)
    assert not (tmp_path / "sprung").exists()
    torch.load(tmp_path / "new.pt", weights_only=False)
    assert (tmp_path / "sprung").exists()  # like the old file


def test_rewriting_needs_no_importable_classes(tmp_path, monkeypatch):
    module = types.ModuleType("training_script")
    exec("class Progress:\n    pass", module.__dict__)
    module.Progress.__module__ = "training_script"
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "training_script", module)
        torch.save({"progress": make_attributed(module.Progress, epoch=3)}, tmp_path / "old.pt")
    rewrite_file(tmp_path)
    monkeypatch.setitem(sys.modules, "training_script", module)
    assert torch.load(tmp_path / "new.pt", weights_only=False)["progress"].epoch == 3


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


@pytest.mark.parametrize(
    "data",
    [
        *(pickle.dumps({"a": [1, (2, "x")], "b": {3}}, 2)[:end] for end in range(1, 40, 3)),
        b"\x80\x02cmath\ninf\n}b.",  # BUILD on a global
        b"\x80\x02}(K\x01u.",  # a key without a value
        b"\x80\x02K\x01K\x02.",  # two objects
        b"\x80\x02(K\x01.",  # a mark is left
        b"\x80\x02R.",
        b"\x80\x02h\x05.",
    ],
)
def test_damaged_pickles_are_not_rewritten(data):
    with pytest.raises(CheckpointError, match=r"x\.pt: its pickle cannot be read"):
        read_pickle(data, "x.pt")
