"""The manifest: values are preserved to the bit, and changed manifests are refused."""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_ucp.comm import Comm
from deepspeed_ucp.convert.identity import fingerprint, identify
from deepspeed_ucp.errors import CheckpointError, UnsupportedError
from deepspeed_ucp.examine.verify import verify_checkpoint
from deepspeed_ucp.formats.deepspeed import seal
from deepspeed_ucp.formats.deepspeed.files import MANIFEST
from deepspeed_ucp.formats.deepspeed.seal import OF_CONVERSIONS, Seal, SealedFile, read_seal
from deepspeed_ucp.formats.open import survey_checkpoint
from deepspeed_ucp.formats.universal.index import (
    STATE_FILE,
    Manifest,
    SealedAtom,
    decode,
    dump_index,
    encode,
    name_atom_file,
    parse_index,
)
from deepspeed_ucp.model.flat import join_parameters
from deepspeed_ucp.model.index import AtomicIndex, GroupInfo
from deepspeed_ucp.model.records import FileRef, Records
from deepspeed_ucp.model.storage import ParamKey
from deepspeed_ucp.model.topology import Topology
from deepspeed_ucp.tensor_parallel.kinds import ShardNC, ShardV
from deepspeed_ucp.tensor_parallel.recorded import read_pattern
from tests.support.conversion import convert_checkpoint
from tests.support.reshard import examples
from tests.synth import Model, Param, random_state, write_checkpoint
from tests.synth import Topology as SavedTopology


def same(one: Any, other: Any) -> bool:
    """Compare values including types, signs of zeros and payloads of NaNs."""
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


@examples(300)
@given(values)
def test_encoding_preserves_plain_data_to_the_bit(value: Any) -> None:
    text = json.dumps(encode(value, ""))
    assert same(decode(json.loads(text, parse_constant=pytest.fail)), value)  # standard JSON: no NaN


def test_encoding_refuses_objects_by_name() -> None:
    with pytest.raises(UnsupportedError, match=r"args\.model\[1\]: object .* is not plain data"):
        encode({"args": {"model": [1, object()]}}, "")


INDEX = AtomicIndex.of(
    (FileRef("/run/tag/b.pt", 20, 7), FileRef("/run/tag/a.pt", 10, None)),
    Records(),
    (),
    topology=Topology(1, "zero12", "bfloat16", 4, 2, 2, flats=(join_parameters(0, ("w",), ((6,),)),)),
    state_file="/run/tag/a.pt",
    scalars={ParamKey("w"): {"step": math.nan}, ParamKey("ä/w", 1): {"step": 2}},
    groups=(GroupInfo((ParamKey("w"),), {"lr": 0.1, "betas": (0.9, 0.999)}), GroupInfo((), {})),
    counters={"global_steps": 3},
    scaler={"cur_scale": math.inf, "dynamic": True},
    clip_grad=math.nan,
    optimizer="AdamW",
    scalar_dtypes={"step": "float32"},
    aliases={"tied": "w"},
    buffers=frozenset({"z", "count"}),
    instances={"w": 2},
    hints={"args": {"sizes": (1, 2)}, "iteration": 7},
    dropped="why",
)

ATOM = SealedAtom("w", "fp32", 0, "float32", (3, 2), 64, 5)
ATOMS = [ATOM, ATOM._replace(state="exp_avg")]
PATTERNS = {"w": ShardV(vocab=2), "v": ShardNC(parts=(4, 2), sized=True, widths=((2, 2), (1, 1)))}
STATES = {STATE_FILE: SealedFile(size=100, crc=9)}


def make(
    index: AtomicIndex = INDEX,
    atoms: Sequence[SealedAtom] = ATOMS,
    patterns: Mapping[str, Any] = PATTERNS,
    states: Mapping[str, SealedFile] = STATES,
    size: int = 96,
) -> Seal:
    """Write the manifest of files that were converted from an index."""
    files = {**states, **{name_atom_file(atom.key): SealedFile(size=size, crc=5) for atom in atoms}}
    identity = dict(zip(("fingerprint", "view"), identify(index), strict=True), verified=True)
    data = dump_index(index, atoms, patterns, {"w": "the user's rules"}, identity)
    return Seal(version=OF_CONVERSIONS, package="1.0", files=files, index=data)


def parse(data: bytes, path: str = "folder/ucp_manifest.json") -> Manifest:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(seal, "read_bounded", lambda *_: data)
        return parse_index(read_seal(path), path)


def round_trip(made: Seal) -> Manifest:
    return parse(made.dump())


def test_a_manifest_preserves_its_index() -> None:
    made, again = make(), round_trip(make())
    assert again.seal == made.model_copy(update={"index": {}, "digest": again.seal.digest})
    for name in ("scalar_dtypes", "counters", "scaler", "clip_grad", "optimizer", "aliases", "instances", "hints"):
        assert same(getattr(again, name), getattr(INDEX, name)), name
    assert same(dict(again.scalars), dict(INDEX.scalars))
    assert again.groups == INDEX.groups
    assert [atom.state for atom in again.atoms] == ["exp_avg", "fp32"]
    assert again.groups[0].hyper["betas"] == (0.9, 0.999)
    assert again.patterns["w"]["origin"] == "the user's rules"
    assert {name: read_pattern(record["pattern"]) for name, record in again.patterns.items()} == PATTERNS
    assert "flats" not in again.source
    assert again.source["tp"] == 2
    assert again.buffers == ("count", "z")
    assert (again.dropped, again.verified) == ("why", True)


def test_equal_sources_give_equal_bytes() -> None:
    """The manifest does not depend on the order of the files."""
    turned = replace(
        INDEX,
        files=INDEX.files[::-1],
        counters=dict(reversed(INDEX.counters.items())),
        hints=dict(reversed(INDEX.hints.items())),
    )
    other = make(turned, ATOMS[::-1], dict(reversed(PATTERNS.items())))
    assert make().dump() == other.dump()
    assert make().dump().isascii()


def test_objects_in_param_groups_are_omitted_from_the_manifest() -> None:
    """A load keeps the live optimizer's objects."""
    index = replace(INDEX, groups=(GroupInfo((ParamKey("w"),), {"lr": 0.1, "hook": object(), "list": [object()]}),))
    assert round_trip(make(index)).groups[0].hyper == {"lr": 0.1}


def test_a_fingerprint_covers_names_sizes_and_zip_directories() -> None:
    files = fingerprint(INDEX)["files"]
    assert files == [
        {"name": "a.pt", "size": 10, "header_crc": None, "records": []},
        {"name": "b.pt", "size": 20, "header_crc": 7},
    ]
    moved = replace(INDEX, state_file="/new/a.pt", files=(FileRef("/new/b.pt", 20, 7), FileRef("/new/a.pt", 10, None)))
    assert fingerprint(moved) == fingerprint(INDEX)


@pytest.mark.parametrize(
    "file", [FileRef("/run/tag/b.pt", 21, 7), FileRef("/run/tag/b.pt", 20, 8), FileRef("/run/tag/c.pt", 20, 7)]
)
def test_a_changed_file_changes_the_fingerprint(file: FileRef) -> None:
    other = replace(INDEX, files=(file, INDEX.files[1]))
    assert fingerprint(other)["digest"] != fingerprint(INDEX)["digest"]
    assert make(other).dump() != make().dump()


def change(**fields: Any) -> str:
    """Return the text of a manifest with changed entries and the original digest."""
    data = json.loads(make().dump())
    data.update(fields)
    return json.dumps({key: value for key, value in data.items() if value != "gone"})


def mend(text: str) -> str:
    """Return the text with a right digest, which an attacker can compute."""
    data = json.loads(text)
    data.pop("digest", None)
    return json.dumps({**data, "digest": hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()})


def change_index(**fields: Any) -> str:
    index = {**json.loads(make().dump())["index"], **fields}
    return mend(change(index={key: value for key, value in index.items() if value != "gone"}))


ODD_VALUES = [{"$float": "00"}, {"$float": "zz"}, {"$tuple": 5}, {"$dict": [[[], 1]]}, {"$bytes": 1}]
OLD_FORMAT = '{"kind": "deepspeed_ucp atomic checkpoint", "version": 2, "package": "0.9"}'
REFUSED = {
    "other": ('{"kind": "x"}', "is not the seal that was written .* convert again"),
    "newer": (
        change(version=4, package="9.9"),
        "is of format 4, this release reads formats 1 and 3.* 9.9: update",
    ),
    "older": (OLD_FORMAT, "is of format 2, this release reads formats 1 and 3.* deepspeed_ucp 0.9: .*convert again"),
    "missing": (change(index="gone"), "its digest does not match"),
    "more": (change(extra=1), "is not the seal that was written .extra"),
    "a save's seal": (mend(change(index="gone", version=1)), "is of another form than expected"),
    "missing, mended": (change_index(groups="gone"), "groups is of another form than expected"),
    "more, mended": (change_index(extra=1), "extra is of another form than expected"),
    "no atom's file": (mend(change(files=json.loads(change())["files"] | {"a": 1})), "files.a.* it is damaged"),
    "no state file": (make(states={}).dump().decode(), "lists no file mp_rank_00_model_states.pt"),
    "edited": (change(package="2"), "its digest does not match its contents; it is damaged .* or convert again"),
    "number": (make().dump().decode().replace(",64,", ",65,", 1), "its digest does not match"),
    **{f"odd value {at}": (change_index(hints=odd), "is no valid manifest") for at, odd in enumerate(ODD_VALUES)},
}


@pytest.mark.parametrize("name", ["/etc/passwd", "../w/fp32.pt", "zero/../../x", "", "zero//x", "a\0b"])
def test_files_outside_of_the_folder_are_refused(name: str) -> None:
    """An attacker can write a manifest with a right digest."""
    for made in (
        make(atoms=[ATOM._replace(name=name)]),
        make(atoms=[ATOM._replace(state=name)]),
        make(states={**STATES, name: SealedFile(size=1, crc=2)}),
        make(replace(INDEX, scalars={ParamKey(name): {"step": 1}})),
    ):
        with pytest.raises(CheckpointError, match="names files outside of its folder"):
            round_trip(made)


@pytest.mark.parametrize(
    ("changes", "experts", "text"),
    [
        ({}, 0, r"other numbers of experts than it says: w \(fp32\)"),
        ({}, 7, r"other numbers of experts than it says: w \(fp32\)"),
        ({"shape": (1 << 20, 0)}, 1 << 20, r"other numbers of experts than it says: w \(fp32\)"),
        ({"offset": 73}, None, r"contradict each other: w \(fp32\)"),
        ({"offset": -1}, None, r"atoms.0.* is of another form than expected"),
        ({"shape": (3, 3)}, None, r"contradict each other: w \(fp32\)"),
        ({"shape": (-3, -2)}, None, r"atoms.0.* is of another form than expected"),
        ({"dtype": "float64"}, None, r"contradict each other: w \(fp32\)"),
        ({"dtype": "blob"}, None, r"contradict each other: w \(fp32\)"),
    ],
    ids=str,
)
def test_contradictory_atoms_are_refused(changes: dict[str, Any], experts: int | None, text: str) -> None:
    index = INDEX if experts is None else replace(INDEX, fused={"w": experts})
    with pytest.raises(CheckpointError, match=text):
        round_trip(make(index, [ATOM._replace(**changes)]))


@pytest.mark.parametrize("text", REFUSED)
def test_texts_that_are_no_manifest_are_refused(text: str) -> None:
    """``tests/test_json.py`` has invalid JSON."""
    content, message = REFUSED[text]
    kind = UnsupportedError if text in ("newer", "older") else CheckpointError
    with pytest.raises(kind, match=f"^folder/ucp_manifest.json: .*{message}"):
        parse(content.encode())


@pytest.fixture
def converted(tmp_path: Path) -> Path:
    """A small conversion."""
    model = Model((Param("a", (3, 5)), Param("b", (7,), group=1)), {"n": torch.arange(3)})
    source = write_checkpoint(tmp_path, model, random_state(model, 0), SavedTopology(1, 2))
    convert_checkpoint(str(source))
    return Path(f"{source}_universal")


@pytest.mark.parametrize("column", [5, 6], ids=["offset", "crc"])
def test_atoms_at_other_offsets_than_in_the_manifest_are_refused(converted: Path, column: int) -> None:
    data = json.loads((converted / MANIFEST).read_text())
    data["index"]["atoms"][0][column] += 1
    (converted / MANIFEST).write_text(mend(json.dumps(data)))
    (fault,) = verify_checkpoint(str(converted), headers_only=True).faults
    assert (fault.kind, fault.file, fault.names) == ("seal", "zero/a/exp_avg.pt", ("a (exp_avg)",))


def test_an_atom_larger_than_its_file_is_refused(tmp_path: Path) -> None:
    """It is refused even if the manifest declares a larger file."""
    (tmp_path / "zero/w").mkdir(parents=True)
    (tmp_path / "zero/w/fp32.pt").write_bytes(bytes(4096))
    for size, file in ((0, MANIFEST), (4096, MANIFEST), (8 << 40, "zero/w/fp32.pt")):
        made = make(atoms=[ATOM._replace(shape=(1 << 40,))], size=size)
        (tmp_path / MANIFEST).write_bytes(made.dump())
        assert file in {fault.file for fault in survey_checkpoint(str(tmp_path), Comm()).findings}
