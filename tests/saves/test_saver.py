"""The ranks' side of a save without any engine: what goes by way of memory, and what is found there."""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable
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
from deepspeed_ucp.io.memory import identify_host
from deepspeed_ucp.load.context import LoadArguments
from deepspeed_ucp.saves import saver as savers
from deepspeed_ucp.saves.finding import find_in_memory
from deepspeed_ucp.saves.memory import Job, find_root, list_jobs, name_job
from deepspeed_ucp.saves.saving import finish_saves, save_into_memory
from deepspeed_ucp.saves.search import Found
from deepspeed_ucp.saves.writer import is_locked
from tests.convert.conversions import write_source
from tests.saves.saving import PATIENCE, TAG, find_writer, is_whole, make_save, set_counter, write
from tests.support.held import without_collector
from tests.support.until import wait_until


class FakeEngine(SimpleNamespace):
    """As much of an engine as a save asks for."""

    def use_node_local_storage(self) -> bool:
        return False


@pytest.fixture
def engine() -> FakeEngine:
    module = SimpleNamespace(parameters=list)
    writer = SimpleNamespace(is_decoupled=lambda: False)
    return FakeEngine(
        local_rank=0, global_steps=3, optimizer=None, module=module, save_non_zero_checkpoint=False,
        checkpoint_engine=writer,
    )  # fmt: skip


@pytest.fixture
def save(engine: FakeEngine, tmp_path: Path) -> Callable[..., tuple[str, bool]]:
    """Saves as an engine does: the folder that DeepSpeed was to write to, and whether that is memory's."""
    config = UniversalConfig(save=SaveOptions(memory=str(tmp_path / "memory"), wait_s=PATIENCE))

    def make(folder: str, tag: str, write: Callable[[str], object] = lambda _: None) -> tuple[str, bool]:
        asked = list[str]()

        def note(given: str) -> None:
            asked.append(given)
            write(given)

        _, in_memory = save_into_memory(engine, config, folder, tag, note, latest=True)
        return asked[0], in_memory

    return make


@pytest.mark.parametrize("tag", ["/elsewhere/tag", "../tag", "./tag", "tag/", "a//b", "", ".", ".."])
def test_tags_that_lead_elsewhere_are_deepspeeds_own(
    tag: str, save: Callable[..., tuple[str, bool]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In a store they would take what lies beside the tag with them."""
    assert save(str(tmp_path / "place"), tag) == (str(tmp_path / "place"), False)
    assert "is not a path below the folder" in caplog.text
    with pytest.raises(StorageError, match="is not a path below the folder"):
        save("s3://bucket/run", tag)


def test_files_that_come_after_the_save_are_left_to_their_writer(
    engine: FakeEngine, save: Callable[..., tuple[str, bool]], tmp_path: Path
) -> None:
    engine.checkpoint_engine.is_decoupled = lambda: True
    assert save(str(tmp_path / "place"), TAG) == (str(tmp_path / "place"), False)


def test_a_save_without_room_comes_after_those_that_are_pending(
    save: Callable[..., tuple[str, bool]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else `latest` would go back to them."""
    place = tmp_path / "place"

    def write_first(folder: str) -> None:
        write_source(Path(folder)).rename(Path(folder) / "first")

    def look(_: str) -> None:
        assert (place / "latest").read_text() == "first" and is_whole(str(place / "first"))

    assert save(str(place), "first", write_first)[1]
    monkeypatch.setattr(savers, "count_free", lambda _: -1)
    assert save(str(place), "second", look) == (str(place), False)


def find(memory: Path, folder: Path, tag: str | None = None) -> str | None:
    """The tag that a load takes from memory."""
    config = UniversalConfig(save=SaveOptions(memory=str(memory)))
    found = find_in_memory(config, str(folder), tag, Comm())
    return found and found.tag


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """One that this process saves into, so that nobody writes what is pending."""
    made = Job(os.path.join(find_root(str(tmp_path / "memory")), name_job()))
    made.own()
    return made


def test_a_load_without_a_tag_takes_what_latest_is_to_name(job: Job, tmp_path: Path) -> None:
    make_save(job, str(tmp_path / "place"), tag="a", step=3)
    make_save(job, str(tmp_path / "place"), tag="best", step=4, latest=False)
    assert find(tmp_path / "memory", tmp_path / "place") == "a"
    assert find(tmp_path / "memory", tmp_path / "place", "best") == "best"
    assert find(tmp_path / "memory", tmp_path / "place" / "best") == "best"
    assert find(tmp_path / "memory", tmp_path / "place" / "elsewhere") is None


def test_what_a_place_does_not_count_hides_no_other_save(job: Job, tmp_path: Path) -> None:
    """The later one has been written, and who rolled back has named another."""
    place = tmp_path / "place"
    make_save(job, str(place), tag="abandoned", step=9)
    assert write(job)
    assert find(tmp_path / "memory", place) == "abandoned"
    write_source(place, 7).rename(place / "earlier")
    (place / "latest").write_text("earlier")
    assert find(tmp_path / "memory", place) is None
    make_save(job, str(place), tag="next", step=5)
    assert find(tmp_path / "memory", place) == "next"


def test_what_was_dropped_for_a_later_save_is_not_loaded(job: Job, tmp_path: Path) -> None:
    """A run that was rolled back has gone on to later steps than the one that follows it."""
    place = tmp_path / "place"
    made = make_save(job, str(place), tag="dropped", step=9)
    made.note_done(made.places[0], "")
    write_source(place, 7)
    (place / "latest").write_text(TAG)
    assert find(tmp_path / "memory", place) is None
    assert find(tmp_path / "memory", place, "dropped") == "dropped"


def test_what_was_dropped_for_one_that_never_came_is_loaded(job: Job, tmp_path: Path) -> None:
    """The node with the other part of that one is lost."""
    place = tmp_path / "place"
    made = make_save(job, str(place), tag="dropped", step=4)
    later = make_save(job, str(place), tag="next", step=5, nodes=2)
    made.note_done(made.places[0], "")
    write_source(place, 7)
    (place / "latest").write_text(TAG)
    assert find(tmp_path / "memory", place) == "dropped"
    later.note_done(later.places[0], "mark")
    assert find(tmp_path / "memory", place) is None
    later.remove()
    later = replace(later, node=1)
    Path(later.folder).mkdir()
    later.write_record()
    later.note_done(later.places[0], "on the first node")  # which has not come to that
    assert find(tmp_path / "memory", place) == "dropped"


def test_a_writer_that_cannot_be_started_stops_no_training(
    engine: FakeEngine, save: Callable[..., tuple[str, bool]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What is in memory is written by the one that is started at the next save, or at the end."""
    place = str(tmp_path / "place")
    with mock.patch.object(savers, "start_writer", side_effect=OSError("no process")):
        assert save(place, TAG, lambda folder: write_source(Path(folder)))[1]
    assert "no process" in caplog.text
    assert find_state(engine).saver.finish() and is_whole(os.path.join(place, TAG))


def test_a_place_that_is_behind_is_told_of_more_and_more_seldom(
    engine: FakeEngine, save: Callable[..., tuple[str, bool]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with mock.patch.object(savers, "start_writer", side_effect=OSError("no process")):
        for engine.global_steps in range(10, 100, 10):
            assert save(str(tmp_path / "place"), f"step{engine.global_steps}", lambda _: None)[1]
    find_state(engine).saver.job.remove()
    assert re.findall(r"is (\d+) steps behind", caplog.text) == ["10", "20", "40"]


def test_swap_files_that_memory_has_no_room_for_are_copied_by_deepspeed(
    save: Callable[..., tuple[str, bool]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """Found in the midst of a save: no rank is to wait for another one then, in DeepSpeed's own barrier."""
    (tmp_path / "nvme").mkdir()
    (tmp_path / "nvme" / "swapped").write_text("state")
    copytree, place = shutil.copytree, str(tmp_path / "place")

    def copy(source: str, destination: str, **options: Any) -> str:
        if destination.startswith(place):
            return copytree(source, destination, **options)
        raise shutil.Error([(source, destination, "[Errno 28] No space left on device")])

    def write_files(folder: str) -> None:
        write_source(Path(folder))
        shutil.copytree(str(tmp_path / "nvme"), os.path.join(folder, TAG, "offloaded_tensors"), dirs_exist_ok=True)

    monkeypatch.setattr(shutil, "copytree", copy)
    assert not save(place, TAG, write_files)[1]
    assert "memory is full by now" in caplog.text and "No space left" in caplog.text
    assert (tmp_path / "place" / TAG / "offloaded_tensors" / "swapped").read_text() == "state"
    with pytest.raises(shutil.Error):
        shutil.copytree(str(tmp_path / "nvme"), str(tmp_path / "elsewhere"))


def test_memory_that_is_removed_while_the_job_lives_stops_no_training(
    engine: FakeEngine, save: Callable[..., tuple[str, bool]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The saves in it are lost, the next one is not."""
    for place in "first", "second":
        assert save(str(tmp_path / place), TAG, lambda folder: write_source(Path(folder)))[1]
        assert find_state(engine).saver.finish() and is_whole(str(tmp_path / place / TAG))
        os.rename(tmp_path / "memory", tmp_path / f"gone from {place}")  # the writer may be at it
    assert caplog.text.count("while the job runs") == 1


def test_folders_may_lie_at_home_and_name_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NVME", str(tmp_path / "nvme"))
    monkeypatch.delenv("SCRATCH", raising=False)
    assert SaveTier(place="~/run").place == str(tmp_path / "run")
    assert [os.path.dirname(find_root(each)) for each in ("~/memory", "$NVME")] == [
        str(tmp_path / "memory"),
        str(tmp_path / "nvme"),
    ]
    with pytest.raises(ConfigError, match="SCRATCH"):
        find_root("$SCRATCH/memory")


@pytest.mark.parametrize("kind", ["link", "dangling", "file", "fifo", "mode", "another's"])
def test_a_folder_that_another_user_may_have_made_is_refused(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resume loads what lies in it."""
    root = tmp_path / f"deepspeed_ucp-{os.getuid()}"
    if kind == "link":
        (tmp_path / "theirs").mkdir(mode=0o700)
        root.symlink_to(tmp_path / "theirs")
    elif kind == "dangling":
        root.symlink_to(tmp_path / "theirs")
    elif kind == "file":
        root.write_text("")
    elif kind == "fifo":
        os.mkfifo(root)
    else:
        root.mkdir(mode=0o700)
        root.chmod(0o777 if kind == "mode" else 0o700)
    if kind == "another's":
        another = os.getuid() + 1
        monkeypatch.setattr(os, "getuid", lambda: another)
        root.rename(tmp_path / f"deepspeed_ucp-{os.getuid()}")
    with pytest.raises(StorageError, match="Remove it, or name another folder"):
        find_root(str(tmp_path))
    assert not (tmp_path / "theirs").is_dir() or kind == "link"


def test_jobs_that_others_may_have_made_are_none_of_ours(tmp_path: Path) -> None:
    root = find_root(str(tmp_path))
    names = [name_job() for _ in range(3)]
    for name in names[:2]:
        os.mkdir(os.path.join(root, name), mode=0o700)
    os.chmod(os.path.join(root, names[1]), 0o722)
    os.symlink(os.path.join(root, names[0]), os.path.join(root, names[2]))
    assert [job.name for job in list_jobs(root)] == [names[0]]


@pytest.mark.parametrize("removed", ["all", "content", "nothing"])
def test_a_removed_folder_is_told_of_before_memory_takes_its_place(
    removed: str, job: Job, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever removed it may want to start from scratch."""
    place = tmp_path / "place"
    make_save(job, str(place), tag="first")
    assert find(tmp_path / "memory", place) == "first" and caplog.text == ""  # nothing was ever there
    assert write(job)
    make_save(job, str(place), tag="second", step=9)
    if removed != "nothing":
        shutil.rmtree(place)
        if removed == "content":
            place.mkdir()
    assert find(tmp_path / "memory", place) == "second"
    told = f"{place} holds none of the checkpoints that were written there (first)"
    assert (told in caplog.text and f"rm -r {job.folder}" in caplog.text) is (removed != "nothing")


@pytest.mark.parametrize("end", ["normal", "preempted"])
def test_memory_is_freed_by_a_job_that_ends_normally(
    end: str, engine: FakeEngine, save: Callable[..., tuple[str, bool]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert save(str(tmp_path / "place"), TAG, lambda folder: write_source(Path(folder)))[1]
    saver = find_state(engine).saver
    monkeypatch.setattr(sys, "last_value", None, raising=False)
    if end == "preempted":
        savers.keep_memory()
    saver.close()
    assert is_whole(str(tmp_path / "place" / TAG))
    assert bool(saver.job.list_saves()) is (end != "normal")
    wait_until(lambda: not is_locked(saver.job) and os.path.exists(saver.job.folder) is (end != "normal"))


def test_two_engines_that_save_into_one_folder_are_told_of(
    engine: FakeEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One that goes on in the place of another is none of two."""
    other, place = FakeEngine(**vars(engine)), str(tmp_path / "place")
    config = UniversalConfig(save=SaveOptions(memory=str(tmp_path / "memory")))
    other.global_steps += 1
    with mock.patch.object(savers, "start_writer", side_effect=OSError("no process")):
        for tag, told in ("first", 0), ("second", 1), ("third", 1):
            for each in engine, other:
                save_into_memory(each, config, place, tag, lambda _: None, latest=True)
            assert caplog.text.count("two engines save") == told
            other.global_steps = engine.global_steps
    for each in engine, other:
        find_state(each).saver.job.remove()


def test_two_engines_do_not_write_over_each_others_tags(
    engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does one engine that saves different steps into two folders."""
    other = FakeEngine(**vars(engine))
    options = SaveOptions(memory=str(tmp_path / "memory"), to=[SaveTier(place=str(tmp_path / "place"))])
    config = UniversalConfig(save=options)

    def save(engine: FakeEngine, folder: str, tag: str) -> None:
        save_into_memory(engine, config, str(tmp_path / folder), tag, lambda _: None, latest=True)

    with mock.patch.object(savers, "start_writer", side_effect=OSError("no process")):
        for folder in ("a", "a", "best"):
            save(engine, folder, "step")
        with pytest.raises(StorageError, match="Give each engine another place"):
            save(other, "b", "step")
        engine.global_steps += 1
        with pytest.raises(StorageError, match="or each save another tag"):
            save(engine, "a", "step")
        save(other, "b", "other")
    for each in (engine, other):
        find_state(each).saver.job.remove()


def test_a_tag_that_was_saved_anew_without_the_plugin_counts(job: Job, tmp_path: Path) -> None:
    """At the same step, and below the seal that is left of the older save."""
    place = tmp_path / "place"
    make_save(job, str(place))
    assert write(job)
    assert find(tmp_path / "memory", place) == TAG
    write_source(tmp_path / "anew", 7)
    shutil.copytree(tmp_path / "anew" / TAG, place / TAG, dirs_exist_ok=True, copy_function=shutil.copyfile)
    assert find(tmp_path / "memory", place) is None


def test_another_releases_saves_stay(save: Callable[..., tuple[str, bool]], tmp_path: Path) -> None:
    """They may be pending."""
    other = Job(os.path.join(find_root(str(tmp_path / "memory")), name_job()))
    made = make_save(other, str(tmp_path / "place"))
    record = Path(made.folder) / "save-0.json"
    record.write_text(record.read_text().replace('"keep"', '"later_name"'))
    assert save(str(tmp_path / "place"), TAG, lambda folder: write_source(Path(folder)))[1]
    assert record.exists()


def test_saves_that_come_while_the_writer_starts_have_the_same_writer(
    engine: FakeEngine, save: Callable[..., tuple[str, bool]], tmp_path: Path
) -> None:
    """Two would wait for each other: the one that has the lock is told nothing."""
    place = str(tmp_path / "place")
    with mock.patch.object(savers, "start_writer", side_effect=savers.start_writer) as start:
        for tag in ("a", "b"):
            assert save(place, tag, lambda folder, tag=tag: write_source(Path(folder)).rename(Path(folder) / tag))[1]
        assert find_state(engine).saver.finish()
        assert save(place, "c", lambda folder: write_source(Path(folder)).rename(Path(folder) / "c"))[1]
        assert find_state(engine).saver.wait(PATIENCE)
    assert start.call_count == 1 and is_whole(os.path.join(place, "c"))


def test_a_writer_that_was_killed_is_followed_by_another(
    engine: FakeEngine, save: Callable[..., tuple[str, bool]], tmp_path: Path
) -> None:
    place = str(tmp_path / "place")
    assert save(place, "a", lambda folder: write_source(Path(folder)).rename(Path(folder) / "a"))[1]
    saver = find_state(engine).saver
    assert saver.finish()
    os.kill(find_writer(saver.job), signal.SIGKILL)
    assert save(place, "b", lambda folder: write_source(Path(folder)).rename(Path(folder) / "b"))[1]
    assert saver.finish() and is_whole(os.path.join(place, "b"))


def test_one_rank_of_a_folder_of_memory_keeps_it(tmp_path: Path) -> None:
    """Launchers may give each rank the local rank 0, and nodes may be containers of one machine."""

    class TwoRanks(Comm):
        size, others = 2, tmp_path / "memory"

        def gather(self, value: Any) -> list[Any]:
            if self.others == tmp_path / "memory":
                return [value, value]
            found = os.stat(find_root(str(self.others)))
            return [value, (self._pack((identify_host(), found.st_dev, found.st_ino)), None)]

    config, comm = UniversalConfig(save=SaveOptions(memory=str(tmp_path / "memory"))), TwoRanks()
    assert savers.list_first(config, comm) == [0, 0]
    comm.others = tmp_path / "container"
    assert savers.list_first(config, comm) == [0, 1]


def test_only_the_rank_that_keeps_the_folder_starts_a_writer(job: Job, tmp_path: Path) -> None:
    make_save(job, str(tmp_path / "place"))
    config = UniversalConfig(save=SaveOptions(memory=str(tmp_path / "memory"), wait_s=0.0))
    with mock.patch.object(savers, "start_writer") as start:
        savers.Saver(config, job.name, 1, [0, 0]).close()
    assert not start.called


def test_a_rank_that_fails_alone_does_not_go_on_to_the_place(engine: FakeEngine) -> None:
    """The others would wait for it in what they do from memory."""
    found, error = Found("folder", TAG, 3), CheckpointError("alone")
    config, comm = UniversalConfig(save=SaveOptions()), Comm()
    with mock.patch.multiple(hook, find_in_memory=mock.DEFAULT, resume=mock.DEFAULT) as mocked:
        mocked["find_in_memory"].return_value, mocked["resume"].side_effect = found, error

        def load() -> object:
            return hook._load_from_memory(engine, "place", None, LoadArguments(), config, mock.Mock(), [], comm)

        assert load() is None
        comm.size = 2
        with pytest.raises(CheckpointError, match="alone"):
            load()
        error.shared = True
        assert load() is None


def test_what_a_load_from_memory_held_is_given_back_before_that_of_the_place(engine: FakeEngine) -> None:
    arguments = engine, "place", None, LoadArguments(), UniversalConfig(save=SaveOptions()), mock.Mock(), [], Comm()
    with (
        without_collector() as failing,
        mock.patch.multiple(hook, find_in_memory=mock.DEFAULT, resume=mock.DEFAULT) as mocked,
    ):
        mocked["find_in_memory"].return_value = Found("folder", TAG, 3)
        mocked["resume"].side_effect = lambda *_, **__: failing.fail(CheckpointError("damaged."))
        assert hook._load_from_memory(*arguments) is None  # type: ignore[arg-type]
        assert failing.held == 0


def test_a_living_job_of_another_process_is_not_read(job: Job, tmp_path: Path) -> None:
    """Its next save writes over the memory of an older one, also while that is read."""
    make_save(job, str(tmp_path / "place"))
    assert find(tmp_path / "memory", tmp_path / "place") == TAG
    job.disown()
    with open(os.path.join(job.folder, "owner")) as other:
        fcntl.flock(other, fcntl.LOCK_EX)  # as another process would
        assert find(tmp_path / "memory", tmp_path / "place") is None


def test_places_of_saves_are_read_too() -> None:
    config = UniversalConfig(
        also=["/also"], save=SaveOptions(to=[SaveTier(place="/fast"), SaveTier(place="s3://b/run")])
    )
    assert config.with_tiers().also == ["/also", "/fast", "s3://b/run"]
    assert UniversalConfig(also=["/also"], save=SaveOptions()).with_tiers().also == ["/also"]


def test_a_save_that_no_retry_can_mend_ends_the_wait(
    engine: FakeEngine, save: Callable[..., tuple[str, bool]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The writer's process gives it up, and the process that trains tells why."""
    place = tmp_path / "place"
    assert save(str(place), TAG, lambda folder: set_counter(write_source(Path(folder)), "global_samples", 6.5))[1]
    finish_saves(engine)
    assert caplog.text.count("global_samples is 6.5") == 1 and "is in memory alone" in caplog.text
    with pytest.raises(StorageError, match=rf"{TAG}: missing at {place} \(.*global_samples is 6.5"):
        finish_saves(engine, required=True)
    assert caplog.text.count("global_samples is 6.5") == 1
    job = find_state(engine).saver.job
    assert (Path(job.folder) / "log").read_text().count("global_samples is 6.5") == 1
    (left,) = job.list_saves()
    assert [each.folder for each in left.list_pending()] == [str(place)] and not (place / "latest").exists()


def test_snapshots_count_apart_from_a_scripts_saves(engine: FakeEngine, tmp_path: Path) -> None:
    """They never go to the folder that a load names, and take no turn of a script's save."""
    places = [SaveTier(place=str(tmp_path / "fast")), SaveTier(place=str(tmp_path / "slow"), every=2, keep=3)]
    told: list[tuple[bool, list[tuple[str, int | None]]]] = []
    for to in ([], places):
        options = SaveOptions(memory=str(tmp_path / "memory"), wait_s=PATIENCE, to=to)
        find_state(engine).saver = None
        for by_itself in (True, True, False, True, False):
            with mock.patch.object(savers.Saver, "tell_writer"):
                save_into_memory(
                    engine, UniversalConfig(save=options), str(tmp_path / "saved"), TAG,
                    lambda folder: write_source(Path(folder)), latest=True, by_itself=by_itself,
                )  # fmt: skip
            made = find_state(engine).saver.job.list_saves()[-1]
            assert made.by_itself is by_itself
            told.append((by_itself, [(os.path.basename(each.folder), each.keep) for each in made.places]))
    saved, fast = [("saved", None)], ("fast", None)
    assert [each for by_itself, each in told[:5] if not by_itself] == [saved, saved]
    assert [each for by_itself, each in told[:5] if by_itself] == [[]] * 3
    assert [each for by_itself, each in told[5:] if not by_itself] == [[fast], [fast, ("slow", 3)]]
    often, seldom = [("fast", 1)], [("fast", 1), ("slow", 1)]
    assert [each for by_itself, each in told[5:] if by_itself] == [often, seldom, often]


def test_a_dead_jobs_snapshot_stays_until_there_is_another(
    engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing else has its state, nor that of another folder's snapshot: the message says how to remove it by hand."""
    dead = Job(os.path.join(find_root(str(tmp_path / "memory")), name_job()))
    for number, name in enumerate(("saved", "older", "other")):
        folder = str(tmp_path / name.replace("older", "other"))
        make_save(dead, folder, tag=name, step=number, places=(), by_itself=True)
    config = UniversalConfig(save=SaveOptions(memory=str(tmp_path / "memory"), wait_s=PATIENCE))
    monkeypatch.setattr(savers, "count_free", lambda _: -1)
    caplog.set_level(logging.INFO)
    with pytest.raises(StorageError, match="MiB are free") as raised:
        save_into_memory(engine, config, str(tmp_path / "saved"), TAG, mock.Mock(), latest=True, by_itself=True)
    assert [save.tag for save in dead.list_saves()] == ["saved", "other"]
    assert f"removed to make room, older of {tmp_path / 'other'}" in caplog.text
    assert f"other (step 2) of {tmp_path / 'other'}" in str(raised.value) and f"rm -r {dead.folder}" in str(
        raised.value
    )
    make_save(other := Job(os.path.join(find_root(str(tmp_path / "memory")), name_job())), str(tmp_path / "third"))
    make_save(other, str(tmp_path / "third"), places=(), by_itself=True)
    save_into_memory(engine, config, str(tmp_path / "third"), TAG, mock.Mock(), latest=True)
    assert other.list_saves() == []  # DeepSpeed has saved
    monkeypatch.undo()
    save_into_memory(
        engine, config, str(tmp_path / "saved"), TAG, lambda folder: write_source(Path(folder)), latest=True,
        by_itself=True,
    )  # fmt: skip
    assert [save.tag for save in dead.list_saves()] == ["other"]


def test_a_dead_run_of_a_folder_next_to_it_keeps_what_is_in_memory_alone(
    save: Callable[..., tuple[str, bool]], tmp_path: Path
) -> None:
    """Trainers have a folder for each save, and so do runs."""
    dead = [Job(os.path.join(find_root(str(tmp_path / "memory")), name_job())) for _ in range(3)]
    make_save(dead[0], str(tmp_path / "runs" / "a"), places=(), by_itself=True)
    make_save(dead[1], str(tmp_path / "runs" / "b"))
    make_save(dead[2], str(tmp_path / "runs" / "c"), places=(), by_itself=True)
    assert write(dead[1])
    assert save(str(tmp_path / "runs" / "c"), TAG, lambda folder: write_source(Path(folder)))[1]
    assert [bool(job.list_saves()) for job in dead] == [True, False, False]


def test_a_dead_jobs_pending_save_stays_until_its_tag_is_saved_again(
    engine: FakeEngine, save: Callable[..., tuple[str, bool]], tmp_path: Path
) -> None:
    """Its writer may have failed for long."""
    place, dead = str(tmp_path / "place"), Job(os.path.join(find_root(str(tmp_path / "memory")), name_job()))
    make_save(dead, place, tag="pending")
    with mock.patch.object(savers, "start_writer", side_effect=OSError("no process")):
        for tag, left in (("next", ["pending"]), ("pending", [])):
            savers._started.clear()
            assert save(place, tag, lambda folder, tag=tag: write_source(Path(folder)).rename(Path(folder) / tag))[1]
            assert [each.tag for each in dead.list_saves()] == left
        savers._started.clear()


def wait_for_save(seconds: float) -> mock._patch[SimpleNamespace]:
    """A clock in the place of :mod:`time` that sleeping alone moves, so much at a time."""
    now = [0.0]

    def sleep(_: float) -> None:
        now[0] += seconds
        time.sleep(0.01)

    return mock.patch.object(savers, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))


def test_a_save_waits_for_the_memory_of_pending_ones(
    engine: FakeEngine, save: Callable[..., tuple[str, bool]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as they are written: nothing that a script has saved is dropped."""

    def count(_: str) -> int:
        saver = find_state(engine).saver
        return -1 if saver is not None and savers.list_late(saver.job.list_saves()) else 1 << 40

    monkeypatch.setattr(savers, "count_free", count)
    place, tags = tmp_path / "place", ["best", "a", "b", "last"]
    for tag in tags:
        assert save(str(place), tag, lambda folder, tag=tag: write_source(Path(folder)).rename(Path(folder) / tag))[1]
    finish_saves(engine, required=True)
    assert all(is_whole(str(place / tag)) for tag in tags) and (place / "latest").read_text() == "last"


def test_a_save_behind_a_place_that_fails_waits_once_and_is_written_without_memory(
    engine: FakeEngine,
    save: Callable[..., tuple[str, bool]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What is pending comes to the place later, but `latest` does not go back to it, nor a tag that was saved anew."""
    place = tmp_path / "place"
    place.write_text("no folder")

    def write_to(folder: str, tag: str) -> None:
        if place.is_file():
            place.unlink()
        write_source(Path(folder), 7).rename(Path(folder) / tag)
        (Path(folder) / "latest").write_text(tag)

    for tag in "first", "again":
        assert save(str(place), tag, lambda folder, tag=tag: write_source(Path(folder)).rename(Path(folder) / tag))[1]
    saver = find_state(engine).saver
    wait_until(lambda: "not written" in Path(saver.job.folder, "log").read_text())
    monkeypatch.setattr(savers, "count_free", lambda _: -1)
    with mock.patch.object(savers.Saver, "tell_writer"), wait_for_save(PATIENCE / 4) as clock:
        assert not save(str(place), "again", lambda folder: write_to(folder, "again"))[1]
        waited = clock.monotonic()
        assert not save(str(place), "last", lambda folder: write_to(folder, "last"))[1]
        assert waited >= PATIENCE and clock.monotonic() == waited
    assert "still to be written: first, again to" in caplog.text and "last is saved there while" in caplog.text
    assert saver.finish() and is_whole(str(place / "first"))
    assert (place / "latest").read_text() == "last" and not (place / "again" / "ucp_seal.json").exists()


def test_who_requires_saves_hears_which_are_missing_and_why(
    engine: FakeEngine, save: Callable[..., tuple[str, bool]], tmp_path: Path
) -> None:
    """A snapshot is none of them; and those that were lost with the memory are named once."""
    place = tmp_path / "place"
    place.write_text("no folder")
    assert save(str(place), "best", lambda folder: write_source(Path(folder)).rename(Path(folder) / "best"))[1]
    saver = find_state(engine).saver
    make_save(saver.job, str(place), tag="by-itself", by_itself=True)
    wait_until(lambda: "not written" in Path(saver.job.folder, "log").read_text())
    with wait_for_save(PATIENCE / 4):
        finish_saves(engine)
        with pytest.raises(StorageError, match=r"best: missing at .*place \(.*(exists|Not a directory)") as raised:
            finish_saves(engine, required=True)
    assert "by-itself" not in str(raised.value)
    os.rename(saver.job.folder, tmp_path / "removed")
    with pytest.raises(StorageError, match="best: .* was removed"):
        finish_saves(engine, required=True)
