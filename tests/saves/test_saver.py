"""The ranks' side of a save, without DeepSpeed: saves through memory, and their reuse."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from deepspeed_ucp.comm import Comm
from deepspeed_ucp.config import SaveOptions, SaveTier, UniversalConfig
from deepspeed_ucp.engine_state import find_state
from deepspeed_ucp.errors import StorageError
from deepspeed_ucp.io.disk import count_allocated
from deepspeed_ucp.saves import budget, launch
from deepspeed_ucp.saves import saver as savers
from deepspeed_ucp.saves.memory import has_writer, list_pending_tags
from deepspeed_ucp.saves.saver import finish_saves
from tests.saves.saving import (
    PATIENCE,
    TAG,
    Run,
    Training,
    find_writer,
    is_whole,
    set_counter,
    write_tag,
)
from tests.support.until import wait_until


def write_nothing(*_: str) -> None:
    pass


@pytest.fixture
def training(tmp_path: Path) -> Training:
    return Training(tmp_path)


@contextmanager
def without_writer(*finished: Training) -> Iterator[None]:
    """Context manager in which no writer can be started; at its end the saves of finished jobs are removed."""
    with mock.patch.object(launch, "start_writer", side_effect=OSError("no process")):
        yield
    for each in finished:
        each.job.remove()


# -- steps of a save ---------------------------------------------------------------------------------------------------


OBSTACLES: dict[str, tuple[str, dict[str, Any] | None]] = dict.fromkeys(
    ("/elsewhere/tag", "../tag", "./tag", "tag/", "a//b", "", ".", ".."), ("is not a path below the folder", None)
)
OBSTACLES |= {
    "decoupled": ("decoupled", {"is_decoupled": lambda: True}),
    "of another library": ("types.SimpleNamespace may still write its files", {}),
}


@pytest.mark.parametrize("tag", OBSTACLES)
def test_a_save_unsuitable_for_memory_is_direct(tag: str, training: Training, caplog: pytest.LogCaptureFixture) -> None:
    """For example, a tag with a path outside the folder: in a store its writer would delete foreign files."""
    message, writer = OBSTACLES[tag]
    if writer is not None:
        training.engine.checkpoint_engine = SimpleNamespace(**writer)
    assert not training.save(tag, write=write_nothing) and training.given == [training.destination]
    assert message in caplog.text
    with pytest.raises(StorageError, match=message):
        training.save(tag, "s3://bucket/run")


def test_a_direct_save_waits_for_the_pending_saves(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a pending save would later replace it in ``latest``."""

    def check(*_: str) -> None:
        assert training.latest == "first" and training.is_whole("first")

    assert training.save("first")
    monkeypatch.setattr(budget, "count_free", lambda _: -1)
    assert not training.save("second", write=check) and training.given[-1] == training.destination


def test_deepspeed_copies_swap_files_that_do_not_fit_into_memory(
    training: Training, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An error inside the save would block other ranks in DeepSpeed's barrier."""
    source, copytree = training.folder / "nvme", shutil.copytree
    source.mkdir()
    (source / "swapped").write_text("state")

    def copy(source: str, destination: str, **options: Any) -> str:
        if destination.startswith(training.destination):
            return copytree(source, destination, **options)
        raise shutil.Error([(source, destination, "[Errno 28] No space left on device")])

    def write_files(folder: str, tag: str) -> None:
        write_tag(folder, tag)
        shutil.copytree(str(source), os.path.join(folder, tag, "offloaded_tensors"), dirs_exist_ok=True)

    monkeypatch.setattr(shutil, "copytree", copy)
    assert not training.save(write=write_files)
    assert "memory is full by now" in caplog.text and "No space left" in caplog.text
    assert Path(training.destination, TAG, "offloaded_tensors", "swapped").read_text() == "state"
    with pytest.raises(shutil.Error):
        shutil.copytree(str(source), str(training.folder / "elsewhere"))


def test_a_save_waits_until_pending_saves_free_memory(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:

    def count(_: str) -> int:
        saver = find_state(training.engine).saver
        return -1 if saver is not None and list_pending_tags(saver.job.list_saves()) else 1 << 40

    monkeypatch.setattr(budget, "count_free", count)
    tags = ["best", "a", "b", "last"]
    assert all(training.save(tag) for tag in tags)
    finish_saves(training.engine, required=True)
    assert training.is_whole(*tags) and training.latest == "last"


def test_the_last_save_is_freed_after_it_is_written(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save that exists only in memory is never freed."""
    assert training.save("first") and training.saver.finish()
    size = training.saver.budget.needed

    def count(_: str) -> int:
        return size - sum(count_allocated(save.folder) for save in training.job.list_saves())

    monkeypatch.setattr(budget, "count_free", count)
    assert training.save("second") and training.saver.finish()
    assert training.save("third", is_snapshot=True)
    with pytest.raises(StorageError, match="MiB are free"):
        training.save("fourth", is_snapshot=True)
    assert [save.tag for save in training.job.list_saves()] == ["third"]
    assert training.is_whole("first", "second")


@contextmanager
def mock_clock(seconds: float) -> Iterator[SimpleNamespace]:
    """Replace :mod:`time` by a clock that advances by so many seconds at each sleep."""
    now = [0.0]

    def sleep(_: float) -> None:
        now[0] += seconds
        time.sleep(0.01)

    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=sleep)
    with mock.patch.object(launch, "time", clock), mock.patch.object(savers, "time", clock):
        yield clock


def test_no_room_next_to_pending_saves_is_an_error(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits first. A pending save would later replace a direct save in ``latest`` or under its tag."""
    Path(training.destination).write_text("no folder")
    assert training.save("first") and training.save("again")
    wait_until(lambda: "not written" in training.log)
    monkeypatch.setattr(budget, "count_free", lambda _: -1)
    with mock.patch.object(launch.WriterPipe, "notify"), mock_clock(PATIENCE / 4) as clock:
        with pytest.raises(StorageError, match="still to be written: first, again to"):
            training.save("last")
        assert clock.monotonic() >= PATIENCE
    os.unlink(training.destination)
    monkeypatch.undo()
    assert training.save("last") and training.saver.finish()
    assert training.latest == "last" and training.is_whole("first")


def test_training_continues_if_memory_is_removed(training: Training, caplog: pytest.LogCaptureFixture) -> None:
    """The saves in it are lost; the next save is written."""
    for destination in "first", "second":
        assert training.save(destination=destination)
        assert training.saver.finish() and is_whole(str(training.folder / destination / TAG))
        os.rename(training.memory, training.folder / f"gone from {destination}")  # the writer may use it
    assert caplog.text.count("while the job runs") == 1


@pytest.mark.parametrize("has_tiers", [False, True])
def test_snapshots_are_kept_in_memory_and_not_counted_as_saves(has_tiers: bool, tmp_path: Path) -> None:
    tiers = [SaveTier(place=str(tmp_path / "fast")), SaveTier(place=str(tmp_path / "slow"), every=2, keep=3)]
    training, found = Training(tmp_path, to=tiers if has_tiers else []), list[list[tuple[str, int | None]]]()
    for is_snapshot in (True, False, True, False):
        with mock.patch.object(launch.WriterPipe, "notify"):
            training.save(is_snapshot=is_snapshot)
        destinations = training.job.list_saves()[-1].destinations
        found.append([(os.path.basename(destination), keep) for destination, keep in destinations.items()])
    first, second = ([("fast", None)], [("fast", None), ("slow", 3)]) if has_tiers else ([("destination", None)],) * 2
    assert found == [[], first, [], second]


def test_a_save_that_would_overwrite_another_folders_save_in_a_destination_is_refused(tmp_path: Path) -> None:
    """The saves are from two engines, or from one engine at two steps."""
    training, other = (Training(tmp_path, to=[SaveTier(place=str(tmp_path / "destination"))]) for _ in range(2))
    with without_writer(training, other):
        for folder in ("a", "a", "best"):
            training.save("step", folder, write_nothing)
        with pytest.raises(StorageError, match="Give each engine another destination"):
            other.save("step", "b", write_nothing)
        training.engine.global_steps += 1
        with pytest.raises(StorageError, match="or each save another tag"):
            training.save("step", "a", write_nothing)
        other.save("other", "b", write_nothing)


def test_an_overwritten_save_of_another_engine_is_logged(training: Training, caplog: pytest.LogCaptureFixture) -> None:
    """An engine that continues another one's steps is not reported."""
    other = Training(training.folder)
    other.engine.global_steps += 1
    with without_writer(training, other):
        for tag, count in ("first", 0), ("second", 1), ("third", 1):
            for each in training, other:
                each.save(tag, write=write_nothing)
            assert caplog.text.count("two engines save the same step") == count
            other.engine.global_steps = training.engine.global_steps


# -- the writer --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_started", [False, True])
def test_training_continues_if_a_writer_fails_to_start(
    is_started: bool, training: Training, caplog: pytest.LogCaptureFixture
) -> None:
    """The next writer writes the save. `finish` does not wait for a writer that has exited."""
    with mock.patch.object(sys, "executable", "/bin/false") if is_started else without_writer():
        assert training.save() and not training.saver.finish()
    assert f"still to be written: {TAG}" in caplog.text and ("no process" in caplog.text) is not is_started
    assert training.saver.finish() and training.is_whole(TAG)


def test_saves_share_a_writer_until_it_is_killed(training: Training) -> None:
    """A starting writer counts: a second one would wait for its lock, and the first one for announcements."""
    with mock.patch.object(launch, "start_writer", side_effect=launch.start_writer) as start:
        assert training.save("a") and has_writer(training.job)
        assert training.save("b") and training.saver.finish()
        assert training.save("c") and training.saver.wait()
        assert start.call_count == 1 and training.is_whole("c")
        os.kill(find_writer(training.job), signal.SIGKILL)
        assert training.save("d") and training.saver.finish() and training.is_whole("d")
    wait_until(lambda: os.path.exists(training.job.spare))
    training.saver.writer.close()
    wait_until(lambda: not has_writer(training.job))
    assert not os.path.exists(training.job.spare)


def test_a_hanging_writer_delays_neither_training_nor_exit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Exit waits at most ``wait_s``. When the writer continues, it writes all saves."""
    training = Training(tmp_path, wait_s=0.5)
    training.save("a")
    wait_until(lambda: not list_pending_tags(training.job.list_saves()))
    stopped = find_writer(training.job)
    os.kill(stopped, signal.SIGSTOP)
    try:
        with mock_clock(0.1) as clock:
            assert training.save("b") and training.save("c")
            training.saver.close()
        assert clock.monotonic() < 1.0
        assert f"still to be written: b, c to {training.destination}" in caplog.text
        assert training.latest == "a"
    finally:
        os.kill(stopped, signal.SIGCONT)
    wait_until(lambda: not has_writer(training.job))
    assert training.latest == "c" and training.is_whole(*"bc")


def test_a_permanent_fault_ends_the_wait_at_exit(training: Training, caplog: pytest.LogCaptureFixture) -> None:
    """The writer abandons the save, and the training process logs the reason."""

    def write_bad(folder: str, tag: str) -> None:
        write_tag(folder, tag)
        set_counter(Path(folder, tag), "global_samples", 6.5)

    assert training.save(write=write_bad)
    finish_saves(training.engine)
    assert caplog.text.count("global_samples is 6.5") == 1 and f"still lacks {TAG}" in caplog.text
    with pytest.raises(StorageError, match=rf"{TAG}: missing at {training.destination} \(.*global_samples is 6.5"):
        finish_saves(training.engine, required=True)
    assert caplog.text.count("global_samples is 6.5") == 1 == training.log.count("global_samples is 6.5")
    (save,) = training.job.list_saves()
    assert save.list_lacking() == [training.destination] and not save.list_pending()
    assert not os.path.exists(f"{training.destination}/latest")


def test_missing_saves_are_logged_with_the_reason(training: Training) -> None:
    """Saves that were lost with the memory are logged once."""
    Path(training.destination).write_text("no folder")
    assert training.save("best")
    wait_until(lambda: "not written" in training.log)
    with mock_clock(PATIENCE / 4):
        finish_saves(training.engine)
        with pytest.raises(StorageError, match=r"best: missing at .*destination \(.*(exists|Not a directory)"):
            finish_saves(training.engine, required=True)
    os.rename(training.job.folder, training.folder / "removed")
    with pytest.raises(StorageError, match="best: .* was removed"):
        finish_saves(training.engine, required=True)


@pytest.mark.parametrize("end", ["preempted", "uncaught error", "normal"])
def test_a_normal_end_of_a_job_frees_its_memory(end: str, training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    """It frees a snapshot, too, which a later save replaces."""
    assert training.save("snapshot", is_snapshot=True) and training.save()
    error = ValueError() if end == "uncaught error" else None
    monkeypatch.setattr(sys, "last_value", error, raising=False)
    if end == "preempted":
        savers.keep_memory()
    training.saver.close()
    assert training.is_whole(TAG) and bool(training.job.list_saves()) is (end != "normal")
    wait_until(lambda: not has_writer(training.job) and os.path.exists(training.job.folder) is (end != "normal"))


def test_only_the_rank_that_owns_the_memory_starts_a_writer(run: Run) -> None:
    run.save()
    config = UniversalConfig(save=SaveOptions(memory=str(run.folder / "memory"), wait_s=0.0))
    with mock.patch.object(launch, "start_writer") as start:
        savers.Saver(config, run.job.name, 1, [0, 0]).close()
    assert not start.called


# -- saves of dead jobs ------------------------------------------------------------------------------------------------


def test_a_dead_jobs_snapshot_is_kept_until_another_exists(
    training: Training, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is the only copy of its state. A snapshot of another folder is kept; a message explains its removal."""
    dead, folder = training.make_dead(), training.folder
    for number, name in enumerate(("destination", "older", "other")):
        dead.save(name.replace("older", "other"), tag=name, step=number, destinations={})
    monkeypatch.setattr(budget, "count_free", lambda _: -1)
    caplog.set_level(logging.INFO)
    with pytest.raises(StorageError, match="MiB are free") as raised:
        training.save(is_snapshot=True)
    assert [save.tag for save in dead.job.list_saves()] == ["destination", "other"]
    assert f"removed to make room, older of {folder / 'other'}" in caplog.text
    assert f"other (step 2) of {folder / 'other'}" in str(raised.value)
    assert f"rm -r {dead.job.folder}" in str(raised.value)
    third = training.make_dead()
    third.save("third")
    third.save("third", destinations={})
    training.save(destination="third", write=write_nothing)
    assert third.job.list_saves() == []  # DeepSpeed has saved
    monkeypatch.undo()
    training.save(is_snapshot=True)
    assert [save.tag for save in dead.job.list_saves()] == ["other"]


def test_a_save_keeps_dead_jobs_saves_of_other_folders_that_exist_only_in_memory(training: Training) -> None:
    """Trainers have a folder for each save, and a folder for each run."""
    dead = [training.make_dead() for _ in range(3)]
    dead[0].save("runs/a", destinations={})
    dead[1].write_save("runs/b")
    dead[2].save("runs/c", destinations={})
    assert training.save(destination="runs/c")
    assert [bool(each.job.list_saves()) for each in dead] == [True, False, False]


def test_a_dead_jobs_pending_save_is_kept_until_its_tag_is_overwritten(training: Training) -> None:
    dead = training.make_dead()
    dead.save(tag="pending")
    with without_writer():
        for tag, tags in (("next", ["pending"]), ("pending", [])):
            assert training.save(tag)
            assert [each.tag for each in dead.job.list_saves()] == tags


def test_a_save_that_a_node_cannot_record_frees_nothing(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    """The dead job's snapshot may be the only complete save."""
    dead = training.make_dead()
    dead.save(destinations={})

    class TwoNodes(Comm):
        def run(self, work: Callable[[], Any]) -> Any:
            done, saver = super().run(work), find_state(training.engine).saver
            if saver is not None and saver.job.list_saves():
                error = StorageError("no room on the other node")
                error.shared = True
                raise error
            return done

    with monkeypatch.context() as patch:
        patch.setattr(savers, "connect", lambda **_: TwoNodes())
        with pytest.raises(StorageError, match="other node"):
            training.save()
    assert training.job.list_saves() == [] and dead.job.list_saves()
    assert training.save() and not dead.job.list_saves()


def test_saves_of_another_release_are_kept(training: Training) -> None:
    """Such saves may be pending."""
    record = Path(training.make_dead().save().folder) / "save-0.json"
    record.write_text(record.read_text().replace('"step"', '"later_name"'))
    assert training.save() and record.exists()
