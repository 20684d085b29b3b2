"""Saves in a folder or store: ``latest`` names only complete saves, and a writer changes no foreign files."""

from __future__ import annotations

import json
import os
import random
import time
from pathlib import Path
from unittest import mock

import obstore
import pytest
from obstore.exceptions import PermissionDeniedError

from deepspeed_ucp.errors import OutOfReachError
from deepspeed_ucp.formats.deepspeed.files import PUBLISHED, SEAL, resolve_published
from deepspeed_ucp.io.paths import UPLOAD
from deepspeed_ucp.io.store import list_folder, list_tree, read_small, remove, write_small
from deepspeed_ucp.saves import destinations
from deepspeed_ucp.saves.launch import WriterPipe
from deepspeed_ucp.saves.memory import SavePart, has_writer
from tests.convert.conversions import write_source
from tests.saves.saving import CONFIG, PLACE, SCRIPT, TAG, Run, call_before
from tests.stores.server import BUCKET, serve_bucket
from tests.support.covering import params
from tests.support.memory import clear_memory
from tests.support.until import wait_until


@pytest.fixture(params=["folder", "store"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Run:
    clear_memory()
    return Run(tmp_path, "" if request.param == "folder" else PLACE)


@pytest.fixture
def other(run: Run, tmp_path: Path) -> Run:
    """A job on another machine, for the same destination."""
    return Run(tmp_path, run.destination, memory="other")


def test_a_save_is_written_to_its_destination_and_overwritten(run: Run) -> None:
    """The cache of an atomic checkpoint that a load has left next to the tag in memory is not copied."""
    names = list[list[str]]()
    for _ in range(2):
        save = run.save()
        (Path(save.folder) / f"{TAG}_universal" / "zero").mkdir(parents=True)
        (Path(save.folder) / f"{TAG}_universal" / "zero" / "half").write_text("of an atomic checkpoint")
        assert run.write() and run.list_pending_tags() == [] and list(save.read("done")) == [run.destination]
        assert run.holds(save) and run.list_names() == {TAG, "latest", SCRIPT} and run.latest == TAG
        names.append(sorted(map(os.path.basename, list_tree(run.destination))))
    assert names[0] == names[1]


def test_foreign_files_in_a_tag_are_kept(run: Run) -> None:
    """They are kept when fewer ranks overwrite the tag and when it is removed. A tag below it is kept, too."""
    tag = f"{run.destination}/{TAG}"
    kept = {"arguments.json": b"{}", "below/mp_rank_00_model_states.pt": b"another tag's"}
    Path(tag, "below").mkdir(parents=True) if "://" not in tag else None
    for name, data in {**kept, "zero_pp_rank_9_mp_rank_00_optim_states.pt": b"of another save"}.items():
        write_small(f"{tag}/{name}", data)
    save = run.write_save(keep=1)
    names = {os.path.basename(name) for name in save.list_files()} | {"ucp_seal.json", "arguments.json", SCRIPT}
    found = {os.path.basename(name) for name in list_tree(tag)}
    assert found | {SCRIPT} == names | ({"ucp_published.json"} if "://" in tag else set())
    assert run.is_whole() and read_small(f"{tag}/below/mp_rank_00_model_states.pt") == b"another tag's"
    run.write_save(tag="next", keep=1)
    assert {name: read_small(f"{tag}/{name}") for name in list_tree(tag)} == kept
    assert not [name for name in run.list_names() if name.startswith(".")]


def test_a_save_replaces_a_local_copy_of_a_stores_tag(tmp_path: Path) -> None:
    """Files that determine a folder's checkpoint format are not kept in the new tag; a user's file is."""
    run = Run(tmp_path)
    tag = Path(run.destination, TAG)
    tag.mkdir(parents=True)
    write_source(tmp_path / "old", 9).rename(tag / f"{UPLOAD}job-1")
    (tag / PUBLISHED).write_text(json.dumps({"folder": f"{UPLOAD}job-1"}))
    for name in (f"{UPLOAD}other/file", "zero/weight/fp32.pt", "ucp_manifest.json", "notes.txt"):
        (tag / name).parent.mkdir(parents=True, exist_ok=True)
        (tag / name).write_text("old")
    save = run.write_save()
    assert {*os.listdir(tag)} == {*os.listdir(f"{save.folder}/{TAG}"), SEAL, "notes.txt"}
    assert resolve_published(str(tag)) == str(tag) and run.is_whole()


def test_delete_old_tags_keeps_the_newest_n_and_the_one_in_latest(run: Run) -> None:
    """Folders that are no tags are kept, too."""
    os.makedirs(f"{run.destination}/theirs") if "://" not in run.destination else None
    write_small(f"{run.destination}/theirs/file", b"1")
    for tag in "abcd":
        run.write_save(tag=tag, keep=2, latest=tag == "a")
    assert run.list_names() == {"a", "c", "d", "latest", "theirs", SCRIPT}


def test_an_unreadable_latest_prevents_the_removal_of_saves(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    """The file may name any of the saves."""
    for tag in "ab":
        run.write_save(tag=tag, keep=1, latest=tag == "a")
    with mock.patch.object(destinations, "read_tag", side_effect=OutOfReachError("busy", path="latest")):
        run.write_save(tag="c", keep=1, latest=False)
    assert run.list_names() == {*"abc", "latest", SCRIPT} and "latest: busy" in caplog.text
    run.write_save(tag="d", keep=1, latest=False)
    assert run.list_names() == {*"ad", "latest", SCRIPT}


def test_a_store_that_never_accepts_latest_is_an_error(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    """Immediate retries would never end."""
    exchange = destinations.exchange_small

    def refuse(path: str, data: bytes, before: bytes | None) -> bool:
        return before is None and exchange(path, data, before)

    run.write_save(tag="a")
    run.save(tag="b")
    with mock.patch.object(destinations, "exchange_small", refuse):
        assert not run.write()
    assert "refused a conditional write" in caplog.text and run.latest == "a"
    assert run.write() and run.latest == "b"


def test_a_tag_that_another_job_has_overwritten_is_not_removed(run: Run, other: Run) -> None:
    run.write_save(tag="a", keep=1)
    other.save(tag="a")
    save = other.write_save(tag="a")
    run.write_save(tag="b", keep=1)
    assert other.holds(save)


@pytest.mark.parametrize("is_saved_again", [False, True])
def test_a_failed_removal_is_repeated_unless_the_tag_was_overwritten(
    is_saved_again: bool, run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    """The overwritten tag has no seal, and its file may have the time of another clock."""
    run.write_save(tag="a", keep=1)

    def remove_seal(destination: str, tag: str) -> None:
        remove(f"{resolve_published(f'{destination}/{tag}')}/{SEAL}")
        raise OSError("busy")

    with mock.patch.object(destinations, "remove_tag", remove_seal):
        run.write_save(tag="b", keep=1)
    assert "a: cannot be removed now: busy" in caplog.text and "a" in run.list_names()
    if is_saved_again:
        path = f"{resolve_published(f'{run.destination}/a')}/mp_rank_00_model_states.pt"
        write_small(path, b"theirs")
        if "://" not in path:
            os.utime(path, (0, 0))
    run.write_save(tag="c", keep=1)
    assert ("a" in run.list_names()) == is_saved_again and "b" not in run.list_names()


def test_latest_that_names_a_damaged_tag_is_replaced(run: Run) -> None:
    def damage() -> None:
        write_small(f"{run.destination}/theirs/{PUBLISHED}", b"{")
        write_small(f"{run.destination}/latest", b"theirs")

    os.makedirs(f"{run.destination}/theirs") if "://" not in run.destination else None
    run.save()
    with call_before("_update_latest", damage):
        assert run.write()
    assert run.latest == TAG and run.is_whole()


@pytest.mark.parametrize(("step", "named"), [(1, "theirs"), (9, TAG)])
def test_latest_never_returns_to_an_older_save_than_another_jobs(step: int, named: str, run: Run, other: Run) -> None:
    other.save(tag="theirs", step=3)
    run.save(step=step)
    with call_before("seal_folder", other.write):
        assert run.write()
    assert run.latest == named and run.is_whole()


def test_a_tag_that_is_saved_again_during_its_write_gets_the_later_save(run: Run) -> None:
    run.save()
    with call_before("put_file", run.save):
        assert run.write()
    (save,) = run.job.list_saves()
    assert save.number == 2 and run.holds(save)


def test_a_part_of_an_earlier_save_does_not_complete_a_later_one(run: Run, tmp_path: Path) -> None:
    """The other node has written its part of a save that the first node abandoned."""
    node = Run(tmp_path, run.destination, memory="node1", name=run.job.name)
    for _ in range(2):
        run.save(nodes=2)
        assert not run.write(wait=0.2)
        assert not {"latest", TAG} <= run.list_names() and not run.is_whole()
        node.write_save(node=1, nodes=2)
    assert run.write() and run.is_whole()
    assert not [name for name in list_tree(run.destination) if ".ucp-written" in name]


def test_a_failed_upload_is_retried(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    clear_memory()
    run = Run(tmp_path, PLACE)
    run.save()
    with mock.patch.object(obstore, "put", side_effect=PermissionDeniedError("403 Forbidden")):
        assert not run.write()
    assert "not written, to be tried again: " in caplog.text and "check the credentials" in caplog.text
    assert list_folder("memory://bucket") == {}
    assert run.write() and run.is_whole()


@pytest.mark.parametrize("kind", params(["folder"], ["store"]))
def test_two_concurrent_jobs_write_the_same_tags(kind: str, tmp_path: Path) -> None:
    """Their writers do not share memory, like writers on different machines."""
    pytest.importorskip("moto", reason="the store is S3")
    with serve_bucket() as server:
        destination = str(tmp_path / "destination") if kind == "folder" else f"s3://{BUCKET}/both"
        config = CONFIG.model_copy(update={"storage_options": server.options})
        runs, drawn = [Run(tmp_path, destination, memory=f"memory{number}") for number in range(2)], random.Random(1)
        writers = [WriterPipe(run.job, config) for run in runs]
        for number in range(6):
            for run, writer in zip(runs, writers, strict=True):
                run.save(tag=f"step{number // 3}", step=number // 3)
                writer.notify()
            time.sleep(drawn.uniform(0, 0.3))
        for writer in writers:
            writer.close()
        wait_until(lambda: not any(has_writer(run.job) for run in runs))
        assert runs[0].latest == "step1" and runs[0].is_whole("step1"), [run.job.folder for run in runs]


def test_only_files_of_another_size_are_written_again(tmp_path: Path) -> None:
    """A node whose process died has written a part of its files."""
    source, folder = tmp_path / "memory" / "tag", tmp_path / "out"
    source.mkdir(parents=True)
    folder.mkdir()
    for name in ("same", "short", "absent"):
        (source / name).write_bytes(b"new!")
    (folder / "same").write_bytes(b"old!")
    (folder / "short").write_bytes(b"old")
    save = SavePart("job", 1, str(folder), "tag", 1, True, 0, 1, {}, str(tmp_path / "memory"))
    assert sorted(destinations._put_part(save, str(folder))) == ["absent", "same", "short"]
    found = {name: (folder / name).read_bytes() for name in ("same", "short", "absent")}
    assert found == {"same": b"old!", "short": b"new!", "absent": b"new!"}
