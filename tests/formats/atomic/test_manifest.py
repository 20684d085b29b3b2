"""The manifest: values are preserved to the bit, and changed manifests are refused."""

from __future__ import annotations

import copy
import hashlib
import json
import math
import random
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_ucp.comm import Comm
from deepspeed_ucp.convert import convert_checkpoint
from deepspeed_ucp.errors import CheckpointError, UnsupportedError
from deepspeed_ucp.examine.verify import verify_checkpoint
from deepspeed_ucp.formats.deepspeed.files import MANIFEST
from deepspeed_ucp.formats.open import survey_checkpoint
from deepspeed_ucp.formats.universal.manifest import (
    AtomRecord,
    Manifest,
    StateRecord,
    fingerprint,
    make_manifest,
    parse_manifest,
    read_manifest,
)
from deepspeed_ucp.formats.universal.plainjson import decode, dump_json
from deepspeed_ucp.io.jsonfile import parse_json
from deepspeed_ucp.model import AtomicIndex, FileRef, GroupInfo, Limits, ModelInfo, ParamKey, RunState, StoredAtoms
from deepspeed_ucp.model.flat import join_parameters
from deepspeed_ucp.model.topology import Topology
from deepspeed_ucp.tensor_parallel import ShardNC, ShardV, read_pattern
from tests.support.reshard import examples, get_field
from tests.synth import Model, Param, random_state, write_checkpoint
from tests.synth import Topology as SavedTopology


def same(one: Any, other: Any) -> bool:
    """Equal with types, signs of zeros and NaNs' payloads."""
    if type(one) is not type(other):
        return False
    if isinstance(one, float):
        return struct.pack(">d", one) == struct.pack(">d", other)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    return bool(one == other)


nans = st.integers(1, 2**51 - 1).map(lambda bits: struct.unpack(">d", struct.pack(">Q", 0x7FF8 << 48 | bits))[0])
scalars = st.none() | st.booleans() | st.integers() | st.floats() | nans | st.text() | st.binary(max_size=4)
keys = st.text(max_size=6) | st.integers() | st.sampled_from(["$tuple", "$float", "$dict", "$bytes", "$"])
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple) | st.dictionaries(keys, inner, max_size=3)
    ),
    max_leaves=12,
)
hypers = st.dictionaries(
    st.sampled_from(["lr", "betas", "eps", "weight_decay", "fused", "name", "$float"]),
    st.floats() | st.tuples(st.floats(), st.floats()) | st.none() | st.booleans() | st.text(max_size=3) | st.integers(),
)


@examples(300)
@given(values)
def test_plain_data_comes_back_to_the_bit(value: Any) -> None:
    text = dump_json(value)
    assert text.isascii()
    assert same(parse_json(text.encode(), "it", object, object_hook=decode), value)
    json.loads(text, parse_constant=pytest.fail)  # standard JSON: other readers know no NaN


def test_objects_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match=r"args\.model\[1\]: object .* is not plain data"):
        dump_json({"args": {"model": [1, object()]}})


INDEX = AtomicIndex(
    stored=StoredAtoms.of((FileRef("/run/tag/b.pt", 20, 7), FileRef("/run/tag/a.pt", 10, None)), (), ()),
    run=RunState(
        scalars={ParamKey("w"): {"step": 3.0}, ParamKey("w", 1): {"step": 2.0}},
        groups=(GroupInfo((ParamKey("w"),), {"lr": 0.1, "betas": (0.9, 0.999)}), GroupInfo((), {})),
        counters={"global_steps": 3},
        scaler={"cur_scale": math.inf, "dynamic": True},
        clip_grad=math.nan,
        state_file="/run/tag/a.pt",
        topology=Topology(1, "zero12", "bfloat16", 4, 2, 2, flats=(join_parameters(0, ("w",), ((6,),)),)),
        optimizer="AdamW",
        scalar_dtypes={"step": "float32"},
    ),
    model=ModelInfo(
        aliases={"tied": "w"},
        buffers=frozenset({"z", "count"}),
        instances={"w": 2},
        hints={"args": {"sizes": (1, 2)}, "iteration": 7},
    ),
    limits=Limits(
        dropped="why",
    ),
)
NAMES = st.characters(exclude_categories=["C"], exclude_characters="./")
"""Of parameters that a folder can be named after."""

ATOM = AtomRecord("w", "fp32", "float32", (3, 2), 2, "zero/w/fp32.pt", 64, 24, 5, 96)
PATTERNS = {"w": ShardV(vocab=2), "v": ShardNC(parts=(4, 2), sized=True, widths=((2, 2), (1, 1)))}
STATES = [StateRecord("mp_rank_00_model_states.pt", 100, 9)]


def make(index: AtomicIndex = INDEX) -> Manifest:
    return make_manifest(index, [ATOM, replace(ATOM, state="exp_avg")], PATTERNS, {"w": "the user's rules"}, STATES)


def round_trip(manifest: Manifest) -> Manifest:
    return parse_manifest(manifest.to_json(), "ucp_manifest.json")


def test_a_manifest_comes_back() -> None:
    manifest, again = make(), round_trip(make())
    assert again.to_json() == manifest.to_json()
    for name in Manifest.__dataclass_fields__:
        assert same(getattr(again, name), getattr(manifest, name)), name
    assert [atom.state for atom in again.atoms] == ["exp_avg", "fp32"]
    assert again.groups[0].hyper["betas"] == (0.9, 0.999)
    assert again.patterns["w"]["origin"] == "the user's rules"
    assert {name: read_pattern(told["pattern"]) for name, told in again.patterns.items()} == PATTERNS
    assert "flats" not in again.source
    assert again.source["tp"] == 2
    assert again.buffers == ("count", "z")


@examples(100)
@given(
    hyper=hypers,
    scaler=st.dictionaries(st.text(max_size=5), st.floats() | st.integers() | st.booleans(), max_size=3),
    step=st.integers() | st.floats() | nans,
    hints=st.dictionaries(st.sampled_from(["args", "iteration"]), values, max_size=2),
    names=st.lists(st.text(NAMES, min_size=1, max_size=8), unique=True, max_size=3),
)
def test_any_values_come_back(
    hyper: dict[str, Any], scaler: dict[str, Any], step: float, hints: dict[str, Any], names: list[str]
) -> None:
    index = INDEX.change(
        groups=(GroupInfo(tuple(map(ParamKey, names)), hyper),),
        scaler=scaler,
        scalars={ParamKey(name): {"step": step} for name in names},
        hints=hints,
        aliases=dict.fromkeys(names, "w"),
    )
    again = round_trip(make(index))
    assert again.groups[0].members == tuple(map(ParamKey, names)) and same(again.groups[0].hyper, hyper)
    for field in ("scaler", "scalars", "hints", "aliases"):
        assert same(getattr(again, field), get_field(index, field)), field


def test_equal_sources_give_equal_bytes() -> None:
    """Independent of the order of discovery."""
    turned = INDEX.change(
        files=INDEX.stored.files[::-1],
        counters=dict(reversed(INDEX.run.counters.items())),
        hints=dict(reversed(INDEX.model.hints.items())),
    )
    one = make_manifest(INDEX, [ATOM, replace(ATOM, state="exp_avg")], PATTERNS, {}, STATES)
    other = make_manifest(turned, [replace(ATOM, state="exp_avg"), ATOM], dict(reversed(PATTERNS.items())), {}, STATES)
    assert one.to_json() == other.to_json()


def test_objects_in_param_groups_stay_the_live_optimizers() -> None:
    """A load does not take them over either."""
    index = INDEX.change(groups=(GroupInfo((ParamKey("w"),), {"lr": 0.1, "hook": object(), "list": [object()]}),))
    assert round_trip(make(index)).groups[0].hyper == {"lr": 0.1}


# --- fingerprints


def test_a_fingerprint_is_of_names_sizes_and_directories() -> None:
    files = fingerprint(INDEX)["files"]
    assert files == [
        {"name": "a.pt", "size": 10, "header_crc": None, "records": []},
        {"name": "b.pt", "size": 20, "header_crc": 7},
    ]
    moved = INDEX.change(state_file="/new/a.pt", files=(FileRef("/new/b.pt", 20, 7), FileRef("/new/a.pt", 10, None)))
    assert fingerprint(moved) == fingerprint(INDEX)


@pytest.mark.parametrize(
    "file", [FileRef("/run/tag/b.pt", 21, 7), FileRef("/run/tag/b.pt", 20, 8), FileRef("/run/tag/c.pt", 20, 7)]
)
def test_another_file_is_another_fingerprint(file: FileRef) -> None:
    other = INDEX.change(files=(file, INDEX.stored.files[1]))
    assert fingerprint(other)["digest"] != fingerprint(INDEX)["digest"]
    assert make(other).to_json() != make().to_json()


# --- refusals


def change(**fields: Any) -> str:
    data = json.loads(make().to_json())
    data.update(fields)
    return json.dumps({key: value for key, value in data.items() if value != "gone"})


def seal(data: dict[str, Any]) -> str:
    """A manifest's text with a correct digest, which anybody can make."""
    data.pop("digest", None)
    contents = parse_json(json.dumps(data).encode(), "it", object, object_hook=decode)
    data["digest"] = hashlib.sha256(dump_json(contents).encode()).hexdigest()
    return json.dumps(data)


def seal_raw(hints: str) -> str:
    return make().to_json().replace('"hints":', '"hints":' + hints + ',"x":', 1)


ODD_JSON = [
    *('{"a":' * 100_000, "[" * 100_000, '{"$float": "00"}', '{"$tuple": 5}', '{"$dict": [[[], 1]]}', "NaN", "1" * 5000)
]
REFUSED = {
    "empty": ("", "is no valid JSON"),
    "cut": (make().to_json()[:200], "is no valid JSON"),
    "list": ("[1]", "an array where an object is expected"),
    "other": ('{"kind": "x"}', "is no manifest of an atomic checkpoint"),
    "newer": (change(version=3, package="9.9"), "is of format 3, this release reads format 2.* deepspeed_ucp 9.9"),
    "missing": (change(groups="gone"), "its digest is"),
    "more": (change(extra=1), "its digest is"),
    "missing, sealed": (seal(json.loads(change(groups="gone"))), "groups is of another form than expected"),
    "more, sealed": (seal(json.loads(change(extra=1))), "extra is of another form than expected"),
    "edited": (change(optimizer="SGD"), "its digest is"),
    "number": (make().to_json().replace('"offset":64', '"offset":65', 1), "its digest is .* damaged or was edited"),
    "tuple": ('{"kind": {"$float": "zz"}}', "is no valid JSON"),
    **{
        f"odd {number}{form.__name__}": (form(text), "")
        for number, text in enumerate(ODD_JSON)
        for form in (str, '{{"kind": {}}}'.format, seal_raw)
    },
}


@pytest.mark.parametrize("name", ["/etc/passwd", "../w/fp32.pt", "zero/../../x", "", "zero//x", "a\0b"])
def test_files_outside_of_the_folder_are_refused(name: str) -> None:
    """Anybody can write a manifest with a right digest."""
    for manifest in (
        make_manifest(INDEX, [replace(ATOM, file=name)], {}, {}, STATES),
        make_manifest(INDEX, [ATOM], {}, {}, [*STATES, StateRecord(name, 1, 2)]),
        replace(make(), state_file=name),
    ):
        with pytest.raises(CheckpointError, match="names files outside of its folder"):
            round_trip(manifest)


@pytest.mark.parametrize(
    ("changes", "experts", "text"),
    [
        ({}, 0, r"other numbers of experts than it says: w \(fp32\)"),
        ({}, 7, r"other numbers of experts than it says: w \(fp32\)"),
        ({"shape": (1 << 20, 0)}, 1 << 20, r"other numbers of experts than it says: w \(fp32\)"),
        ({"nbytes": 25}, None, r"contradict each other: w \(fp32\)"),
        ({"offset": -1}, None, r"atoms.0.offset.* is of another form than expected"),
        ({"shape": (3, 3)}, None, r"contradict each other: w \(fp32\)"),
        ({"shape": (-3, -2)}, None, r"atoms.0.shape.* is of another form than expected"),
        ({"dtype": "float16"}, None, r"contradict each other: w \(fp32\)"),
        ({"dtype": "blob"}, None, r"contradict each other: w \(fp32\)"),
    ],
    ids=str,
)
def test_contradictory_atoms_are_refused(changes: dict[str, Any], experts: int | None, text: str) -> None:
    index = INDEX if experts is None else INDEX.change(fused={"w": experts})
    with pytest.raises(CheckpointError, match=text):
        round_trip(make_manifest(index, [replace(ATOM, **changes)], {}, {}, STATES))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("text", REFUSED)
def test_other_texts_are_refused(text: str) -> None:
    content, message = REFUSED[text]
    kind = UnsupportedError if text == "newer" else CheckpointError
    with pytest.raises(kind, match=f"^folder/ucp_manifest.json: .*{message}"):
        parse_manifest(content, "folder/ucp_manifest.json")


def test_a_folder_may_have_a_manifest(tmp_path: Path) -> None:
    assert read_manifest(str(tmp_path)) is None
    assert read_manifest(str(tmp_path / "nowhere")) is None
    (tmp_path / "ucp_manifest.json").write_text(make().to_json())
    found = read_manifest(str(tmp_path))
    assert found is not None
    assert found.to_json() == make().to_json()
    (tmp_path / "ucp_manifest.json").write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError, match=r"ucp_manifest.json: cannot be read"):
        read_manifest(str(tmp_path))


# --- any contents with a right digest


ODD = [None, True, -1, 0, 1 << 70, 1.5, "x", "", [], [[]], {}, {"a": 1}, {"$tuple": [1]}, {"$dict": [[1, 2]]}, [None]]


def list_places(told: Any, place: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    entries = told.items() if isinstance(told, dict) else enumerate(told) if isinstance(told, list) else ()
    return [place, *(deep for key, value in entries for deep in list_places(value, (*place, key)))]


def put(told: Any, place: tuple[Any, ...], value: Any) -> Any:
    told = copy.deepcopy(told)
    inner = told
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return told


def test_odd_values_anywhere_are_refused_or_harmless(tmp_path: Path) -> None:
    model = Model((Param("a", (3, 5)), Param("b", (7,), group=1)), {"n": torch.arange(3)})
    source = write_checkpoint(tmp_path, model, random_state(model, 0), SavedTopology(1, 2))
    convert_checkpoint(str(source))
    folder = Path(f"{source}_universal")
    told = json.loads((folder / MANIFEST).read_text())
    draw = random.Random(0)
    places = list_places(told)[1:]
    for place in draw.sample(places, min(len(places), 200)):
        try:
            text = seal(put(told, place, draw.choice(ODD)))
        except CheckpointError:
            continue
        (folder / MANIFEST).write_text(text)
        report = survey_checkpoint(str(folder), Comm())
        assert report.index is not None or report.findings, place
        for finding in report.findings:
            assert finding.file, (place, finding)
        verify_checkpoint(str(folder), headers_only=True)


def test_an_atom_larger_than_its_file_is_refused(tmp_path: Path) -> None:
    """Also if the manifest claims a larger file."""
    (tmp_path / "zero/w").mkdir(parents=True)
    (tmp_path / "zero/w/fp32.pt").write_bytes(bytes(4096))
    for size, file in ((0, MANIFEST), (4096, MANIFEST), (8 << 40, "zero/w/fp32.pt")):
        atom = replace(ATOM, shape=(1 << 40,), nbytes=4 << 40, vocab=None, size=size)
        (tmp_path / MANIFEST).write_text(make_manifest(INDEX, [atom], {}, {}, STATES).to_json())
        assert file in {fault.file for fault in survey_checkpoint(str(tmp_path), Comm()).findings}


def test_a_file_has_one_size() -> None:
    manifest = make_manifest(INDEX, [ATOM, replace(ATOM, state="x", size=97)], {}, {}, STATES)
    with pytest.raises(CheckpointError, match="two sizes: zero/w/fp32.pt"):
        round_trip(manifest)
