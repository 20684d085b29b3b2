"""The writer's process without an engine: what it leaves in places, and what it frees, whatever stops it."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from deepspeed_ucp.errors import CheckpointError, DiskFullError, UnsupportedError
from deepspeed_ucp.io import disk
from deepspeed_ucp.saves import budget, memory, places, publishing
from deepspeed_ucp.saves import writer as writing
from deepspeed_ucp.saves.launch import WriterPipe, finish_dead, start_writer
from deepspeed_ucp.saves.memory import Job, Snapshot, is_locked, name_job
from deepspeed_ucp.saves.writer import SaveWriter
from tests.convert.conversions import read_bytes
from tests.saves.mounts import run_in_namespace, save_into_small_memory, write_to_small_disk
from tests.saves.saving import (
    CONFIG,
    PATIENCE,
    TAG,
    Run,
    begin,
    find_writer,
    is_whole,
    make_parts,
    make_save,
    run_writer,
    set_counter,
    strip,
    write,
    write_both,
    write_pending,
)
from tests.support.covering import params
from tests.support.crash import failing
from tests.support.until import wait_until

SCRIPT = "zero_to_fp32.py"


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


@pytest.fixture
def nodes(tmp_path: Path) -> list[Run]:
    return make_parts(tmp_path)


# -- faults ------------------------------------------------------------------------------------------------------------


def write_all(run: Run) -> None:
    """Run a writer to the end of the job."""
    with run_writer(SaveWriter(run.job, PATIENCE)):
        pass


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """The tags and places that a writer in this process tries."""
    attempts, original = list[tuple[str, str]](), places.write_save

    def note(save: Snapshot, place: str, *args: Any) -> str:
        attempts.append((save.tag, os.path.basename(place)))
        return original(save, place, *args)

    monkeypatch.setattr(writing, "write_save", note)
    return attempts


def cut_model_states(tag: Path) -> None:
    path = next(tag.glob("*model_states.pt"))
    path.write_bytes(path.read_bytes()[:-100])


FAULTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "fraction": (lambda tag: set_counter(tag, "global_samples", 6.5), "global_samples"),
    "text": (lambda tag: set_counter(tag, "global_samples", "6"), "global_samples"),
    "damage": (cut_model_states, "model_states.pt"),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_a_fault_that_no_retry_can_mend_is_reported_once_and_not_retried(
    kind: str, run: Run, attempts: list[tuple[str, str]], caplog: pytest.LogCaptureFixture
) -> None:
    bad, (spoil, named) = run.save("one", "other"), FAULTS[kind]
    spoil(Path(bad.folder) / TAG)
    write_all(run)
    assert sorted(attempts) == [(TAG, "one"), (TAG, "other")]
    lines = [each for each in caplog.messages if "no retry can mend" in each]
    assert len(lines) == 2 and all(named in line and ("damage" not in line or kind == "damage") for line in lines)
    assert sorted(bad.read("refused")) == [str(run.folder / each) for each in ("one", "other")]
    assert len(bad.list_lacking()) == 2 and not bad.list_pending()  # memory keeps it
    good = run.save("one", tag="global_step4")
    write_all(run)
    assert not good.list_pending() and is_whole(str(run.folder / "one" / "global_step4"))


def test_a_file_that_is_damaged_on_its_way_is_written_again(
    run: Run, attempts: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, copy = run.save(), places.put_file

    def cut_first(destination: str, source: str) -> None:
        copy(destination, source)
        if len(attempts) == 1 and destination.endswith("model_states.pt"):
            os.truncate(destination, 100)

    monkeypatch.setattr(places, "put_file", cut_first)
    monkeypatch.setattr(writing, "_AGAIN", 0.01)
    write_all(run)
    assert len(attempts) == 2 and not made.list_pending() and run.is_whole()


def test_a_place_that_fails_holds_up_no_other(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    (run.folder / "file").write_text("no folder")
    run.save("file", "place")
    writer = SaveWriter(run.job, PATIENCE)
    assert not write_pending(writer) and not write_pending(writer)
    assert run.is_whole() and caplog.text.count("not written, to be tried again") == 1
    (run.folder / "file").unlink()
    assert write_pending(writer) and is_whole(str(run.folder / "file" / TAG))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS], ids=errno.errorcode.get)
def test_a_disk_that_fails_leaves_the_former_files(code: int, run: Run) -> None:
    run.write_save()
    before = read_bytes(Path(run.place))
    run.save()
    for at in range(0, 12, 3):
        with failing(at, code=code):
            assert not run.write()
        now = read_bytes(Path(run.place))
        assert strip(before) == {name: data for name, data in now.items() if name in before}
    run.write_save(tag="next")
    run.write_save()
    assert read_bytes(Path(run.place)) != before and run.is_whole()
    assert run.list_names() == {TAG, "next", "latest", SCRIPT}


def test_coordination_files_that_cannot_be_deleted_do_not_undo_a_save(run: Run) -> None:
    """The next save of the job deletes its record next to the tag."""
    run.save(tag="first")
    with mock.patch.object(writing, "end_save", side_effect=OSError(errno.EIO, os.strerror(errno.EIO))):
        assert run.write() and list(run.job.read("written")[run.place]) == ["first"]
    assert [name for name in run.list_names() if "first" in name] != ["first"]
    run.write_save(tag="second")
    assert run.list_names() == {"first", "second", "latest", SCRIPT}


def fill_memory(kind: str) -> mock._patch[Any]:
    """Let memory have no room for an object of a state."""
    note = Snapshot.note

    def note_or_fail(save: Snapshot, given: str, record: Mapping[str, str]) -> None:
        if given == kind:
            raise DiskFullError("full", path="memory")
        note(save, given, record)

    return mock.patch.object(Snapshot, "note", note_or_fail)


def test_a_writer_survives_a_full_memory(run: Run) -> None:
    """It cannot record then that a save is written; it does so once there is room."""
    writer = SaveWriter(run.job, PATIENCE)
    for tag in (TAG, "next"):
        run.save(tag=tag)
        with fill_memory("done"):
            assert not write_pending(writer)
    assert write_pending(writer) and not run.list_late()


@pytest.mark.parametrize("note", ["failed", "refused"])
def test_a_fault_that_cannot_be_recorded_holds_up_no_other_save(note: str, run: Run) -> None:
    run.save(tag="first")
    second = run.save(tag="second")
    damaged = CheckpointError("is damaged.") if note == "failed" else UnsupportedError("is not supported.")

    def write_or_fail(each: Snapshot, *args: Any) -> str:
        if each.tag == "first":
            raise damaged
        return places.write_save(each, *args)

    with fill_memory(note), mock.patch.object(writing, "write_save", write_or_fail):
        assert run.write() is (note == "refused")
    assert second.read("done") and run.is_whole("second")


def test_a_full_memory_keeps_no_written_save_pending(tmp_path: Path) -> None:
    """Nor does the next save wait for it: room for the records is reserved when a save begins."""
    run_in_namespace(lambda: save_into_small_memory(tmp_path))


@pytest.mark.parametrize(("fault", "message"), [("full", "disk full"), ("ro", "Read-only file system")])
def test_a_repaired_disk_gets_all_saves(fault: str, message: str, tmp_path: Path) -> None:
    run_in_namespace(lambda: write_to_small_disk(tmp_path, fault, message))


# -- records in memory -------------------------------------------------------------------------------------------------


def test_a_record_is_written_after_its_files_and_removed_before_them(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    events = list[str]()
    for name in "sync_file", "sync_folder", "write_at":

        def note(path: str | int, *_: object, name: str = name) -> None:
            events.append(name if isinstance(path, int) else f"{name} {os.path.basename(path)}")

        for module in memory, disk:
            monkeypatch.setattr(module, name, note, raising=False)
    made = run.save()
    files = {f"sync_file {os.path.basename(each)}" for each in made.list_files()}
    assert files < set(events[:-1]) and f"sync_folder {TAG}" in events and events[-1] == "write_at"
    events.clear()
    Path(made.folder, "save-0.json").touch()
    made.recycle()
    assert events == [f"sync_folder {os.path.basename(made.folder)}"] and os.path.exists(run.job.spare)


def test_a_save_that_is_freed_while_its_folder_is_looked_at_is_no_error(run: Run) -> None:
    """The next save deletes unfinished folders while the writer frees older saves."""
    made, glob = run.save(), Path.glob

    def list_and_free(folder: Path, pattern: str) -> list[Path]:
        found = list(glob(folder, pattern))
        made.recycle()
        return found

    with mock.patch.object(Path, "glob", list_and_free):
        assert not run.job.is_unfinished(made.number)


def test_a_line_of_a_record_that_is_cut_off_does_not_count(run: Run) -> None:
    run.job.reserve(7, 0)
    made = replace(run.save("first", "second"), folder=run.job.find_folder(7))
    first, second = made.destinations
    made.note("done", {first: "mark"})
    record = Path(made.folder, "save-0.json")
    size = record.stat().st_size
    text = record.read_text().rstrip("\n")
    record.write_text((text + '\n{"done": {"second": "ma').ljust(size, "\n"))
    assert made.read("done") == {first: "mark"} and made.list_pending() == [second]
    made.note("done", {second: "other"})
    made.note("done", {first: ""})
    assert made.read("done") == {first: "", second: "other"}
    assert record.stat().st_size == size
    made.note("failed", {first: "y" * size})
    for number in range(3):  # the room that is reserved has the last one alone
        made.note("failed", {first: str(number) * (size // 2)})
    assert record.stat().st_size < 2 * size and made.read("failed") == {first: "2" * (size // 2)}
    assert made.read("done") == {first: "", second: "other"} and made.is_recorded() is False


# -- which saves are written, and kept in memory -----------------------------------------------------------------------


@pytest.mark.parametrize("latest", [True, False])
def test_all_saves_of_a_script_are_written(
    latest: bool, run: Run, attempts: list[tuple[str, str]], caplog: pytest.LogCaptureFixture
) -> None:
    """Except one that a later save under the same tag replaces. Memory keeps the newest."""
    for number, tag in enumerate(("best", "a", "best", "b", "last")):
        run.save(tag=tag, step=number, latest=latest or tag == "last")
    assert run.write()
    assert [tag for tag, _ in attempts] == ["a", "best", "b", "last"]
    assert all(map(run.is_whole, ("best", "a", "b", "last"))) and run.latest == "last"
    assert f"{run.place}: best not written, a later save has the same tag" in caplog.text
    assert caplog.text.count("not written") == 1 and not run.list_late()
    assert [each.tag for each in run.job.list_saves()] == ["last"]


def test_a_snapshot_in_memory_alone_is_not_freed_for_a_save_of_another_folder(run: Run) -> None:
    run.save(tag="snapshot", destinations={}, save_dir="run")
    for tag in "best", "better":
        run.write_save(tag=tag)
    assert [each.tag for each in run.job.list_saves()] == ["snapshot", "better"]
    run.save(tag="next", destinations={}, save_dir="run")
    run.write_save(tag="last")
    assert [each.tag for each in run.job.list_saves()] == ["next", "last"]


def test_latest_does_not_name_a_newer_save_that_is_not_for_it(run: Run) -> None:
    run.save(tag="a")
    run.save(tag="best", latest=False)
    assert run.write()
    assert run.latest == "a" and run.is_whole("a") and run.is_whole("best")


def test_latest_does_not_go_back_to_a_save_that_is_written_late(run: Run) -> None:
    run.save(tag="late")
    run.save(tag="next")
    original = writing.write_save

    def fail_late(save: Snapshot, *args: Any) -> str:
        if save.tag == "late":
            raise OSError("not yet")
        return original(save, *args)

    with mock.patch.object(writing, "write_save", fail_late):
        assert not run.write()
    assert run.write() and run.is_whole("late") and run.latest == "next"


def test_a_slow_place_holds_up_no_other(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    slow, fast = str(run.folder / "slow"), str(run.folder / "fast")
    goes_on, copy = threading.Event(), places.put_file

    def copy_slowly(destination: str, source: str) -> None:
        assert destination.startswith(fast) or goes_on.wait(PATIENCE)
        copy(destination, source)

    monkeypatch.setattr(places, "put_file", copy_slowly)
    with run_writer(SaveWriter(run.job, PATIENCE)) as announce:
        for tag in "abc":
            run.save("slow", "fast", tag=tag)
            announce()
            wait_until(lambda tag=tag: is_whole(f"{fast}/{tag}"))
        assert not os.path.exists(f"{slow}/a") and len(run.job.list_saves()) == 3
        goes_on.set()
    assert set(os.listdir(slow)) == {*"abc", "latest", SCRIPT} and Path(slow, "latest").read_text() == "c"
    assert caplog.text == ""


def test_a_place_that_fails_is_tried_again_after_pauses(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new save is tried at once. At the end retries go on for the seconds asked for. Only pauses move the clock."""
    pauses, now = list[float](), [0.0]
    failed = mock.Mock(side_effect=OSError(errno.EIO, os.strerror(errno.EIO)))
    monkeypatch.setattr(writing, "write_save", failed)
    monkeypatch.setattr(writing, "time", SimpleNamespace(monotonic=lambda: now[0]))
    is_third, is_fifth = threading.Event(), threading.Event()

    class Pauses(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            assert timeout is not None
            pauses.append(timeout)
            if len(pauses) in (3, 5):  # then there is news
                (is_third if len(pauses) == 3 else is_fifth).set()
                return super().wait(PATIENCE)
            now[0] += timeout
            return False

    run.save()
    writer = SaveWriter(run.job, 25.0)
    (place,) = writer.list_places()
    place.news = Pauses()
    with run_writer(writer) as announce:
        assert is_third.wait(PATIENCE)
        announce()
        assert is_fifth.wait(PATIENCE)
    assert pauses == [10, 10, 10, 10, 10, 10, 10, 5]
    assert failed.call_count == len(pauses) + 1 and run.list_late()


def test_a_save_that_was_not_announced_is_written_at_the_end(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rank was killed between the save and the announcement."""

    def end(*_: object) -> bytes:
        run.save()
        return b""

    monkeypatch.setattr(writing, "os", SimpleNamespace(**{**vars(os), "read": end}))
    monkeypatch.setattr(writing, "sys", SimpleNamespace(stdin=SimpleNamespace(fileno=int)))
    assert SaveWriter(run.job, PATIENCE).run() == 0 and run.is_whole()


# -- the process -------------------------------------------------------------------------------------------------------


def test_the_process_ends_when_everything_is_written(run: Run) -> None:
    """Although its starter has ended, and saves were made while it wrote. It replaces a killed process."""
    writer = WriterPipe(run.job, CONFIG)
    writer.notify()
    assert is_locked(run.job)  # a writer that starts slowly counts as running
    for tag in "killed", "before", TAG:
        run.save(tag=tag)
        writer.notify()
        wait_until(lambda: not run.list_late())
        if tag == "killed":
            os.kill(find_writer(run.job), signal.SIGKILL)
            wait_until(lambda: not is_locked(run.job))
    wait_until(lambda: os.path.exists(run.job.spare))
    writer.close()
    wait_until(lambda: not is_locked(run.job))
    assert run.is_whole() and not os.path.exists(run.job.spare)


SEARCHED = [None, "", ":", ".", f"code:{os.path.dirname(os.__file__)}"]


@pytest.mark.parametrize("searched", params(SEARCHED[::3], SEARCHED, str))
def test_no_code_of_the_working_directory_is_executed(
    searched: str | None, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other users may have put files there, named like Python's own modules and the package."""
    folder = run.folder / "code"
    names = ["hashlib", "json", "logging", "sitecustomize", "usercustomize", "files", "deepspeed_ucp/__init__"]
    for path in (base / f"{name}.py" for base in (folder, folder / "code") for name in names):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("import os\nos.mkdir(f'{os.path.abspath(__file__)}-executed')\n")
    monkeypatch.chdir(folder)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    if searched is not None:
        monkeypatch.setenv("PYTHONPATH", searched)
    run.save()
    start_writer(run.job, CONFIG).close()
    wait_until(lambda: not run.list_late())
    assert run.is_whole()
    assert list(folder.rglob("*-executed")) == [] and list(folder.rglob("__pycache__")) == []


@pytest.mark.parametrize("last", ["", "finished\n"], ids=["killed", "finished"])
def test_memory_is_freed_only_after_a_normal_end(last: str, run: Run) -> None:
    """Although it has a snapshot, which a later save replaces."""
    run.save(destinations={})
    run.save(tag="last")
    writer = WriterPipe(run.job, CONFIG)
    writer.notify()
    writer.close(f"\n{last}".encode())
    wait_until(lambda: run.is_whole("last"))
    wait_until(lambda: not (run.list_late() or is_locked(run.job)))
    assert bool(run.job.list_saves()) is not bool(last)
    wait_until(lambda: os.path.exists(run.job.folder) is not bool(last))


@pytest.mark.parametrize("kind", ["snapshot", "failed", "one of two nodes"])
def test_memory_is_not_freed_while_it_has_the_only_copy(kind: str, run: Run) -> None:
    made = run.write_save(tag="written")
    if kind == "snapshot":
        run.save(tag="last", destinations={})
    elif kind == "failed":
        (run.folder / "file").write_text("no folder")
        run.save("file", tag="last")
    else:
        made = replace(made, node=1, nodes=2)
        made.write_record()
        made.note("done", {run.place: "on the first node"})
        shutil.rmtree(run.place)
    writer = SaveWriter(run.job, 0.1)
    writer._is_finished = True
    writer.free_finished()
    assert run.job.list_saves()


# -- which jobs are running --------------------------------------------------------------------------------------------


def test_a_job_is_owned_as_long_as_the_process_that_saves(tmp_path: Path) -> None:
    """Also for processes that cannot see it: containers share memory, not process numbers."""
    job, (begun, begin), (ended, end) = Job(str(tmp_path / "job")), os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        job.own()
        os.fork()  # a worker that outlives the process, and does not save
        os.write(begin, b"1")
        os.close(end)
        os.read(ended, 1)
        os._exit(0)
    assert os.read(begun, 1) + os.read(begun, 1) == b"11"
    with mock.patch.object(Path, "read_text", side_effect=OSError):
        assert job.is_owned()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert not job.is_owned()
    for fd in (begun, begin, ended, end):
        os.close(fd)


def test_a_look_at_a_jobs_lock_does_not_hold_it(tmp_path: Path) -> None:
    """Not even if the process is forked while it looks."""
    (tmp_path / "owner").touch()
    (goes_on, go), children, flock = os.pipe(), list[int](), fcntl.flock

    def lock(file: Any, operation: int) -> None:
        flock(file, operation)
        if not children:
            children.append(os.fork())
            if not children[0]:
                os.close(go)
                os.read(goes_on, 1)
                os._exit(0)

    with mock.patch.object(fcntl, "flock", lock):
        assert not Job(str(tmp_path)).is_owned()
    with open(tmp_path / "owner") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(go)
    os.waitpid(children[0], 0)
    os.close(goes_on)


def test_a_job_that_begins_is_not_taken_for_a_dead_one(tmp_path: Path) -> None:
    """By another one that begins at the same time."""
    job, flock = Job(str(tmp_path / name_job())), fcntl.flock

    def lock(file: Any, operation: int) -> None:
        with mock.patch.object(fcntl, "flock", flock):
            finish_dead(str(tmp_path), CONFIG)
        flock(file, operation)

    with mock.patch.object(fcntl, "flock", lock):
        job.own()
    assert job.is_there() and job.is_owned()


@pytest.mark.parametrize("tag", ["later", "same"])
def test_a_dead_jobs_pending_save_replaces_nothing_of_a_living_job(tag: str, tmp_path: Path) -> None:
    """It may have been rolled back: neither ``latest`` nor a tag goes back to it."""
    dead, living = Job(str(tmp_path / "memory" / name_job())), Run(tmp_path, name=name_job())
    pending = make_save(dead, living.place, tag="same")
    living.save(tag="before")
    made = living.write_save(tag=tag)
    assert write(dead) and not pending.list_pending()
    assert living.latest == tag and living.holds(made) and living.is_whole("same")


# -- several nodes -----------------------------------------------------------------------------------------------------


def test_a_save_is_published_when_all_nodes_have_written(nodes: list[Run], caplog: pytest.LogCaptureFixture) -> None:
    assert not nodes[0].write(wait=0.2)
    assert "1 of 2 nodes have not written their files" in caplog.text
    assert not [name for name in nodes[0].list_names() if not name.startswith(".")]
    write_both(nodes)
    assert nodes[0].list_names() == {TAG, "latest"} and nodes[0].is_whole()
    assert strip(read_bytes(Path(nodes[0].place, TAG))) == read_bytes(nodes[0].folder / "whole" / TAG)


def copy_save(run: Run, number: int) -> None:
    """Make a save with the files of the first one."""
    made = run.job.list_saves()[0]
    shutil.copytree(made.folder, run.job.find_folder(number))
    replace(made, number=number, folder=run.job.find_folder(number)).write_record()


def test_a_node_writes_the_saves_that_the_first_node_has_begun(nodes: list[Run], tmp_path: Path) -> None:
    """Neither a later one that it has already, nor an older one that the first node has dropped."""
    for run in nodes:
        copy_save(run, 2)
        copy_save(run, 3)
    os.rename(nodes[0].job.find_folder(3), tmp_path / "not yet")
    other = threading.Thread(target=nodes[1].write)
    other.start()
    time.sleep(0.2)  # it must not write meanwhile
    assert not (tmp_path / "place").exists()
    assert nodes[0].write()
    assert [save.number for save in nodes[0].job.list_saves() if not save.list_pending()] == [2]
    os.rename(tmp_path / "not yet", nodes[0].job.find_folder(3))
    assert nodes[0].write()
    other.join()
    assert not nodes[1].list_late()


def test_only_the_first_node_removes_saves(nodes: list[Run]) -> None:
    """Another node writes its part before the save is complete; the older one may be the only complete save then."""
    write_both(nodes)
    Path(nodes[0].place, "latest").unlink()
    made = nodes[1].job.list_saves()[0]
    folder = Path(nodes[1].job.find_folder(2))
    shutil.copytree(Path(made.folder) / TAG, folder / "next")
    places = {nodes[1].place: 1}
    made = replace(made, number=2, tag="next", destinations=places, latest=False, folder=str(folder))
    made.write_record()
    begin(made)
    assert nodes[1].write() and nodes[0].is_whole()


def test_a_running_job_frees_memory_without_a_look_at_the_place(nodes: list[Run]) -> None:
    """Training would wait for a place that is slow."""
    (made,) = nodes[1].job.list_saves()
    copy_save(nodes[1], 2)
    made.note("done", {nodes[1].place: "on the first node"})
    with mock.patch.object(budget, "is_sealed", side_effect=AssertionError):
        budget.free_unwanted(nodes[1].job)
    assert [save.number for save in nodes[1].job.list_saves()] == [2]


def test_a_node_that_could_not_record_a_written_save_finds_it_in_the_place(nodes: list[Run], tmp_path: Path) -> None:
    """Unless the tag is another save."""
    state = Path(nodes[1].job.list_saves()[0].folder) / "save-1.json"
    pending = state.read_bytes()
    write_both(nodes)
    state.write_bytes(pending)
    assert nodes[1].write(wait=0.2) and nodes[1].list_names() == {TAG, "latest"}
    state.write_bytes(pending)
    shutil.rmtree(nodes[0].place)
    other = Run(tmp_path, memory="other")
    other.save()
    other.write_save()  # of other weights
    assert not nodes[1].write(wait=0.2)


# -- folders -----------------------------------------------------------------------------------------------------------


def test_folders_that_cannot_be_exchanged_are_renamed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        ctypes.set_errno(errno.EINVAL)
        return -1

    monkeypatch.setattr(publishing, "load_libc", type("C", (), {"renameat2": fail}))
    for _ in range(2):
        assert run.holds(run.write_save())
    assert run.list_names() == {TAG, "latest", SCRIPT}


@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_tag_that_another_job_publishes_right_before_the_rename_stays(
    can_exchange: bool, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS cannot lock the folder in which writers rename, nor exchange two folders."""
    run.write_save()
    made, other, rename = run.save(), Run(run.folder, run.place, memory="other", name="other"), publishing._rename
    theirs = [other.save() for _ in range(3)][-1]  # of other weights
    acts = [other.write]

    def rename_late(old: str, new: str, flag: int) -> bool:
        if acts:
            assert acts.pop()()
        return (can_exchange or flag == publishing._NOREPLACE) and rename(old, new, flag)

    monkeypatch.setattr(publishing, "_lock_folder", lambda _: nullcontext())
    monkeypatch.setattr(publishing, "_rename", rename_late)
    assert run.write() and other.holds(theirs)
    assert "another job has published this tag" in made.read("refused")[run.place]


def test_leftovers_of_a_dead_job_are_removed_after_a_day(run: Run) -> None:
    """By the clock of the place, and unless they are the only complete save of their tag."""
    place, kept = Path(run.place), {".new.ucp-save-living-3", ".whole.ucp-save-dead-4"}
    for name in {".new.ucp-save-dead-3", f".{TAG}.ucp-save-dead-4", f".{TAG}.ucp-save-dead-4-old", *kept}:
        (place / name).mkdir(parents=True)
        (place / name / "file").write_text("")
        (place / name / "ucp_seal.json" if "new" not in name else place / name).touch()
        for path in [place / name, *(place / name).iterdir()] if "living" not in name else [place / name]:
            os.utime(path, (0, time.time() - 90000))
    run.write_save()
    assert run.list_names() == {TAG, "latest", SCRIPT, *kept}


@pytest.mark.parametrize("moved", [-1e5, 1e5])
def test_a_clock_that_is_set_back_or_ahead_changes_nothing(moved: float, run: Run) -> None:
    """Older saves of this job are removed, and a tag that others have overwritten stays, whatever the files' times."""
    place = Path(run.place)

    def move(save: Snapshot, *_: object) -> None:
        for number, path in enumerate((place / save.tag).iterdir()):
            os.utime(path, (0, time.time() + moved * (number + 1)))

    for tag in "abcd":
        with mock.patch.object(places, "_name_latest", side_effect=move):
            run.write_save(tag=tag, keep=2)
        if tag == "b":
            path = place / "b" / "mp_rank_00_model_states.pt"
            path.write_bytes(path.read_bytes())
            os.utime(path, (0, (place / "b" / "ucp_seal.json").stat().st_mtime - 1))
    assert {path.name for path in place.iterdir() if path.is_dir()} == {"b", "c", "d"}
