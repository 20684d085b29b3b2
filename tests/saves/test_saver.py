"""The ranks' side of a save without DeepSpeed: which saves go through memory, and which are found there."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from deepspeed_ucp import hook
from deepspeed_ucp.comm import Comm
from deepspeed_ucp.config import SaveOptions, SaveTier, UniversalConfig
from deepspeed_ucp.engine_state import find_state
from deepspeed_ucp.errors import CheckpointError, ConfigError, StorageError
from deepspeed_ucp.io.disk import count_allocated
from deepspeed_ucp.io.memory import identify_host
from deepspeed_ucp.saves import budget, launch
from deepspeed_ucp.saves import saver as savers
from deepspeed_ucp.saves.memory import (
    Job,
    find_root,
    is_locked,
    list_jobs,
    list_late,
    list_owners,
    name_job,
)
from deepspeed_ucp.saves.saver import finish_saves
from deepspeed_ucp.saves.search import Found, find_in_memory
from tests.convert.conversions import write_source
from tests.saves.saving import PATIENCE, TAG, find_writer, is_whole, make_save, set_counter, write
from tests.saves.training import Engine, Training, write_tag
from tests.support.covering import params
from tests.support.held import without_collector
from tests.support.until import wait_until


def write_nothing(*_: str) -> None:
    pass


@pytest.fixture
def training(tmp_path: Path) -> Training:
    return Training(tmp_path)


@contextmanager
def without_writer() -> Iterator[None]:
    """No writer can be started inside."""
    with mock.patch.object(launch, "start_writer", side_effect=OSError("no process")):
        yield


# -- the way of a save -------------------------------------------------------------------------------------------------


OBSTACLES: dict[str, tuple[str, Callable[[Engine], object]]] = {
    tag: ("is not a path below the folder", lambda _: None)
    for tag in ("/elsewhere/tag", "../tag", "./tag", "tag/", "a//b", "", ".", "..")
}
OBSTACLES[TAG] = "decoupled", lambda engine: setattr(engine.checkpoint_engine, "is_decoupled", lambda: True)


@pytest.mark.parametrize("tag", OBSTACLES)
def test_a_save_that_memory_cannot_take_is_saved_without_it(
    tag: str, training: Training, caplog: pytest.LogCaptureFixture
) -> None:
    """In a store the writer of a tag that leads elsewhere would delete other files."""
    message, change = OBSTACLES[tag]
    change(training.engine)
    assert not training.save(tag, write=write_nothing) and training.given == [str(training.place)]
    assert message in caplog.text
    with pytest.raises(StorageError, match=message):
        training.save(tag, "s3://bucket/run")


def test_a_save_without_room_follows_the_pending_saves(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise ``latest`` would go back to them."""

    def check(*_: str) -> None:
        assert (training.place / "latest").read_text() == "first" and is_whole(str(training.place / "first"))

    assert training.save("first")
    monkeypatch.setattr(budget, "count_free", lambda _: -1)
    assert not training.save("second", write=check) and training.given[-1] == str(training.place)


def test_swap_files_without_room_are_copied_by_deepspeed(
    training: Training, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An error inside the save would leave other ranks in DeepSpeed's barrier."""
    source = training.folder / "nvme"
    source.mkdir()
    (source / "swapped").write_text("state")
    copytree = shutil.copytree

    def copy(source: str, destination: str, **options: Any) -> str:
        if destination.startswith(str(training.place)):
            return copytree(source, destination, **options)
        raise shutil.Error([(source, destination, "[Errno 28] No space left on device")])

    def write_files(folder: str, tag: str) -> None:
        write_tag(folder, tag)
        shutil.copytree(str(source), os.path.join(folder, tag, "offloaded_tensors"), dirs_exist_ok=True)

    monkeypatch.setattr(shutil, "copytree", copy)
    assert not training.save(write=write_files)
    assert "memory is full by now" in caplog.text and "No space left" in caplog.text
    assert (training.place / TAG / "offloaded_tensors" / "swapped").read_text() == "state"
    with pytest.raises(shutil.Error):
        shutil.copytree(str(source), str(training.folder / "elsewhere"))


def test_a_save_waits_for_the_memory_of_pending_ones(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    """No save of a script is dropped."""

    def count(_: str) -> int:
        saver = find_state(training.engine).saver
        return -1 if saver is not None and list_late(saver.job.list_saves()) else 1 << 40

    monkeypatch.setattr(budget, "count_free", count)
    tags = ["best", "a", "b", "last"]
    assert all(training.save(tag) for tag in tags)
    finish_saves(training.engine, required=True)
    assert all(is_whole(str(training.place / tag)) for tag in tags)
    assert (training.place / "latest").read_text() == "last"


def test_memory_with_room_for_one_save(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last save is freed for the next one when its destination has it, but never one that is in memory alone."""
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
    assert all(is_whole(str(training.place / tag)) for tag in ("first", "second"))


@contextmanager
def replace_time(**functions: Callable[..., object]) -> Iterator[SimpleNamespace]:
    clock = SimpleNamespace(**functions)
    with mock.patch.object(launch, "time", clock), mock.patch.object(savers, "time", clock):
        yield clock


def mock_clock(seconds: float) -> AbstractContextManager[SimpleNamespace]:
    """Replace :mod:`time` by a clock that only sleeping moves, by so many seconds at a time."""
    now = [0.0]

    def sleep(_: float) -> None:
        now[0] += seconds
        time.sleep(0.01)

    return replace_time(monotonic=lambda: now[0], sleep=sleep)


def test_a_save_that_pending_ones_leave_no_room_for_is_an_error(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a wait. A save without memory would be replaced by the pending ones in ``latest``, or under its tag."""
    training.place.write_text("no folder")
    assert training.save("first") and training.save("again")
    wait_until(lambda: "not written" in training.log)
    monkeypatch.setattr(budget, "count_free", lambda _: -1)
    with mock.patch.object(launch.WriterPipe, "notify"), mock_clock(PATIENCE / 4) as clock:
        with pytest.raises(StorageError, match="still to be written: first, again to"):
            training.save("last")
        assert clock.monotonic() >= PATIENCE
    training.place.unlink()
    monkeypatch.undo()
    assert training.save("last") and training.saver.finish()
    assert (training.place / "latest").read_text() == "last" and is_whole(str(training.place / "first"))


def test_memory_that_is_removed_stops_no_training(training: Training, caplog: pytest.LogCaptureFixture) -> None:
    """The saves in it are lost, the next one is not."""
    for place in "first", "second":
        assert training.save(place=place)
        assert training.saver.finish() and is_whole(str(training.folder / place / TAG))
        os.rename(training.memory, training.folder / f"gone from {place}")  # the writer may be using it
    assert caplog.text.count("while the job runs") == 1


@pytest.mark.parametrize("has_tiers", [False, True])
def test_snapshots_stay_in_memory_and_are_not_counted(has_tiers: bool, tmp_path: Path) -> None:
    tiers = [SaveTier(place=str(tmp_path / "fast")), SaveTier(place=str(tmp_path / "slow"), every=2, keep=3)]
    training, found = Training(tmp_path, to=tiers if has_tiers else []), list[list[tuple[str, int | None]]]()
    for is_snapshot in (True, False, True, False):
        with mock.patch.object(launch.WriterPipe, "notify"):
            training.save(is_snapshot=is_snapshot)
        places = training.job.list_saves()[-1].destinations
        found.append([(os.path.basename(place), keep) for place, keep in places.items()])
    first, second = ([("fast", None)], [("fast", None), ("slow", 3)]) if has_tiers else ([("place", None)],) * 2
    assert found == [[], first, [], second]


def test_saves_of_two_folders_do_not_replace_each_other_in_one_place(tmp_path: Path) -> None:
    """Neither of two engines, nor of one engine at two steps."""
    training, other = (Training(tmp_path, to=[SaveTier(place=str(tmp_path / "place"))]) for _ in range(2))
    with without_writer():
        for folder in ("a", "a", "best"):
            training.save("step", folder, write_nothing)
        with pytest.raises(StorageError, match="Give each engine another place"):
            other.save("step", "b", write_nothing)
        training.engine.global_steps += 1
        with pytest.raises(StorageError, match="or each save another tag"):
            training.save("step", "a", write_nothing)
        other.save("other", "b", write_nothing)
    for each in training, other:
        each.job.remove()


def test_an_engine_that_replaces_the_save_of_another_one_is_reported(
    training: Training, caplog: pytest.LogCaptureFixture
) -> None:
    """Not an engine that continues another one's steps."""
    other = Training(training.folder)
    other.engine.global_steps += 1
    with without_writer():
        for tag, count in ("first", 0), ("second", 1), ("third", 1):
            for each in training, other:
                each.save(tag, write=write_nothing)
            assert caplog.text.count("two engines save the same step") == count
            other.engine.global_steps = training.engine.global_steps
    for each in training, other:
        each.job.remove()


# -- the writer --------------------------------------------------------------------------------------------------------


def test_a_writer_that_cannot_be_started_stops_no_training(
    training: Training, caplog: pytest.LogCaptureFixture
) -> None:
    """The save is written by the writer that is started at the next save or at the end."""
    with without_writer():
        assert training.save()
    assert "no process" in caplog.text
    assert training.saver.finish() and is_whole(str(training.place / TAG))


def test_a_place_that_is_late_is_reported_once(training: Training, caplog: pytest.LogCaptureFixture) -> None:
    with without_writer():
        for tag in "abcd":
            assert training.save(tag, write=write_nothing)
    training.job.remove()
    assert caplog.text.count("still lacks") == caplog.text.count(f"{training.place} still lacks a, which") == 1


def test_saves_share_a_writer_until_it_is_killed(training: Training) -> None:
    """Also while it starts: a second writer would wait for the first one's lock, and the first for announcements."""
    with mock.patch.object(launch, "start_writer", side_effect=launch.start_writer) as start:
        assert training.save("a") and training.save("b") and training.saver.finish()
        assert training.save("c") and training.saver.wait()
        assert start.call_count == 1 and is_whole(str(training.place / "c"))
        os.kill(find_writer(training.job), signal.SIGKILL)
        assert training.save("d") and training.saver.finish() and is_whole(str(training.place / "d"))


def test_a_writer_that_ends_at_once_is_not_waited_for(
    training: Training, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "/bin/false")
        assert training.save()
        assert not training.saver.finish() and f"still to be written: {TAG}" in caplog.text
    assert training.saver.finish() and is_whole(str(training.place / TAG))


def test_a_writer_that_hangs_delays_neither_training_nor_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """For longer than ``wait_s``. When it continues, it writes everything."""
    training, slept = Training(tmp_path, wait_s=0.5), list[float]()

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        time.sleep(seconds)

    training.save("a")
    wait_until(lambda: not list_late(training.job.list_saves()))
    stopped = find_writer(training.job)
    os.kill(stopped, signal.SIGSTOP)
    try:
        with replace_time(monotonic=time.monotonic, sleep=sleep):
            assert training.save("b") and training.save("c")
            training.saver.close()
        assert sum(slept) < 1.0 and f"still to be written: b, c to {training.place}" in caplog.text
        assert (training.place / "latest").read_text() == "a"
    finally:
        os.kill(stopped, signal.SIGCONT)
    wait_until(lambda: not is_locked(training.job))
    assert (training.place / "latest").read_text() == "c"
    assert all(is_whole(str(training.place / tag)) for tag in "bc")


def test_a_save_that_no_retry_can_mend_ends_the_wait(training: Training, caplog: pytest.LogCaptureFixture) -> None:
    """The writer gives it up, and the training process logs why."""

    def write_bad(folder: str, tag: str) -> None:
        write_tag(folder, tag)
        set_counter(Path(folder, tag), "global_samples", 6.5)

    assert training.save(write=write_bad)
    finish_saves(training.engine)
    assert caplog.text.count("global_samples is 6.5") == 1 and f"still lacks {TAG}" in caplog.text
    with pytest.raises(StorageError, match=rf"{TAG}: missing at {training.place} \(.*global_samples is 6.5"):
        finish_saves(training.engine, required=True)
    assert caplog.text.count("global_samples is 6.5") == 1 == training.log.count("global_samples is 6.5")
    (save,) = training.job.list_saves()
    assert save.list_lacking() == [str(training.place)] and not save.list_pending()
    assert not (training.place / "latest").exists()


def test_missing_saves_are_named_with_the_reason(training: Training) -> None:
    """Saves that were lost with the memory are named once."""
    training.place.write_text("no folder")
    assert training.save("best")
    wait_until(lambda: "not written" in training.log)
    with mock_clock(PATIENCE / 4):
        finish_saves(training.engine)
        with pytest.raises(StorageError, match=r"best: missing at .*place \(.*(exists|Not a directory)"):
            finish_saves(training.engine, required=True)
    os.rename(training.job.folder, training.folder / "removed")
    with pytest.raises(StorageError, match="best: .* was removed"):
        finish_saves(training.engine, required=True)


@pytest.mark.parametrize("end", params(["preempted"], ["normal"]))
def test_memory_is_freed_by_a_job_that_ends_normally(
    end: str, training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert training.save()
    monkeypatch.setattr(sys, "last_value", None, raising=False)
    if end == "preempted":
        savers.keep_memory()
    training.saver.close()
    assert is_whole(str(training.place / TAG)) and bool(training.job.list_saves()) is (end != "normal")
    wait_until(lambda: not is_locked(training.job) and os.path.exists(training.job.folder) is (end != "normal"))


def test_the_first_rank_that_shares_a_memory_owns_it(tmp_path: Path) -> None:
    """Launchers may give each rank the local rank 0, and nodes may be containers of one machine."""

    class TwoRanks(Comm):
        size, others = 2, tmp_path / "memory"

        def gather(self, value: Any) -> list[Any]:
            if self.others == tmp_path / "memory":
                return [value, value]
            found = os.stat(find_root(str(self.others)))
            return [value, (self._pack((identify_host(), found.st_dev, found.st_ino)), None)]

    config, comm = UniversalConfig(save=SaveOptions(memory=str(tmp_path / "memory"))), TwoRanks()
    assert list_owners(config.save.memory, comm) == [0, 0]
    comm.others = tmp_path / "container"
    assert list_owners(config.save.memory, comm) == [0, 1]


def test_only_the_rank_that_owns_the_memory_starts_a_writer(job: Job, tmp_path: Path) -> None:
    make_save(job, str(tmp_path / "place"))
    config = UniversalConfig(save=SaveOptions(memory=str(tmp_path / "memory"), wait_s=0.0))
    with mock.patch.object(launch, "start_writer") as start:
        savers.Saver(config, job.name, 1, [0, 0]).close()
    assert not start.called


# -- saves of dead jobs ------------------------------------------------------------------------------------------------


def test_a_dead_jobs_snapshot_stays_until_there_is_another(
    training: Training, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing else has its state, nor that of another folder's snapshot: the message says how to remove it by hand."""
    dead, folder = training.make_job(), training.folder
    for number, name in enumerate(("place", "older", "other")):
        place = str(folder / name.replace("older", "other"))
        make_save(dead, place, tag=name, step=number, destinations={})
    monkeypatch.setattr(budget, "count_free", lambda _: -1)
    caplog.set_level(logging.INFO)
    with pytest.raises(StorageError, match="MiB are free") as raised:
        training.save(is_snapshot=True)
    assert [save.tag for save in dead.list_saves()] == ["place", "other"]
    assert f"removed to make room, older of {folder / 'other'}" in caplog.text
    assert f"other (step 2) of {folder / 'other'}" in str(raised.value)
    assert f"rm -r {dead.folder}" in str(raised.value)
    third = training.make_job()
    make_save(third, str(folder / "third"))
    make_save(third, str(folder / "third"), destinations={})
    training.save(place="third", write=write_nothing)
    assert third.list_saves() == []  # DeepSpeed has saved
    monkeypatch.undo()
    training.save(is_snapshot=True)
    assert [save.tag for save in dead.list_saves()] == ["other"]


def test_a_save_next_to_a_dead_runs_folder_frees_nothing_that_is_in_memory_alone(training: Training) -> None:
    """Trainers have a folder for each save, and so do runs."""
    dead = [training.make_job() for _ in range(3)]
    make_save(dead[0], str(training.folder / "runs" / "a"), destinations={})
    make_save(dead[1], str(training.folder / "runs" / "b"))
    make_save(dead[2], str(training.folder / "runs" / "c"), destinations={})
    assert write(dead[1]) and training.save(place="runs/c")
    assert [bool(job.list_saves()) for job in dead] == [True, False, False]


def test_a_dead_jobs_pending_save_stays_until_its_tag_is_saved_again(training: Training) -> None:
    """Its writer may have failed for long."""
    dead = training.make_job()
    make_save(dead, str(training.place), tag="pending")
    with without_writer():
        for tag, tags in (("next", ["pending"]), ("pending", [])):
            assert training.save(tag)
            assert [each.tag for each in dead.list_saves()] == tags


def test_saves_of_another_release_stay(training: Training) -> None:
    """They may be pending."""
    record = Path(make_save(training.make_job(), str(training.place)).folder) / "save-0.json"
    record.write_text(record.read_text().replace('"step"', '"later_name"'))
    assert training.save() and record.exists()


# -- loads from memory -------------------------------------------------------------------------------------------------


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """A job of this process, so that no writer writes its pending saves."""
    made = Job(os.path.join(find_root(str(tmp_path / "memory")), name_job()))
    made.own()
    return made


Find = Callable[..., str | None]


@pytest.fixture
def find(tmp_path: Path) -> Find:
    """Return the tag that a load of a folder takes from memory."""
    config = UniversalConfig(save=SaveOptions(memory=str(tmp_path / "memory")))

    def find(tag: Any = None, below: str = "") -> str | None:
        found = find_in_memory(config, str(tmp_path / "place" / below), tag, Comm())
        return found and found.tag

    return find


def test_a_load_without_a_tag_takes_the_save_that_is_for_latest(job: Job, find: Find, tmp_path: Path) -> None:
    """A tag may be a number."""
    make_save(job, str(tmp_path / "place"), tag="a", step=3)
    make_save(job, str(tmp_path / "place"), tag="7", step=4, latest=False)
    assert [find(), find("7"), find(7), find(below="7"), find(below="elsewhere")] == ["a", "7", "7", "7", None]


def test_a_later_save_that_was_rolled_back_hides_no_other(job: Job, find: Find, tmp_path: Path) -> None:
    place = tmp_path / "place"
    make_save(job, str(place), tag="abandoned", step=9)
    assert write(job) and find() == "abandoned"
    write_source(place, 7).rename(place / "earlier")
    (place / "latest").write_text("earlier")
    assert find() is None
    make_save(job, str(place), tag="next", step=5)
    assert find() == "next"


@pytest.mark.parametrize("is_tag_given", [False, True])
@pytest.mark.parametrize(("stored", "expected"), [(9, None), (3, "a"), (2, "a")])
def test_a_later_save_at_a_destination_precedes_an_older_one_in_memory(
    stored: int, expected: str | None, is_tag_given: bool, job: Job, tmp_path: Path
) -> None:
    """With ``to`` the folder that the script names stays empty."""
    place, tier = tmp_path / "place", tmp_path / "tier"
    options = SaveOptions(memory=str(tmp_path / "memory"), to=[{"place": str(tier)}])
    made = make_save(job, str(place), tag="a", step=3, destinations={str(tier): None})
    set_counter(write_source(tier).rename(tier / made.tag), "global_steps", stored)
    (tier / "latest").write_text(made.tag)
    tag = made.tag if is_tag_given else None
    found = find_in_memory(UniversalConfig(save=options), str(place), tag, Comm())
    assert (found and found.tag) == expected


@pytest.mark.parametrize("step", [9, 4])
def test_a_save_that_was_dropped_is_loaded_only_if_no_later_one_was_written(
    step: int, job: Job, find: Find, tmp_path: Path
) -> None:
    """The node with the other part of the later one may be lost. A run that was rolled back has later steps."""
    place = tmp_path / "place"
    made = make_save(job, str(place), tag="dropped", step=step)
    write_source(place, 7)
    (place / "latest").write_text(TAG)
    later = make_save(job, str(place), tag="next", step=5, nodes=2) if step == 4 else None
    made.note("done", {str(place): ""})
    if later is None:
        assert find() is None and find("dropped") == "dropped"
        return
    assert find() == "dropped"
    later.note("done", {str(place): "mark"})
    assert find() is None
    later.remove()
    later = replace(later, node=1)
    Path(later.folder).mkdir()
    later.write_record()
    later.note("done", {str(place): "on the first node"})  # which has not published it
    assert find() == "dropped"


@pytest.mark.parametrize("removed", ["all", "content", "nothing"])
@pytest.mark.parametrize("has_tiers", [False, True])
def test_a_load_from_memory_warns_if_all_places_were_emptied(
    removed: str, has_tiers: bool, job: Job, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The user may want to start from scratch."""
    folder, place = str(tmp_path / "place"), tmp_path / ("tier" if has_tiers else "place")
    to = [SaveTier(place=str(place))] if has_tiers else []
    config = UniversalConfig(save=SaveOptions(memory=str(tmp_path / "memory"), to=to))

    def find() -> str | None:
        found = find_in_memory(config, folder, None, Comm())
        return found and found.tag

    def make(tag: str, step: int) -> None:
        make_save(job, folder, tag=tag, step=step, destinations={str(place): None})

    make("first", 1)
    assert find() == "first" and caplog.text == ""  # nothing was ever there
    assert write(job)
    make("second", 9)
    if removed != "nothing":
        shutil.rmtree(place)
        if removed == "content":
            place.mkdir()
    assert find() == "second"
    text = f"{place} has no checkpoint, although the run wrote saves there: it continues from second in memory, step 9"
    assert (text in caplog.text and f"rm -r {job.folder}" in caplog.text) is (removed != "nothing")


def test_a_tag_that_was_saved_again_without_the_plugin_is_loaded(job: Job, find: Find, tmp_path: Path) -> None:
    """At the same step, and below the seal of the older save."""
    place = tmp_path / "place"
    make_save(job, str(place))
    assert write(job) and find() == TAG
    write_source(tmp_path / "anew", 7)
    shutil.copytree(tmp_path / "anew" / TAG, place / TAG, dirs_exist_ok=True, copy_function=shutil.copyfile)
    assert find() is None


def test_a_running_job_of_another_process_is_not_read(job: Job, find: Find, tmp_path: Path) -> None:
    """Its next save overwrites an older one, also while that is read."""
    make_save(job, str(tmp_path / "place"))
    assert find() == TAG
    job.disown()
    with open(os.path.join(job.folder, "owner")) as other:
        fcntl.flock(other, fcntl.LOCK_EX)  # as another process would
        assert find() is None


def test_a_rank_that_fails_alone_does_not_load_from_the_place() -> None:
    """The other ranks would wait for it in their load from memory. Memory that a failed load used is freed."""
    config, comm = UniversalConfig(save=SaveOptions()), Comm()
    with (
        without_collector() as failing,
        mock.patch.object(hook, "find_in_memory", return_value=Found("folder", TAG, 3)),
    ):

        def load(error: CheckpointError, size: int = 1) -> object:
            comm.size = size
            return hook._load_from_memory(
                Engine(), "place", None, config, lambda *_: failing.fail(error), mock.Mock(), comm
            )

        assert load(CheckpointError("alone")) is None and failing.held == 0
        with pytest.raises(CheckpointError, match="alone"):
            load(CheckpointError("alone"), size=2)
        error = CheckpointError("alone")
        error.shared = True
        assert load(error, size=2) is None


# -- folders -----------------------------------------------------------------------------------------------------------


def test_folders_may_name_the_home_and_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_a_memory_that_another_user_may_have_made_is_refused(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resume loads the saves in it."""
    user = os.getuid() + (kind == "another's")
    FOREIGN[kind](tmp_path / f"deepspeed_ucp-{user}")
    monkeypatch.setattr(os, "getuid", lambda: user)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(StorageError, match="Remove it, or name another folder"):
        find_root(str(tmp_path))
    assert sorted(tmp_path.iterdir()) == before


def test_jobs_that_another_user_may_have_made_are_ignored(tmp_path: Path) -> None:
    root = find_root(str(tmp_path))
    names = [name_job() for _ in range(3)]
    for name in names[:2]:
        os.mkdir(os.path.join(root, name), mode=0o700)
    os.chmod(os.path.join(root, names[1]), 0o722)
    os.symlink(os.path.join(root, names[0]), os.path.join(root, names[2]))
    assert [job.name for job in list_jobs(root)] == [names[0]]


def test_destinations_are_searched_by_loads() -> None:
    tiers = [SaveTier(place="/fast"), SaveTier(place="s3://b/run")]
    for to, also in ((tiers, ["/also", "/fast", "s3://b/run"]), ([], ["/also"])):
        assert UniversalConfig(also=["/also"], save=SaveOptions(to=to)).with_tiers().also == also
