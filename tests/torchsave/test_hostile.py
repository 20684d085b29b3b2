"""Reading a file never runs code of its pickles; malicious and damaged files quickly raise an error of the package."""

from __future__ import annotations

import io
import os
import pickle
import pickletools
import subprocess
import time
import tracemalloc
import uuid
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from itertools import product
from pathlib import Path
from types import SimpleNamespace
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
from deepspeed_ucp.torchsave import unpickle
from deepspeed_ucp.torchsave.objects import MOST_BITS, Global, PickledObject, describe, has_more_parts, walk
from deepspeed_ucp.torchsave.repickle import write_pickle
from deepspeed_ucp.torchsave.torchfile import list_records, name_storages, read_header
from deepspeed_ucp.torchsave.unpickle import read_pickle
from tests.support.covering import cover, params
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


COLLISIONS: dict[str, Callable[[list[bytes]], bytes]] = {
    "items of a dict": lambda keys: b"}(" + b"".join(key + b"N" for key in keys) + b"u",
    "items one by one": lambda keys: b"}" + b"".join(key + b"Ns" for key in keys),
    "an ordered dict": lambda keys: b"ccollections\nOrderedDict\n)R(" + b"".join(key + b"N" for key in keys) + b"u",
    "a set": lambda keys: b"\x8f(" + b"".join(keys) + b"\x90",
    "a frozenset": lambda keys: b"(" + b"".join(keys) + b"\x91",
    "a dict of protocol 0": lambda keys: b"(" + b"".join(key + b"N" for key in keys) + b"d",
    "a set of protocol 2": lambda keys: REDUCE_SET + b"](" + b"".join(keys) + b"e\x85R",
}


BOMBS = {
    "tuples": nest(60),
    "lists": b"]" + b"".join(b"q\x00](h\x00h\x00e" for _ in range(60)),
    "a dict's key": b"}" + nest(60) + b"Ns",
    "a set's item": b"\x8f(" + nest(60) + b"\x90",
    "a frozenset": b"(" + nest(60) + b"\x91",
    "a frozenset in a key": b"}(" + nest(4) + b"\x91" + b"2\x86" * 60 + b"Ns",
    "nested frozensets": b"(K\x01\x91" + b"".join(b"q\x000(h\x00h\x00\x86\x91" for _ in range(60)),
    "an ordered dict's key": b"ccollections\nOrderedDict\n)R" + nest(60) + b"Ns",
    "a persistent id": nest(60) + b"Q",
    "a long persistent id": text("x" * 100_000) + b"\x85Q",
    "a large persistent id": b"("
    + text("storage")
    + b"ctorch\nFloatStorage\n"
    + b"\x8b\x40\x0d\x03\x00"
    + b"\x7f" * 200_000
    + text("cpu")
    + b"K\x01tQ",
    "a memo index": b"Nr\xff\xff\xff\x07",
    "a long memo index": b"Np99999999999999999999\n",
    "a deep list": b"]" * DEEP + b"a" * (DEEP - 1),
    "a deep tuple": b")" + b"\x85" * DEEP,
    "a deep call": b"cos\nsystem\n" + b")R" * DEEP,
    "a deep key": b"})" + b"\x85" * DEEP + b"Ns",
    "a call's arguments": b"cos\nsystem\n" + nest(60) + b"R",
    "a state": b"cargparse\nNamespace\n)\x81" + nest(60) + b"b",
    "a set of a bomb": REDUCE_SET + b"](" + nest(60) + b"e\x85R",
    "bytearray": b"c__builtin__\nbytearray\n\x8a\x04\x00\x00\x00\x60\x85R",
    "bytes": b"c__builtin__\nbytes\n\x8a\x04\x00\x00\x00\x60\x85R",
    "a new bytearray": b"c__builtin__\nbytearray\n\x8a\x04\x00\x00\x00\x60\x85\x81",
    "an array": b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\n\x8a\x05\x00\x00\x00\x00\x02\x85"
    + text("b")
    + b"\x87R",
    "an array with keywords": b"cnumpy\nndarray\n)}" + text("shape") + b"\x8a\x05\x00\x00\x00\x00\x02s\x92",
    "a tensor class": b"ctorch\nFloatTensor\n\x8a\x05\x00\x00\x00\x00\x02\x85R",
    "a storage class": b"ctorch\nFloatStorage\n\x8a\x05\x00\x00\x00\x00\x02\x85R",
    "a long string": b"\x8d\xff\xff\xff\xff\xff\xff\xff\x7fabc",
    "a long bytearray": b"\x96\xff\xff\xff\xff\xff\xff\xff\x7fabc",
    "a long integer": b"\x8b\xff\xff\xff\x7fabc",
    "a long number": b"I" + b"9" * 100_000 + b"\n",
    "a large integer": b"\x8b\x40\x0d\x03\x00" + b"\x7f" * 200_000,
    "many views of a long shape": b"(" + b"K\x01" * 10_000 + b"tq\x00" + b"ctorch\nSize\nh\x00\x85R0" * 1_000 + b"N",
    "a long frame": b"\x95\xff\xff\xff\xff\xff\xff\xff\xff",
}
ALLOCATING = ("bytearray", "bytes", "a new bytearray", "an array", "an array with keywords")


@pytest.mark.parametrize("kind", BOMBS)
def test_small_pickles_of_huge_objects_are_refused_in_time_and_memory(kind: str) -> None:
    """The pickle is read alone, and in both formats as client state, hyper-parameter, ds_config and shapes."""
    bomb = BOMBS[kind]
    with bounded(memory=True):
        look_at_pickle(forge(bomb))
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


@pytest.mark.parametrize(
    ("kinds", "words"),
    [
        ((*ALLOCATING, "a tensor class", "a storage class"), r"cannot be read \(ValueError: it calls"),
        (("a dict's key",), r"cannot be read \(ValueError: a key of"),
        (("a persistent id", "a long persistent id", "a large persistent id"), ""),
    ],
)
def test_errors_about_hostile_pickles_name_the_cause(kinds: tuple[str, ...], words: str) -> None:
    for kind in kinds:
        with pytest.raises(UcpError, match=rf"x\.pt: its pickle .*{words}") as caught:
            read_pickle(forge(BOMBS[kind]), "x.pt")
        assert len(str(caught.value)) < 300
        assert isinstance(caught.value, CheckpointError) or not words


COPIES = b"q\x000c__builtin__\nlist\nq\x01" + b"h\x01h\x00\x85R" * 3000
COSTLY: dict[str, Callable[[], bytes]] = {
    **{
        f"{kind} of {form}": lambda make=make, form=form: make(collide(form))
        for kind, make in COLLISIONS.items()
        for form in ("numbers", "tuples")
    },
    "the memo": lambda: b"N" + b"".join(b"p%d\n" % number for number in NUMBERS),
    "copies of one value": lambda: b"](" + text("x" * 50_000) + COPIES + b"e",
}


@pytest.mark.parametrize("kind", COSTLY)
def test_values_that_need_quadratic_time_are_refused(kind: str, tmp_path: Path) -> None:
    """For example, a dictionary of n keys with one hash needs n² comparisons."""
    words = {"the memo": "large number in its memo", "copies of one value": "copy one value over and over"}
    path = tmp_path / MODEL_FILE
    path.write_bytes(make_zip(forge(b"}", text("client"), COSTLY[kind](), b"s")))
    with bounded(), pytest.raises(CheckpointError, match=words.get(kind, "one hash")):
        read_objects(str(path), trust_pickle=False)


def test_a_few_collisions_are_accepted() -> None:
    """Large numbers, tuples and frozensets are valid keys, in many dictionaries."""
    keys = [2**70, -(2**90), (1, -1), (1, -2), frozenset((1, "x")), (0.5, ("a", None))]
    value = [dict.fromkeys(keys, number) for number in range(100)] + [{-1: 1, -2: 2, 0.5: 3}]
    for protocol in (2, 5):
        assert read_pickle(pickle.dumps(value[:-1], protocol), "x.pt").end
    assert read_pickle(pickle.dumps([dict.fromkeys(keys[:4])] * 2 + value[-1:], 2), "x.pt").root[-1] == value[-1]


EXTENSIONS = [b"\x82\x01", b"\x83\x01\x00", b"\x84\x01\x00\x00\x00"]
OLD = [b"(cos\nsystem\no", b"(ios\nsystem\n", b"Pabc\n", b"U\x01a", b"T\x01\x00\x00\x00a", b"S'a'\n"]
OUT_OF_BAND = [b"\x97", b"N\x98"]


@pytest.mark.parametrize("code", [*EXTENSIONS, *OLD, *OUT_OF_BAND])
def test_unsupported_instructions_of_pickles_are_refused(code: bytes) -> None:
    """These are extension codes, INST, OBJ, persistent ids as text, strings of Python 2, and out-of-band buffers."""
    with pytest.raises(UnsupportedError, match=r"x\.pt: its pickle uses the instruction [A-Z0-9_]+"):
        read_pickle(forge(code), "x.pt")


def test_descriptions_of_any_value_are_short() -> None:
    nested = read_pickle(forge(nest(60)), "x").root
    values = [10**5000, "x" * 10**6, b"x" * 10**6, [[]] * 10**6, {1: 2}, None, 1.5, nested]
    assert all(len(describe(value)) < 100 for value in values)
    assert has_more_parts(nested, 10**4)
    assert len(list(walk(nested))) < 200


def test_repeated_records_are_refused(tmp_path: Path) -> None:
    for name in ("data.pkl", "data/0"):
        path = tmp_path / "x.pt"
        torch.save({"w": torch.ones(4)}, path)
        with pytest.warns(UserWarning, match="Duplicate name"), zipfile.ZipFile(path, "a") as archive:
            archive.writestr(f"x/{name}", b"other")
        for look in (read_header, list_records, name_storages):
            with pytest.raises(CheckpointError, match="this zip has 2|lists record data/0 twice"):
                look(str(path))


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


def open_changed(folder: Path, change: Callable[[dict[str, Any]], object]) -> Any:
    """Open a checkpoint with a changed state dict of the optimizer."""
    files = build_files(MODEL, random_state(MODEL, 0), Topology(1))
    optim = next(content for name, content in files.items() if "optim_states" in name)
    change(optim["optimizer_state_dict"]["base_optimizer_state"])
    write_files(folder, files)
    return open_checkpoint(str(folder), Comm(), Naming(GROUPS))


@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
@pytest.mark.parametrize("dtype", STATES, ids=str)
def test_one_element_states_are_read_in_every_dtype(tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    one = torch.ones(shape, dtype=dtype)
    index = open_changed(tmp_path, lambda base: [entries.update(counted=one) for entries in base["state"].values()])
    assert {scalars["counted"] for scalars in index.scalars.values()} == {1}
    assert index.scalar_dtypes["counted"] == str(dtype).removeprefix("torch.")


def script_function() -> None:
    """A value of a hyper-parameter."""


@pytest.mark.parametrize(
    "value",
    [script_function, dict, torch.nn.Linear, torch.float16, [len]],
    ids=["function", "dict", "Linear", "dtype", "list"],
)
def test_functions_and_classes_in_a_param_group_can_be_sent(tmp_path: Path, value: Any) -> None:
    index = open_changed(tmp_path, lambda base: [group.update(hook=value) for group in base["param_groups"]])
    assert isinstance(index.groups[0].hyper["hook"], Unread)
    assert pickle.loads(pickle.dumps(index)).groups == index.groups


def test_all_names_are_checked_before_deepspeed_loads_a_file(tmp_path: Path) -> None:
    run = Run(client_state={"foo": script_function, "bar": [time.sleep]})
    write_files(tmp_path, build_files(MODEL, random_state(MODEL, 0), Topology(1), run))
    index = open_checkpoint(str(tmp_path), Comm(), Naming(GROUPS))
    with pytest.raises(UnsupportedError, match=r"consent \(.*script_function, time\.sleep\).*trust_pickle"):
        check_trusted(index.globals)
    with torch.serialization.safe_globals([script_function, time.sleep]):
        check_trusted(index.globals)


def test_classes_in_deepspeeds_files_are_allowed(tmp_path: Path) -> None:
    topologies = (Topology(0), Topology(2, 2, "fp16"), Topology(1, 2, "bf16", "bf16"), Topology(3, 2))
    for number, topology in enumerate(topologies):
        state = random_state(MODEL, 0, precision=topology.precision)
        write_files(tmp_path / str(number), build_files(MODEL, state, topology))
        check_trusted(open_checkpoint(str(tmp_path / str(number)), Comm(), Naming(GROUPS)).globals)


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


class Evil:
    """An object that runs a callable when it is unpickled."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.function, self.args = function, args

    def __reduce__(self) -> Any:
        return self.function, self.args

    def __hash__(self) -> int:
        return 0


class Holder:
    """An object that has only attributes."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


class Stated(Holder):
    """An object whose state is not a dictionary."""

    def __getstate__(self) -> Any:
        return [*vars(self).items()]

    def __setstate__(self, state: Any) -> None:
        vars(self).update(dict(state))


class Listed(Holder, list[Any]):
    """An object with attributes and items."""


def touch(path: str) -> None:
    """Create a file; must not be called."""
    Path(path).touch()


def evils(mark: Path) -> list[Evil]:
    return [
        Evil(os.system, f"touch {mark}"),
        Evil(touch, str(mark)),
        Evil(eval, f"open({str(mark)!r}, 'w')"),
        Evil(subprocess.check_call, ["touch", str(mark)]),
        Evil(torch.load, str(mark)),
        Evil(torch.storage._load_from_bytes, pickle.dumps(Evil(touch, str(mark)))),
        Evil(getattr(os, "mkdir"), str(mark)),  # noqa: B009
    ]


PLACES: dict[str, Callable[[dict[str, Any], Any], None]] = {
    "client_state": lambda files, evil: files["model"].update(foo=evil),
    "deep in client_state": lambda files, evil: files["model"].update(foo=[{"x": (1, {evil: evil})}]),
    "lr_scheduler": lambda files, evil: files["model"].update(lr_scheduler=evil),
    "ds_config": lambda files, evil: files["model"]["ds_config"].update(
        zero_optimization=evil, optimizer={"type": evil}
    ),
    "module": lambda files, evil: files["model"]["module"].update(x=evil),
    "buffer_names": lambda files, evil: files["model"].update(buffer_names=[evil]),
    "param_shapes": lambda files, evil: files["model"].update(param_shapes=evil),
    "shared_params": lambda files, evil: files["model"].update(shared_params=evil),
    "global_steps": lambda files, evil: files["model"].update(global_steps=evil),
    "dp_world_size": lambda files, evil: files["model"].update(dp_world_size=evil),
    "optimizer": lambda files, evil: files["optim"].update(optimizer_state_dict=evil),
    "optimizer states": lambda files, evil: base(files)["state"].update({0: {"exp_avg": evil, "step": evil}}),
    "optimizer state": lambda files, evil: base(files).update(state=evil),
    "param_groups": lambda files, evil: base(files)["param_groups"][0].update(lr=evil, betas=(evil, evil)),
    "params": lambda files, evil: base(files)["param_groups"][0].update(params=[evil]),
    "masters": lambda files, evil: zero(files).update(
        single_partition_of_fp32_groups=[evil, evil], fp32_flat_groups=[evil]
    ),
    "loss_scaler": lambda files, evil: zero(files).update(loss_scaler=evil),
    "zero_stage": lambda files, evil: zero(files).update(zero_stage=evil),
    "slices": lambda files, evil: zero(files).update(param_slice_mappings=[{"a": evil}, {"b": evil}]),
    "partition_count": lambda files, evil: zero(files).update(
        partition_count=evil, group_paddings=evil, clip_grad=evil
    ),
    "the whole file": lambda files, evil: files.update(model=evil),
    "the whole shard": lambda files, evil: files.update(optim=evil),
}


def zero(files: dict[str, Any]) -> dict[str, Any]:
    return files["optim"].get("optimizer_state_dict") or files["model"]["optimizer"]  # type: ignore[no-any-return]


def base(files: dict[str, Any]) -> dict[str, Any]:
    state = zero(files)
    return state.get("base_optimizer_state") or state.get("optimizer_state_dict") or state


WRITERS = [Topology(0), Topology(1, 1), Topology(3, 1)]


@pytest.mark.parametrize(
    ("place", "topology", "legacy"),
    params(
        cover(list(PLACES), WRITERS, [False, True]),
        product(PLACES, WRITERS, [False, True]),
        lambda row: f"{row[0]}-{row[1].label}{'-legacy' * row[2]}",
    ),
)
def test_opening_a_checkpoint_runs_no_code(tmp_path: Path, place: str, topology: Topology, legacy: bool) -> None:
    mark = tmp_path / MARK
    names = list(build_files(MODEL, random_state(MODEL, 0), topology))
    for number, evil in enumerate(evils(mark)):
        contents = list(build_files(MODEL, random_state(MODEL, 0), topology).values())
        files = {"model": contents[0], "optim": contents[1] if len(contents) > 1 else {}}
        PLACES[place](files, evil)
        folder = tmp_path / str(number)
        write_files(folder, dict(zip(names, files.values(), strict=False)), legacy=legacy)
        with suppress(UcpError):
            open_checkpoint(str(folder), Comm(), Naming(GROUPS))
        assert not mark.exists()


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_the_client_state_runs_code_only_with_consent(tmp_path: Path, legacy: bool) -> None:
    mark = tmp_path / MARK
    run = Run(client_state={"foo": Evil(touch, str(mark))})
    path = tmp_path / "x"
    write_files(path, build_files(MODEL, random_state(MODEL, 0), Topology(1), run), legacy=legacy)
    file = str(path / "mp_rank_00_model_states.pt")
    with pytest.raises(UnsupportedError, match=r"touch.*add_safe_globals"):
        read_objects(file, trust_pickle=UniversalConfig().trust_pickle)
    assert not mark.exists()
    read_objects(file, trust_pickle=True)
    assert mark.exists()


FORGED = {
    "GLOBAL REDUCE": lambda mark: forge(b"cos\nsystem\n", text(f"touch {mark}"), b"\x85R"),
    "STACK_GLOBAL REDUCE": lambda mark: forge(text("posix"), text("system"), b"\x93", text(f"touch {mark}"), b"\x85R"),
    "dotted STACK_GLOBAL": lambda mark: forge(
        text("os"), text("path.os.system"), b"\x93", text(f"touch {mark}"), b"\x85R"
    ),
    "INST": lambda mark: forge(b"(", text(f"touch {mark}"), b"ios\nsystem\n"),
    "OBJ": lambda mark: forge(b"(cos\nsystem\n", text(f"touch {mark}"), b"o"),
    "NEWOBJ": lambda mark: forge(b"csubprocess\nPopen\n", text(f"touch {mark}"), b"\x85\x81"),
    "NEWOBJ_EX": lambda mark: forge(b"csubprocess\nPopen\n", text(f"touch {mark}"), b"\x85}\x92"),
    "torch attribute": lambda mark: forge(text("torch"), text("os"), b"\x93", b"}b"),
    "torch.load": lambda mark: forge(b"ctorch\nload\n", text(str(mark)), b"\x85R"),
    "getattr chain": lambda mark: forge(
        b"cbuiltins\ngetattr\n", b"cos\nsystem\n", text("__call__"), b"\x86R", text(f"touch {mark}"), b"\x85R"
    ),
    "a known callable on a class": lambda mark: forge(
        b"ccopyreg\n_reconstructor\n", b"csubprocess\nPopen\n", b"cbuiltins\nobject\nN\x87R"
    ),
    "a known callable on a method": lambda mark: forge(b"ccopyreg\n_reconstructor\n", b"cos\nfork\n", b"NN\x87R"),
    "BUILD on a callable": lambda mark: forge(
        b"ctorch._utils\n_rebuild_tensor_v2\n", b"N}", text("__kwdefaults__"), b"}s\x86b"
    ),
}


@pytest.mark.parametrize("kind", FORGED)
def test_forged_pickles_run_no_code(tmp_path: Path, kind: str) -> None:
    mark = tmp_path / MARK
    data = FORGED[kind](mark)
    pickletools.dis(data, out=io.StringIO())  # it is well-formed
    with suppress(UcpError):
        read_pickle(data, "x.pt")
    assert not mark.exists()


@pytest.mark.parametrize("name", ["os.system", "builtins.eval", "torch.load", "torch.ops", "numpy.load", "a.b.c"])
def test_globals_are_read_as_names(name: str) -> None:
    module, _, attribute = name.rpartition(".")
    found = read_pickle(forge(text(module), text(attribute), b"\x93", b"K\x01K\x02\x86R"), "x.pt")
    assert isinstance(found.root, PickledObject) and (found.root.kind, found.root.args) == (name, (1, 2))
    assert list(found.list_uses()[0]) == [Global(module, attribute)]


def test_a_storage_type_in_place_of_a_storage_is_refused() -> None:
    assert isinstance(read_pickle(forge(b"ctorch\nFloatStorage\n", b"K\x05\x85R"), "x.pt").root, PickledObject)


@pytest.mark.parametrize("pid", [text("module"), b"K\x05", b")", b"N", text("storage") * 5 + b"t"])
def test_persistent_ids_of_another_kind_are_refused(pid: bytes) -> None:
    with pytest.raises(UcpError, match="instead of a storage"):
        read_pickle(forge(b"(" * (pid[-1:] == b"t"), pid, b"Q"), "x.pt")


def test_inert_objects_can_be_sent_between_ranks() -> None:
    inert = read_pickle(forge(b"cos\nsystem\n", text("x"), b"\x85R"), "x.pt").root
    again = pickle.loads(pickle.dumps(inert))
    assert (again.kind, again.args, again.state, again.items) == (inert.kind, inert.args, inert.state, inert.items)
    assert again.parts == inert.parts


def save_and_read(folder: Path, value: Any, *, legacy: bool = False) -> Any:
    torch.save({"value": value}, folder / "x.pt", _use_new_zipfile_serialization=not legacy)
    return read_header(str(folder / "x.pt")).tree["value"]


def test_hyper_parameters_of_a_scripts_class_are_read_as_inert_objects(tmp_path: Path) -> None:
    """They are equal if their pickles are equal, so ranks' files can be compared."""
    first, same, other = (read_hyper(save_and_read(tmp_path, Holder(size=size)), "x.pt") for size in (3, 3, 4))
    assert first == same != other
    assert pickle.loads(pickle.dumps(first)) == first


@pytest.mark.parametrize("seed", [2**64, -(2**70), (1 << MOST_BITS) - 1, 1 << MOST_BITS])
def test_integer_hyper_parameters_of_many_digits_are_read(tmp_path: Path, seed: int) -> None:
    """Random generators have seeds of up to 128 bits."""
    is_large = seed.bit_length() > MOST_BITS
    value = read_hyper(save_and_read(tmp_path, seed), "x.pt")
    assert isinstance(value, Unread) if is_large else value == seed


def test_numpy_hyper_parameters_become_numbers(tmp_path: Path) -> None:
    """A scheduler that computes with numpy leaves numpy scalars in the param groups."""
    values = {"lr": np.float64(3e-4), "steps": np.int64(-5), "scale": np.float32(1.5), "on": np.bool_(True)}
    found = read_hyper(save_and_read(tmp_path, values), "x.pt")
    assert isinstance(found, dict)
    assert found == {"lr": 3e-4, "steps": -5, "scale": 1.5, "on": True}
    assert {type(value) for value in found.values()} == {float, int, bool}


def make_odd_uuid() -> uuid.UUID:
    """Make a UUID whose hash does not read a number."""
    odd = uuid.UUID(int=1)
    object.__setattr__(odd, "int", (touch,))
    return odd


OBJECTS: list[Callable[[], Any]] = [
    lambda: Holder(a=1, b=[2]),
    lambda: Holder(inner=Holder()),
    Holder,
    lambda: Stated(a=1),
    lambda: Listed(a=1),
    lambda: uuid.UUID(int=7),
    lambda: {uuid.UUID(int=9): 1},
    make_odd_uuid,
    lambda: SimpleNamespace(a=1),
    lambda: OrderedDict(a=Holder(a=1)),
    lambda: Evil(touch, "x"),
]


@given(st.lists(st.sampled_from(OBJECTS), max_size=8), st.sampled_from([2, 4, 5]))
def test_the_shortcut_for_stateless_objects_changes_no_result(chosen: list[Callable[[], Any]], protocol: int) -> None:
    data = pickle.dumps([make() for make in chosen], protocol)
    with mock.patch.object(unpickle, "_is_bare", return_value=False):
        slowly = read_pickle(data, "x")
    quickly = read_pickle(data, "x")
    assert quickly.list_uses() == slowly.list_uses()
    assert write_pickle(quickly.root, protocol) == write_pickle(slowly.root, protocol)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_every_truncation_of_a_pickle_is_refused(protocol: int) -> None:
    value = {"a": "x" * 300, "b": bytes(300), "c": [1, 300, 1 << 40, 1.5, True], "d": {1}, "e": bytearray(300), "f": ()}
    data = pickle.dumps(value, protocol)
    assert read_pickle(data, "x.pt").end == len(data)
    for end in range(len(data)):
        with pytest.raises(CheckpointError, match=r"^x\.pt: "):
            read_pickle(data[:end], "x.pt")
