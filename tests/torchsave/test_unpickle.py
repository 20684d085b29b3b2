"""Reading a file never runs code of its pickles."""

from __future__ import annotations

import io
import os
import pickle
import pickletools
import subprocess
import uuid
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
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
from deepspeed_ucp.formats.deepspeed.reading import read_hyper
from deepspeed_ucp.load.client import read_objects
from deepspeed_ucp.torchsave import unpickle
from deepspeed_ucp.torchsave.objects import MOST_BITS, Global, PickledObject
from deepspeed_ucp.torchsave.repickle import write_pickle
from deepspeed_ucp.torchsave.torchfile import read_header
from deepspeed_ucp.torchsave.unpickle import read_pickle
from tests.support.covering import cover, params
from tests.synth import Model, Param, Run, Topology, build_files, random_state, write_files
from tests.torchsave.inputs import forge, text

MODEL = Model((Param("a", (3, 5)), Param("b", (7,), group=1)), {"n": torch.arange(3)})
GROUPS = [[("a", True)], [("b", True)]]
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


@pytest.mark.parametrize(
    "name", ["os.system", "builtins.eval", "torch.load", "torch.ops", "torch._C", "numpy.load", "a.b.c"]
)
def test_globals_are_read_as_names(name: str) -> None:
    module, _, attribute = name.rpartition(".")
    found = read_pickle(forge(text(module), text(attribute), b"\x93", b"K\x01K\x02\x86R"), "x.pt")
    assert isinstance(found.root, PickledObject)
    assert (found.root.kind, found.root.args) == (name, (1, 2))
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
