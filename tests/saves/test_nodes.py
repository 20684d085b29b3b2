"""Writers of several nodes, each with its part of a save."""

from __future__ import annotations

import os
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from deepspeed_ucp.saves import budget
from deepspeed_ucp.saves.memory import SavePart
from deepspeed_ucp.saves.writer import SaveWriter
from tests.convert.conversions import read_bytes
from tests.saves.saving import PATIENCE, TAG, Run, begin, fail_save, make_parts, strip, write_both, write_pending


@pytest.fixture
def nodes(tmp_path: Path) -> list[Run]:
    return make_parts(tmp_path)


def test_a_save_is_published_after_all_nodes_have_written(nodes: list[Run], caplog: pytest.LogCaptureFixture) -> None:
    assert not nodes[0].write(wait=0.2)
    assert "1 of 2 nodes have not written their files" in caplog.text
    assert not [name for name in nodes[0].list_names() if not name.startswith(".")]
    write_both(nodes)
    assert nodes[0].list_names() == {TAG, "latest"} and nodes[0].is_whole()
    assert strip(read_bytes(Path(nodes[0].destination, TAG))) == read_bytes(nodes[0].folder / "whole" / TAG)


def copy_save(run: Run, number: int, tag: str = TAG, **changes: Any) -> SavePart:
    """Make a save with the files of the first one."""
    (first, *_), folder = run.job.list_saves(), Path(run.job.find_folder(number))
    shutil.copytree(Path(first.folder, TAG), folder / tag)
    copy = replace(first, number=number, tag=tag, folder=str(folder), **changes)
    copy.write_record()
    return copy


def test_a_node_writes_only_saves_that_the_first_node_has_begun(nodes: list[Run], tmp_path: Path) -> None:
    """It waits with later saves, and skips older ones that the first node has dropped."""
    for run in nodes:
        copy_save(run, 2)
        copy_save(run, 3)
    os.rename(nodes[0].job.find_folder(3), tmp_path / "not yet")
    other = threading.Thread(target=nodes[1].write)
    other.start()
    time.sleep(0.2)  # the node must not write in this time
    assert not (tmp_path / "destination").exists()
    assert nodes[0].write()
    assert [save.number for save in nodes[0].job.list_saves() if not save.list_pending()] == [2]
    os.rename(tmp_path / "not yet", nodes[0].job.find_folder(3))
    assert nodes[0].write()
    other.join()
    assert not nodes[1].list_pending_tags()


def test_a_later_save_keeps_the_written_parts_of_a_pending_one(nodes: list[Run]) -> None:
    """The other node has recorded its part as written and does not repeat the write."""
    for run in nodes:
        copy_save(run, 2, "next")
        for save in run.job.list_saves():
            begin(save)
    assert nodes[1].write()

    with fail_save(TAG, OSError("not yet")):
        assert not nodes[0].write() and nodes[0].is_whole("next")
    assert nodes[0].write(wait=0.2) and nodes[0].is_whole()


def test_a_node_without_files_waits_for_the_first_node(nodes: list[Run], tmp_path: Path) -> None:
    """The tag has the seal of another save. Then it may write before all others."""
    saves = [run.job.list_saves()[0] for run in nodes]
    for path in Path(saves[1].folder, TAG).iterdir():
        path.rename(Path(saves[0].folder, TAG, path.name))
    Run(tmp_path, memory="other").write_save()
    assert not nodes[1].write(wait=0.2)
    begin(saves[0])
    assert nodes[1].write() and nodes[0].write()
    assert nodes[0].is_whole() and budget.is_safe(saves[1])
    assert strip(read_bytes(Path(nodes[0].destination, TAG))) == read_bytes(tmp_path / "whole" / TAG)


def test_only_the_first_node_removes_saves(nodes: list[Run]) -> None:
    """When another node writes its part, the older save may be the only complete one."""
    write_both(nodes)
    Path(nodes[0].destination, "latest").unlink()
    begin(copy_save(nodes[1], 2, "next", destinations={nodes[1].destination: 1}, latest=False))
    assert nodes[1].write() and nodes[0].is_whole()


def test_a_running_job_frees_memory_without_reading_the_destination(nodes: list[Run]) -> None:
    """A slow destination would delay training."""
    (made,) = nodes[1].job.list_saves()
    copy_save(nodes[1], 2)
    made.note("done", {nodes[1].destination: "on the first node"})
    with mock.patch.object(budget, "has_sealed_part", side_effect=AssertionError):
        budget.recycle_unneeded(nodes[1].job, is_agreed=False)
    assert [save.number for save in nodes[1].job.list_saves()] == [2]


def test_a_snapshot_is_freed_after_all_nodes_recorded_a_later_one(run: Run) -> None:
    """Other nodes may be lost before they record the later snapshot."""
    for tag in "abc":
        run.save(tag=tag, destinations={}, nodes=2)
    SaveWriter(run.job, PATIENCE).free()
    assert [save.tag for save in run.job.list_saves()] == ["b", "c"]
    budget.recycle_unneeded(run.job, is_agreed=True)
    assert [save.tag for save in run.job.list_saves()] == ["c"]


def test_a_node_finds_an_unrecorded_written_save_in_the_destination(nodes: list[Run], tmp_path: Path) -> None:
    """If the tag contains another save, the node writes again."""
    state = Path(nodes[1].job.list_saves()[0].folder) / "save-1.json"
    pending = state.read_bytes()
    write_both(nodes)
    state.write_bytes(pending)
    assert nodes[1].write(wait=0.2) and nodes[1].list_names() == {TAG, "latest"}
    state.write_bytes(pending)
    shutil.rmtree(nodes[0].destination)
    other = Run(tmp_path, memory="other", name="job")
    other.save()
    other.write_save()  # with other weights
    assert not nodes[1].write(wait=0.2)


def test_a_save_with_a_damaged_part_is_abandoned(nodes: list[Run], caplog: pytest.LogCaptureFixture) -> None:
    """That node has written its part and does not repeat the write."""
    assert not nodes[0].write(wait=0.2)  # it begins the save
    assert nodes[1].write()
    (save,), (part,) = nodes[0].job.list_saves(), nodes[1].job.list_saves()
    (name,) = [Path(path).name for path in part.list_files()][:1]
    (arrived,) = Path(nodes[0].destination).glob(f".*/{name}")
    os.truncate(arrived, 100)
    writer = SaveWriter(nodes[0].job, PATIENCE)
    assert not write_pending(writer)  # its files may be damaged, too: it writes them once more
    assert write_pending(writer)
    assert f"no retry can mend this: {arrived}" in caplog.text
    assert save.list_lacking() == [nodes[0].destination] and not save.list_pending()  # memory keeps it
