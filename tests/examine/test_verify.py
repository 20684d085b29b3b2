"""`ds_ucp verify`: complete checkpoints pass, and every kind of damage is reported with its file."""

from __future__ import annotations

import errno
import os
import shutil
import zipfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given

from deepspeed_ucp.cli.dispatch import main
from deepspeed_ucp.comm import Comm
from deepspeed_ucp.errors import CheckpointError, ConfigError, UnsupportedError
from deepspeed_ucp.examine import verify
from deepspeed_ucp.examine.verify import Verification, list_files, share_files, verify_checkpoint
from deepspeed_ucp.formats import latest
from deepspeed_ucp.formats.deepspeed.files import MANIFEST, SEAL
from deepspeed_ucp.formats.deepspeed.seal import SealedFile, read_seal
from deepspeed_ucp.formats.locations import FileTable
from deepspeed_ucp.formats.open import seal_folder
from deepspeed_ucp.io import scan
from deepspeed_ucp.io.paths import Entry
from deepspeed_ucp.stream.full_tensors import WorkOptions, no_bar
from deepspeed_ucp.torchsave.torchfile import list_records
from tests.formats.saves import PIPE, tail_cut
from tests.support.cases import Case, cases
from tests.support.conversion import convert_checkpoint
from tests.support.damage import flip, flip_largest, write_checksums
from tests.support.descriptors import count_read_bytes
from tests.support.ranks import World, run_ranks
from tests.support.reshard import examples, temporary_folder
from tests.synth import Model, Param, Run, Topology, random_state, write_checkpoint

MODEL = Model(
    (Param("a.weight", (30, 50)), Param("a.bias", (7,), group=1), Param("fixed", (3, 4), frozen=True)),
    {"count": torch.arange(3)},
)
OPTIM = "zero_pp_rank_{}_mp_rank_00_optim_states.pt"
MAIN = "mp_rank_00_model_states.pt"
MAIN_ZERO3 = "zero_pp_rank_0_mp_rank_00_model_states.pt"
LAYER = "layer_02-model_0{}-model_states.pt"
PIPED = Topology(1, 2, "bf16", tp=2, pp=2)


def write(folder: Path, topology: Topology, model: Model | None = None, seed: int = 0, **more: Any) -> Path:
    model = model or (PIPE if topology.pp > 1 else MODEL)
    state = random_state(model, seed, precision=topology.precision, topology=topology)
    return write_checkpoint(folder, model, state, topology, cut=tail_cut, **more)


def write_atomic(folder: Path) -> Path:
    model = Model((*MODEL.params, Param("c.weight", (30, 50))), MODEL.buffers)
    return Path(convert_checkpoint(str(write(folder, Topology(2, 2, "bf16"), model))).destination)


def list_faults(report: Verification) -> list[tuple[str, str]]:
    return [(fault.kind + "?" * (not fault.is_fault), fault.file) for fault in report.faults]


def verify_folder(path: Path, *also: Path, **options: Any) -> list[tuple[str, str]]:
    return list_faults(verify_checkpoint(str(path), also=[*map(str, also)], **options))


@examples(30)
@given(case=cases(4))
def test_any_synthesised_checkpoint_passes_verify(case: Case) -> None:
    with temporary_folder() as folder:
        path, whole = case.write(folder), case.topology.kind == "raw"  # other wrappers' groups omit frozen parameters
        groups = [[param.name for param in group if whole or param.trains] for group in case.model.groups]
        report = verify_checkpoint(str(path), groups=groups)
        assert (report.whole, report.faults, report.kind) == (True, (), "normal")
        assert report.topology.startswith(f"ZeRO-{case.topology.stage}")
        assert [file.name for file in report.files] == sorted(os.listdir(path))
        assert report.read == report.nbytes == sum(file.stat().st_size for file in path.iterdir())
        assert report.unchecked == (report.nbytes if case.legacy else 0)
        for file in () if case.legacy else report.files:
            assert file.records == sum(entry.file_size > 0 for entry in zipfile.ZipFile(path / file.name).infolist())


def test_a_changed_bit_is_reported_with_its_record_and_tensors(tmp_path: Path) -> None:
    path, seen = write(tmp_path, Topology(1, 2, "bf16"), run=Run(client_state={"rng": torch.arange(9)})), set[Any]()
    for name in sorted(os.listdir(path)):
        whole = (path / name).read_bytes()
        for label, record in list_records(str(path / name)).records.items():
            flip(path / name, record.offset + record.nbytes - 1)
            report = verify_checkpoint(str(path))
            assert not report.whole
            assert all(fault.file in (name, "") for fault in report.faults), report.faults
            fault = next(fault for fault in report.faults if (fault.kind, fault.file) == ("crc", name))
            assert f"record {label}, bytes [{record.offset}, {record.offset + record.nbytes})" in fault.text
            assert all(atom in fault.text for atom in fault.names[:1])
            seen.add((name, fault.names))
            (path / name).write_bytes(whole)
    for rank in range(2):
        alone = {(f"a.weight ({state})",) for state in ("fp32", "exp_avg", "exp_avg_sq")}
        assert alone <= {names for name, names in seen if OPTIM.format(rank) in name}


# -- damage -----------------------------------------------------------------------------------------------------------

Change = Callable[[Path], object]


def cut(name: str, length: int) -> Change:
    return lambda path: os.truncate(path / name, length % (path / name).stat().st_size)


def remove(*names: str) -> Change:
    return lambda path: [(path / name).unlink() for name in names]


def take(name: str, topology: Topology, **more: Any) -> Change:
    return lambda path: shutil.copy(write(path.parent / "other", topology, **more) / name, path / name)


def swap(path: Path) -> None:
    first, second = (path / OPTIM.format(rank) for rank in (1, 2))
    data = first.read_bytes()
    shutil.copy(second, first)
    second.write_bytes(data)


def add_odd_layer(path: Path) -> None:
    torch.save({"x": torch.ones(100)}, path / "layer_00-expert_01-model_01-model_states.pt")


def take_state_files(path: Path) -> None:
    other = write(path.parent / "other", Topology(2, 2, "bf16"), run=Run(global_steps=9))
    converted = convert_checkpoint(str(other)).destination
    for name in (MAIN, MAIN_ZERO3):
        (path / name).unlink()  # a hard link
        shutil.copy(f"{converted}/{name}", path / name)


def copy(source: str, target: str) -> Change:
    return lambda path: shutil.copy(path / source, path / target)


def save_again(path: Path) -> None:
    write(path.parent, Topology(1, 2))


def flip_in(name: str) -> Change:
    return lambda path: flip_largest(path / name)


def chain(*changes: Change) -> Change:
    return lambda path: [change(path) for change in changes]


SHARD = [OPTIM.format(rank) for rank in range(6)]
WEIGHT = "zero/a.weight/{}.pt"
MASTER = WEIGHT.format("fp32")
ZERO1, ZERO3, BF16, ATOMIC = Topology(1, 3), Topology(3, 3), Topology(1, 2, "bf16"), None
ZERO3_MAIN = "zero_pp_rank_2_mp_rank_00_model_states.pt"
EARLIER = [("leftover?", SHARD[2]), ("leftover?", SHARD[3])]
DAMAGE: dict[str, tuple[Topology | None, Change, list[tuple[str, ...]]]] = {
    "emptied": (ZERO1, cut(SHARD[0], 0), [("header", SHARD[0])]),
    "last byte lost": (ZERO1, cut(MAIN, -1), [("header", MAIN)]),
    "missing": (ZERO1, remove(SHARD[2]), [("missing", SHARD[2])]),
    "first file missing": (ZERO1, remove(MAIN), [("missing", "")]),
    "first file missing, ZeRO 3": (ZERO3, remove(MAIN_ZERO3), [("missing", MAIN_ZERO3)]),
    "swapped": (ZERO1, swap, [("header", SHARD[1], "was saved as"), ("header", SHARD[2])]),
    "larger world": (ZERO3, take(SHARD[1], replace(ZERO3, dp=4)), [("foreign", SHARD[1])]),
    "other step": (ZERO3, take(ZERO3_MAIN, ZERO3, run=Run(global_steps=4)), [("foreign", ZERO3_MAIN, "global_steps")]),
    "other run": (BF16, take(f"bf16_{SHARD[1]}", BF16, seed=1), [("foreign", f"bf16_{SHARD[1]}", "run or step")]),
    "no optimizer": (Topology(1, 1), remove(SHARD[0]), [("missing?", "")]),
    "no layer": (PIPED, remove(LAYER.format(1)), [("missing", LAYER.format(1))]),
    "no layer on any rank": (PIPED, remove(LAYER.format(0), LAYER.format(1)), [("missing", "", "layer_02")]),
    "earlier save": (Topology(1, 4), save_again, EARLIER),
    "earlier save, damaged": (Topology(1, 4), chain(save_again, cut(SHARD[1], 9)), [("header", SHARD[1]), *EARLIER]),
    "unsupported": (ZERO1, chain(add_odd_layer, flip_in(SHARD[1])), [("unsupported", ""), ("crc", SHARD[1])]),
    "atom cut": (ATOMIC, cut(MASTER, 500), [("header", MASTER)]),
    "atom missing": (ATOMIC, remove(MASTER), [("missing", MASTER)]),
    "stray atom": (ATOMIC, copy(MASTER, "zero/a.bias/x.pt"), [("extra", "zero/a.bias/x.pt")]),
    "other atom": (ATOMIC, copy("zero/c.weight/fp32.pt", MASTER), [("seal", MASTER)]),
    "atom flipped": (ATOMIC, flip_in(MASTER), [("crc", MASTER)]),
    "manifest flipped": (ATOMIC, lambda path: flip(path / MANIFEST, 400), [("seal", MANIFEST)]),
    "no manifest": (ATOMIC, remove(MANIFEST), [("missing", MANIFEST, f"{MANIFEST} is missing")]),
    "other state files": (ATOMIC, take_state_files, [("seal", MAIN), ("seal", MAIN_ZERO3)]),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_every_kind_of_damage_is_reported_with_its_file(case: str, tmp_path: Path) -> None:
    topology, change, expected = DAMAGE[case]
    path = write(tmp_path, topology) if topology else write_atomic(tmp_path)
    change(path)
    report = verify_checkpoint(str(path))
    assert list_faults(report) == [each[:2] for each in expected], report.faults
    assert report.whole == all("?" in kind for kind, *_ in expected)
    text = " ".join(fault.text for fault in report.faults)
    assert all(words in text for _, _, *more in expected for words in more)
    assert report.unchecked == 0  # files with an unreadable directory do not count


@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO], ids=["out-of-reach", "lost"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_verify_reports_an_unreadable_file_as_one_fault(
    code: int, ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, work = write(tmp_path, Topology(1, 3)), os.open

    def refuse(path: Any, *rest: Any, **how: Any) -> int:
        if str(path).endswith(OPTIM.format(1)):
            raise OSError(code, os.strerror(code), path)
        return work(path, *rest, **how)

    monkeypatch.setattr(os, "open", refuse)
    for report in run_ranks(ranks, lambda _, comm: verify_checkpoint(str(path), comm)):
        assert list_faults(report) == [("read" if code == errno.EACCES else "header", OPTIM.format(1))]
        assert report.unchecked == 0


def test_damaged_records_are_reported_by_offset_if_there_is_no_index(tmp_path: Path) -> None:
    path = write(tmp_path, Topology(1, 2))
    (path / OPTIM.format(0)).unlink()
    for label, record in list_records(str(path / OPTIM.format(1))).records.items():
        if record.nbytes > 1000 and label.startswith("data/"):
            flip(path / OPTIM.format(1), record.offset)
    report = verify_checkpoint(str(path))
    names = {atom for fault in report.faults if fault.kind == "crc" for atom in fault.names}
    assert "optimizer_state_dict.base_optimizer_state.state.0.exp_avg" in names


def test_verify_of_stage_0_needs_no_parameter_names(tmp_path: Path) -> None:
    path = write(tmp_path, Topology(0))
    assert verify_folder(path) == [("unnamed?", MAIN)]
    assert verify_folder(path, groups=[["a.weight"]]) == [("unnamed", MAIN)]
    single = Model((Param("a", (3, 5)), Param("b", (4,))))
    assert verify_folder(write(tmp_path / "single", Topology(0), single)) == []


def test_bytes_without_checksums_are_counted(tmp_path: Path) -> None:
    with write_checksums(False):
        report = verify_checkpoint(str(write(tmp_path, Topology(1, 2))))
    assert report.whole and report.unchecked > 0.5 * report.read


def test_headers_only_reads_no_tensors(tmp_path: Path) -> None:
    path = write(tmp_path, Topology(1, 2))
    flip_largest(path / OPTIM.format(1))
    report = verify_checkpoint(str(path), headers_only=True)
    assert (report.whole, report.read) == (True, 0)
    os.truncate(path / OPTIM.format(0), 99)
    assert verify_folder(path, headers_only=True) == [("header", OPTIM.format(0))]


def test_the_index_of_sharded_weights_is_no_torch_file(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(3)}, tmp_path / "pytorch_model-1.bin")
    (tmp_path / "pytorch_model.bin.index.json").write_text('{"weight_map": {"a": "pytorch_model-1.bin"}}')
    assert verify_folder(tmp_path) == []


def test_unknown_files_are_listed(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(CheckpointError, match="holds no checkpoint .notes.txt"):
        verify_checkpoint(str(tmp_path))
    path = write(tmp_path, Topology(1, 2))
    (path / "zero_to_fp32.py").write_text("pass")
    seal_folder(str(path), Comm())
    assert verify_checkpoint(str(path)).others == ("zero_to_fp32.py",)


def test_progress_counts_every_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan, "CHUNK", 4096)
    path, done = write(tmp_path, Topology(2, 3)), list[int]()
    bar = mock.Mock(return_value=nullcontext(done.append))
    report = verify_checkpoint(str(path), options=WorkOptions(bar=bar))
    assert sum(done) == report.read == sum(entry.size for entry in list_files(str(path))[0].values())
    bar.assert_called_once_with(report.read)
    assert max(done) <= 4096


def test_a_file_that_is_truncated_during_the_read_is_one_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, Topology(1, 2), Model((Param("a", (300, 500)),)))
    name, size = OPTIM.format(1), os.path.getsize(path / OPTIM.format(1))

    def cut_and_scan(*args: Any, **more: Any) -> Any:
        os.truncate(path / name, size // 2)
        return scan.scan_files(*args, **more)

    monkeypatch.setattr(scan, "CHUNK", 4096)
    monkeypatch.setattr("deepspeed_ucp.examine.verify.scan_files", cut_and_scan)
    (fault,) = [fault for fault in verify_checkpoint(str(path)).faults if fault.kind == "read"]
    assert f"ends at byte {size // 2}" in fault.text
    assert "other places" in fault.text


def test_every_byte_is_read_once(tmp_path: Path) -> None:
    model = Model((Param("a", (1000, 500)), Param("b", (500, 1000)), Param("c", (500, 300), frozen=True)))
    path = write(tmp_path, Topology(1, 3, "bf16"), model)
    before = count_read_bytes()
    report = verify_checkpoint(str(path))
    assert report.whole
    assert report.read <= count_read_bytes() - before < 1.05 * report.read


# -- several ranks ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 5])
def test_ranks_share_the_files_and_report_equal_results(tmp_path: Path, size: int) -> None:
    path, bars = write(tmp_path, Topology(3, 3)), [mock.Mock(side_effect=no_bar) for _ in range(size)]
    flip_largest(path / OPTIM.format(1))
    os.truncate(path / OPTIM.format(2), 999)

    def work(rank: int, comm: Comm) -> Verification:
        return replace(verify_checkpoint(str(path), comm, WorkOptions(bar=bars[rank])), seconds=0.0)

    results = run_ranks(size, work)
    assert results == [replace(verify_checkpoint(str(path)), seconds=0.0)] * size
    totals = [bar.call_args.args[0] for bar in bars]
    assert sum(totals) == results[0].read
    assert sum(total > 0 for total in totals) == min(size, len(os.listdir(path)))


def test_ranks_with_different_files_verify_their_files(tmp_path: Path) -> None:
    path = write(tmp_path, Topology(1, 3))
    hosts = [tmp_path / f"host{number}" for number in range(3)]
    for number, host in enumerate(hosts):
        host.mkdir()
        for name in (MAIN, OPTIM.format(number)):
            shutil.copy2(path / name, host)
    flip_largest(hosts[2] / OPTIM.format(2))
    for report in run_ranks(3, lambda rank, comm: verify_checkpoint(str(hosts[rank]), comm)):
        assert list_faults(report) == [("crc", OPTIM.format(2))]
        assert len(report.files) == 4


def test_latest_is_read_by_one_rank_and_a_failure_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, reads = write(tmp_path, Topology(1, 2)), list[str]()
    (tmp_path / "latest").write_text(path.name)

    def look(path: str) -> bool:
        reads.append(path)
        raise ConnectionError("out of reach")

    monkeypatch.setattr(latest, "is_folder", look)
    report = World(2).run(lambda _rank, comm: verify_checkpoint(str(path), comm))
    assert len(reads) == 1
    for each in report:
        (fault,) = each.faults
        assert fault.kind == "latest" and not fault.is_fault and "out of reach" in fault.text


def test_a_failed_listing_fails_on_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, turns = write(tmp_path, Topology(1, 2)), iter([verify.list_files])

    def look(folder: str) -> Any:
        if (listed := next(turns, None)) is None:
            raise UnsupportedError("no module named obstore")
        return listed(folder)

    monkeypatch.setattr(verify, "list_files", look)
    report = World(2).run(lambda _rank, comm: verify_checkpoint(str(path), comm))
    assert [type(each) for each in report] == [UnsupportedError] * 2


def test_shares_are_about_equal() -> None:
    sizes = {f"file{index}": 1000 + index for index in range(50)} | {"large": 9000}
    table = FileTable.of("folder", {name: Entry(size, 0.0) for name, size in sizes.items()})
    shares = run_ranks(4, lambda _, comm: share_files(table, comm))
    assert sorted(name for share in shares for name in share) == sorted(sizes)
    loads = [sum(sizes[name] for name in share) for share in shares]
    assert max(loads) - min(loads) <= 1100


# -- several places ---------------------------------------------------------------------------------------------------


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    path = write(tmp_path, Topology(1, 3))
    shutil.copytree(path, tmp_path / "nvme")
    monkeypatch.setattr("deepspeed_ucp.formats.locations.measure_distance", lambda folder: int("nvme" not in folder))
    return path, tmp_path / "nvme"


def test_verify_reads_each_file_in_one_place(places: tuple[Path, Path]) -> None:
    path, near = places
    (path / OPTIM.format(0)).unlink()
    (near / OPTIM.format(1)).unlink()
    report = verify_checkpoint(str(path), also=[str(near)])
    assert report.faults == () and report.read == report.nbytes
    assert verify_folder(path) == [("missing", OPTIM.format(0))]


def test_a_damaged_copy_is_a_warning(places: tuple[Path, Path]) -> None:
    path, near = places
    flip_largest(near / OPTIM.format(0))
    os.truncate(near / OPTIM.format(1), 100)  # skipped because of its size
    flip_largest(path / OPTIM.format(1))
    flip(near / OPTIM.format(2), (near / OPTIM.format(2)).stat().st_size - 22)
    report = verify_checkpoint(str(path), also=[str(near)])
    kinds = {OPTIM.format(0): ["crc"], OPTIM.format(1): ["crc"], OPTIM.format(2): ["header?"]}
    assert {each: [kind for kind, name in list_faults(report) if name == each] for each in kinds} == kinds
    fault = next(fault for fault in report.faults if fault.file == OPTIM.format(0))
    assert fault.text.endswith(f"{path / OPTIM.format(0)} is right: remove this copy, and a load reads that one.")
    assert fault.names == ("a.weight (exp_avg)",)


@pytest.mark.parametrize("length", [100, 0])
def test_a_truncated_file_is_a_warning_if_another_place_has_it(length: int, places: tuple[Path, Path]) -> None:
    path, near = places
    os.truncate(path / OPTIM.format(1), length)
    report = verify_checkpoint(str(path), also=[str(near)])
    assert list_faults(report) == [("header?", OPTIM.format(1))] and report.whole
    assert report.faults[0].text.endswith(f"{near / OPTIM.format(1)} is right.")
    assert report.nbytes == sum(file.stat().st_size for file in near.iterdir())
    os.truncate(near / OPTIM.format(1), length + 1)
    assert not verify_checkpoint(str(path), also=[str(near)]).whole


def test_another_runs_file_in_a_nearer_place_is_a_warning(places: tuple[Path, Path], tmp_path: Path) -> None:
    path, near = places
    shutil.copy(write(tmp_path / "theirs", Topology(1, 3), seed=1) / OPTIM.format(1), near / OPTIM.format(1))
    report = verify_checkpoint(str(path), also=[str(near)])
    assert list_faults(report) == [("foreign?", OPTIM.format(1))] and report.whole
    assert "it is another file" in report.faults[0].text


def test_files_without_checksums_are_verified_in_the_first_place(places: tuple[Path, Path], tmp_path: Path) -> None:
    _, near = places
    path = write(tmp_path / "legacy", Topology(1, 3), legacy=True)
    shutil.rmtree(near)
    shutil.copytree(path, near)
    (near / OPTIM.format(1)).write_bytes(bytes((path / OPTIM.format(1)).stat().st_size))
    assert verify_folder(path, near) == []


# -- atomic checkpoints -----------------------------------------------------------------------------------------------


def test_an_atomic_checkpoint_passes_with_and_without_its_manifest(tmp_path: Path) -> None:
    """DeepSpeed's converter writes no manifest, and only tensors of the optimizer."""
    atomic = write_atomic(tmp_path)
    report = verify_checkpoint(str(atomic))
    assert (report.faults, report.kind, len(report.fingerprint["digest"])) == ((), "atomic", 64)
    shutil.copy(atomic / WEIGHT.format("step"), atomic / "zero/step.pt")
    assert verify_folder(atomic) == [("extra", "zero/step.pt")]
    for path in [*atomic.rglob("module.pt"), atomic / MANIFEST, atomic / "zero/step.pt"]:
        path.unlink()
    report = verify_checkpoint(str(atomic))
    assert (report.faults, report.kind, report.fingerprint) == ((), "atomic", {})
    flip_largest(atomic / WEIGHT.format("exp_avg"))
    os.truncate(atomic / WEIGHT.format("fp32"), 500)
    assert verify_folder(atomic) == [("crc", WEIGHT.format("exp_avg")), ("header", WEIGHT.format("fp32"))]


@pytest.mark.parametrize(
    ("damage", "options", "compared"),
    [("", {}, 1), ("", {"headers_only": True}, 0), ("crc", {}, 0), ("latest", {}, 1)],
    ids=["whole", "headers", "damaged", "warned"],
)
def test_masters_are_compared_with_copies_if_nothing_else_is_wrong(
    damage: str, options: dict[str, bool], compared: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, Topology(1, 2))
    if damage == "crc":
        flip_largest(path / OPTIM.format(0))
    elif damage:
        (path.parent / "latest").write_text("global_step9")
    calls: list[object] = []
    monkeypatch.setattr("deepspeed_ucp.examine.verify.check_samples", lambda *args: calls.append(args))
    found = verify_checkpoint(str(path), **options)
    assert (len(calls), found.whole, bool(found.faults)) == (compared, damage != "crc", bool(damage))


# -- seals and manifests ----------------------------------------------------------------------------------------------


@pytest.fixture
def proofs(tmp_path: Path) -> dict[str, Path]:
    """A folder, its seal in another place, and the manifest of its conversion."""
    folder = write(tmp_path, Topology(3, 3))
    seal_folder(str(folder), Comm())
    shutil.move(folder / SEAL, tmp_path / "kept.json")
    convert_checkpoint(str(folder))
    return {"folder": folder, "seal": tmp_path / "kept.json", "manifest": Path(f"{folder}_universal") / MANIFEST}


@pytest.mark.parametrize("kind", ["seal", "manifest"])
def test_a_proof_passes_proven_files_and_names_others(proofs: dict[str, Path], tmp_path: Path, kind: str) -> None:
    folder, against = proofs["folder"], str(proofs[kind])
    assert verify_folder(folder, against=against) == []
    shutil.copy(write(tmp_path / "other", Topology(3, 3), seed=1) / SHARD[1], folder / SHARD[1])
    assert verify_checkpoint(str(folder)).whole
    assert verify_folder(folder, against=against) == [("seal", SHARD[1])]
    ranks = run_ranks(3, lambda _, comm: verify_folder(folder, comm=comm, against=against))
    assert ranks == [[("seal", SHARD[1])]] * 3
    assert main(["verify", str(folder), "--against", against]) == 1
    (folder / SHARD[1]).unlink()
    assert verify_folder(folder, against=against) == [("missing", SHARD[1])]


def test_a_manifest_proves_its_folder(proofs: dict[str, Path], tmp_path: Path) -> None:
    atomic = proofs["manifest"].parent
    kept = str(shutil.copy(atomic / MANIFEST, tmp_path / "manifest.json"))
    other = convert_checkpoint(str(write(tmp_path / "other", Topology(3, 3), seed=1))).destination
    assert verify_folder(atomic, against=kept) == []
    assert {("seal", MASTER), ("seal", "zero/a.bias/exp_avg.pt")} <= {*verify_folder(Path(other), against=kept)}


def test_a_proof_names_missing_files_and_changed_manifest_entries(proofs: dict[str, Path]) -> None:
    """The missing files are named in no header, and the changed atoms have unchanged files."""
    seal = read_seal(str(proofs["seal"]))
    more = seal.model_copy(update={"files": {**seal.files, "client/more.pt": SealedFile(size=1, crc=2)}})
    proofs["seal"].write_bytes(more.dump())
    assert verify_folder(proofs["folder"], against=str(proofs["seal"])) == [("missing", "client/more.pt")]
    seal, atomic = read_seal(str(proofs["manifest"])), proofs["manifest"].parent
    for atom in seal.index["atoms"]:
        atom[5] += 64 * (atom[:2] == ["a.weight", "fp32"])
    proofs["manifest"].write_bytes(seal.dump())
    assert ("seal", MASTER) in verify_folder(atomic)


@pytest.mark.parametrize("text", [None, "", "{}", "[" * 9999])
def test_invalid_proofs_are_refused(proofs: dict[str, Path], tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "proof").write_text(text)
    with pytest.raises(ConfigError, match="--against: neither a seal .ucp_seal.json, .*proof: ") as error:
        verify_checkpoint(str(proofs["folder"]), against=str(tmp_path / "proof"))
    assert ("there is no such file" in str(error.value)) == (text is None)
    assert "pydantic" not in str(error.value) and "validation error" not in str(error.value)
    assert len(error.value.args) == 1
