"""The writer's process without an engine: the files that it writes and frees, under faults of every kind."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from deepspeed_ucp.errors import CheckpointError, DiskFullError, UnsupportedError
from deepspeed_ucp.saves import destinations, publishing
from deepspeed_ucp.saves import writer as writing
from deepspeed_ucp.saves.launch import start_writer
from deepspeed_ucp.saves.memory import SavePart
from deepspeed_ucp.saves.writer import SaveWriter
from tests.convert.conversions import read_bytes, write_source
from tests.saves.saving import (
    CONFIG,
    PATIENCE,
    SCRIPT,
    TAG,
    Run,
    fail_save,
    is_whole,
    run_writer,
    set_counter,
    strip,
    write_pending,
)
from tests.support.covering import params
from tests.support.crash import failing, run_child
from tests.support.until import wait_until

# -- faults ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """The tags and destinations of the attempts of a writer in this process."""
    attempts, original = list[tuple[str, str]](), destinations.write_save

    def note(save: SavePart, destination: str, *args: Any) -> str:
        attempts.append((save.tag, os.path.basename(destination)))
        return original(save, destination, *args)

    monkeypatch.setattr(writing, "write_save", note)
    return attempts


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "fraction": (lambda tag: set_counter(tag, "global_samples", 6.5), "global_samples"),
    "text": (lambda tag: set_counter(tag, "global_samples", "6"), "global_samples"),
    "damage": (lambda tag: os.truncate(next(tag.glob("*model_states.pt")), 1000), "model_states.pt"),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_a_permanent_fault_is_reported_once_and_not_retried(
    kind: str, run: Run, attempts: list[tuple[str, str]], caplog: pytest.LogCaptureFixture
) -> None:
    bad, (spoil, named) = run.save("one", "other"), FAULTS[kind]
    spoil(Path(bad.folder) / TAG)
    with run_writer(SaveWriter(run.job, PATIENCE)):
        pass
    assert sorted(attempts) == [(TAG, "one"), (TAG, "other")]
    lines = [each for each in caplog.messages if "no retry can mend" in each]
    assert len(lines) == 2 and all(named in line and ("damage" not in line or kind == "damage") for line in lines)
    assert sorted(bad.read("refused")) == [str(run.folder / each) for each in ("one", "other")]
    assert len(bad.list_lacking()) == 2 and not bad.list_pending()  # memory keeps it
    good = run.save("one", tag="global_step4")
    with run_writer(SaveWriter(run.job, PATIENCE)):
        pass
    assert not good.list_pending() and is_whole(str(run.folder / "one" / "global_step4"))


def test_a_file_that_is_damaged_in_transfer_is_rewritten(
    run: Run, attempts: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, copy = run.save(), destinations.put_file

    def cut_first(destination: str, source: str) -> None:
        copy(destination, source)
        if len(attempts) == 1 and destination.endswith("model_states.pt"):
            os.truncate(destination, 100)

    monkeypatch.setattr(destinations, "put_file", cut_first)
    monkeypatch.setattr(writing, "_AGAIN", 0.01)
    with run_writer(SaveWriter(run.job, PATIENCE)):
        pass
    assert len(attempts) == 2 and not made.list_pending() and run.is_whole()


def test_a_failing_destination_does_not_delay_others(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    (run.folder / "file").write_text("no folder")
    run.save("file", "destination")
    writer = SaveWriter(run.job, PATIENCE)
    assert not write_pending(writer) and not write_pending(writer)
    assert run.is_whole() and caplog.text.count("not written, to be tried again") == 1
    (run.folder / "file").unlink()
    assert write_pending(writer) and is_whole(str(run.folder / "file" / TAG))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS], ids=errno.errorcode.get)
def test_a_failing_disk_keeps_the_former_files(code: int, run: Run) -> None:
    run.write_save()
    before = read_bytes(Path(run.destination))
    run.save()
    for at in range(0, 12, 3):
        with failing(at, code=code):
            assert not run.write()
        now = read_bytes(Path(run.destination))
        assert strip(before) == {name: data for name, data in now.items() if name in before}
    run.write_save(tag="next")
    run.write_save()
    assert read_bytes(Path(run.destination)) != before and run.is_whole()
    assert run.list_names() == {TAG, "next", "latest", SCRIPT}


def test_coordination_files_that_cannot_be_deleted_do_not_undo_a_save(run: Run) -> None:
    """The next save of the job deletes its record next to the tag."""
    run.save(tag="first")
    with mock.patch.object(
        writing, "delete_coordination_files", side_effect=OSError(errno.EIO, os.strerror(errno.EIO))
    ):
        assert run.write() and list(run.job.read("written")[run.destination]) == ["first"]
    assert [name for name in run.list_names() if "first" in name] != ["first"]
    run.write_save(tag="second")
    assert run.list_names() == {"first", "second", "latest", SCRIPT}


def fill_memory(kind: str) -> mock._patch[Any]:
    """Let writes of a record or object fail because memory is full."""
    note = SavePart.note

    def note_or_fail(save: SavePart, given: str, record: Mapping[str, str]) -> None:
        if given == kind:
            raise DiskFullError("full", path="memory")
        note(save, given, record)

    return mock.patch.object(SavePart, "note", note_or_fail)


@pytest.mark.parametrize("note", ["done", "failed", "refused"])
def test_a_full_memory_does_not_delay_other_saves(note: str, run: Run) -> None:
    """The writer records a written save or a fault of one when room is available again."""
    writer, error = SaveWriter(run.job, PATIENCE), {"failed": CheckpointError, "refused": UnsupportedError}.get(note)
    saves = [run.save(tag=tag) for tag in ("first", "second")]
    with fill_memory(note), fail_save("first", error("is wrong.")) if error else nullcontext():
        assert write_pending(writer) is (note == "refused")
    assert bool(saves[1].read("done")) is (error is not None) and run.is_whole("second" if error else "first")
    if error is None:
        assert write_pending(writer) and not run.list_pending_tags()


_NEWNS, _NEWUSER = 0x00020000, 0x10000000


def in_namespace(test: Callable[..., object]) -> Callable[..., None]:
    """Run a test in a forked child with a private mount namespace; skip it if the system does not allow that."""

    @wraps(test)
    def run(*arguments: object, **options: object) -> None:
        command = ["unshare", "--map-root-user", "--mount", "mount", "-t", "tmpfs", "x", "/mnt"]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("this system does not let a process mount file systems")
        user, group = os.getuid(), os.getgid()

        def work() -> None:
            libc = ctypes.CDLL(None, use_errno=True)
            assert libc.unshare(_NEWNS | _NEWUSER) == 0, os.strerror(ctypes.get_errno())
            for name, text in {"setgroups": "deny", "uid_map": f"0 {user} 1", "gid_map": f"0 {group} 1"}.items():
                Path("/proc/self", name).write_text(text)
            subprocess.run(["mount", "--make-rprivate", "/"], check=True)
            test(*arguments, **options)

        assert run_child(work) == 0

    return run


def mount(folder: str | Path, options: str) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "small", str(folder)], check=True)


@pytest.mark.parametrize(("fault", "message"), [("full", "disk full"), ("ro", "Read-only file system")])
@in_namespace
def test_a_repaired_disk_gets_all_saves(fault: str, message: str, run: Run, caplog: pytest.LogCaptureFixture) -> None:
    os.mkdir(run.destination)
    mount(run.destination, "size=96k")
    run.write_save(tag="first")
    if fault == "ro":
        mount(run.destination, "remount,ro")
    run.save(tag="second")
    writer = SaveWriter(run.job, PATIENCE)
    assert not write_pending(writer)
    assert "not written, to be tried again" in caplog.text and message in caplog.text
    assert run.latest == "first" and run.is_whole("first")
    mount(run.destination, "remount,rw,size=4m")
    assert write_pending(writer) and run.list_pending_tags() == [] and run.latest == "second"
    assert run.is_whole("first", "second") and not list(Path(run.destination).glob(".*"))


@in_namespace
def test_a_full_memory_does_not_prevent_the_record_of_a_written_save(tmp_path: Path) -> None:
    """A save reserves room for its records when it begins, so the next save does not wait."""
    memory = tmp_path / "memory"
    memory.mkdir()
    mount(memory, "size=4m")
    run = Run(tmp_path)
    run.job.reserve(1, 0)
    write_source(Path(run.job.find_folder(1)))
    with suppress(OSError), open(memory / "ballast", "ab", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    assert os.statvfs(memory).f_bavail == 0
    destinations = {run.destination: None}
    save = SavePart(run.job.name, 1, run.destination, TAG, 3, True, 0, 1, destinations, run.job.find_folder(1))
    save.write_record()
    writer = SaveWriter(run.job, PATIENCE)
    assert write_pending(writer) and run.list_pending_tags() == [] and run.is_whole() and run.latest == TAG
    os.unlink(memory / "ballast")
    run.save(tag="next")
    assert write_pending(writer)
    assert list(run.job.read("written")[run.destination]) == [TAG, "next"]


# -- the choice of saves to write and to keep in memory ----------------------------------------------------------------


@pytest.mark.parametrize("latest", [True, False])
def test_all_saves_of_a_script_are_written(
    latest: bool, run: Run, attempts: list[tuple[str, str]], caplog: pytest.LogCaptureFixture
) -> None:
    """A save that a later one under the same tag replaces is skipped. Memory keeps the newest."""
    for number, tag in enumerate(("best", "a", "best", "b", "last")):
        run.save(tag=tag, step=number, latest=latest or tag == "last")
    assert run.write()
    assert [tag for tag, _ in attempts] == ["a", "best", "b", "last"]
    assert run.is_whole("best", "a", "b", "last") and run.latest == "last"
    assert f"{run.destination}: best not written, a later save has the same tag" in caplog.text
    assert caplog.text.count("not written") == 1 and not run.list_pending_tags()
    assert [each.tag for each in run.job.list_saves()] == ["last"]


def test_a_snapshot_is_not_freed_for_a_save_of_another_folder(run: Run) -> None:
    run.save(tag="snapshot", destinations={}, save_dir="run")
    for tag in "best", "better":
        run.write_save(tag=tag)
    assert [each.tag for each in run.job.list_saves()] == ["snapshot", "better"]
    run.save(tag="next", destinations={}, save_dir="run")
    run.write_save(tag="last")
    assert [each.tag for each in run.job.list_saves()] == ["next", "last"]


def test_latest_does_not_return_to_a_save_that_is_written_late(run: Run) -> None:
    """It does not name a newer save that is excluded from ``latest``, either."""
    for tag in ("late", "next", "best"):
        run.save(tag=tag, latest=tag != "best")
    with fail_save("late", OSError("not yet")):
        assert not run.write()
    assert run.write() and run.is_whole("late") and run.is_whole("best") and run.latest == "next"


def test_a_slow_destination_does_not_delay_others(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    slow, fast = str(run.folder / "slow"), str(run.folder / "fast")
    goes_on, copy = threading.Event(), destinations.put_file

    def copy_slowly(destination: str, source: str) -> None:
        assert destination.startswith(fast) or goes_on.wait(PATIENCE)
        copy(destination, source)

    monkeypatch.setattr(destinations, "put_file", copy_slowly)
    with run_writer(SaveWriter(run.job, PATIENCE)) as announce:
        for tag in "abc":
            run.save("slow", "fast", tag=tag)
            announce()
            wait_until(lambda tag=tag: is_whole(f"{fast}/{tag}"))
        assert not os.path.exists(f"{slow}/a") and len(run.job.list_saves()) == 3
        goes_on.set()
    assert set(os.listdir(slow)) == {*"abc", "latest", SCRIPT} and Path(slow, "latest").read_text() == "c"
    assert caplog.text == ""


def test_a_failing_destination_is_retried_after_growing_pauses(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new save is tried at once. At exit, retries continue for `wait` seconds. Only pauses advance the clock."""
    pauses, now = list[float](), [0.0]
    failed = mock.Mock(side_effect=OSError(errno.EIO, os.strerror(errno.EIO)))
    monkeypatch.setattr(writing, "write_save", failed)
    monkeypatch.setattr(writing, "time", SimpleNamespace(monotonic=lambda: now[0]))
    is_third, is_fifth = threading.Event(), threading.Event()

    class Pauses(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            assert timeout is not None
            pauses.append(timeout)
            if len(pauses) in (3, 5):  # an announcement arrives
                (is_third if len(pauses) == 3 else is_fifth).set()
                return super().wait(PATIENCE)
            now[0] += timeout
            return False

    run.save()
    writer = SaveWriter(run.job, 25.0)
    (thread,) = writer.list_writers()
    thread.wake = Pauses()
    with run_writer(writer) as announce:
        assert is_third.wait(PATIENCE)
        announce()
        assert is_fifth.wait(PATIENCE)
    assert pauses == [10, 10, 10, 10, 10, 10, 10, 5]
    assert failed.call_count == len(pauses) + 1 and run.list_pending_tags()


def test_an_unannounced_save_is_written_at_exit(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rank was killed between the save and the announcement."""

    def end(*_: object) -> bytes:
        run.save()
        return b""

    monkeypatch.setattr(writing, "os", SimpleNamespace(**{**vars(os), "read": end}))
    monkeypatch.setattr(writing, "sys", SimpleNamespace(stdin=SimpleNamespace(fileno=int)))
    assert SaveWriter(run.job, PATIENCE).run() == 0 and run.is_whole()


# -- the process -------------------------------------------------------------------------------------------------------


SEARCHED = [None, "", ":", ".", f"code:{os.path.dirname(os.__file__)}"]


@pytest.mark.parametrize("searched", params(SEARCHED[::3], SEARCHED, str))
def test_a_writer_runs_no_code_of_the_current_folder(
    searched: str | None, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other users may have written files there, named like Python's modules and the package."""
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
    wait_until(lambda: not run.list_pending_tags())
    assert run.is_whole()
    assert list(folder.rglob("*-executed")) == [] and list(folder.rglob("__pycache__")) == []


@pytest.mark.parametrize("kind", ["snapshot", "failed", "one of two nodes"])
def test_memory_with_the_only_copy_is_not_freed(kind: str, run: Run) -> None:
    save = run.write_save(tag="written")
    if kind == "snapshot":
        run.save(tag="last", destinations={})
    elif kind == "failed":
        (run.folder / "file").write_text("no folder")
        run.save("file", tag="last")
    else:
        save = replace(save, node=1, nodes=2)
        save.write_record()
        save.note("done", {run.destination: "on the first node"})
        shutil.rmtree(run.destination)
    writer = SaveWriter(run.job, 0.1)
    writer._is_finished = True
    writer.free_finished()
    assert run.job.list_saves()


@pytest.mark.parametrize("tag", ["later", "same"])
def test_a_dead_jobs_pending_save_overwrites_no_save_of_a_running_job(tag: str, tmp_path: Path) -> None:
    """The dead job may have been rolled back, so neither ``latest`` nor a tag returns to its save."""
    dead, living = Run(tmp_path), Run(tmp_path)
    pending = dead.save(tag="same")
    dead.job.unlock()
    living.save(tag="before")
    made = living.write_save(tag=tag)
    assert dead.write() and not pending.list_pending()
    assert living.latest == tag and living.holds(made) and living.is_whole("same")


# -- folders -----------------------------------------------------------------------------------------------------------


def test_folders_that_cannot_be_exchanged_are_renamed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publishing, "load_libc", lambda: mock.Mock(renameat2=lambda *_: ctypes.set_errno(22) or -1))
    for _ in range(2):
        assert run.holds(run.write_save())
    assert run.list_names() == {TAG, "latest", SCRIPT}


@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_tag_that_another_job_publishes_before_the_rename_is_kept(
    can_exchange: bool, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS cannot lock the folder in which writers rename, nor exchange two folders."""
    run.write_save()
    save, other, rename = run.save(), Run(run.folder, run.destination, memory="other"), publishing._rename
    published = [other.save() for _ in range(3)][-1]  # with other weights
    acts = [other.write]

    def rename_late(old: str, new: str, flag: int) -> bool:
        if acts:
            assert acts.pop()()
        return (can_exchange or flag == publishing._NOREPLACE) and rename(old, new, flag)

    monkeypatch.setattr(publishing, "_lock_folder", lambda _: nullcontext())
    monkeypatch.setattr(publishing, "_rename", rename_late)
    assert run.write() and other.holds(published)
    assert "another job has published this tag" in save.read("refused")[run.destination]


def test_leftovers_of_a_dead_job_are_removed_after_a_day(run: Run) -> None:
    """The age is by the clock of the destination. The only complete save of a tag is kept."""
    destination, kept = Path(run.destination), {".new.ucp-save-living-3", ".whole.ucp-save-dead-4"}
    for name in {".new.ucp-save-dead-3", f".{TAG}.ucp-save-dead-4", f".{TAG}.ucp-save-dead-4-old", *kept}:
        (destination / name).mkdir(parents=True)
        (destination / name / "file").write_text("")
        (destination / name / "ucp_seal.json" if "new" not in name else destination / name).touch()
        for path in [destination / name, *((destination / name).iterdir() if "living" not in name else ())]:
            os.utime(path, (0, time.time() - 90000))
    run.write_save()
    assert run.list_names() == {TAG, "latest", SCRIPT, *kept}


@pytest.mark.parametrize("moved", [-1e5, 1e5])
def test_pruning_does_not_depend_on_file_times(moved: float, run: Run) -> None:
    """Older saves of this job are removed, also if later ones have older files; an overwritten tag is kept."""
    destination = Path(run.destination)

    def move(save: SavePart, *_: object) -> None:
        for number, path in enumerate((destination / save.tag).iterdir()):
            os.utime(path, (0, time.time() + moved * (number + 1 + 10 * ord(save.tag))))

    for tag in "abcd":
        with mock.patch.object(destinations, "_update_latest", side_effect=move):
            run.write_save(tag=tag, keep=2)
        if tag == "b":
            path = destination / "b" / "mp_rank_00_model_states.pt"
            os.utime(path, (0, (destination / "b" / "ucp_seal.json").stat().st_mtime - 1))
    assert {path.name for path in destination.iterdir() if path.is_dir()} == {"b", "c", "d"}
