"""Checkpoints in a store: loads, conversions, exports and seals equal results for a local folder, to the bit."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from itertools import count, product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from deepspeed_ucp.cli import main
from deepspeed_ucp.comm import Comm
from deepspeed_ucp.convert import ConvertOptions
from deepspeed_ucp.errors import CheckpointError, StorageError, UnsupportedError
from deepspeed_ucp.export.safetensors import export_safetensors
from deepspeed_ucp.export.tensors import ExportOptions
from deepspeed_ucp.formats import open_checkpoint
from deepspeed_ucp.formats.deepspeed.seal import remove_seal
from deepspeed_ucp.formats.latest import find_checkpoint, find_tags
from deepspeed_ucp.formats.open import seal_folder
from deepspeed_ucp.io import objects, paths, store, upload
from deepspeed_ucp.io.paths import (
    DISK,
    MEMORY,
    NETWORK,
    Entry,
    choose_map,
    count_readers,
    find_storage_kind,
    measure_distance,
)
from tests.support.contents import check_content
from tests.support.conversion import convert_checkpoint
from tests.support.covering import params
from tests.support.memory import clear_memory, put_folder, read_tree
from tests.support.ranks import Apart, World, run_ranks
from tests.support.reshard import load, make_targets, open_everywhere
from tests.synth import Model, Param, State, Topology, random_state, write_checkpoint

URL, TO = "memory://stores/run", "memory://stores/there"
MODEL = Model(
    (
        *(Param(f"layer.{number}.w", (40, 50 + number)) for number in range(4)),
        *(Param(f"layer.{number}.b", (50 + number,)) for number in range(4)),
        Param("frozen", (7, 9), frozen=True),
    )
)

Save = Callable[..., tuple[str, State]]


@pytest.fixture
def saved(tmp_path: Path) -> Save:
    """Save a run to a local folder and to the store; return the local tag's folder and the state."""
    clear_memory()

    def save(topology: Topology, model: Model = MODEL, **options: Any) -> tuple[str, State]:
        state = random_state(model, 5, topology=topology)
        folder = write_checkpoint(tmp_path / "run", model, state, topology, **options)
        put_folder(tmp_path / "run", URL)
        return str(folder), state

    return save


@pytest.mark.parametrize(("stage", "legacy"), params([(3, False), (1, True)], [(0, False)], str))
def test_a_load_from_a_store_restores_every_bit(saved: Save, stage: int, legacy: bool) -> None:
    _, state = saved(Topology(stage, 3 if stage else 1), legacy=legacy)
    targets = make_targets(MODEL, Topology(2, 2))
    check_content(load(open_everywhere(find_checkpoint(URL), targets), targets), state)


@pytest.mark.parametrize("open_all", [open_checkpoint, seal_folder])
def test_every_rank_gets_the_entries_that_one_has_listed(
    saved: Save, open_all: Callable[[str, Comm], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They include files whose headers another rank reads, and replace older versions."""
    saved(Topology(1, 2))
    folder = find_checkpoint(URL)
    listed = {name: entry for name, entry in store.list_folder(folder).items() if name.endswith(".pt")}
    monkeypatch.setattr(objects, "_known", Apart())

    def look(rank: int, comm: Comm) -> dict[str, Any]:
        store.note_listed(folder, {name: Entry(entry.size, 0.0, "older") for name, entry in listed.items()})
        open_all(folder, comm)
        return {name: objects._known.get(f"{folder}/{name}") for name in listed}

    assert run_ranks(2, look) == [listed, listed]


def test_a_conversion_to_a_store_equals_one_to_a_folder(saved: Save, tmp_path: Path) -> None:
    """It contains a large tensor that several threads write."""
    model = Model((*MODEL.params, Param("large", (1100, 1000))))
    folder, _ = saved(Topology(1, 2), model)
    options = ConvertOptions(window=16 << 20, workers=4)
    convert_checkpoint(folder, str(tmp_path / "local"), options=options)
    reports = run_ranks(2, lambda rank, comm: convert_checkpoint(URL, TO, comm=comm, options=options))
    assert read_tree(TO) == read_tree(str(tmp_path / "local"))
    twice = len(store.read_small(f"{TO}/mp_rank_00_model_states.pt"))  # under upstream's second name, too
    assert reports[0].bytes_written == sum(map(len, read_tree(TO).values())) - twice
    assert store.read_small("memory://stores/latest_universal") == b"there"
    assert convert_checkpoint(URL, TO).reused
    assert not convert_checkpoint(URL, TO, options=ConvertOptions(overwrite=True)).reused
    assert main(["verify", TO]) == main(["diff", TO, folder]) == main(["inspect", "-q", TO]) == 0
    assert main(["plan", TO, "--target", "dp=3,zero=3"]) == main(
        ["verify", URL, "--against", f"{TO}/ucp_manifest.json"]
    )


def test_an_export_to_a_store_equals_one_to_a_folder(saved: Save, tmp_path: Path) -> None:
    saved(Topology(3, 2))
    index = open_checkpoint(find_checkpoint(URL), Comm())
    export_safetensors(index, str(tmp_path / "local"), max_shard=20_000)
    export_safetensors(index, TO, max_shard=20_000)
    assert read_tree(TO) == read_tree(str(tmp_path / "local"))
    with pytest.raises(StorageError, match="exists already"):
        export_safetensors(index, TO)
    with pytest.raises(UnsupportedError, match="Export on one node"):
        run_ranks(2, lambda rank, comm: export_safetensors(index, f"{TO}2", comm))


def test_an_error_in_the_temporary_folder_of_uploads_names_it(saved: Save, monkeypatch: pytest.MonkeyPatch) -> None:
    """If one rank cannot create the folder, all ranks raise."""
    folder, _ = saved(Topology(1, 2))
    with monkeypatch.context() as patch:
        patch.setattr("deepspeed_ucp.io.disk._count_free", lambda _path: 1000)
        message = rf"(?s)needs .*, has 1,000 bytes free.*Files are written below TMPDIR \({tempfile.gettempdir()}\)"
        with pytest.raises(StorageError, match=message):
            convert_checkpoint(folder, f"{URL}/converted")
    made = [tempfile.TemporaryDirectory(), FileNotFoundError(2, "No such file or directory", "/scratch")]
    monkeypatch.setattr(tempfile, "TemporaryDirectory", mock.Mock(side_effect=made))
    found = World(2).run(lambda _rank, comm: convert_checkpoint(folder, TO, comm=comm))
    assert [type(each) for each in found] == [StorageError] * 2


@pytest.mark.parametrize("stopped", params([1, -2, -1], [12]))
def test_a_stopped_upload_leaves_no_complete_output(
    saved: Save, monkeypatch: pytest.MonkeyPatch, stopped: int, tmp_path: Path
) -> None:
    """It is stopped before each file, including the last two, the optimizer's state and the manifest."""
    folder, _ = saved(Topology(1, 2))
    convert_checkpoint(folder, str(tmp_path / "local"))
    whole, put = read_tree(str(tmp_path / "local")), upload.put_file
    most = len(whole) + stopped if stopped < 0 else stopped
    for _ in range(2):  # a fresh destination, then an existing one
        numbers = count()

        def stop(url: str, path: str, numbers: Iterator[int] = numbers) -> None:
            if next(numbers) >= most:
                raise OSError("the network is gone")
            put(url, path)

        monkeypatch.setattr(upload, "put_file", stop)
        with pytest.raises(StorageError, match="cannot be written .the network is gone"):
            convert_checkpoint(folder, TO, options=ConvertOptions(overwrite=True))
        with pytest.raises((CheckpointError, UnsupportedError)):
            open_checkpoint(TO, Comm())
        monkeypatch.setattr(upload, "put_file", put)
        convert_checkpoint(folder, TO)
        assert read_tree(TO) == whole


def test_invalid_destinations_in_a_store_are_refused(saved: Save) -> None:
    folder, _ = saved(Topology(1, 2))
    convert_checkpoint(folder, TO)
    store.write_small(f"{TO}/thesis.tex", b"years of work")
    with pytest.raises(StorageError, match=r"thesis.*stays"):
        convert_checkpoint(folder, TO, options=ConvertOptions(overwrite=True))
    with pytest.raises(StorageError, match="lies in the checkpoint"):
        convert_checkpoint(URL, f"{find_checkpoint(URL)}/inside")
    with pytest.raises(StorageError, match="whole bucket"):
        convert_checkpoint(URL, "memory://stores")
    with pytest.raises(UnsupportedError, match="is read only"):
        convert_checkpoint(URL, "https://host/run")


def test_foreign_files_at_a_destination_are_kept(saved: Save, tmp_path: Path) -> None:
    """They are kept even if they have names of the package, in a store and in a folder."""
    folder, _ = saved(Topology(1, 2))
    index, names = (
        open_checkpoint(folder, Comm()),
        ("mp_rank_00_model_states.pt", "client/notes", "zero/notes", "tokenizer.json"),
    )
    for number, name in enumerate(names):
        (tmp_path / str(number) / name).parent.mkdir(parents=True)
        for to, overwrite in product((f"{TO}{number}", str(tmp_path / str(number))), (False, True)):
            store.write_small(f"{to}/{name}", b"of others")
            with pytest.raises(StorageError, match="is not an atomic checkpoint, so it stays"):
                convert_checkpoint(folder, to, options=ConvertOptions(overwrite=overwrite))
            with pytest.raises(StorageError, match="is not an export, so it stays"):
                export_safetensors(index, to, options=ExportOptions(overwrite=overwrite))
            assert read_tree(to) == {name: b"of others"}


def test_a_checkpoint_in_a_store_can_be_sealed_and_verified(saved: Save, capsys: Any) -> None:
    saved(Topology(1, 2))
    tag = find_checkpoint(URL)
    assert main(["verify", URL, "--seal"]) == 0
    assert main(["verify", URL, "--against", f"{tag}/ucp_seal.json"]) == 0
    name = next(name for name in store.list_folder(tag) if "optim_states" in name)
    store.write_small(f"{tag}/{name}", store.read_small(f"{tag}/{name}") + b"more")
    with pytest.raises(CheckpointError, match=r"ucp_seal.json says"):
        open_checkpoint(tag, Comm())
    assert main(["verify", URL]) == 1
    for _ in range(2):
        remove_seal(tag)
        assert "ucp_seal.json" not in store.list_folder(tag)


def test_paths_of_files_in_a_store(saved: Save, tmp_path: Path) -> None:
    saved(Topology(1, 2))
    with pytest.raises(CheckpointError, match="memory://stores/nowhere does not exist"):
        find_checkpoint("memory://stores/nowhere")
    assert find_tags("memory://stores") == []
    assert paths.is_url("s3://bucket/run") and paths.is_url("abfs://a@b/c") and not paths.is_url("/s3://x")
    assert not paths.is_url(f"file://{tmp_path}") and paths.normalize(f"file://{tmp_path}/") == str(tmp_path)
    assert paths.normalize("s3://bucket/run//") == "s3://bucket/run"


# -- local folders and paths ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "far"), [(DISK, 0), (MEMORY, 0), ("", 0), (NETWORK, 1)])
def test_network_storage_has_more_readers(kind: str, far: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "find_storage_kind", lambda path: kind)
    assert measure_distance("/folder") == far
    monkeypatch.setattr(paths, "count_threads", lambda: 8)
    assert count_readers("/folder") == (16 if far else 8)
    monkeypatch.setattr(paths, "count_threads", lambda: 32)
    assert count_readers("/folder") == 32
    assert (choose_map("/folder") is map) == (not far)


def test_kinds_of_file_systems() -> None:
    assert measure_distance("s3://bucket/run") == 2
    kinds = {"/proc": NETWORK, "/dev/shm": MEMORY, "/nowhere": ""}  # of an unknown kind is /proc
    assert {path: find_storage_kind(path) for path in kinds} == kinds


def test_a_tree_lists_files_behind_links(tmp_path: Path) -> None:
    """Links to a parent folder and dangling links are ignored."""
    elsewhere, folder = tmp_path / "elsewhere", tmp_path / "tag"
    for each in (elsewhere / "w", folder / "deep"):
        each.mkdir(parents=True)
    (elsewhere / "w" / "fp32.pt").write_bytes(b"123")
    (folder / "deep" / "file").write_bytes(b"1")
    for name, target in {"zero": elsewhere, "again": elsewhere, "deep/up": folder, "none": tmp_path / "gone"}.items():
        (folder / name).symlink_to(target)
    (elsewhere / "back").symlink_to(folder)
    (folder / "itself").symlink_to("itself")
    found = {name: entry.size for name, entry in store.list_tree(str(folder)).items()}
    assert found == {"zero/w/fp32.pt": 3, "again/w/fp32.pt": 3, "deep/file": 1, "none": 0, "itself": 0}
