"""Folders and records of saves in memory."""

from __future__ import annotations

import fcntl
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from deepspeed_ucp.config import SaveTier
from deepspeed_ucp.errors import ConfigError, StorageError
from deepspeed_ucp.io import disk
from deepspeed_ucp.saves import memory
from deepspeed_ucp.saves.launch import finish_dead_jobs
from deepspeed_ucp.saves.memory import Job, find_root, list_jobs, list_owners, name_job
from tests.saves.saving import CONFIG, TAG, Run
from tests.support.ranks import run_ranks


def test_a_record_is_written_after_its_files_and_removed_before_them(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    events = list[str]()
    for name in "sync_file", "sync_folder", "write_at":

        def note(path: str | int, *_: object, name: str = name) -> None:
            events.append(name if isinstance(path, int) else f"{name} {os.path.basename(path)}")

        for module in memory, disk:
            monkeypatch.setattr(module, name, note, raising=False)
    save = run.save()
    files = {f"sync_file {os.path.basename(each)}" for each in save.list_files()}
    assert files < set(events[:-1]) and f"sync_folder {TAG}" in events and events[-1] == "write_at"
    events.clear()
    Path(save.folder, "save-0.json").touch()
    save.recycle()
    assert events == [f"sync_folder {os.path.basename(save.folder)}"] and os.path.exists(run.job.spare)


def test_a_save_may_be_freed_while_its_folder_is_listed(run: Run) -> None:
    """The next save deletes unfinished folders while the writer frees older saves."""
    made, glob = run.save(), Path.glob

    def list_and_free(folder: Path, pattern: str) -> list[Path]:
        found = list(glob(folder, pattern))
        made.recycle()
        return found

    with mock.patch.object(Path, "glob", list_and_free):
        assert not run.job.is_unfinished(made.number)


def test_a_truncated_line_of_a_record_is_ignored(run: Run) -> None:
    run.job.reserve(7, 0)
    save = replace(run.save("first", "second"), folder=run.job.find_folder(7))
    first, second = save.destinations
    save.note("done", {first: "mark"})
    record = Path(save.folder, "save-0.json")
    size = record.stat().st_size
    text = record.read_text().rstrip("\n")
    record.write_text((text + '\n{"done": {"second": "ma').ljust(size, "\n"))
    assert save.read("done") == {first: "mark"} and save.list_pending() == [second]
    save.note("done", {second: "other"})
    save.note("done", {first: ""})
    assert save.read("done") == {first: "", second: "other"}
    assert record.stat().st_size == size
    save.note("failed", {first: "y" * size})
    for number in range(3):  # the reserved room contains only the last line
        save.note("failed", {first: str(number) * (size // 2)})
    assert record.stat().st_size < 2 * size and save.read("failed") == {first: "2" * (size // 2)}
    assert save.read("done") == {first: "", second: "other"} and save.is_recorded() is False


def test_a_job_is_owned_until_its_saving_process_ends(tmp_path: Path) -> None:
    """Processes of other containers see this, too: containers share memory, not process numbers."""
    job, (begun, begin), (ended, end) = Job(str(tmp_path / "job")), os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        job.create()
        os.fork()  # a worker that outlives the process and does not save
        os.write(begin, b"1")
        os.close(end)
        os.read(ended, 1)
        os._exit(0)
    assert os.read(begun, 1) + os.read(begun, 1) == b"11"
    assert job.is_running()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert not job.is_running()
    for fd in (begun, begin, ended, end):
        os.close(fd)


def test_checking_a_jobs_lock_does_not_acquire_it(tmp_path: Path) -> None:
    """A process that is forked during the check keeps the open file, like a copy of the descriptor."""
    (tmp_path / "owner").touch()
    copies, flock = list[int](), fcntl.flock

    def lock(file: Any, operation: int) -> None:
        flock(file, operation)
        copies.append(os.dup(file.fileno()))

    with mock.patch.object(fcntl, "flock", lock):
        assert not Job(str(tmp_path)).is_running()
    with open(tmp_path / "owner") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    for fd in copies:
        os.close(fd)


def test_a_starting_job_does_not_count_as_dead(tmp_path: Path) -> None:
    """Another job starts at the same time."""
    job, flock = Job(str(tmp_path / name_job())), fcntl.flock

    def lock(file: Any, operation: int) -> None:
        with mock.patch.object(fcntl, "flock", flock):
            finish_dead_jobs(str(tmp_path), CONFIG)
        flock(file, operation)

    with mock.patch.object(fcntl, "flock", lock):
        job.create()
    assert job.exists() and job.is_running()


def test_the_first_of_the_ranks_that_share_memory_owns_it(tmp_path: Path) -> None:
    """Launchers may set local rank 0 on each rank, and nodes may be containers of one machine."""
    for others, owners in ("memory", [0, 0]), ("container", [0, 1]):
        folders = [str(tmp_path / "memory"), str(tmp_path / others)]
        assert run_ranks(2, lambda rank, comm, folders=folders: list_owners(folders[rank], comm)) == [owners] * 2


def test_memory_folders_expand_the_home_and_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NVME", str(tmp_path / "nvme"))
    monkeypatch.delenv("SCRATCH", raising=False)
    assert SaveTier(place="~/run").place == str(tmp_path / "run")
    found = [os.path.dirname(find_root(each)) for each in ("~/memory", "$NVME")]
    assert found == [str(tmp_path / "memory"), str(tmp_path / "nvme")]
    with pytest.raises(ConfigError, match="SCRATCH"):
        find_root("$SCRATCH/memory")


def make_theirs(root: Path) -> None:
    (root.parent / "theirs").mkdir(mode=0o700)
    root.symlink_to(root.parent / "theirs")


FOREIGN: dict[str, Callable[[Path], object]] = {
    "link": make_theirs,
    "dangling link": lambda root: root.symlink_to(root.parent / "none"),
    "file": Path.touch,
    "fifo": os.mkfifo,
    "mode": lambda root: (root.mkdir(), root.chmod(0o777)),
    "another's": lambda root: root.mkdir(mode=0o700),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_memory_writable_by_another_user_is_refused(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resume would load the saves in it."""
    user = os.getuid() + (kind == "another's")
    FOREIGN[kind](tmp_path / f"deepspeed_ucp-{user}")
    monkeypatch.setattr(os, "getuid", lambda: user)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(StorageError, match="Remove it, or name another folder"):
        find_root(str(tmp_path))
    assert sorted(tmp_path.iterdir()) == before


def test_jobs_that_another_user_may_have_written_are_ignored(tmp_path: Path) -> None:
    root = find_root(str(tmp_path))
    names = [name_job() for _ in range(3)]
    for name in names[:2]:
        os.mkdir(os.path.join(root, name), mode=0o700)
    os.chmod(os.path.join(root, names[1]), 0o722)
    os.symlink(os.path.join(root, names[0]), os.path.join(root, names[2]))
    assert [job.name for job in list_jobs(root)] == [names[0]]
