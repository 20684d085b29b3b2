"""Client state and scheduler: objects of harmless classes are restored, others and forged ones are refused by name."""

from __future__ import annotations

import argparse
import collections
import copy
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import os
import pathlib
import random
import string
import sys
import types
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from deepspeed.runtime.zero.config import ZeroStageEnum

from deepspeed_ucp.errors import UnsupportedError
from deepspeed_ucp.formats.deepspeed.reading import list_globals, read_stage
from deepspeed_ucp.load.client import check_trusted, read_objects
from deepspeed_ucp.model.index import Use
from deepspeed_ucp.torchsave.torchfile import read_header
from tests.support.clients import (
    RUNS,
    Attributes,
    Colour,
    Frozen,
    Settings,
    check_names,
    edit_pickle,
    read_trusting_nothing,
    write,
)
from tests.support.damage import write_checksums
from tests.support.pythons import OLD_MEMBERS
from tests.synth import Topology

TOPOLOGIES = [
    Topology(0),
    Topology(0, 1, "bf16"),
    Topology(2, 2, "fp16"),
    Topology(1, 2, "bf16", "bf16"),
    Topology(3, 2),
]


class Level(enum.IntFlag):
    LOW = 1
    HIGH = 4


LEVELS = Level.LOW if OLD_MEMBERS else Level.LOW | Level.HIGH


@dataclasses.dataclass(frozen=True, slots=True)
class Slim:
    value: int


@dataclasses.dataclass
class Restoring:
    value: int

    def __setstate__(self, state: Any) -> None:
        RUNS.append("restored")


@dataclasses.dataclass
class Ending:
    value: int

    def __del__(self) -> None:
        RUNS.append("ended")


class Watched(dict[str, Any]):
    """A pickle can set an attribute of this class by code: in the second part of its state."""

    @property
    def watched(self) -> int:
        return 1

    @watched.setter
    def watched(self, value: int) -> None:
        RUNS.append("set")


class Registering(type):
    def __call__(cls, *args: Any) -> Any:
        RUNS.append("made")
        return super().__call__(*args)


class Registered(list[int], metaclass=Registering):
    pass


def _attribute(made: Any, **fields: Any) -> Any:
    vars(made).update(fields)
    return made


class Own:
    def __init__(self, value: int) -> None:
        self.value = value

    def __setstate__(self, state: Any) -> None:
        RUNS.append("restored")
        vars(self).update(state)


class Plain:
    limit = 3

    def __init__(self, value: Any) -> None:
        RUNS.append("made")
        self.value = value

    def double(self) -> Any:
        return 2 * self.value


class Speaking(Plain):
    """A class whose code runs when a script prints it."""

    def __repr__(self) -> str:
        return RUNS.append("printed") or ""


class Asked(Plain):
    """A class whose code runs when a script reads an attribute."""

    @property
    def twice(self) -> Any:
        return 2 * self.value


def read_back(folder: Path, value: Any, trust_pickle: bool = False) -> Any:
    return read_objects(write(folder, {"mine": value}), trust_pickle=trust_pickle)["mine"]


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=lambda t: t.label)
@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
@pytest.mark.parametrize("checked", [True, False], ids=["crc", "nocrc"])
def test_client_state_loads_from_all_files(tmp_path: Path, topology: Topology, legacy: bool, checked: bool) -> None:
    with write_checksums(checked):
        path = write(tmp_path, {"epoch": 3, "rng": torch.arange(4)}, topology, legacy, lr_scheduler={"last": 9})
    found = read_objects(path, trust_pickle=False)
    assert (found["epoch"], found["lr_scheduler"], found["global_steps"]) == (3, {"last": 9}, 3)
    assert found["rng"].equal(torch.arange(4))
    assert not {"module", "optimizer", "frozen_param_fragments"} & set(found)


COMMON = {
    "namespace": argparse.Namespace(lr=1e-3, betas=(0.9, 0.99), path=pathlib.Path("a/b")),
    "arrays": [np.arange(6.0).reshape(2, 3), np.array([True, False]), np.array(["a"])],
    "numpy": [np.float32(1.5), np.int64(3), np.array(["2026-01-02"], dtype="datetime64[D]")],
    "numpy rng": [np.random.get_state(), np.random.default_rng(0).bit_generator.state],  # noqa: NPY002 - as scripts save
    "numpy legacy rng": np.random.RandomState(3).get_state(),
    "python rng": random.getstate(),
    "torch rng": torch.get_rng_state(),
    "datetime": datetime.datetime(2026, 1, 2, 3, 4, 5),
    "times": [datetime.timedelta(days=1), datetime.date(2026, 1, 2), datetime.time(1, 2, tzinfo=datetime.UTC)],
    "aware datetime": datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC),
    "path": pathlib.Path("/data/x"),
    "dicts": [collections.Counter("aab"), collections.OrderedDict(b=1, a=2), collections.defaultdict(int, x=1)],
    "deque": collections.deque([1, 2], maxlen=3),
    "enums": [Colour.RED, {Colour.RED: LEVELS}],
    "a dict with attributes": _attribute(Attributes(a=1), b=[2]),
    "dataclasses": [Settings("a", [1], Settings("b")), Frozen(3), Slim(4), argparse.Namespace(x=Settings("c"))],
    "simple namespace": types.SimpleNamespace(a=1),
    "classes of numbers": [np.float32, float, torch.bfloat16],
    "sets and bytes": [{1, 2}, frozenset({3}), b"ab", bytearray(b"cd")],
    "numbers": [1j, 1 << 80, float("inf"), True, None, slice(1, 2)],
    "torch": [torch.Size((1, 2)), torch.float16, torch.device("cpu"), torch.tensor(2.0), torch.ones(2, 3).t()],
    "numbers of the standard library": [range(2, 9, 3), decimal.Decimal("1.50"), fractions.Fraction(-1, 3), Ellipsis],
    "identity": {"run": uuid.UUID(int=5)},
    "kinds of torch": [torch.strided, torch.per_tensor_affine, torch.int4, torch.device("cuda", 1)],
    "numpy's classes": [np.bool_, np.int64, np.dtype("f4"), np.bool_(True), np.str_("a")],
    "nested": {"a": [{"b": (torch.ones(2), np.zeros(2))}], 3: "x", ("k", 1): 2},
}


def same(left: Any, right: Any) -> bool:
    if type(left) is not type(right):
        return False
    if isinstance(right, (torch.Tensor, np.ndarray)):
        return left.dtype == right.dtype and left.tolist() == right.tolist()
    if isinstance(right, dict):
        return list(left) == list(right) and all(same(left[key], value) for key, value in right.items())
    if isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


def read_trusted(folder: Path, value: Any) -> Any:
    path = write(folder, {"mine": value})
    check_names(path)
    return read_trusting_nothing(path)["mine"]


@pytest.mark.parametrize("kind", COMMON)
def test_objects_of_common_classes_are_restored(tmp_path: Path, kind: str) -> None:
    if OLD_MEMBERS and kind == "enums":
        pytest.skip("this Python pickles members of flags by a `getattr` that is refused")
    assert same(read_trusted(tmp_path, COMMON[kind]), COMMON[kind])


@pytest.mark.parametrize("then", ["core", "_core"], ids=["numpy1", "numpy2"])
@pytest.mark.parametrize("trust", [False, True])
def test_arrays_pickled_by_another_numpy_version_are_restored(tmp_path: Path, then: str, trust: bool) -> None:
    """Numpy 1 pickles ``numpy.core.multiarray._reconstruct``, numpy 2 has it under ``numpy._core``."""
    held = [np.random.RandomState(3).get_state(), np.float64(2.5), np.array(["a"])]
    path = write(tmp_path, {"mine": held})
    now = next(use.kind for use in read_header(path).uses.values() if use.kind.endswith("multiarray.scalar"))
    edit_pickle(path, lambda data: data.replace(f"c{now[:-7]}\n".encode(), f"cnumpy.{then}.multiarray\n".encode()))
    assert {f"numpy.{then}.multiarray.scalar"} == {
        use.kind for use in list_globals(read_header(path)) if "multiarray.scalar" in use.kind
    }
    check_names(path)
    assert same(read_objects(path, trust_pickle=trust)["mine"], held)


def test_partials_of_harmless_functions_are_restored(tmp_path: Path) -> None:
    (found,) = read_trusted(tmp_path, [functools.partial(int, base=2)])
    assert (type(found), found.func, found("101")) == (functools.partial, int, 5)


def test_objects_with_attributes_are_restored_without_running_their_code(tmp_path: Path) -> None:
    value = Plain([Plain(1), Settings("a")])
    RUNS.clear()
    found = read_trusted(tmp_path, value)
    assert not RUNS
    assert (type(found), found.value[0].double(), found.value[1]) == (Plain, 2, Settings("a"))


def test_objects_of_trainers_are_restored(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    parsing = pytest.importorskip("lightning.pytorch.utilities.parsing")
    config = transformers.LlamaConfig(hidden_size=32, dtype=torch.bfloat16)
    held = [config, transformers.BatchEncoding({"a": [1]}), parsing.AttributeDict(a=1)]
    found = read_trusted(tmp_path, held)
    assert list(map(type, found)) == list(map(type, held))
    assert (found[0].to_dict(), found[1].data, found[2].a) == (config.to_dict(), {"a": [1]}, 1)


def test_parameters_and_cyclic_references_are_restored(tmp_path: Path) -> None:
    found = read_back(tmp_path / "parameter", torch.nn.Parameter(torch.ones(2)))
    assert found.is_leaf and copy.deepcopy(found).tolist() == [1.0, 1.0]
    value: dict[str, Any] = {"x": 1}
    value["self"] = value
    found = read_back(tmp_path / "cycle", value)
    assert found["self"] is found


def test_trust_pickle_and_add_safe_globals_allow_a_class(tmp_path: Path) -> None:
    assert read_back(tmp_path / "a", Own(3), trust_pickle=True).value == 3
    assert list(read_back(tmp_path / "b", collections.deque([1, 2]), trust_pickle=True)) == [1, 2]
    with torch.serialization.safe_globals([Own]):
        assert read_back(tmp_path / "c", Own(4)).value == 4
    before = set(torch.serialization.get_safe_globals())
    with pytest.raises(UnsupportedError):
        read_back(tmp_path / "d", Own(5))
    read_back(tmp_path / "e", argparse.Namespace(a=1))
    assert set(torch.serialization.get_safe_globals()) == before


def test_a_missing_class_is_not_reported_as_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Own, "__module__", "test_client_of_then")
    monkeypatch.setitem(sys.modules, "test_client_of_then", sys.modules[__name__])
    path = write(tmp_path, {"mine": Own(3)})
    monkeypatch.undo()
    with pytest.raises(UnsupportedError, match="cannot be unpickled .ModuleNotFoundError: .*test_client_of_then"):
        read_objects(path, trust_pickle=True)


@pytest.mark.parametrize(
    "wrap",
    [dict, collections.OrderedDict, lambda v: [dict(v)], lambda v: argparse.Namespace(**v)],
    ids=["dict", "ordered", "list", "namespace"],
)
def test_restored_tensors_do_not_map_the_file(tmp_path: Path, wrap: Any) -> None:
    path = write(tmp_path, {"mine": wrap({"w": torch.ones(5000)})})
    found = read_objects(path, trust_pickle=False)["mine"]
    found = found[0] if isinstance(found, list) else found
    tensor = found.w if isinstance(found, argparse.Namespace) else found["w"]
    with open(path, "r+b") as stream:  # as a later save over the same tag would
        stream.write(bytes(Path(path).stat().st_size))
    assert tensor.eq(1).all()


class Call:
    """Pickled as a call.

    Python 3.11.0 to 3.11.3 pickle a member of an enum as ``getattr(kind, name)``.
    """

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call


RED = Call(getattr, (Colour, "RED"))


def test_enum_members_pickled_as_getattr_calls_are_restored(tmp_path: Path) -> None:
    path = str(tmp_path / "x.pt")
    torch.save({"colour": RED, "stage": Call(getattr, (ZeroStageEnum, "weights"))}, path)
    held = read_trusting_nothing(path)
    assert held["colour"] is Colour.RED and held["stage"] is ZeroStageEnum.weights
    assert read_stage(read_header(path).tree["stage"]) == 3
    check_names(path)


# -- refused: unknown classes, and harmless ones that a forged file uses to run code, or to take memory or time --------


UNKNOWN = {
    "own class": (Own(3), "test_client.Own"),
    "defaultdict": (collections.defaultdict(Own, x=1), "defaultdict|Own"),
    "function": (len, "len"),
    "partial": (functools.partial(os.system, "true"), r"posix.system\)"),
    "a partial of a value's class": (functools.partial(Settings, "a"), "Settings"),
    "a value in a partial": (functools.partial(int, Settings("a")), "Settings"),
    "a class that speaks": (Speaking(1), "Speaking"),
    "a class that is asked": (Asked(1), "Asked"),
    "a tool of the standard library": (_attribute(object.__new__(string.Formatter), a=1), "Formatter"),
    "a fraction as a key": ({fractions.Fraction(1, 3): 1}, "Fraction"),
    "several": ([Own(3), len, {"x": (os.getcwd,)}], "test_client.Own, builtins.len, posix.getcwd"),
    "a value as a key": ({Frozen(1): 2}, "Frozen"),
    "a value in a set": ([{(Frozen(1), 1)}], "Frozen"),
    "a value in a frozen set": (frozenset([Frozen(1)]), "Frozen"),
    "a value as a key of another kind of dict": (collections.OrderedDict({Frozen(1): 2}), "Frozen"),
    "a value in a counter": (collections.Counter([Frozen(1)]), "Frozen"),
    "a dataclass that is no value": (Restoring(1), "Restoring"),
    "a dataclass that ends": (Ending(1), "Ending"),
    "a class as a value": (Settings, "Settings"),
    "a dict that sets attributes by code": (Watched(a=1), "Watched"),
    "a list that is made by code": (Registered([1]), "Registered"),
    "objects in an array": (np.array([Own(3)], dtype=object), "Own"),
}
CALLS = {
    "a method": (Call(getattr, (Colour, "__init_subclass__")), "__init_subclass__"),
    "a class method": (Call(getattr, (dict, "fromkeys")), "fromkeys"),
    "a class": (Call(getattr, (object, "__class__")), "__class__"),
    "given": (Call(collections.defaultdict, (getattr,)), "builtins.getattr"),
    "a made name": (Call(getattr, (Colour, Call(str, ("RED",)))), "builtins.getattr"),
    "of a member": (Call(getattr, (RED, "name")), "builtins.getattr"),
    "a default": (Call(getattr, (Colour, "RED", None)), "builtins.getattr"),
}
"""Calls of ``getattr`` that name no member of an enum."""


CLASSES = Settings.__module__


def name(module: str, attribute: str) -> bytes:
    return f"c{module}\n{attribute}\n".encode()


def text(value: str) -> bytes:
    return b"X" + len(value).to_bytes(4, "little") + value.encode()


CLASS, KEEP, KEPT, LOSE = name(CLASSES, "Settings"), b"r\0\0\1\0", b"j\0\0\1\0", b"0"
CLASS_NAME = f"{CLASSES}.Settings"
EMPTY, CALL, ONE = b")\x81", b"R", b"K\1"
VALUE = CLASS + EMPTY
SETSTATE = text("__setstate__") + name("__builtin__", "set")
FROZEN = name(CLASSES, "Frozen") + EMPTY + b"}" + text("value") + ONE + b"sb"
HASHED = b"(" + FROZEN + b"l"
NAMESPACE, ATTRIBUTES = name("argparse", "Namespace") + EMPTY, name(CLASSES, "Attributes")
SIMPLE, ORDERED = name("types", "SimpleNamespace"), name("collections", "OrderedDict")
FRACTION, DECIMAL = name("fractions", "Fraction"), name("decimal", "Decimal")
UUID, UUID_STATE = name("uuid", "UUID") + EMPTY, b"}" + text("int") + ONE + b"s"
TENSOR = (
    name("torch._tensor", "_rebuild_from_type_v2")
    + (b"(" + name("builtins", "complex") + name("builtins", "complex") + b")}" + SETSTATE + b"st")
    + b"R"
)
VALUES = {
    "called": CLASS + text("a") + b"\x85" + CALL,
    "called with keywords": CLASS + b")}" + text("name") + ONE + b"s\x92",
    "called and lost": CLASS + KEEP + text("a") + b"\x85" + CALL + LOSE + KEPT + EMPTY,
    "an instance is called": VALUE + b")" + CALL,
    "an instance is called and lost": CLASS + KEEP + EMPTY + b")" + CALL + LOSE + KEPT + EMPTY,
    "filled": VALUE + b"(" + ONE + b"e",
    "filled and lost": b"]" + CLASS + KEEP + EMPTY + b"(" + ONE + b"e" + LOSE + KEPT + EMPTY + b"a",
    "given entries": VALUE + ONE + ONE + b"s",
    "given to a call": name("__builtin__", "slice") + VALUE + b"\x85" + CALL,
    "deep in a call": name("__builtin__", "bytearray") + b"]" + VALUE + b"a\x85" + CALL,
    "its class is given to a call": name("collections", "defaultdict") + CLASS + KEEP + b"\x85R0" + KEPT + EMPTY,
    "hashed": b"}" + VALUE + ONE + b"s",
    "attributes by a tuple": VALUE + b"N}" + text("name") + ONE + b"s\x86b",
    "the state of what a call makes": name("collections", "Counter") + b")R}" + text("a") + VALUE + b"sb",
}
"""Values that are more than objects with attributes."""
COSTLY = {
    "a list of a range": name("__builtin__", "list") + name("__builtin__", "xrange") + b"J\xff\xff\xff\x7f\x85R\x85R",
    "a number by an exponent": FRACTION + text("1e999999999") + b"\x85R",
    "a number of a decimal": name("__builtin__", "int") + DECIMAL + text("1e999999999") + b"\x85R\x85R",
    "a fraction of a decimal": FRACTION + DECIMAL + text("1e9") + b"\x85R\x85R",
    "a partial that is called": name("functools", "partial")
    + name("__builtin__", "bytearray")
    + b"\x85RJ\xff\xff\xff\x7f\x85R",
}
"""Small objects that make large ones."""
STEERED = {
    "of a value": VALUE + b"}" + SETSTATE + b"sb" + HASHED + b"b",
    "of an object": NAMESPACE + b"}" + SETSTATE + b"sb" + HASHED + b"b",
    "of a method": NAMESPACE + b"}" + text("append") + name("__builtin__", "hash") + b"sbNa",
    "by an entry": ATTRIBUTES + EMPTY + SETSTATE + b"s" + HASHED + b"b",
    "by an entry of a list": ATTRIBUTES + EMPTY + text("extend") + name("__builtin__", "set") + b"s(" + HASHED + b"e",
    "of a tensor": TENSOR + HASHED + b"b",
    "of a namespace": SIMPLE + b"}" + SETSTATE + b"s\x85R" + HASHED + b"b",
    "by keywords": SIMPLE + b")}" + SETSTATE + b"s\x92" + HASHED + b"b",
    "of an ordered dict": ORDERED + b")R}" + SETSTATE + b"sb" + HASHED + b"b",
    "by an argument": ATTRIBUTES + b"}" + SETSTATE + b"s\x85R" + HASHED + b"b",
}
"""Objects that take ``__setstate__``, ``append`` or similar methods from the file."""
HASHES = {
    "of a uuid": UUID + UUID_STATE + text("is_safe") + FROZEN + b"sb",
    "of a uuid, later": b"(" + UUID_STATE + KEEP + UUID + KEPT + b"b" + KEPT + text("is_safe") + FROZEN + b"s0l",
    "of a uuid, nested": UUID + UUID_STATE + text("is_safe") + b"K\1\x85sb",
}
"""UUIDs whose `int` is not a number, so that hashing them runs code."""
MEMBERS = {
    attribute: name(module, attribute) + ONE + b"\x85R}" + text("_value_") + text("other") + b"sb"
    for module, attribute in ((CLASSES, "Colour"), ("deepspeed.runtime.zero.config", "ZeroStageEnum"))
}
"""Changes of an enum's members, which the whole process shares."""
REFUSED: dict[str, tuple[Any, str]] = {
    **{kind: (value, rf"consent \(.*({name})") for kind, (value, name) in UNKNOWN.items()},
    **{kind: (call, rf"is no enum with a member|consent \(.*{name}") for kind, (call, name) in CALLS.items()},
    **{
        kind: (forged, words)
        for table, words in (
            (VALUES, r"consent \(.*Settings"),
            (COSTLY, "consent"),
            (STEERED, "consent|state is not a dictionary"),
            (HASHES, r"consent \(.*uuid.UUID"),
            (MEMBERS, r"consent \(.*(Colour|ZeroStageEnum)"),
        )
        for kind, forged in table.items()
    },
}


@pytest.mark.parametrize("kind", REFUSED)
def test_unknown_classes_and_forged_pickles_are_refused_and_run_no_code(kind: str, tmp_path: Path) -> None:
    """The check before DeepSpeed's load refuses them, too. `trust_pickle` for a class does not allow calls of it."""
    held, words = REFUSED[kind]
    is_forged = isinstance(held, bytes)
    path = write(tmp_path, {"mine": "here" if is_forged else held, "colour": RED})

    def forge(data: bytes) -> bytes:
        assert data.count(text("here")) == 1
        return data.replace(text("here"), held)

    if is_forged:
        edit_pickle(path, forge)
    RUNS.clear()
    for look in (read_trusting_nothing, check_names):
        with pytest.raises(UnsupportedError, match=words) as error:
            look(path)
        if kind in STEERED:
            consent = torch.serialization.safe_globals([argparse.Namespace, types.SimpleNamespace])
            with consent, pytest.raises(UnsupportedError, match=words):
                look(path)
        if kind in UNKNOWN:
            shown = str(error.value)
            assert str(tmp_path) in shown and "add_safe_globals" in shown
            # the option trust_pickle has no effect on the files of a trainer
            assert look is check_names or not [
                each for each in ("trust_pickle", "weights_only", "\x1b") if each in shown
            ]
    assert not RUNS


def test_a_class_that_is_harmless_as_a_value_is_refused_in_a_call() -> None:
    value, called = Use(CLASS_NAME, value=True), Use(CLASS_NAME)
    for uses in ([value, called], [called]):
        with pytest.raises(UnsupportedError, match="Settings"):
            check_trusted(dict.fromkeys(uses, "x.pt"))
    check_trusted({value: "x.pt"})
