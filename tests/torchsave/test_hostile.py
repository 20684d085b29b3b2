"""Reading a file never runs code of its pickles; malicious and damaged files quickly raise an error of the package."""

from __future__ import annotations

import io
import os
import pickle
import pickletools
import time
import tracemalloc
import zipfile
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from itertools import cycle, product
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_ucp.comm import Comm
from deepspeed_ucp.config import UniversalConfig
from deepspeed_ucp.errors import CheckpointError, UcpError, UnsupportedError
from deepspeed_ucp.formats import open_checkpoint
from deepspeed_ucp.formats.deepspeed.headers import Unread
from deepspeed_ucp.formats.deepspeed.naming import Naming
from deepspeed_ucp.formats.deepspeed.reading import read_file, read_hyper
from deepspeed_ucp.load.client import check_trusted, read_objects
from deepspeed_ucp.torchsave.objects import MOST_BITS, Global, PickledObject, describe, has_more_parts, walk
from deepspeed_ucp.torchsave.repickle import write_pickle
from deepspeed_ucp.torchsave.torchfile import list_records, read_header
from deepspeed_ucp.torchsave.unpickle import read_pickle
from tests.support.reshard import examples
from tests.synth import Model, Param, Run, Topology, build_files, random_state, write_files
from tests.torchsave.inputs import MODEL_FILE, OPTIM_FILE, forge, look_at_file, look_at_pickle, rebuild_zip, text

MODEL = Model((Param("a", (3, 5)), Param("b", (7,), group=1)), {"n": torch.arange(3)})
GROUPS = [[("a", True)], [("b", True)]]
SECONDS, BYTES = 5.0, 64 << 20
"""Limits for reading a file of some kilobytes, on a busy machine."""


@contextmanager
def bounded(*, memory: bool = False) -> Iterator[None]:
    """Check the time, and on request the peak memory (which slows the code down)."""
    if memory:
        tracemalloc.start()
    begin = time.process_time()
    try:
        yield
        assert time.process_time() - begin < SECONDS
        assert not memory or tracemalloc.get_traced_memory()[1] < BYTES
    finally:
        tracemalloc.stop()


def nest(levels: int) -> bytes:
    """Make a tuple of 2 ** levels parts."""
    return b"K\x01\x85" + b"2\x86" * levels


DEEP = 1_500
"""Levels of nesting, more than Python's recursion allows."""

REDUCE_SET = b"c__builtin__\nset\n"


NUMBERS = [(2**61 - 1) * factor for factor in range(2**7, 20_000)]
"""Different keys with one hash: numbers are hashed modulo 2 ** 61 - 1, and tuples without a secret."""


@cache
def collide(form: str) -> list[bytes]:
    return [write_pickle(number if form == "numbers" else (number, "x"))[2:-1] for number in NUMBERS]


COLLISIONS = {
    "items of a dict": (b"}(", b"N", b"u"),
    "items one by one": (b"}", b"Ns", b""),
    "an ordered dict": (b"ccollections\nOrderedDict\n)R(", b"N", b"u"),
    "a set": (b"\x8f(", b"", b"\x90"),
    "a frozenset": (b"(", b"", b"\x91"),
    "a dict of protocol 0": (b"(", b"N", b"d"),
    "a set of protocol 2": (REDUCE_SET + b"](", b"", b"e\x85R"),
}
"""Instructions before the keys, after each key, and after all."""

STORAGE = b"ctorch\nFloatStorage\n"
LARGE = b"\x8a\x05\x00\x00\x00\x00\x02"
ALLOCATING = {
    "bytearray": b"c__builtin__\nbytearray\n" + LARGE + b"\x85R",
    "bytes": b"c__builtin__\nbytes\n" + LARGE + b"\x85R",
    "a new bytearray": b"c__builtin__\nbytearray\n" + LARGE + b"\x85\x81",
    "an array": b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\n" + LARGE + b"\x85" + text("b") + b"\x87R",
    "an array with keywords": b"cnumpy\nndarray\n)}" + text("shape") + LARGE + b"s\x92",
    "a tensor class": b"ctorch\nFloatTensor\n" + LARGE + b"\x85R",
    "a storage class": STORAGE + LARGE + b"\x85R",
}
LARGE_INTEGER = b"\x8b\x40\x0d\x03\x00" + b"\x7f" * 200_000
IDENTIFIERS = {
    "a persistent id": nest(60) + b"Q",
    "a long persistent id": text("x" * 100_000) + b"\x85Q",
    "a large persistent id": b"("
    + text("storage")
    + b"ctorch\nFloatStorage\n"
    + LARGE_INTEGER
    + text("cpu")
    + b"K\x01tQ",
}

BOMBS = {
    **ALLOCATING,
    **IDENTIFIERS,
    "tuples": nest(60),
    "lists": b"]" + b"".join(b"q\x00](h\x00h\x00e" for _ in range(60)),
    "a dict's key": b"}" + nest(60) + b"Ns",
    "a set's item": b"\x8f(" + nest(60) + b"\x90",
    "a frozenset": b"(" + nest(60) + b"\x91",
    "a frozenset in a key": b"}(" + nest(4) + b"\x91" + b"2\x86" * 60 + b"Ns",
    "nested frozensets": b"(K\x01\x91" + b"".join(b"q\x000(h\x00h\x00\x86\x91" for _ in range(60)),
    "an ordered dict's key": b"ccollections\nOrderedDict\n)R" + nest(60) + b"Ns",
    "a memo index": b"Nr\xff\xff\xff\x07",
    "a long memo index": b"Np99999999999999999999\n",
    "a deep list": b"]" * DEEP + b"a" * (DEEP - 1),
    "a deep tuple": b")" + b"\x85" * DEEP,
    "a deep call": b"cos\nsystem\n" + b")R" * DEEP,
    "a deep key": b"})" + b"\x85" * DEEP + b"Ns",
    "a call's arguments": b"cos\nsystem\n" + nest(60) + b"R",
    "a state": b"cargparse\nNamespace\n)\x81" + nest(60) + b"b",
    "a set of a bomb": REDUCE_SET + b"](" + nest(60) + b"e\x85R",
    "a long string": b"\x8d\xff\xff\xff\xff\xff\xff\xff\x7fabc",
    "a long bytearray": b"\x96\xff\xff\xff\xff\xff\xff\xff\x7fabc",
    "a long integer": b"\x8b\xff\xff\xff\x7fabc",
    "a long number": b"I" + b"9" * 100_000 + b"\n",
    "a large integer": LARGE_INTEGER,
    "many views of a long shape": b"(" + b"K\x01" * 10_000 + b"tq\x00" + b"ctorch\nSize\nh\x00\x85R0" * 1_000 + b"N",
    "a long frame": b"\x95\xff\xff\xff\xff\xff\xff\xff\xff",
}


@pytest.mark.parametrize("kind", BOMBS)
def test_small_pickles_of_huge_objects_are_refused_in_time_and_memory(kind: str, tmp_path: Path) -> None:
    """The pickle is read alone, and in both formats as client state, hyper-parameter, ds_config and shapes."""
    bomb = BOMBS[kind]
    (tmp_path / "legacy.pt").write_bytes(make_legacy(forge(bomb)))
    with bounded(memory=True):
        look_at_pickle(forge(bomb))
        with suppress(UcpError):
            read_header(str(tmp_path / "legacy.pt"))
    places = [(text(key), bomb) for key in ("client", "ds_config", "param_shapes", "args", "buffer_names", "module")]
    model = forge(b"}(", *(part for pair in places for part in pair), b"u")
    group = (text("params"), b"]", text("lr"), bomb)
    inner = (text("state"), b"}", text("param_groups"), b"](}(", *group, b"ue")
    optim = forge(b"}", text("optimizer_state_dict"), b"}(", *inner, b"us")
    with bounded():
        for name, data in ((MODEL_FILE, model), (OPTIM_FILE, optim)):
            look_at_file(make_zip(data), name)
            look_at_file(make_legacy(data), name)


def make_zip(data: bytes) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("archive/data.pkl", data)
        archive.writestr("archive/byteorder", b"little")
    return stream.getvalue()


def make_legacy(data: bytes) -> bytes:
    front = [pickle.dumps(value, 2) for value in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True})]
    return b"".join([*front, data, pickle.dumps([], 2)])


COPIES = b"q\x000c__builtin__\nlist\nq\x01" + b"h\x01h\x00\x85R" * 3000
COSTLY = {
    "the memo": b"N" + b"".join(b"p%d\n" % number for number in NUMBERS),
    "copies of one value": b"](" + text("x" * 50_000) + COPIES + b"e",
}
WORDS = {"the memo": "large number in its memo", "copies of one value": "copy one value over and over"}


@pytest.mark.parametrize(("kind", "form"), [*product(COLLISIONS, ("numbers", "tuples")), *product(COSTLY, [""])])
def test_values_that_need_quadratic_time_are_refused(kind: str, form: str, tmp_path: Path) -> None:
    """For example, a dictionary of n keys with one hash needs n² comparisons."""
    path, (before, after, end) = tmp_path / MODEL_FILE, COLLISIONS.get(kind, (b"", b"", b""))
    value = COSTLY.get(kind) or before + b"".join(key + after for key in collide(form)) + end
    path.write_bytes(make_zip(forge(b"}", text("client"), value, b"s")))
    with bounded(), pytest.raises(CheckpointError, match=WORDS.get(kind, "one hash")):
        read_objects(str(path), trust_pickle=False)


def test_a_few_collisions_are_accepted() -> None:
    """Large numbers, tuples and frozensets are valid keys, in many dictionaries."""
    keys = [2**70, -(2**90), (1, -1), (1, -2), frozenset((1, "x")), (0.5, ("a", None))]
    value = [dict.fromkeys(keys, number) for number in range(100)] + [{-1: 1, -2: 2, 0.5: 3}]
    for protocol in (2, 5):
        read_pickle(pickle.dumps(value[:-1], protocol), "x.pt")
    assert read_pickle(pickle.dumps([dict.fromkeys(keys[:4])] * 2 + value[-1:], 2), "x.pt").root[-1] == value[-1]


UNSUPPORTED = {
    "extension codes": [b"\x82\x01", b"\x83\x01\x00", b"\x84\x01\x00\x00\x00"],
    "instances": [b"(cos\nsystem\no", b"(ios\nsystem\n"],
    "an id as text": [b"Pabc\n"],
    "strings of Python 2": [b"U\x01a", b"T\x01\x00\x00\x00a", b"S'a'\n"],
    "out-of-band buffers": [b"\x97", b"N\x98"],
}
OTHER_IDENTIFIERS = [text("module"), b"K\x05", b")", b"N", b"(" + text("storage") * 5 + b"t"]
DAMAGED = {
    "BUILD on a global": b"cmath\ninf\n}b",
    "a key without a value": b"}(K\x01u",
    "two objects": b"K\x01K\x02",
    "an open mark": b"(K\x01",
    "no arguments": b"R",
    "no memo": b"h\x05",
}
REFUSED = [
    *((code, UnsupportedError, "uses the instruction [A-Z0-9_]+") for codes in UNSUPPORTED.values() for code in codes),
    *((pid, UnsupportedError, "refers to .* instead of a storage") for pid in IDENTIFIERS.values()),
    *((pid + b"Q", UnsupportedError, "refers to .* instead of a storage") for pid in OTHER_IDENTIFIERS),
    *((data, CheckpointError, r"cannot be read \(ValueError: it calls") for data in ALLOCATING.values()),
    (BOMBS["a dict's key"], CheckpointError, r"cannot be read \(ValueError: a key of"),
    *((data, CheckpointError, r"cannot be read \(") for data in DAMAGED.values()),
]


@pytest.mark.parametrize(("data", "error", "words"), REFUSED, ids=lambda value: repr(value)[:30])
def test_refusals_of_pickles_name_the_cause(data: bytes, error: type[UcpError], words: str) -> None:
    with pytest.raises(error, match=rf"x\.pt: its pickle {words}") as caught:
        read_pickle(forge(data), "x.pt")
    assert len(str(caught.value)) < 300


def test_descriptions_of_any_value_are_short() -> None:
    nested = read_pickle(forge(nest(60)), "x").root
    values = [10**5000, "x" * 10**6, b"x" * 10**6, [[]] * 10**6, {1: 2}, None, 1.5, nested]
    assert all(len(describe(value)) < 100 for value in values)
    assert has_more_parts(nested, 10**4)
    assert len(list(walk(nested))) < 200


@pytest.mark.parametrize("offset", [-8, 10**6])
def test_tensors_outside_of_their_storage_are_refused(tmp_path: Path, offset: int) -> None:
    path = tmp_path / MODEL_FILE
    torch.save({"module": {"w": torch.ones(4)}}, path)
    file = read_header(str(path))
    call = file.tree["module"]["w"].made
    call.parts[1] = (call.parts[1][0], offset, *call.parts[1][2:])
    data = bytearray(path.read_bytes())
    path.write_bytes(rebuild_zip(bytes(data), write_pickle(file.tree)))
    with pytest.raises(CheckpointError, match="a tensor at -8|not all there"):
        read_file(str(tmp_path), MODEL_FILE)


STATES = [torch.bfloat16, torch.float16, torch.int8, torch.int16, torch.uint8, torch.float64, torch.bool, torch.int32]


def script_function() -> None:
    """A value of a hyper-parameter."""


def test_states_of_one_element_and_classes_in_param_groups_are_read(tmp_path: Path) -> None:
    """States have any dtype. Functions and classes can be sent."""
    values = {"a": script_function, "b": dict, "c": torch.nn.Linear, "d": torch.float16, "e": [len]}
    states = {f"{dtype}{shape}": torch.ones(shape, dtype=dtype) for dtype in STATES for shape in ((), (1,))}
    files = build_files(MODEL, random_state(MODEL, 0), Topology(1))
    base = files[OPTIM_FILE]["optimizer_state_dict"]["base_optimizer_state"]
    for entries in (*base["state"].values(), *base["param_groups"]):
        entries.update(values if "params" in entries else states)
    write_files(tmp_path, files)
    index = open_checkpoint(str(tmp_path), Comm(), Naming(GROUPS))
    for name, value in states.items():
        assert {scalars[name] for scalars in index.scalars.values()} == {1}
        assert index.scalar_dtypes[name] == str(value.dtype).removeprefix("torch.")
    assert all(isinstance(index.groups[0].hyper[name], Unread) for name in values)
    assert pickle.loads(pickle.dumps(index)).groups == index.groups


@examples(100)
@given(st.lists(st.sampled_from(sorted(BOMBS.values()) + [bytes([code]) for code in range(256)]), max_size=12))
def test_random_instructions_raise_only_errors_of_the_package(parts: list[bytes]) -> None:
    look_at_pickle(forge(*parts))


@pytest.mark.parametrize("offset", [-(2**70), -1, 2**70])
def test_a_zip_directory_with_offsets_outside_of_the_file_is_refused(tmp_path: Path, offset: int) -> None:
    torch.save({"a": torch.ones(3)}, tmp_path / MODEL_FILE)
    with (tmp_path / MODEL_FILE).open("rb") as stream:
        entries = zipfile.ZipFile(stream).infolist()
        entries[-1].header_offset = offset
        with (
            pytest.raises(CheckpointError, match=f"has no header at byte {offset}"),
            mock.patch.object(zipfile.ZipFile, "infolist", return_value=entries[-1:]),
        ):
            list_records(str(tmp_path / MODEL_FILE))


MARK = "UCP_TEST_MARK"
LEGACY = pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])


class Evil:
    """An object that runs a callable when it is unpickled."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.function, self.args = function, args

    def __reduce__(self) -> Any:
        return self.function, self.args

    def __hash__(self) -> int:
        return 0


def touch(path: str) -> None:
    """Create a file; must not be called."""
    Path(path).touch()


def evils(mark: Path) -> list[Evil]:
    return [
        Evil(os.system, f"touch {mark}"),
        Evil(touch, str(mark)),
        Evil(torch.storage._load_from_bytes, pickle.dumps(Evil(touch, str(mark)))),
    ]


Place = tuple[Any, ...]


def list_places(value: Any, above: Place = ()) -> Iterator[Place]:
    """Yield the keys that lead to each value of a file."""
    yield above
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    for key, part in parts:
        yield from list_places(part, (*above, key))


def change_at(value: Any, place: Place, new: Any) -> Any:
    if not place:
        return new
    key, *rest = place
    changed = dict(value) if isinstance(value, dict) else list(value)
    changed[key] = change_at(value[key], tuple(rest), new)
    return tuple(changed) if type(value) is tuple else changed


WRITERS = [Topology(0), Topology(1, 1), Topology(3, 1)]


@LEGACY
@pytest.mark.parametrize("topology", WRITERS, ids=lambda topology: topology.label)
def test_opening_a_checkpoint_runs_no_code(tmp_path: Path, topology: Topology, legacy: bool) -> None:
    """A call replaces each value of each file in turn, and is a key of the client state."""
    mark = tmp_path / MARK
    calls = cycle(evils(mark))
    run = Run(client_state={"foo": [{"x": (1, {next(calls): next(calls)})}], "bar": 1})
    files = build_files(MODEL, random_state(MODEL, 0), topology, run)
    for name, content in files.items():
        for number, place in enumerate(list_places(content)):
            folder = tmp_path / f"{name}{number}"
            write_files(folder, {**files, name: change_at(content, place, next(calls))}, legacy=legacy)
            with suppress(UcpError):
                open_checkpoint(str(folder), Comm(), Naming(GROUPS))
            assert not mark.exists()


@LEGACY
def test_the_client_state_runs_code_only_with_consent(tmp_path: Path, legacy: bool) -> None:
    """All names are checked before DeepSpeed loads a file, too."""
    mark = tmp_path / MARK
    run = Run(client_state={"foo": Evil(touch, str(mark)), "bar": [time.sleep]})
    write_files(tmp_path, build_files(MODEL, random_state(MODEL, 0), Topology(1), run), legacy=legacy)
    with pytest.raises(UnsupportedError, match=r"touch.*add_safe_globals"):
        read_objects(str(tmp_path / MODEL_FILE), trust_pickle=UniversalConfig().trust_pickle)
    index = open_checkpoint(str(tmp_path), Comm(), Naming(GROUPS))
    with pytest.raises(UnsupportedError, match=r"consent \(.*touch, time\.sleep\).*trust_pickle"):
        check_trusted(index.globals)
    with torch.serialization.safe_globals([touch, time.sleep]):
        check_trusted(index.globals)
    assert not mark.exists()
    read_objects(str(tmp_path / MODEL_FILE), trust_pickle=True)
    assert mark.exists()


FORGED = {
    "GLOBAL REDUCE": b"cos\nsystem\nCOMMAND\x85R",
    "STACK_GLOBAL REDUCE": text("posix") + text("system") + b"\x93COMMAND\x85R",
    "dotted STACK_GLOBAL": text("os") + text("path.os.system") + b"\x93COMMAND\x85R",
    "INST": b"(COMMANDios\nsystem\n",
    "OBJ": b"(cos\nsystem\nCOMMANDo",
    "NEWOBJ": b"csubprocess\nPopen\nCOMMAND\x85\x81",
    "NEWOBJ_EX": b"csubprocess\nPopen\nCOMMAND\x85}\x92",
    "torch attribute": text("torch") + text("os") + b"\x93}b",
    "torch.load": b"ctorch\nload\nPATH\x85R",
    "getattr chain": b"cbuiltins\ngetattr\ncos\nsystem\n" + text("__call__") + b"\x86RCOMMAND\x85R",
    "a known callable on a class": b"ccopyreg\n_reconstructor\ncsubprocess\nPopen\ncbuiltins\nobject\nN\x87R",
    "a known callable on a method": b"ccopyreg\n_reconstructor\ncos\nfork\nNN\x87R",
    "BUILD on a callable": b"ctorch._utils\n_rebuild_tensor_v2\nN}" + text("__kwdefaults__") + b"}s\x86b",
}


@pytest.mark.parametrize("kind", FORGED)
def test_forged_pickles_run_no_code(tmp_path: Path, kind: str) -> None:
    mark = tmp_path / MARK
    data = forge(FORGED[kind].replace(b"COMMAND", text(f"touch {mark}")).replace(b"PATH", text(str(mark))))
    pickletools.dis(data, out=io.StringIO())  # it is well-formed
    with suppress(UcpError):
        read_pickle(data, "x.pt")
    assert not mark.exists()


@pytest.mark.parametrize("name", ["os.system", "builtins.eval", "torch.load", "torch.ops", "numpy.load", "a.b.c"])
def test_globals_are_read_as_names(name: str) -> None:
    """Their calls can be sent between ranks."""
    module, _, attribute = name.rpartition(".")
    found = read_pickle(forge(text(module), text(attribute), b"\x93", b"K\x01K\x02\x86R"), "x.pt")
    assert list(found.list_uses()[0]) == [Global(module, attribute)]
    for inert in (found.root, pickle.loads(pickle.dumps(found.root))):
        assert isinstance(inert, PickledObject) and (inert.kind, inert.args) == (name, (1, 2))
        assert (inert.state, inert.items, inert.parts) == (None, [], found.root.parts)


def test_a_storage_type_in_place_of_a_storage_is_refused() -> None:
    assert isinstance(read_pickle(forge(b"ctorch\nFloatStorage\n", b"K\x05\x85R"), "x.pt").root, PickledObject)


@pytest.mark.parametrize("seed", [2**64, -(2**70), (1 << MOST_BITS) - 1, 1 << MOST_BITS])
def test_hyper_parameters_of_any_type_are_read(tmp_path: Path, seed: int) -> None:
    """Random generators have seeds of up to 128 bits, and a scheduler leaves numpy scalars in the param groups.

    Objects are equal if their pickles are equal, so ranks' files can be compared.
    """
    numbers = {"lr": np.float64(3e-4), "steps": np.int64(-5), "scale": np.float32(1.5), "on": np.bool_(True)}
    torch.save([numbers, seed, *(Namespace(size=size) for size in (3, 3, 4))], tmp_path / "x.pt")
    values = (read_hyper(value, "x.pt") for value in read_header(str(tmp_path / "x.pt")).tree)
    plain, number, first, same, other = values
    assert plain == {"lr": 3e-4, "steps": -5, "scale": 1.5, "on": True}
    assert [type(value) for value in plain.values()] == [float, int, float, bool]
    assert isinstance(number, Unread) if seed.bit_length() > MOST_BITS else number == seed
    assert first == same != other
    assert pickle.loads(pickle.dumps(first)) == first


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_every_truncation_of_a_pickle_is_refused(protocol: int) -> None:
    value = {"a": "x" * 300, "b": bytes(300), "c": [1, 300, 1 << 40, 1.5, True], "d": {1}, "e": bytearray(300), "f": ()}
    data = pickle.dumps(value, protocol)
    read_pickle(data, "x.pt")
    for end in range(len(data)):
        with pytest.raises(CheckpointError, match=r"^x\.pt: "):
            read_pickle(data[:end], "x.pt")
