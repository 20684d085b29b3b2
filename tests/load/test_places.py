"""Loads of saves with files or copies in several places or on several machines, and of damaged copies."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_ucp.cli import main
from deepspeed_ucp.comm import Comm
from deepspeed_ucp.convert import ConvertOptions, convert_index
from deepspeed_ucp.errors import CheckpointError, UnsupportedError
from deepspeed_ucp.examine.verify import verify_checkpoint
from deepspeed_ucp.export.safetensors import export_safetensors
from deepspeed_ucp.formats import locations, open_checkpoint
from deepspeed_ucp.formats.deepspeed.files import list_entries
from deepspeed_ucp.formats.deepspeed.naming import Naming
from deepspeed_ucp.formats.locations import find_files
from deepspeed_ucp.formats.open import read_saved_job, seal_folder
from deepspeed_ucp.io.read import MemorySink
from deepspeed_ucp.io.store import LocalFile
from deepspeed_ucp.load.transfer import Transfer
from deepspeed_ucp.model.access import READ_ALL
from deepspeed_ucp.model.index import AtomicIndex
from deepspeed_ucp.model.records import FileRef, Records
from deepspeed_ucp.model.topology import Topology as SavedTopology
from deepspeed_ucp.plan.rounds import LoadPlan
from deepspeed_ucp.stream.reader import AtomReader, check_copy
from tests.convert.conversions import read_bytes
from tests.support.cases import Case, cases, topologies
from tests.support.contents import check_content, check_reads
from tests.support.conversion import convert_checkpoint
from tests.support.damage import write_checksums
from tests.support.direct import change_file, check_loaded, run_load
from tests.support.ranks import World, run_ranks
from tests.support.reads import item, read_of
from tests.support.reshard import (
    FakeTarget,
    Loaded,
    Options,
    examples,
    groups_of,
    load_rank,
    make_targets,
    temporary_folder,
)
from tests.synth import Model, Param, Run, State, Topology, random_state, read_state

MODEL = Model((Param("a.weight", (7, 13)), Param("b.bias", (5,), group=1), Param("c", (3, 5), frozen=True)))
STATES = "mp_rank_00_model_states.pt"


def shard(rank: int) -> str:
    return f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


def write(folder: Path, source: Topology, seed: int = 0) -> Path:
    return Case(MODEL, source, random_state(MODEL, seed, precision=source.precision), legacy=False).write(folder)


def scatter(
    save: Path, count: int, holders: Callable[[str], Iterable[int]], *, times: bool = True, name: str = "host"
) -> list[Path]:
    """Copy a save's files to the hosts that hold them; `times`: with their modification times."""
    hosts = [save.parent / f"{name}{number}" for number in range(count)]
    for host in hosts:
        host.mkdir()
    for file in sorted(save.iterdir()):
        for host in holders(file.name):
            shutil.copy2(file, hosts[host])
            if not times:
                os.utime(hosts[host] / file.name, (host + 1, host + 1))
    return hosts


def hold_one_shard(name: str) -> list[int]:
    """Give the model states to both of two hosts, and a shard to each."""
    return [0, 1] if name == STATES else [int(name.split("_")[3])]


def open_place(folder: Path, target: FakeTarget, comm: Comm, *also: Path) -> AtomicIndex:
    """Open a checkpoint as a rank of a load does (collective)."""
    places = [str(place) for place in also]
    return open_checkpoint(str(folder), comm, Naming(groups_of(target, comm)[0]), also=places)


def load_scattered(
    folders: Sequence[Path],
    target: Topology,
    *also: Path,
    model: Model = MODEL,
    after_opening: Callable[[], object] = list,
    **options: Any,
) -> list[Loaded]:
    targets = make_targets(model, target)

    def load(rank: int, comm: Comm) -> Loaded:
        index = open_place(folders[rank % len(folders)], targets[rank], comm, *also)
        after_opening()
        return load_rank(index, targets[rank], comm, Options(**options))

    return run_ranks(len(targets), load)


def indices(folders: Sequence[Path], *also: Path) -> list[AtomicIndex]:
    places = [str(place) for place in also]
    return run_ranks(len(folders), lambda rank, comm: open_checkpoint(str(folders[rank]), comm, also=places))


def write_unchecked(folder: Path, form: str) -> Path:
    with write_checksums(False):
        return Case(MODEL, Topology(1, 3), random_state(MODEL, 0), legacy=form == "legacy").write(folder)


# -- several places ---------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def near(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make folders named `nvme` nearer than all others."""
    monkeypatch.setattr("deepspeed_ucp.formats.locations.measure_distance", lambda path: int("nvme" not in path))


def two_places(tmp_path: Path, source: Topology) -> tuple[Path, Path, State]:
    """Write a save to the first place and copy it to a second one, which is nearer."""
    save = write(tmp_path / "shared", source)
    nvme = shutil.copytree(save, tmp_path / "nvme")
    return save, nvme, read_state(save, MODEL, source)


def test_each_file_is_read_from_the_nearest_place_that_has_it(tmp_path: Path) -> None:
    save, nvme, saved = two_places(tmp_path, Topology(1, 3))
    (nvme / shard(1)).unlink()
    loaded = load_scattered([save], Topology(3, 2), nvme)
    check_content(loaded, saved)
    paths = {path for rank in loaded if rank.transfer for path in rank.transfer.files}
    assert {Path(path).name for path in paths if "nvme" not in path} == {shard(1)}
    assert {shard(0), shard(2)} < {Path(path).name for path in paths if "nvme" in path}


def test_a_further_place_may_have_all_files(tmp_path: Path) -> None:
    save, nvme, saved = two_places(tmp_path, Topology(1, 3))
    shutil.rmtree(save)
    check_content(load_scattered([save], Topology(2, 2), nvme), saved)
    assert read_saved_job(str(save), also=[str(nvme)]).ranks == 3


@pytest.mark.parametrize("damage", ["other", "longer", "unreadable", "gone", "truncated"])
def test_an_invalid_nearer_file_is_skipped(damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save, nvme, saved = two_places(tmp_path, Topology(1, 3))
    spoil, later = nvme / shard(1), list[Callable[[], object]]()
    if damage == "other":
        shutil.copy2(write(tmp_path / "theirs", Topology(1, 3), seed=1) / shard(1), spoil)
    elif damage == "longer":
        spoil.write_bytes(b"PK" + bytes(9) + spoil.read_bytes())
    elif damage == "unreadable":
        os.truncate(spoil, 1000)
    elif damage == "gone":
        later.append(lambda: spoil.unlink(missing_ok=True))
    else:
        later.append(lambda: os.truncate(spoil, 64))
    check_content(load_scattered([save], Topology(3, 2), nvme, after_opening=lambda: [do() for do in later]), saved)
    warnings = [text for text in caplog.messages if "nvme" in text]
    assert any(shard(1) in text for text in warnings)
    assert len(warnings) <= 2, "one warning per place and rank"


@pytest.mark.parametrize("form", ["legacy", "zip"])
def test_an_earlier_save_without_checksums_in_a_nearer_place_is_skipped(form: str, tmp_path: Path) -> None:
    """Its files have the same names and sizes, and other bytes."""
    save, nvme = write_unchecked(tmp_path / "shared", form), tmp_path / "nvme"
    shutil.copytree(save, nvme)
    for rank in range(3):
        flip(nvme / shard(rank))
    (save / shard(2)).unlink()
    shutil.copytree(nvme, tmp_path / "nvme-third")
    saved = read_state(write_unchecked(tmp_path / "again", form), MODEL, Topology(1, 3))
    index = open_checkpoint(str(save), Comm(), also=[str(nvme), str(tmp_path / "nvme-third")])
    held = {Path(file.path).name: file.places for file in index.files}
    assert held[shard(1)] == (str(save / shard(1)),)
    assert held[shard(2)] == (str(nvme / shard(2)),), "the first place that has it"
    shutil.copy2(tmp_path / "again" / save.name / shard(2), save)
    check_content(load_scattered([save], Topology(3, 2), nvme), saved)


def test_a_header_without_checksums_is_not_combined_with_records_of_another_place(tmp_path: Path) -> None:
    save, other = write_unchecked(tmp_path / "shared", "legacy"), tmp_path / "other"
    shutil.copytree(save, other)
    data = (save / shard(1)).read_bytes()
    (save / shard(1)).write_bytes(bytes(64) + data[64:])
    with pytest.raises(CheckpointError, match=rf"{save / shard(1)}: neither a torch.save zip nor"):
        open_checkpoint(str(save), Comm(), also=[str(other)])


def test_a_file_without_zip_directory_is_no_copy_of_one_with_it(tmp_path: Path) -> None:
    paths = [str(tmp_path / name) for name in ("a", "b")]
    Path(paths[1]).write_bytes(bytes(100))
    with pytest.raises(CheckpointError, match=r"b: has no directory with checksums, .* it is another file"):
        check_copy(paths[1], FileRef(paths[0], 100, 7, tuple(paths)))
    check_copy(paths[1], FileRef(paths[1], 100, 7, (paths[1],)))
    check_copy(paths[1], FileRef(paths[0], 100, None, tuple(paths)))


def test_a_place_that_rank_0_cannot_access_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    """Rank 0 accesses a store for all ranks; here it lacks the store's module."""
    save = write(tmp_path, Topology(1, 2))

    def refuse(folder: str) -> Any:
        if "://" in folder:
            raise UnsupportedError(f"{folder}: no module named obstore")
        return list_entries(folder)

    found = World(2).run(lambda _rank, comm: find_files([str(save), "s3://bucket/run"], comm, refuse))
    assert [type(each) for each in found] == [UnsupportedError] * 2


@pytest.mark.parametrize("live", [False, True], ids=["pass 1", "pass 2"])
def test_a_failed_read_continues_in_the_next_place(
    live: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save, nvme, saved = two_places(tmp_path, Topology(1, 2))
    read, run_pass, reads, passes = LocalFile.read, Transfer._run_pass, list[int](), [False]

    def fail(file: LocalFile, views: list[memoryview], offset: int) -> None:
        if "nvme" in file.path and "optim" in file.path and passes[-1] == live:
            reads.append(offset)
            if len(reads) > 2:
                raise CheckpointError(f"{file.path}: cannot be read at byte {offset} (Input/output error).")
        read(file, views, offset)

    def note(self: Transfer, plan: LoadPlan, *, is_first_pass: bool) -> Any:
        passes.append(not is_first_pass)
        return run_pass(self, plan, is_first_pass=is_first_pass)

    monkeypatch.setattr(Transfer, "_run_pass", note)
    monkeypatch.setattr(LocalFile, "read", fail)
    monkeypatch.setattr(LocalFile, "fetch", lambda *_: None)
    loaded = load_scattered([save], Topology(1, 3), nvme, in_place=not live)
    for rank in loaded:
        rank.counted = False  # some bytes are read a second time
    check_content(loaded, saved)
    assert len(reads) > 2
    assert "taken from another place" in caplog.text


def test_the_last_error_is_raised_if_all_places_fail(tmp_path: Path) -> None:
    save, nvme, _ = two_places(tmp_path, Topology(1, 2))

    def truncate() -> None:
        for place in (save, nvme):
            os.truncate(place / shard(1), 100)

    with pytest.raises(CheckpointError, match=rf"shared.*{shard(1)}"):
        load_scattered([save], Topology(1, 1), nvme, after_opening=truncate)


def test_nodes_read_local_files_and_a_complete_place_has_the_rest(tmp_path: Path) -> None:
    """A new node has no files. Only the second place has the files of a lost node."""
    save = write(tmp_path / "all", Topology(1, 4))
    holders = {STATES: [0, 1], shard(0): [0], shard(1): [0]}
    hosts = scatter(save, 3, lambda name: holders.get(name, []), name="nvme")
    loaded = load_scattered(hosts, Topology(3, 3), save)
    check_content(loaded, read_state(save, MODEL, Topology(1, 4)))


# -- damage that checksums detect -------------------------------------------------------------------------------------


def flip(path: Path) -> None:
    """Change every byte of a file's records, but not its directory."""
    index = open_checkpoint(str(path.parent), Comm())
    numbers = [number for number, file in enumerate(index.files) if file.path.endswith(path.name)]
    data = bytearray(path.read_bytes())
    pairs = zip(index.records.files, index.records, strict=True)
    for record in (each for file, each in pairs if file in numbers and each.nbytes > 4):
        held = slice(record.offset, record.offset + record.nbytes)
        data[held] = bytes(byte ^ 255 for byte in data[held])
    path.write_bytes(data)


@pytest.mark.parametrize("name", [shard(1), STATES])
def test_a_damaged_copy_is_refused_and_verify_identifies_it(name: str, tmp_path: Path) -> None:
    """After the copy is deleted, as the message advises, the next place is read."""
    save, nvme, saved = two_places(tmp_path, Topology(1, 3))
    flip(nvme / name)
    with pytest.raises(CheckpointError) as refused:
        load_scattered([save], Topology(3, 2), nvme)
    text = str(refused.value)
    assert f"one of the copies {nvme / name}, {save / name} is damaged. Nothing was changed" in text
    assert "`ds_ucp verify --also PLACE` names it" in text
    found = verify_checkpoint(str(save), also=[str(nvme)])
    assert any(f"{save / name} is right: remove this copy" in fault.text for fault in found.faults) and not found.whole
    (nvme / name).unlink()
    check_content(load_scattered([save], Topology(3, 2), nvme), saved)


def test_convert_and_export_of_node_local_files_need_a_complete_place(tmp_path: Path) -> None:
    save = write(tmp_path / "all", Topology(1, 2))
    hosts = scatter(save, 2, hold_one_shard)
    alone, with_all = indices(hosts), indices(hosts, save)

    def write_both(rank: int, comm: Comm, held: Sequence[AtomicIndex], name: str) -> None:
        convert_index(held[rank], str(save), str(tmp_path / f"{name}-converted"), comm, ConvertOptions())
        export_safetensors(held[rank], str(tmp_path / f"{name}-exported"), comm)

    with pytest.raises(UnsupportedError, match=r"a conversion reads its part of each.*that has them all \("):
        run_ranks(2, lambda rank, comm: write_both(rank, comm, alone, "alone"))
    with pytest.raises(UnsupportedError, match=r"an export reads its part of each.*that has them all \("):
        run_ranks(2, lambda rank, comm: export_safetensors(alone[rank], str(tmp_path / "out"), comm))
    run_ranks(2, lambda rank, comm: write_both(rank, comm, with_all, "whole"))
    convert_checkpoint(str(save), str(tmp_path / "right"))
    assert read_bytes(tmp_path / "whole-converted") == read_bytes(tmp_path / "right")


def test_two_threads_that_fail_together_skip_a_place_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [str(tmp_path / name) for name in ("a", "b")]
    for path in paths:
        Path(path).write_bytes(bytes(range(100)))
    both, read = threading.Barrier(2), LocalFile.read

    def fail(file: LocalFile, views: list[memoryview], offset: int) -> None:
        if file.path == paths[0]:
            both.wait()
            raise CheckpointError(f"{file.path}: cannot be read.")
        read(file, views, offset)

    monkeypatch.setattr(LocalFile, "read", fail)
    monkeypatch.setattr(LocalFile, "fetch", lambda *_: None)
    monkeypatch.setattr("deepspeed_ucp.stream.reader.check_copy", lambda *_: None)
    index = make_index((FileRef(paths[0], 100, None, tuple(paths)),), 100)
    into = bytearray(100)
    reads = [read_of(item(0, low, 50, 0, low)) for low in (0, 50)]
    with AtomReader(index) as reader:
        reader.read_parallel(reads, [MemorySink(memoryview(into))], 2)
    assert into == bytes(range(100))


def make_index(files: Sequence[FileRef], nbytes: int) -> Any:
    records = Records.of([(number, 0, nbytes, None) for number in range(len(files))])
    return AtomicIndex.of(files, records, (), SavedTopology(1, "zero12", "float32"), "")


def make_copies(folder: Path, count: int, nbytes: int = 10) -> Any:
    """Create files without checksums, each missing in the first of two places."""
    names = [[str(folder / place / "zero" / f"{number}" / "fp32.pt") for place in "ab"] for number in range(count)]
    for _, path in names:
        Path(path).parent.mkdir(parents=True)
        Path(path).write_bytes(bytes(nbytes))
    return make_index([FileRef(each[0], nbytes, None, tuple(each)) for each in names], nbytes)


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), None])
def test_failing_places_are_skipped(error: OSError | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each access may take minutes to fail. Wrong bytes in one file do not disable a place."""
    index, tried = make_copies(tmp_path, 8), list[str]()

    def look(path: str, file: FileRef) -> None:
        tried.append(path)
        if path == file.places[0]:
            raise CheckpointError(f"{path}: cannot be had.") from error

    monkeypatch.setattr("deepspeed_ucp.stream.reader.check_copy", look)
    with AtomReader(index) as reader:
        paths = [reader.read_file(number, lambda file: file.path) for number in range(8)]
    assert paths == [file.places[1] for file in index.files]
    assert sum(path.startswith(f"{tmp_path}/a/") for path in tried) == (3 if error else 8)


def test_a_file_that_opens_slowly_does_not_delay_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index, begun, read = make_copies(tmp_path, 2), threading.Event(), threading.Event()
    waited: list[bool] = []

    def look(path: str, file: FileRef) -> None:
        if file is index.files[0]:
            begun.set()
            waited.append(read.wait(120))

    monkeypatch.setattr("deepspeed_ucp.stream.reader.check_copy", look)
    into = bytearray(20)
    reads = [read_of(item(number, 0, 10, 0, 10 * number)) for number in range(2)]
    with AtomReader(index) as reader:
        slow = threading.Thread(target=reader.read, args=(reads[:1], [MemorySink(memoryview(into))]))
        slow.start()
        assert begun.wait(120)
        reader.read(reads[1:], [MemorySink(memoryview(into))])
        read.set()
        slow.join()
    assert set(waited) == {True}


def test_an_atomic_checkpoint_that_some_ranks_do_not_see_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a" / "zero").mkdir(parents=True)
    (tmp_path / "b").mkdir()
    with pytest.raises(CheckpointError, match="some ranks see an atomic checkpoint, others do not"):
        indices([tmp_path / "a", tmp_path / "b"])


def test_commands_find_the_tag_in_further_places(tmp_path: Path) -> None:
    """A node without the folder finds the tag in another place; a place may be the folder of a tag."""
    save = write(tmp_path / "all" / "step1", Topology(1, 3))
    save.parent.joinpath("latest").write_text(save.name)
    near, absent = tmp_path / "near" / save.name, tmp_path / "absent"
    shutil.copytree(save, near)
    (near / shard(1)).unlink()
    assert main(["inspect", str(near)]) == 2
    for places in ((near.parent, save.parent), (absent, save.parent), (near, absent, save)):
        also = [word for place in places[1:] for word in ("--also", str(place))]
        assert main(["inspect", str(places[0]), *also]) == 0


@pytest.mark.parametrize("link", [False, True], ids=["missing", "dangling"])
def test_times_of_two_places_are_not_compared(link: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save, near = write(tmp_path, Topology(1, 3)), tmp_path / "near"
    shutil.copytree(save, near)
    for file in near.iterdir():
        os.utime(file, (time.time() + 86400, time.time() + 86400))
    (save / shard(1)).unlink()
    if link:
        (save / shard(1)).symlink_to("nowhere")
    (index,) = indices([save], near)
    assert str(near / shard(1)) in {file.path for file in index.files}
    assert "written" not in caplog.text
    other = write(tmp_path / "other", Topology(1, 3), seed=1)
    shutil.copy(other / shard(2), near / shard(2))
    os.utime(near / shard(2), (time.time() + 86400, time.time() + 86400))
    indices([save], near)
    assert ("were written 24 hours after" in caplog.text) is not link  # a dangling link has no time
    assert "days before" not in caplog.text


# -- files that are distributed over machines -------------------------------------------------------------------------


@examples(40)
@given(data=st.data(), case=cases(max_dp=5), target=topologies(max_dp=5), hosts=st.integers(1, 4), times=st.booleans())
def test_files_distributed_over_machines_are_read_once(
    data: st.DataObject, case: Case, target: Topology, hosts: int, times: bool
) -> None:
    with temporary_folder() as folder:
        save = case.write(folder)
        saved = read_state(save, case.model, case.topology)
        ranks = len(make_targets(case.model, target))
        holders = st.sets(st.integers(0, min(hosts, ranks) - 1), min_size=1)
        machines = scatter(save, min(hosts, ranks), lambda _name: data.draw(holders), times=times)
        save.rename(folder / "away")
        loaded = load_scattered(machines, target, model=case.model)
        check_content(loaded, saved)
        check_reads(loaded[0].fill_plan.index, loaded, 64)


def test_ranks_with_equal_files_exchange_no_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save = write(tmp_path, Topology(1, 4))
    monkeypatch.setattr(locations, "_sum_content", None)
    for index in indices([save] * 3):
        assert index.access == READ_ALL
        assert all(file.places == () for file in index.files)


@pytest.mark.parametrize("form", ["zip", "legacy"])
def test_modification_times_that_differ_between_machines_do_not_split_a_save(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some file systems report other times. A large file without a directory is identified by its time."""
    save = write_unchecked(tmp_path, form) if form == "legacy" else write(tmp_path, Topology(1, 3))
    seal_folder(str(save), Comm())
    hosts = scatter(save, 2, lambda _name: [0, 1], times=False)
    folders = [hosts[0], hosts[1], hosts[1], hosts[0], hosts[0]]
    assert [index.access for index in indices(folders)] == [READ_ALL] * 5
    if form == "legacy":
        monkeypatch.setattr(locations, "_SMALL", 0)
        with pytest.raises(CheckpointError, match="is one file on"):
            indices(folders)


def test_files_that_differ_between_machines_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = write(tmp_path / "a", Topology(1, 2)), write(tmp_path / "b", Topology(1, 2), seed=1)
    hosts = scatter(first, 2, lambda name: [0] if name == shard(0) else [0, 1])
    shutil.copy2(second / shard(1), hosts[1])
    monkeypatch.setattr("socket.gethostname", name_hosts("node-a", "node-b"))
    text = rf"{shard(1)}: is one file on node-a .\d+ bytes. and another on node-b .\d+ bytes.; the nodes hold different"
    with pytest.raises(CheckpointError, match=text):
        indices(hosts)


def test_a_missing_file_is_refused_with_all_machines_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save = write(tmp_path, Topology(1, 4))
    hosts = scatter(save, 2, lambda name: {STATES: [0, 1], shard(3): [0], shard(0): [0], shard(1): [1]}.get(name, []))
    monkeypatch.setattr("socket.gethostname", name_hosts("node-a", "node-b"))
    files = "node-a has the files of data-parallel ranks 0 and 3; node-b has the files of data-parallel ranks 1"
    with pytest.raises(CheckpointError, match=rf"{shard(2)} is missing.*{files}"):
        indices(hosts)


def test_a_seal_identifies_the_machine_of_a_missing_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save = write(tmp_path, Topology(1, 3))
    hosts = scatter(save, 3, lambda name: range(3) if name == STATES else [int(name.split("_")[3])])
    monkeypatch.setattr("socket.gethostname", name_hosts("node-a", "node-b", "node-c"))
    run_ranks(3, lambda rank, comm: seal_folder(str(hosts[rank]), comm, local=True))
    assert len({(host / "ucp_seal.json").read_bytes() for host in hosts}) == 1
    monkeypatch.setattr("socket.gethostname", name_hosts("node-a", "node-c"))
    with pytest.raises(CheckpointError, match=rf"{shard(1)} is missing.*node-b had {shard(1)}; node-a has"):
        indices([hosts[0], hosts[2]])
    shutil.copy2(hosts[1] / shard(1), hosts[0])
    assert len(indices([hosts[0], hosts[2]])[0].files) == 4


def name_hosts(*names: str) -> Callable[[], str]:
    repeated = iter(names * 3)
    return lambda: next(repeated)


def test_rank_0s_model_states_provide_the_client_state(tmp_path: Path) -> None:
    """With use_node_local_storage each node's first rank writes the model states, with another client state."""
    case = Case(MODEL, Topology(1, 4, "bf16"), random_state(MODEL, 0, precision="bf16"), legacy=False)
    save = case.write(tmp_path)
    hosts = scatter(save, 2, lambda name: [0, 1] if name == STATES else [0] if name in (shard(2), shard(3)) else [1])
    change_file(hosts[0] / STATES, lambda tree: tree.update(script="of the second node"))
    change_file(hosts[1] / STATES, lambda tree: tree.update(script="of the first node, which holds rank 0"))
    index = indices(hosts)
    assert [each.access.is_partial for each in index] == [True, True]
    access = index[0].access
    states = [os.path.basename(file.path) for file in index[0].files].index(STATES)
    assert access.list_readers(states, 2).tolist() == [1]
    loaded = load_scattered(hosts, Topology(3, 3, "bf16"))
    check_content(loaded, read_state(save, MODEL, case.topology))


def test_a_node_without_a_state_file_gets_its_objects_from_a_peer(tmp_path: Path) -> None:
    case = Case(MODEL, Topology(1, 2), random_state(MODEL, 0), legacy=False)
    save = case.write(tmp_path, Run(client_state={"epoch": 4}))
    hosts, targets = scatter(save, 2, lambda name: [int(name != STATES)]), make_targets(MODEL, Topology(1, 2))

    def load(rank: int, comm: Comm) -> Any:
        return run_load(open_place(hosts[rank], targets[rank], comm), targets[rank], comm)

    assert [client["epoch"] for *_, client in run_ranks(2, load)] == [4, 4]
    check_loaded(targets, read_state(save, MODEL, case.topology))


def test_a_nodes_model_states_of_another_step_are_refused(tmp_path: Path) -> None:
    save = write(tmp_path, Topology(1, 2))
    hosts = scatter(save, 2, hold_one_shard)
    change_file(hosts[1] / STATES, lambda tree: tree.update(global_steps=99))
    with pytest.raises(CheckpointError, match=rf"{STATES} of .*its step differs"):
        indices(hosts)
