"""The writer's process without any engine: what it leaves in places, whatever stops it."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from deepspeed_ucp.errors import CheckpointError, DiskFullError, UnsupportedError
from deepspeed_ucp.saves import coordination, memory, places, to_folder
from deepspeed_ucp.saves import writer as writing
from deepspeed_ucp.saves.memory import Destination, Job, Snapshot, name_job
from deepspeed_ucp.saves.saver import finish_dead
from deepspeed_ucp.saves.writer import SaveWriter, is_locked, list_late, start_writer
from tests.convert.conversions import read_bytes, write_source
from tests.saves.namespace import run_in_namespace
from tests.saves.saving import (
    PATIENCE,
    SETTINGS,
    TAG,
    find_writer,
    is_whole,
    make_save,
    run_writer,
    set_counter,
    strip,
    write,
)
from tests.support.crash import failing, list_calls, run_dying
from tests.support.until import wait_until


@pytest.fixture
def job(tmp_path: Path) -> Job:
    made = Job(str(tmp_path / "memory" / "job"))
    made.own()
    return made


@pytest.fixture
def save(job: Job, tmp_path: Path) -> Callable[..., Snapshot]:
    """Makes saves of the job, one after the other; places are named below the test's folder."""

    def make(*folders: str, **changes: Any) -> Snapshot:
        return make_save(job, *(str(tmp_path / each) for each in folders or ("place",)), **changes)

    return make


def test_a_save_comes_to_its_place(job: Job, save: Callable[..., Snapshot], tmp_path: Path) -> None:
    made = save()
    assert write(job)
    assert strip(read_bytes(tmp_path / "place" / TAG)) == read_bytes(Path(made.folder) / TAG)
    assert is_whole(str(tmp_path / "place" / TAG))
    assert sorted(os.listdir(tmp_path / "place")) == [TAG, "latest", "zero_to_fp32.py"]
    assert (tmp_path / "place" / "latest").read_text() == TAG
    assert list_late(job.list_saves()) == {} and list(made.read_done()) == [str(tmp_path / "place")]


def note_attempts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """The saves and places that a writer in this process tries, each time that it does."""
    attempts, original = list[tuple[int, str]](), places.write_save

    def note(save: Snapshot, place: Destination, *args: Any) -> str:
        attempts.append((save.number, os.path.basename(place.folder)))
        return original(save, place, *args)

    monkeypatch.setattr(writing, "write_save", note)
    return attempts


@pytest.mark.parametrize("value", [6.5, "6"])
def test_a_fault_that_no_retry_can_mend_is_reported_once_and_not_retried(
    job: Job,
    save: Callable[..., Snapshot],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    value: object,
) -> None:
    attempts, bad = note_attempts(monkeypatch), save("one", "other")
    set_counter(Path(bad.folder) / TAG, "global_samples", value)
    with run_writer(SaveWriter(job, 1, PATIENCE)):
        pass
    assert sorted(attempts) == [(1, "one"), (1, "other")]
    lines = [each for each in caplog.messages if "no retry can mend" in each]
    assert len(lines) == 2 and all("global_samples" in line and "damage" not in line for line in lines)
    assert sorted(bad.list_refused()) == sorted(str(tmp_path / each) for each in ("one", "other"))
    assert len(bad.list_pending()) == 2  # memory keeps it
    good = save("one", tag="global_step4")
    with run_writer(SaveWriter(job, 1, PATIENCE)):
        pass
    assert not good.list_pending() and is_whole(str(tmp_path / "one" / "global_step4"))


def test_a_save_that_is_damaged_in_memory_is_not_retried(
    job: Job, save: Callable[..., Snapshot], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    attempts, bad = note_attempts(monkeypatch), save()
    path = next((Path(bad.folder) / TAG).glob("*model_states.pt"))
    path.write_bytes(path.read_bytes()[:-100])
    with run_writer(SaveWriter(job, 1, PATIENCE)):
        pass
    assert attempts == [(1, "place")] and "no retry can mend" in caplog.text and path.name in caplog.text


def test_a_file_that_is_damaged_on_its_way_is_written_again(
    job: Job, save: Callable[..., Snapshot], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    attempts, made, copy = note_attempts(monkeypatch), save(), to_folder._copy

    def cut_first(source: str, destination: str) -> None:
        copy(source, destination)
        if len(attempts) == 1 and destination.endswith("model_states.pt"):
            os.truncate(destination, 100)

    monkeypatch.setattr(to_folder, "_copy", cut_first)
    monkeypatch.setattr(writing, "_AGAIN_AT_END", 0.01)
    with run_writer(SaveWriter(job, 1, PATIENCE)):
        pass
    assert len(attempts) == 2 and not made.list_pending() and is_whole(str(tmp_path / "place" / TAG))


def test_a_record_on_a_disk_is_not_ahead_of_its_files(
    job: Job, save: Callable[..., Snapshot], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor behind what is written over them: a machine may stop at any time."""
    events = list[str]()
    for name in "sync_file", "sync_folder", "write_atomically":

        def note(path: str, *_: object, name: str = name, **__: object) -> None:
            events.append(f"{name} {os.path.basename(path)}")

        monkeypatch.setattr(memory, name, note)
    made = save()
    files = {f"sync_file {os.path.basename(each)}" for each in made.list_files()}
    assert files < set(events[:-1]) and f"sync_folder {TAG}" in events and events[-1] == "write_atomically save-0.json"
    events.clear()
    Path(made.folder, "save-0.json").touch()
    made.spare()
    assert events == [f"sync_folder {os.path.basename(made.folder)}"] and os.path.exists(job.spare)


def test_the_newest_save_stays_in_memory(job: Job, save: Callable[..., Snapshot], tmp_path: Path) -> None:
    save(tag="a")
    assert write(job)
    save(tag="b")
    assert write(job)
    assert [each.tag for each in job.list_saves()] == ["b"]
    assert {"a", "b"} <= set(os.listdir(tmp_path / "place"))


def test_a_place_that_is_too_slow_gets_of_snapshots_the_newest_alone(
    job: Job, save: Callable[..., Snapshot], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for tag in "abc":
        save(tag=tag, by_itself=True)
    assert write(job)
    assert set(os.listdir(tmp_path / "place")) == {"c", "latest", "zero_to_fp32.py"}
    assert caplog.text == ""


@pytest.mark.parametrize("latest", [True, False])
def test_all_saves_of_a_script_are_written(
    latest: bool, job: Job, save: Callable[..., Snapshot], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Only one under the same tag replaces another."""
    for number, tag in enumerate(("best", "a", "best", "b", "last")):
        save(tag=tag, step=number, latest=latest or tag == "last")
    writer, written = SaveWriter(job, 1, PATIENCE), list[str]()

    def note(each: Snapshot, *args: Any) -> str:
        written.append(f"{each.tag}{each.number}")
        return places.write_save(each, *args)

    with mock.patch.object(writing, "write_save", note):
        assert writer.write_pending()
    assert written == ["a2", "best3", "b4", "last5"]
    assert all(is_whole(str(tmp_path / "place" / tag)) for tag in ("best", "a", "b", "last"))
    assert (tmp_path / "place" / "latest").read_text() == "last"
    assert f"{tmp_path / 'place'}: best not written, a later save has the same tag" in caplog.text
    assert caplog.text.count("not written") == 1 and list_late(job.list_saves()) == {}


def test_a_snapshot_in_memory_alone_is_not_freed_for_a_save_of_another_folder(
    job: Job, save: Callable[..., Snapshot], tmp_path: Path
) -> None:
    save(tag="snapshot", places=(), by_itself=True, save_dir="run")
    for tag in "best", "better":
        save("elsewhere", tag=tag)
        assert write(job)
    assert [each.tag for each in job.list_saves()] == ["snapshot", "better"]
    save(tag="next", places=(), by_itself=True, save_dir="run")
    save("elsewhere", tag="last")
    assert write(job)
    assert [each.tag for each in job.list_saves()] == ["next", "last"]


def test_a_save_that_was_overtaken_is_written_and_not_named(
    job: Job, save: Callable[..., Snapshot], tmp_path: Path
) -> None:
    """A later one was written without memory."""
    save(tag="pending").overtake()
    write_source(tmp_path / "place", 7)
    (tmp_path / "place" / "latest").write_text(TAG)
    assert write(job) and is_whole(str(tmp_path / "place" / "pending"))
    assert (tmp_path / "place" / "latest").read_text() == TAG


def test_a_save_that_latest_is_to_name_waits_for_its_like(
    job: Job, save: Callable[..., Snapshot], tmp_path: Path
) -> None:
    """Not dropped for a newer one that it is not to name."""
    save(tag="a")
    save(tag="best", latest=False)
    assert write(job)
    assert (tmp_path / "place" / "latest").read_text() == "a" and is_whole(str(tmp_path / "place" / "a"))
    assert is_whole(str(tmp_path / "place" / "best"))


def test_a_place_keeps_so_many(job: Job, save: Callable[..., Snapshot], tmp_path: Path) -> None:
    """Not what others wrote there, nor what `latest` names."""
    (tmp_path / "place" / "theirs").mkdir(parents=True)
    for tag in "abcd":
        save(tag=tag, keep=2, latest=tag == "a")
        assert write(job)
    assert set(os.listdir(tmp_path / "place")) == {"a", "c", "d", "latest", "theirs", "zero_to_fp32.py"}


def test_snapshots_take_the_place_of_none_that_a_script_asked_for(
    job: Job, save: Callable[..., Snapshot], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither in a place, nor while both wait for it; and `latest` does not go back to the one that comes later."""
    for tag in ("a", "b", "c", "d"):
        save(tag=tag, keep=2)
        save(tag=f"{tag}-by-itself", keep=1, by_itself=True)
        save(tag=f"{tag}-later", keep=1, by_itself=True)
        assert write(job)
        assert (tmp_path / "place" / "latest").read_text() == f"{tag}-later"
    assert set(os.listdir(tmp_path / "place")) == {"c", "d", "d-later", "latest", "zero_to_fp32.py"}
    save(tag="last")
    save(tag="last-by-itself", keep=1, by_itself=True)
    own = writing.write_save

    def fail_first(save: Snapshot, *args: Any) -> str:
        if save.tag == "last":
            raise OSError("not yet")
        return own(save, *args)

    with mock.patch.object(writing, "write_save", fail_first):
        assert not write(job)
    assert write(job) and is_whole(str(tmp_path / "place" / "last"))
    assert (tmp_path / "place" / "latest").read_text() == "last-by-itself"
    assert "is dropped" not in caplog.text


def test_one_place_that_fails_is_not_the_others(
    job: Job, save: Callable[..., Snapshot], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And is tried again."""
    (tmp_path / "file").write_text("no folder")
    save("file", "place")
    writer = SaveWriter(job, 1, PATIENCE)
    assert not writer.write_pending() and not writer.write_pending()
    assert is_whole(str(tmp_path / "place" / TAG))
    assert caplog.text.count("not written, to be tried again") == 1
    (tmp_path / "file").unlink()
    assert writer.write_pending() and is_whole(str(tmp_path / "file" / TAG))


def test_a_slow_place_holds_up_no_other_and_memory_does_not_fill(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Snapshots that wait for it longer than a newer one are freed at once."""
    slow, fast = Destination(str(tmp_path / "slow")), Destination(str(tmp_path / "fast"))
    goes_on, copy = threading.Event(), to_folder._copy

    def copy_slowly(source: str, destination: str) -> None:
        assert destination.startswith(fast.folder) or goes_on.wait(PATIENCE)
        copy(source, destination)

    monkeypatch.setattr(to_folder, "_copy", copy_slowly)
    with run_writer(SaveWriter(job, 1, PATIENCE)) as tell:
        for tag in "abcd":
            make_save(job, slow, fast, tag=tag, by_itself=True)
            tell()
            wait_until(lambda tag=tag: is_whole(str(tmp_path / "fast" / tag)))
        wait_until(lambda: len(list_late(job.list_saves()).get(slow.folder, ())) == 2)
        wait_until(lambda: [save.tag for save in job.list_saves()] == ["a", "d"])
        assert not (tmp_path / "slow" / "a").exists()
        goes_on.set()
    assert {"a", "d", "latest"} <= set(os.listdir(tmp_path / "slow")) and is_whole(str(tmp_path / "slow" / "d"))
    assert (tmp_path / "slow" / "latest").read_text() == "d"
    assert "b" not in os.listdir(tmp_path / "slow") and caplog.text == ""


def test_a_place_that_fails_is_tried_again_after_longer_and_longer_pauses(
    job: Job, save: Callable[..., Snapshot], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once where a save comes, and at the end for as long as was told; by a clock that pauses alone move."""
    pauses, now = list[float](), [0.0]
    failed = mock.Mock(side_effect=OSError(errno.EIO, os.strerror(errno.EIO)))
    monkeypatch.setattr(writing, "write_save", failed)
    monkeypatch.setattr(writing, "time", SimpleNamespace(monotonic=lambda: now[0]))
    is_told, is_enough = threading.Event(), threading.Event()

    class Pauses(threading.Condition):
        def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
            assert timeout is not None
            pauses.append(timeout)
            if len(pauses) in (3, 8):  # then there is news
                (is_told if len(pauses) == 3 else is_enough).set()
                return super().wait_for(predicate, PATIENCE)
            now[0] += timeout
            return predicate()

    save()
    writer = SaveWriter(job, 1, 50.0)
    writer._changed = Pauses()
    with run_writer(writer) as tell:
        assert is_told.wait(PATIENCE)
        tell()
        assert is_enough.wait(PATIENCE)
    assert pauses == [10, 20, 40, 80, 160, 320, 320, 320, 1, 2, 4, 8, 16, 19]
    assert failed.call_count == len(pauses) + 1 and list_late(job.list_saves())


def test_what_nobody_has_told_of_is_written_at_the_end(
    job: Job, save: Callable[..., Snapshot], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a rank that was killed between a save and the word of it."""

    def end(*_: object) -> bytes:
        save()
        return b""

    monkeypatch.setattr(writing, "os", SimpleNamespace(**{**vars(os), "read": end}))
    monkeypatch.setattr(writing, "sys", SimpleNamespace(stdin=SimpleNamespace(fileno=int)))
    assert SaveWriter(job, 1, PATIENCE).run() == 0
    assert is_whole(str(tmp_path / "place" / TAG))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS], ids=errno.errorcode.get)
def test_a_disk_that_fails_leaves_what_was_there(
    code: int, job: Job, save: Callable[..., Snapshot], tmp_path: Path
) -> None:
    save()
    assert write(job)
    before = read_bytes(tmp_path / "place")
    save()
    for at in range(0, 12, 3):
        with failing(at, code=code):
            assert not write(job)
        assert strip(before) == {name: data for name, data in read_bytes(tmp_path / "place").items() if name in before}
    save(tag="next")
    assert write(job)
    save()
    assert write(job)
    assert read_bytes(tmp_path / "place") != before and is_whole(str(tmp_path / "place" / TAG))
    assert set(os.listdir(tmp_path / "place")) == {TAG, "next", "latest", "zero_to_fp32.py"}


def test_memory_that_is_full_ends_no_writer(job: Job, save: Callable[..., Snapshot]) -> None:
    """It cannot note then what it has written; it does so once there is room."""
    made = save()
    full = mock.patch.object(Snapshot, "note_done", side_effect=DiskFullError("full", path=made.folder))
    writer = SaveWriter(job, 1, PATIENCE)
    with full:
        assert not writer.write_pending()
    save(tag="next")
    with full:
        assert not writer.write_pending()
    assert writer.write_pending() and not list_late(job.list_saves())


@pytest.mark.parametrize("note", ["note_failed", "note_refused"])
def test_a_fault_that_memory_has_no_room_for_keeps_no_other_save_from_its_place(
    note: str, job: Job, save: Callable[..., Snapshot], tmp_path: Path
) -> None:
    first, second = save(tag="first"), save(tag="second")
    damaged = CheckpointError("is damaged.") if note == "note_failed" else UnsupportedError("is not supported.")

    def write_or_fail(each: Snapshot, *args: Any) -> str:
        if each.tag == "first":
            raise damaged
        return places.write_save(each, *args)

    full = mock.patch.object(Snapshot, note, side_effect=DiskFullError("full", path=first.folder))
    with full, mock.patch.object(writing, "write_save", write_or_fail):
        assert SaveWriter(job, 1, PATIENCE).write_pending() is (note == "note_refused")
    assert second.read_done() and (tmp_path / "place" / "second").is_dir()


def test_a_full_memory_keeps_no_written_save_pending(tmp_path: Path) -> None:
    """Nor the next one waiting for it: the room of its records was reserved when it began."""
    done = run_in_namespace("tests.saves.small_memory", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_record_whose_last_line_is_cut_off_has_the_lines_before_it(job: Job, save: Callable[..., Snapshot]) -> None:
    """A machine that stops tears it; the next line comes behind it."""
    job.reserve(7, 0)
    made = replace(save("first", "second"), folder=job.find_folder(7))
    first, second = made.places
    made.note_done(first, "mark")
    record = Path(made.folder, "done-0.json")
    size = record.stat().st_size
    text = record.read_text().rstrip("\n")
    record.write_text((text + '\n{"second": "ma').ljust(size, "\n"))
    assert made.read_done() == {first.folder: "mark"} and made.list_pending() == [second]
    made.note_done(second, "other")
    made.note_done(first, "")
    assert made.read_done() == {first.folder: "", second.folder: "other"}
    assert record.stat().st_size == size
    record.write_text('{"of": "an older release"}')
    made.note_done(first, "mark")
    assert made.read_done() == {"of": "an older release", first.folder: "mark"}


def test_killed_at_any_call(job: Job, save: Callable[..., Snapshot], tmp_path: Path) -> None:
    """What `latest` names is whole at every moment, also where a tag is written over; and the next writer goes on."""
    save()
    assert write(job)
    save()
    kept = tmp_path / "kept"
    shutil.copytree(tmp_path / "memory", kept / "memory")
    shutil.copytree(tmp_path / "place", kept / "place")

    def reset() -> None:
        for name in ("memory", "place"):
            shutil.rmtree(tmp_path / name)
            shutil.copytree(kept / name, tmp_path / name)

    calls = len(list_calls(lambda: write(job)))
    assert calls > 20
    for at in range(0, calls, 1 if os.environ.get("UCP_EXHAUSTIVE") else 3):
        reset()
        assert run_dying(lambda: write(job), at)
        named = tmp_path / "place" / (tmp_path / "place" / "latest").read_text()
        assert is_whole(str(named)), at
        assert write(job)
        assert is_whole(str(tmp_path / "place" / TAG))
        assert set(os.listdir(tmp_path / "place")) == {TAG, "latest", "zero_to_fp32.py"}, at


def test_the_process_ends_when_all_is_written(job: Job, save: Callable[..., Snapshot], tmp_path: Path) -> None:
    """Without those that started it, and with what came while it wrote."""
    lines = start_writer(job, SETTINGS)
    for tag in "before", TAG:
        save(tag=tag)
        lines.write(b"\n")
        lines.flush()
        wait_until(lambda: not list_late(job.list_saves()))
    wait_until(lambda: os.path.exists(job.spare))
    lines.close()
    wait_until(lambda: not is_locked(job))
    assert is_whole(str(tmp_path / "place" / TAG)) and not os.path.exists(job.spare)


def test_a_killed_process_is_followed_by_another(job: Job, save: Callable[..., Snapshot], tmp_path: Path) -> None:
    lines = start_writer(job, SETTINGS)
    wait_until(lambda: is_locked(job))
    with suppress(ProcessLookupError):
        os.kill(find_writer(job), signal.SIGKILL)
    wait_until(lambda: not is_locked(job))
    save()
    start_writer(job, SETTINGS).close()
    wait_until(lambda: not list_late(job.list_saves()))
    assert is_whole(str(tmp_path / "place" / TAG))
    lines.close()


@pytest.mark.parametrize("searched", [None, "", ":", ".", f"code:{os.path.dirname(os.__file__)}"])
def test_nothing_of_the_working_directory_is_executed(
    searched: str | None,
    job: Job,
    save: Callable[..., Snapshot],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Other users may have put files there, under names of Python's own modules and of the package."""
    folder = tmp_path / "code"
    names = ["hashlib", "json", "logging", "sitecustomize", "usercustomize", "files", "deepspeed_ucp/__init__"]
    for path in (base / f"{name}.py" for base in (folder, folder / "code") for name in names):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("import os\nos.mkdir(f'{os.path.abspath(__file__)}-executed')\n")
    monkeypatch.chdir(folder)
    if searched is None:
        monkeypatch.delenv("PYTHONPATH", raising=False)
    else:
        monkeypatch.setenv("PYTHONPATH", searched)
    save()
    start_writer(job, SETTINGS).close()
    wait_until(lambda: not list_late(job.list_saves()))
    assert is_whole(str(tmp_path / "place" / TAG))
    assert list(folder.rglob("*-executed")) == [] and list(folder.rglob("__pycache__")) == []


@pytest.mark.parametrize("last", ["", "finished\n"], ids=["killed", "finished"])
def test_memory_is_freed_after_a_normal_end_alone(
    last: str, job: Job, save: Callable[..., Snapshot], tmp_path: Path
) -> None:
    """A snapshot that a later save replaces is no reason to keep it."""
    save(places=(), by_itself=True)
    save(tag="last")
    lines = start_writer(job, SETTINGS)
    lines.write(f"\n{last}".encode())
    lines.close()
    wait_until(lambda: is_whole(str(tmp_path / "place" / "last")))
    wait_until(lambda: not (list_late(job.list_saves()) or is_locked(job)))
    assert bool(job.list_saves()) is not bool(last)
    wait_until(lambda: os.path.exists(job.folder) is not bool(last))


@pytest.mark.parametrize("kind", ["snapshot", "failed", "one of two nodes"])
def test_memory_is_not_freed_while_it_has_the_only_copy(
    kind: str, job: Job, save: Callable[..., Snapshot], tmp_path: Path
) -> None:
    made = save(tag="written")
    assert write(job)
    if kind == "snapshot":
        save(tag="last", places=(), by_itself=True)
    elif kind == "failed":
        (tmp_path / "file").write_text("no folder")
        save("file", tag="last")
    else:
        made = replace(made, node=1, nodes=2)
        made.write_record()
        made.note_done(made.places[0], "on the first node")
        shutil.rmtree(tmp_path / "place")
    writer = SaveWriter(job, 1, 0.1)
    writer._is_finished = True
    writer.free_finished()
    assert job.list_saves()


def test_a_job_lives_as_long_as_the_process_that_saves(tmp_path: Path) -> None:
    """Also for those that cannot see the process: containers share memory, not numbers of processes."""
    job, (told, tell), (ended, end) = Job(str(tmp_path / "job")), os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        job.own()
        os.fork()  # a worker outlives it, and is not the one that saves
        os.write(tell, b"1")
        os.close(end)
        os.read(ended, 1)
        os._exit(0)
    assert os.read(told, 1) + os.read(told, 1) == b"11"
    with mock.patch.object(Path, "read_text", side_effect=OSError):
        assert job.is_owned()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert not job.is_owned()
    for fd in (told, tell, ended, end):
        os.close(fd)


def test_who_looks_whether_a_job_lives_holds_up_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even where its process is forked while it looks."""
    (tmp_path / "owner").touch()
    (goes_on, go), children, own = os.pipe(), list[int](), fcntl.flock

    def lock(file: Any, operation: int) -> None:
        own(file, operation)
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
    job, own = Job(str(tmp_path / name_job())), fcntl.flock

    def lock(file: Any, operation: int) -> None:
        with mock.patch.object(fcntl, "flock", own):
            finish_dead(str(tmp_path), SETTINGS)
        own(file, operation)

    with mock.patch.object(fcntl, "flock", lock):
        job.own()
    assert job.is_there() and job.is_owned()


@pytest.mark.parametrize("tag", ["later", "same"])
def test_what_a_dead_job_has_left_comes_before_a_living_ones(tag: str, tmp_path: Path) -> None:
    """It may have been rolled back: `latest` does not go back to it, nor what lies under a tag."""
    dead, living = (Job(str(tmp_path / "memory" / name_job())) for _ in range(2))
    living.own()
    left = make_save(dead, str(tmp_path / "place"), tag="same")
    make_save(living, str(tmp_path / "place"), tag="before")
    made = make_save(living, str(tmp_path / "place"), tag=tag)
    assert write(living)
    assert write(dead) and not left.list_pending()
    assert (tmp_path / "place" / "latest").read_text() == tag
    assert strip(read_bytes(tmp_path / "place" / tag)) == read_bytes(Path(made.folder) / tag)
    assert is_whole(str(tmp_path / "place" / "same"))


@pytest.fixture
def nodes(tmp_path: Path) -> list[Job]:
    """Two nodes' memory with a part of one save each."""
    jobs = [Job(str(tmp_path / f"node{node}" / "job")) for node in range(2)]
    whole = write_source(tmp_path / "whole")
    for node, each in enumerate(jobs):
        each.own()
        folder = Path(each.find_folder(1))
        (folder / TAG).mkdir(parents=True)
        for number, path in enumerate(sorted(whole.iterdir())):
            if number % 2 == node:
                shutil.copy(path, folder / TAG)
        place = (Destination(str(tmp_path / "place")),)
        Snapshot("job", 1, str(tmp_path / "place"), TAG, 3, True, node, 2, place, str(folder)).write_record()
    return jobs


def begin(save: Snapshot) -> None:
    """Record that the first node writes a save, which is what it does before anything else; others follow it."""
    name = os.path.basename(to_folder._name_aside(save, save.places[0]))
    coordination.begin_writing(replace(save, node=0), save.places[0], name, str)


def test_nodes_that_have_other_saves_pending_write_what_the_first_has_begun(
    nodes: list[Job], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A later one that this node has already, or an older one that the first one has dropped, is none of it."""
    for job in nodes:
        made = job.list_saves()[0]
        for number in (2, 3):
            shutil.copytree(made.folder, job.find_folder(number))
            replace(made, number=number, folder=job.find_folder(number)).write_record()
    os.rename(nodes[0].find_folder(3), tmp_path / "not yet")
    other = threading.Thread(target=write, args=(nodes[1],))
    other.start()
    time.sleep(0.2)  # in which it is not to write
    assert not (tmp_path / "place").exists()
    assert write(nodes[0])
    assert [save.number for save in nodes[0].list_saves() if not save.list_pending()] == [2]
    os.rename(tmp_path / "not yet", nodes[0].find_folder(3))
    assert write(nodes[0])
    other.join()
    assert caplog.text.count("1 is dropped") == 0 and not list_late(nodes[1].list_saves())


def test_a_save_that_a_node_has_dropped_gives_way_to_a_newer_one(
    nodes: list[Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Though the first node has begun it; where nothing is newer it waits."""
    monkeypatch.setattr(coordination, "_QUIET", 0.3)
    for job in nodes:
        made = job.list_saves()[0]
        shutil.copytree(made.folder, job.find_folder(2))
        replace(made, number=2, folder=job.find_folder(2)).write_record()
    shutil.rmtree(nodes[1].find_folder(1))
    os.rename(nodes[0].find_folder(2), tmp_path / "not yet")
    writer, went = SaveWriter(nodes[0], 1, PATIENCE), list[bool]()
    first = threading.Thread(target=lambda: went.append(writer.write_pending()))
    first.start()
    time.sleep(1)
    assert first.is_alive()
    os.rename(tmp_path / "not yet", nodes[0].find_folder(2))
    first.join()
    assert went == [False] and "1 of 2 nodes have not written their files, and a newer save waits" in caplog.text
    first = threading.Thread(target=lambda: went.append(writer.write_pending()))
    first.start()
    assert write(nodes[1])
    first.join()
    assert went[-1] and is_whole(str(tmp_path / "place" / TAG))


def test_nodes_write_their_parts_of_one_save(nodes: list[Job], tmp_path: Path) -> None:
    first = threading.Thread(target=write, args=(nodes[0],))
    first.start()
    time.sleep(0.3)
    assert not (tmp_path / "place" / "latest").exists()
    assert write(nodes[1])
    first.join()
    assert read_bytes(tmp_path / "whole" / TAG) == strip(read_bytes(tmp_path / "place" / TAG))
    assert is_whole(str(tmp_path / "place" / TAG))
    assert set(os.listdir(tmp_path / "place")) == {TAG, "latest"}


def test_a_node_that_never_writes_is_no_save(
    nodes: list[Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert not write(nodes[0], wait=0.2)
    assert "1 of 2 nodes have not written their files" in caplog.text
    assert [name for name in os.listdir(tmp_path / "place") if not name.startswith(".")] == []
    assert write(nodes[1])
    assert write(nodes[0]) and is_whole(str(tmp_path / "place" / TAG))


def test_folders_that_cannot_be_exchanged_are_renamed(
    job: Job, save: Callable[..., Snapshot], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        ctypes.set_errno(errno.EINVAL)
        return -1

    monkeypatch.setattr(to_folder, "load_libc", type("C", (), {"renameat2": fail}))
    for _ in range(2):
        made = save()
        assert write(job)
        assert strip(read_bytes(tmp_path / "place" / TAG)) == read_bytes(Path(made.folder) / TAG)
    assert set(os.listdir(tmp_path / "place")) == {TAG, "latest", "zero_to_fp32.py"}


def test_what_a_dead_job_has_left_in_a_place_goes_after_a_day(
    job: Job, save: Callable[..., Snapshot], tmp_path: Path
) -> None:
    """By the clock of the place, and unless it is the only whole save of its tag."""
    place = tmp_path / "place"
    kept = {".new.ucp-save-living-3", ".whole.ucp-save-dead-4"}
    for name in {".new.ucp-save-dead-3", f".{TAG}.ucp-save-dead-4", f".{TAG}.ucp-save-dead-4-old", *kept}:
        (place / name).mkdir(parents=True)
        (place / name / "file").write_text("")
        (place / name / "ucp_seal.json" if "new" not in name else place / name).touch()
        for path in [place / name, *(place / name).iterdir()] if "living" not in name else [place / name]:
            os.utime(path, (0, time.time() - 90000))
    save()
    assert write(job)
    assert set(os.listdir(place)) == {TAG, "latest", "zero_to_fp32.py", *kept}


@pytest.mark.parametrize("moved", [-1e5, 1e5])
def test_a_clock_that_is_set_back_or_ahead_changes_nothing(
    moved: float, job: Job, save: Callable[..., Snapshot], tmp_path: Path
) -> None:
    """Of what a job has written older saves go, and what is written anew by others stays, whatever files' times are."""
    place = tmp_path / "place"

    def move(tag: str) -> None:
        for number, path in enumerate((place / tag).iterdir()):
            os.utime(path, (0, time.time() + moved * (number + 1)))

    for tag in "abcd":
        with mock.patch.object(to_folder, "name_latest", side_effect=lambda save, *_: move(save.tag)):
            save(tag=tag, keep=2)
            assert write(job)
        if tag == "b":
            path = place / "b" / "mp_rank_00_model_states.pt"
            path.write_bytes(path.read_bytes())
            os.utime(path, (0, (place / "b" / "ucp_seal.json").stat().st_mtime - 1))
    assert {path.name for path in place.iterdir() if path.is_dir()} == {"b", "c", "d"}


def test_what_others_have_in_a_tag_stays(job: Job, save: Callable[..., Snapshot], tmp_path: Path) -> None:
    """Also where the tag is written over by fewer ranks, or another tag lies below it."""
    tag = tmp_path / "place" / TAG
    (tag / "below").mkdir(parents=True)
    (tag / "below" / "mp_rank_00_model_states.pt").write_text("another tag's")
    (tag / "arguments.json").write_text("{}")
    (tag / "zero_pp_rank_9_mp_rank_00_optim_states.pt").write_text("of another save")
    made = save(keep=1)
    assert write(job)
    own = set(os.listdir(Path(made.folder) / TAG)) | {"ucp_seal.json"}
    assert set(os.listdir(tag)) == own | {"arguments.json", "below"} and is_whole(str(tag))
    save(tag="next", keep=1)
    assert write(job)
    assert set(os.listdir(tag)) == {"arguments.json", "below"} and os.listdir(tag / "below")
    assert [name for name in os.listdir(tmp_path / "place") if name.startswith(".")] == []


def test_a_tag_that_another_has_saved_anew_is_not_this_jobs(
    job: Job, save: Callable[..., Snapshot], tmp_path: Path
) -> None:
    other = Job(str(tmp_path / "memory" / "other"))
    other.own()
    save(tag="a", keep=1)
    assert write(job)
    for _ in range(2):  # of other weights
        make_save(other, str(tmp_path / "place"), tag="a")
    assert write(other)
    save(tag="b", keep=1)
    assert write(job)
    assert is_whole(str(tmp_path / "place" / "a"))


def test_a_node_that_is_not_the_first_removes_nothing(nodes: list[Job], tmp_path: Path) -> None:
    """It has written before the save is whole; where `latest` names none that was the last whole one."""
    first = threading.Thread(target=write, args=(nodes[0],))
    first.start()
    assert write(nodes[1])
    first.join()
    (tmp_path / "place" / "latest").unlink()
    made = nodes[1].list_saves()[0]
    folder = Path(nodes[1].find_folder(2))
    shutil.copytree(Path(made.folder) / TAG, folder / "next")
    places = (Destination(str(tmp_path / "place"), 1),)
    made = replace(made, number=2, tag="next", places=places, latest=False, folder=str(folder))
    made.write_record()
    begin(made)
    assert write(nodes[1])
    assert is_whole(str(tmp_path / "place" / TAG))


@pytest.mark.parametrize("killed", [0, 1])
def test_a_node_killed_at_any_call_goes_on(killed: int, nodes: list[Job], tmp_path: Path) -> None:
    """Where the other one has written by then it does not do so again."""
    begin(nodes[0].list_saves()[0])
    if killed == 0:
        assert write(nodes[1])
    kept, names = tmp_path / "kept", ("node0", "node1", "place")
    for name in names:
        shutil.copytree(tmp_path / name, kept / name)

    def reset() -> None:
        for name in names:
            shutil.rmtree(tmp_path / name)
            shutil.copytree(kept / name, tmp_path / name)

    for at in range(len(list_calls(lambda: write(nodes[killed])))):
        reset()
        assert run_dying(lambda: write(nodes[killed]), at)
        assert write(nodes[killed], wait=0.5), at
        assert write(nodes[0], wait=0.5) and is_whole(str(tmp_path / "place" / TAG))
        assert set(os.listdir(tmp_path / "place")) == {TAG, "latest"}


def test_a_node_that_could_not_note_what_it_has_done_sees_it_in_the_place(nodes: list[Job], tmp_path: Path) -> None:
    """The first one has ended the save meanwhile; what lies under the tag may be another save, too."""
    save = nodes[1].list_saves()[0]
    first = threading.Thread(target=write, args=(nodes[0],))
    first.start()
    assert write(nodes[1])
    first.join()
    done = Path(save.folder) / "done-1.json"
    done.unlink()
    assert write(nodes[1], wait=0.2) and set(os.listdir(tmp_path / "place")) == {TAG, "latest"}
    done.unlink()
    shutil.rmtree(tmp_path / "place")
    other = Job(str(tmp_path / "other" / "job"))
    other.own()
    for _ in range(2):  # of other weights
        make_save(other, str(tmp_path / "place"))
    assert write(other)
    assert not write(nodes[1], wait=0.2)


def test_what_a_load_has_made_beside_the_tag_is_no_part_of_it(
    job: Job, save: Callable[..., Snapshot], tmp_path: Path
) -> None:
    made = save()
    (Path(made.folder) / f"{TAG}_universal" / "zero").mkdir(parents=True)
    (Path(made.folder) / f"{TAG}_universal" / "zero" / "half").write_text("of an atomic checkpoint")
    assert write(job)
    assert sorted(os.listdir(tmp_path / "place")) == [TAG, "latest", "zero_to_fp32.py"]
