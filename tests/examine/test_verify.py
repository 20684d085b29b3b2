"""Looking at every byte: whole checkpoints are whole, and every sort of damage is named where it is."""

from __future__ import annotations

import errno
import os
import random
import shutil
import zipfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given

from deepspeed_ucp.comm import Comm
from deepspeed_ucp.convert import convert_checkpoint
from deepspeed_ucp.errors import CheckpointError, UnsupportedError
from deepspeed_ucp.examine import verify
from deepspeed_ucp.examine.verify import Verification, list_files, share_files, verify_checkpoint
from deepspeed_ucp.io import scan
from deepspeed_ucp.sources import latest
from deepspeed_ucp.sources.atomic.manifest import read_manifest
from deepspeed_ucp.sources.findings import Finding
from deepspeed_ucp.sources.open import seal_folder
from deepspeed_ucp.stream.batches import WorkOptions, no_bar
from deepspeed_ucp.torchsave.torchfile import list_records
from tests.sources.parallel import tail_cut
from tests.sources.test_index import count_read_bytes
from tests.sources.test_parallel import PIPE, PLAIN
from tests.support.ranks import World, run_ranks
from tests.support.reshard import Case, cases, examples, temporary_folder
from tests.synth import Model, Param, Run, Topology, build_files, random_state, write_checkpoint, write_files

MODEL = Model(
    (Param("a.weight", (30, 50)), Param("a.bias", (7,), group=1), Param("fixed", (3, 4), frozen=True)),
    {"count": torch.arange(3)},
)
OPTIM = "zero_pp_rank_{}_mp_rank_00_optim_states.pt"
MAIN = "mp_rank_00_model_states.pt"
TOPOLOGIES = [
    Topology(0),
    Topology(0, 1, "fp16", "unfused"),
    Topology(1, 3),
    Topology(2, 2, "bf16"),
    Topology(3, 3),
    Topology(1, 2, "bf16", "bf16"),
]


def write(folder: Path, topology: Topology, model: Model = MODEL, **more: object) -> Path:
    state = random_state(model, 0, precision=topology.precision, topology=topology)
    return write_checkpoint(folder, model, state, topology, cut=tail_cut, **more)  # type: ignore[arg-type]


def name_groups(model: Model, topology: Topology) -> list[list[str]]:
    """What stage 0 does not tell: DeepSpeed's own wrappers leave frozen parameters out of their groups."""
    whole = topology.kind == "raw"
    return [[param.name for param in group if whole or param.trains] for group in model.groups]


def tell(found: Verification) -> list[tuple[str, str]]:
    """Kinds and files of the faults; warnings with a question mark."""
    return [(fault.kind + "?" * fault.warning, fault.file) for fault in found.faults]


def only_fault(folder: Path, kind: str, name: str) -> Finding:
    """The one thing that is wrong."""
    found = verify_checkpoint(str(folder))
    assert tell(found) == [(kind, name)], found.faults
    assert not found.whole
    return found.faults[0]


def flip(path: Path, offset: int) -> None:
    """Change a bit of a byte."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 4
    path.write_bytes(bytes(data))


def flip_largest(path: Path) -> None:
    """Change a bit in the middle of a file's largest record."""
    record = max(list_records(str(path)).records, key=lambda record: (record.name != "data.pkl", record.nbytes))
    flip(path, record.offset + record.nbytes // 2)


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=lambda t: t.label)
def test_a_whole_checkpoint_is_whole(tmp_path: Path, topology: Topology) -> None:
    path = write(tmp_path, topology)
    found = verify_checkpoint(str(path), groups=name_groups(MODEL, topology))
    assert (found.whole, found.faults, found.kind, found.unchecked) == (True, (), "normal", 0)
    assert [file.name for file in found.files] == sorted(os.listdir(path))
    assert found.read == sum(file.stat().st_size for file in path.iterdir())
    assert found.topology.startswith(f"ZeRO-{topology.stage}")
    for file in found.files:
        entries = [entry for entry in zipfile.ZipFile(path / file.name).infolist() if entry.file_size]
        assert file.records == len(entries)


@pytest.mark.parametrize(
    ("topology", "model"),
    [(Topology(1, 2, tp=2), PLAIN), (Topology(3, 2, tp=2), PLAIN), (Topology(1, 2, "bf16", tp=2, pp=2), PIPE)],
    ids=lambda each: each.label if isinstance(each, Topology) else "",
)
def test_a_whole_3d_checkpoint_is_whole(tmp_path: Path, topology: Topology, model: Model) -> None:
    assert verify_checkpoint(str(write(tmp_path, topology, model))).faults == ()


@examples(30)
@given(case=cases(4))
def test_whatever_was_saved_is_whole(case: Case) -> None:
    with temporary_folder() as folder:
        found = verify_checkpoint(
            str(case.write(folder)), groups=[[param.name for param in group] for group in case.model.groups]
        )
        assert found.faults == ()
        nbytes = sum(file.nbytes for file in found.files)
        assert (found.unchecked == nbytes) == case.legacy


def test_a_changed_bit_names_the_record_and_what_is_in_it(tmp_path: Path) -> None:
    path = write(tmp_path, Topology(2, 2))
    name = OPTIM.format(1)
    tree = torch.load(path / name, weights_only=False)["optimizer_state_dict"]
    key = tree["base_optimizer_state"]["state"][0]["exp_avg"].untyped_storage()
    for record in list_records(str(path / name)).records:
        if record.nbytes == key.nbytes() and record.name != "data.pkl":
            shutil.copy(path / name, tmp_path / "kept")
            flip(path / name, record.offset + record.nbytes // 2)
            fault = only_fault(path, "crc", name)
            assert f"record {record.name}, bytes [{record.offset}, {record.offset + record.nbytes})" in fault.text
            states = {atom.partition(" ")[2] for atom in fault.names}
            assert {atom.partition(" ")[0] for atom in fault.names} == {"a.weight"}
            assert len(states) == 1 and states < {"(fp32)", "(exp_avg)", "(exp_avg_sq)"}
            assert fault.names[0] in fault.text
            shutil.move(tmp_path / "kept", path / name)


def test_every_record_is_looked_at(tmp_path: Path) -> None:
    path = write(tmp_path, Topology(1, 2, "bf16"), run=Run(client_state={"rng": torch.arange(9)}))
    for name in sorted(os.listdir(path)):
        whole = (path / name).read_bytes()
        for record in list_records(str(path / name)).records:
            flip(path / name, record.offset + record.nbytes - 1)
            found = verify_checkpoint(str(path))
            assert ("crc", name) in tell(found), (name, record)
            assert all(fault.file in (name, "") for fault in found.faults), found.faults
            (path / name).write_bytes(whole)


def test_a_changed_byte_anywhere_is_named_or_harmless(tmp_path: Path) -> None:
    path, draw = write(tmp_path, Topology(1, 2)), random.Random(0)
    name = OPTIM.format(1)
    whole = (path / name).read_bytes()
    records = list_records(str(path / name)).records
    directory = whole.index(b"PK\1\2")
    places = draw.sample(range(directory), 60) + draw.sample(range(directory, len(whole)), 60)
    for place in places:
        flip(path / name, place)
        found = verify_checkpoint(str(path))
        inside = any(record.offset <= place < record.offset + record.nbytes for record in records)
        assert not (inside and found.whole), place
        assert all(fault.file in (name, "") for fault in found.faults), found.faults
        (path / name).write_bytes(whole)


@pytest.mark.parametrize("name", [MAIN, OPTIM.format(0), OPTIM.format(2)])
@pytest.mark.parametrize("length", [0, 100, -2000, -1])
def test_a_file_cut_off_is_named(tmp_path: Path, name: str, length: int) -> None:
    path = write(tmp_path, Topology(1, 3))
    os.truncate(path / name, length % (path / name).stat().st_size)
    fault = only_fault(path, "header", name)
    assert name in fault.text
    assert verify_checkpoint(str(path)).unchecked == 0  # which tells of what was written without checksums


@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO], ids=["out-of-reach", "lost"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_file_that_cannot_be_opened_is_one_fault(
    code: int, ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, work = write(tmp_path, Topology(1, 3)), os.open

    def refuse(path: Any, *rest: Any, **how: Any) -> int:
        if str(path).endswith(OPTIM.format(1)):
            raise OSError(code, os.strerror(code), path)
        return work(path, *rest, **how)

    monkeypatch.setattr(os, "open", refuse)
    for found in run_ranks(ranks, lambda _, comm: verify_checkpoint(str(path), comm)):
        assert tell(found) == [("read" if code == errno.EACCES else "header", OPTIM.format(1))]
        assert found.unchecked == 0


def test_all_faults_are_told_at_once(tmp_path: Path) -> None:
    path = write(tmp_path, Topology(1, 6))
    os.truncate(path / OPTIM.format(0), 300)
    (path / OPTIM.format(1)).unlink()
    flip_largest(path / OPTIM.format(3))
    shutil.copy(path / OPTIM.format(4), path / OPTIM.format(5))
    shutil.copy(path / MAIN, path / "mp_rank_01_model_states.pt")
    found = verify_checkpoint(str(path))
    assert set(tell(found)) >= {
        ("header", OPTIM.format(0)),
        ("missing", OPTIM.format(1)),
        ("crc", OPTIM.format(3)),
        ("header", OPTIM.format(5)),
    }
    assert not any(fault.file in (OPTIM.format(2), OPTIM.format(4), MAIN) for fault in found.faults), found.faults
    assert "was saved as" in next(fault.text for fault in found.faults if fault.file == OPTIM.format(5))


def test_damaged_bytes_are_named_by_their_place_where_there_is_no_index(tmp_path: Path) -> None:
    path = write(tmp_path, Topology(1, 2))
    (path / OPTIM.format(0)).unlink()
    tree = torch.load(path / OPTIM.format(1), weights_only=False)["optimizer_state_dict"]
    assert tree["base_optimizer_state"]["state"]
    for record in list_records(str(path / OPTIM.format(1))).records:
        if record.nbytes > 1000 and record.name.startswith("data/"):
            flip(path / OPTIM.format(1), record.offset)
    found = verify_checkpoint(str(path))
    told = {atom for fault in found.faults if fault.kind == "crc" for atom in fault.names}
    assert "optimizer_state_dict.base_optimizer_state.state.0.exp_avg" in told


@pytest.mark.parametrize("topology", [Topology(1, 3), Topology(3, 3), Topology(1, 2, tp=2)], ids=lambda t: t.label)
def test_a_missing_file_is_named(tmp_path: Path, topology: Topology) -> None:
    model = PLAIN if topology.tp > 1 else MODEL
    path = write(tmp_path, topology, model)
    for name in sorted(os.listdir(path)):
        if name in ("zero_pp_rank_0_mp_rank_00_model_states.pt", MAIN):
            continue  # without these nothing tells what belongs to the save
        data = (path / name).read_bytes()
        (path / name).unlink()
        only_fault(path, "missing", name)
        (path / name).write_bytes(data)


@pytest.mark.parametrize("name", [MAIN, "zero_pp_rank_0_mp_rank_00_model_states.pt"])
def test_without_its_first_file_a_folder_is_no_checkpoint(tmp_path: Path, name: str) -> None:
    path = write(tmp_path, Topology(3, 1) if "zero" in name else Topology(1, 1))
    (path / name).unlink()
    found = verify_checkpoint(str(path))
    assert "missing" in {fault.kind for fault in found.faults}


def test_files_swapped_between_ranks_are_named(tmp_path: Path) -> None:
    path = write(tmp_path, Topology(1, 3))
    first, second = path / OPTIM.format(1), path / OPTIM.format(2)
    data = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(data)
    assert tell(verify_checkpoint(str(path))) == [("header", first.name), ("header", second.name)]


@pytest.mark.parametrize("topology", [Topology(1, 3), Topology(3, 3), Topology(2, 3, "fp16")], ids=lambda t: t.label)
def test_a_file_of_another_run_is_named(tmp_path: Path, topology: Topology) -> None:
    path = write(tmp_path / "right", topology)
    other = write(tmp_path / "other", replace(topology, dp=4))
    name = next(name for name in sorted(os.listdir(path)) if name.startswith("zero_pp_rank_1_") and "optim" in name)
    shutil.copy(other / name, path / name)
    only_fault(path, "foreign", name)


def test_a_file_of_another_step_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "right", Topology(3, 3))
    other = write(tmp_path / "other", Topology(3, 3), run=Run(global_steps=4))
    name = "zero_pp_rank_2_mp_rank_00_model_states.pt"
    shutil.copy(other / name, path / name)
    fault = only_fault(path, "foreign", name)
    assert "global_steps" in fault.text


def test_masters_of_another_step_are_found_by_the_copies(tmp_path: Path) -> None:
    path = write(tmp_path / "right", Topology(1, 2, "bf16"))
    state = random_state(MODEL, 1, precision="bf16")
    other = write_checkpoint(tmp_path / "other", MODEL, state, Topology(1, 2, "bf16"))
    name = f"bf16_{OPTIM.format(1)}"
    shutil.copy(other / name, path / name)
    assert "another run or step" in only_fault(path, "foreign", name).text


def test_elements_that_no_file_holds_are_told(tmp_path: Path) -> None:
    topology = Topology(1, 2)
    files = build_files(MODEL, random_state(MODEL, 0), topology)
    content = files[OPTIM.format(1)]["optimizer_state_dict"]
    content["single_partition_of_fp32_groups"][0] = content["single_partition_of_fp32_groups"][0][:-8].clone()
    write_files(tmp_path / "tag", files)
    assert not verify_checkpoint(str(tmp_path / "tag")).whole


def test_stage_0_names_no_parameters(tmp_path: Path) -> None:
    path = write(tmp_path, Topology(0))
    found = verify_checkpoint(str(path))
    assert (tell(found), found.whole) == ([("unnamed?", MAIN)], True)
    single = Model((Param("a", (3, 5)), Param("b", (4,))))
    assert verify_checkpoint(str(write(tmp_path / "single", Topology(0), single))).faults == ()
    found = verify_checkpoint(str(path), groups=[["a.weight"]])
    assert (tell(found), found.whole) == ([("unnamed", MAIN)], False)


def test_weights_alone_are_told(tmp_path: Path) -> None:
    path = write(tmp_path, Topology(1, 1))
    (path / OPTIM.format(0)).unlink()
    assert tell(verify_checkpoint(str(path))) == [("missing?", "")]


def test_a_missing_layer_of_a_pipeline_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, Topology(1, 2, "bf16", tp=2, pp=2), PIPE)
    (path / "layer_02-model_01-model_states.pt").unlink()
    only_fault(path, "missing", "layer_02-model_01-model_states.pt")
    (path / "layer_02-model_00-model_states.pt").unlink()
    assert "layer_02" in only_fault(path, "missing", "").text


def test_files_of_an_earlier_save_are_a_warning(tmp_path: Path) -> None:
    path = write(tmp_path, Topology(1, 4))
    write(tmp_path, Topology(1, 2))
    found = verify_checkpoint(str(path))
    assert found.whole
    assert tell(found) == [("leftover?", OPTIM.format(2)), ("leftover?", OPTIM.format(3))]


def test_leftovers_are_told_beside_faults(tmp_path: Path) -> None:
    path = write(tmp_path, Topology(1, 4))
    write(tmp_path, Topology(1, 2))
    os.truncate(path / OPTIM.format(1), 9)
    found = verify_checkpoint(str(path))
    assert ("header", OPTIM.format(1)) in tell(found)
    assert ("leftover?", OPTIM.format(3)) in tell(found)


def test_without_checksums_the_bytes_are_told_as_unchecked(tmp_path: Path) -> None:
    path = write(tmp_path, Topology(1, 2), legacy=True)
    found = verify_checkpoint(str(path))
    assert found.whole
    assert found.unchecked == found.read == sum(file.stat().st_size for file in path.iterdir())


def test_a_writer_that_computes_no_checksums(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        path = write(tmp_path, Topology(1, 2))
    finally:
        torch.serialization.set_crc32_options(True)
    found = verify_checkpoint(str(path))
    assert found.whole
    assert found.unchecked > 0.5 * found.read


def test_headers_only_leaves_the_tensors_alone(tmp_path: Path) -> None:
    path = write(tmp_path, Topology(1, 2))
    flip_largest(path / OPTIM.format(1))
    found = verify_checkpoint(str(path), headers_only=True)
    assert (found.whole, found.read) == (True, 0)
    os.truncate(path / OPTIM.format(0), 99)
    assert tell(verify_checkpoint(str(path), headers_only=True)) == [("header", OPTIM.format(0))]


def test_kinds_that_are_not_covered_are_checked_for_damage_all_the_same(tmp_path: Path) -> None:
    path = write(tmp_path, Topology(1, 2))
    torch.save({"x": torch.ones(100)}, path / "layer_00-expert_01-model_01-model_states.pt")
    assert tell(verify_checkpoint(str(path))) == [("unsupported", "")]
    flip_largest(path / OPTIM.format(1))
    assert tell(verify_checkpoint(str(path))) == [("unsupported", ""), ("crc", OPTIM.format(1))]


def test_an_empty_folder_cannot_be_verified(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(CheckpointError, match="holds no checkpoint .notes.txt"):
        verify_checkpoint(str(tmp_path))


def test_other_files_are_listed(tmp_path: Path) -> None:
    path = write(tmp_path, Topology(1, 2))
    (path / "zero_to_fp32.py").write_text("pass")
    seal_folder(str(path), Comm())
    assert verify_checkpoint(str(path)).others == ("zero_to_fp32.py",)


def test_progress_is_told_every_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan, "CHUNK", 4096)
    path, told, totals = write(tmp_path, Topology(2, 3)), list[int](), list[int]()

    def make_bar(total: int) -> Any:
        totals.append(total)
        return nullcontext(told.append)

    found = verify_checkpoint(str(path), options=WorkOptions(bar=make_bar))
    assert sum(told) == found.read == sum(entry.size for entry in list_files(str(path))[0].values()) == totals[0]
    assert max(told) <= 4096


def test_a_file_cut_off_while_it_is_read_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, Topology(1, 2), Model((Param("a", (300, 500)),)))
    name, size = OPTIM.format(1), os.path.getsize(path / OPTIM.format(1))

    def cut_and_scan(*args: Any, **more: Any) -> Any:
        os.truncate(path / name, size // 2)
        return scan.scan_files(*args, **more)

    monkeypatch.setattr(scan, "CHUNK", 4096)
    monkeypatch.setattr("deepspeed_ucp.examine.verify.scan_files", cut_and_scan)
    found = [fault for fault in verify_checkpoint(str(path)).faults if fault.kind == "read"]
    assert len(found) == 1
    assert f"ends at byte {size // 2}" in found[0].text
    assert "other places" in found[0].text


def test_every_byte_is_read_once(tmp_path: Path) -> None:
    model = Model((Param("a", (1000, 500)), Param("b", (500, 1000)), Param("c", (500, 300), frozen=True)))
    path = write(tmp_path, Topology(1, 3, "bf16"), model)
    before = count_read_bytes()
    found = verify_checkpoint(str(path))
    assert found.whole
    assert found.read <= count_read_bytes() - before < 1.05 * found.read


# -- several ranks ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 5])
def test_ranks_share_the_files_and_tell_the_same(tmp_path: Path, size: int) -> None:
    path = write(tmp_path, Topology(3, 3))
    flip_largest(path / OPTIM.format(1))
    os.truncate(path / OPTIM.format(2), 999)
    told: dict[int, int] = {}

    def work(rank: int, comm: object) -> Verification:
        def make_bar(total: int) -> Any:
            told[rank] = total
            return no_bar(total)

        return replace(verify_checkpoint(str(path), comm, WorkOptions(bar=make_bar)), seconds=0.0)  # type: ignore[arg-type]

    results = run_ranks(size, work)
    assert all(result == results[0] for result in results)
    assert results[0] == replace(verify_checkpoint(str(path)), seconds=0.0)
    assert sum(told.values()) == results[0].read
    assert sum(total > 0 for total in told.values()) == min(size, len(os.listdir(path)))


# -- several places ---------------------------------------------------------------------------------------------------


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A checkpoint, and a copy of it that is nearer."""
    path = write(tmp_path, Topology(1, 3))
    shutil.copytree(path, tmp_path / "nvme")
    monkeypatch.setattr("deepspeed_ucp.sources.places.measure_distance", lambda folder: int("nvme" not in folder))
    return path, tmp_path / "nvme"


def test_each_file_is_looked_at_in_one_place(places: tuple[Path, Path]) -> None:
    path, near = places
    (path / OPTIM.format(0)).unlink()
    (near / OPTIM.format(1)).unlink()
    found = verify_checkpoint(str(path), also=[str(near)])
    assert tell(found) == [] and found.whole
    assert found.read == found.nbytes
    assert tell(verify_checkpoint(str(path))) == [("missing", OPTIM.format(0))]


def test_a_copy_that_a_load_passes_over_is_a_warning(places: tuple[Path, Path]) -> None:
    path, near = places
    flip_largest(near / OPTIM.format(0))
    os.truncate(near / OPTIM.format(1), 100)  # passed over: of another size
    flip_largest(path / OPTIM.format(1))
    flip(near / OPTIM.format(2), (near / OPTIM.format(2)).stat().st_size - 22)
    found = verify_checkpoint(str(path), also=[str(near)])
    assert [kind for kind, name in tell(found) if name == OPTIM.format(0)] == ["crc"]
    assert [kind for kind, name in tell(found) if name == OPTIM.format(1)] == ["crc"]
    assert [kind for kind, name in tell(found) if name == OPTIM.format(2)] == ["header?"]
    told = next(fault for fault in found.faults if fault.file == OPTIM.format(0))
    assert told.text.endswith(f"{path / OPTIM.format(0)} is right: remove this copy, and a load reads that one.")
    assert told.names == ("a.weight (exp_avg)",)


@pytest.mark.parametrize("length", [100, 0])
def test_a_first_file_that_is_cut_off_is_a_warning_where_another_place_has_it(
    length: int, places: tuple[Path, Path]
) -> None:
    """As a load takes the other one then, of whatever size it is."""
    path, near = places
    os.truncate(path / OPTIM.format(1), length)
    found = verify_checkpoint(str(path), also=[str(near)])
    assert tell(found) == [("header?", OPTIM.format(1))] and found.whole
    assert found.faults[0].text.endswith(f"{near / OPTIM.format(1)} is right.")
    assert found.nbytes == sum(file.stat().st_size for file in near.iterdir())
    os.truncate(near / OPTIM.format(1), length + 1)
    assert not verify_checkpoint(str(path), also=[str(near)]).whole


def test_another_runs_file_in_a_nearer_place_is_told(places: tuple[Path, Path], tmp_path: Path) -> None:
    path, near = places
    theirs = write_checkpoint(tmp_path / "theirs", MODEL, random_state(MODEL, 1), Topology(1, 3), cut=tail_cut)
    shutil.copy(theirs / OPTIM.format(1), near / OPTIM.format(1))
    found = verify_checkpoint(str(path), also=[str(near)])
    assert tell(found) == [("foreign?", OPTIM.format(1))] and found.whole
    assert "it is another file" in found.faults[0].text


def test_of_what_has_no_checksums_the_first_place_is_looked_at(places: tuple[Path, Path], tmp_path: Path) -> None:
    """As a load reads it."""
    _, near = places
    state = random_state(MODEL, 0)
    path = write_checkpoint(tmp_path / "legacy", MODEL, state, Topology(1, 3), cut=tail_cut, legacy=True)
    shutil.rmtree(near)
    shutil.copytree(path, near)
    (near / OPTIM.format(1)).write_bytes(bytes((path / OPTIM.format(1)).stat().st_size))
    found = verify_checkpoint(str(path), also=[str(near)])
    assert tell(found) == [] and found.whole


def test_where_latest_leads_is_asked_by_one_rank_and_no_fault_where_it_cannot_be_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, asked = write(tmp_path, Topology(1, 2)), list[str]()
    (tmp_path / "latest").write_text(path.name)

    def look(path: str) -> bool:
        asked.append(path)
        raise ConnectionError("out of reach")

    monkeypatch.setattr(latest, "is_folder", look)
    found = World(2).run(lambda _rank, comm: verify_checkpoint(str(path), comm))
    assert len(asked) == 1
    for each in found:
        (fault,) = each.faults
        assert fault.kind == "latest" and fault.warning and "out of reach" in fault.text


def test_a_place_that_one_rank_cannot_ask_ends_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, turns = write(tmp_path, Topology(1, 2)), iter([verify.list_files])

    def look(folder: str) -> Any:
        if (listed := next(turns, None)) is None:
            raise UnsupportedError("no module named obstore")
        return listed(folder)

    monkeypatch.setattr(verify, "list_files", look)
    found = World(2).run(lambda _rank, comm: verify_checkpoint(str(path), comm))
    assert [type(each) for each in found] == [UnsupportedError] * 2


def test_ranks_that_see_different_files_look_at_their_own(tmp_path: Path) -> None:
    path = write(tmp_path, Topology(1, 3))
    hosts = [tmp_path / f"host{number}" for number in range(3)]
    for number, host in enumerate(hosts):
        host.mkdir()
        for name in (MAIN, OPTIM.format(number)):
            shutil.copy2(path / name, host)
    flip_largest(hosts[2] / OPTIM.format(2))
    for found in run_ranks(3, lambda rank, comm: verify_checkpoint(str(hosts[rank]), comm)):
        assert tell(found) == [("crc", OPTIM.format(2))]
        assert len(found.files) == 4


def test_shares_are_about_equal() -> None:
    sizes = {f"file{index}": 1000 + index for index in range(50)} | {"large": 9000}
    shares = share_files(sizes, 4)
    assert sorted(name for share in shares for name in share) == sorted(sizes)
    loads = [sum(sizes[name] for name in share) for share in shares]
    assert max(loads) - min(loads) <= 1100


# -- atomic checkpoints -----------------------------------------------------------------------------------------------


@pytest.fixture
def atomic(tmp_path: Path) -> Path:
    """An atomic checkpoint of ours."""
    model = Model((*MODEL.params, Param("c.weight", (30, 50))), MODEL.buffers)
    source = write(tmp_path, Topology(2, 2, "bf16"), model)
    convert_checkpoint(str(source))
    return Path(f"{source}_universal")


def test_a_whole_atomic_checkpoint_is_whole(atomic: Path) -> None:
    found = verify_checkpoint(str(atomic))
    assert (found.faults, found.kind) == ((), "atomic")
    assert len(found.fingerprint["digest"]) == 64


def test_step_files_that_an_older_manifest_does_not_list(atomic: Path) -> None:
    manifest = read_manifest(str(atomic))
    assert manifest is not None
    listed = tuple(state for state in manifest.states if not state.name.endswith("/step.pt"))
    assert len(listed) < len(manifest.states)
    (atomic / "ucp_manifest.json").write_text(replace(manifest, states=listed).to_json())
    assert verify_checkpoint(str(atomic)).faults == ()
    shutil.copy(atomic / "zero/a.weight/step.pt", atomic / "zero/step.pt")
    only_fault(atomic, "extra", "zero/step.pt")


DAMAGE: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "cut off": (lambda path: os.truncate(path / "zero/a.weight/fp32.pt", 500), "header", "zero/a.weight/fp32.pt"),
    "removed": (lambda path: (path / "zero/a.weight/exp_avg.pt").unlink(), "missing", "zero/a.weight/exp_avg.pt"),
    "more": (lambda path: torch.save({"param": torch.ones(2)}, path / "zero/a.bias/x.pt"), "extra", "zero/a.bias/x.pt"),
    "another's": (
        lambda path: shutil.copy(path / "zero/c.weight/fp32.pt", path / "zero/a.weight/fp32.pt"),
        "manifest",
        "zero/a.weight/fp32.pt",
    ),
    "flipped": (
        lambda path: flip_largest(path / "zero/a.weight/fp32.pt"),
        "crc",
        "zero/a.weight/fp32.pt",
    ),
    "step": (lambda path: os.truncate(path / "zero/a.weight/step.pt", 90), "header", "zero/a.weight/step.pt"),
    "manifest": (lambda path: flip(path / "ucp_manifest.json", 400), "manifest", "ucp_manifest.json"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_of_an_atomic_checkpoint_is_named(atomic: Path, damage: str) -> None:
    change, kind, name = DAMAGE[damage]
    change(atomic)
    found = verify_checkpoint(str(atomic))
    assert tell(found) == [(kind, name)], found.faults


def test_a_folder_without_manifest_is_looked_at_by_its_headers(atomic: Path) -> None:
    """As DeepSpeed's own converter leaves it: no manifest, and no tensors but those of the optimizer."""
    (atomic / "ucp_manifest.json").unlink()
    assert "ucp_manifest.json is missing" in only_fault(atomic, "missing", "ucp_manifest.json").text
    for path in atomic.rglob("module.pt"):
        path.unlink()
    found = verify_checkpoint(str(atomic))
    assert (found.faults, found.kind, found.fingerprint) == ((), "atomic", {})
    flip_largest(atomic / "zero/a.weight/exp_avg.pt")
    os.truncate(atomic / "zero/a.weight/fp32.pt", 500)
    assert tell(verify_checkpoint(str(atomic))) == [
        ("crc", "zero/a.weight/exp_avg.pt"),
        ("header", "zero/a.weight/fp32.pt"),
    ]


def test_another_state_file_is_found_by_the_manifest(atomic: Path, tmp_path: Path) -> None:
    other = write(tmp_path / "other", Topology(2, 2, "bf16"), run=Run(global_steps=9))
    convert_checkpoint(str(other))
    for name in (MAIN, "zero_pp_rank_0_mp_rank_00_model_states.pt"):
        (atomic / name).unlink()
        shutil.copy(f"{other}_universal/{name}", atomic / name)
    found = verify_checkpoint(str(atomic))
    assert ("manifest", MAIN) in tell(found)
