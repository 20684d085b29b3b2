"""Search of loads for saves in memory."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from deepspeed_ucp import hook
from deepspeed_ucp.comm import Comm
from deepspeed_ucp.config import SaveOptions, SaveTier, UniversalConfig
from deepspeed_ucp.errors import CheckpointError
from deepspeed_ucp.saves.search import FoundSave, find_in_memory
from tests.convert.conversions import write_source
from tests.saves.saving import TAG, Engine, Run, set_counter
from tests.support.held import without_collector

Find = Callable[..., str | None]


@pytest.fixture
def destination(tmp_path: Path) -> Path:
    """The script's folder."""
    return tmp_path / "destination"


@pytest.fixture
def find(tmp_path: Path, destination: Path) -> Find:
    """Return a function that finds the tag that a load takes from memory, or None."""

    def find(tag: Any = None, below: str = "", to: Sequence[Path] = ()) -> str | None:
        tiers = [SaveTier(place=str(each)) for each in to]
        config = UniversalConfig(save=SaveOptions(memory=str(tmp_path / "memory"), to=tiers))
        found = find_in_memory(config, str(destination / below), tag, Comm())
        return found and found.tag

    return find


def test_a_load_without_a_tag_takes_the_save_for_latest(run: Run, find: Find, destination: Path) -> None:
    """A tag may be a number."""
    run.save(tag="a", step=3)
    run.save(tag="7", step=4, latest=False)
    assert [find(), find("7"), find(7), find(below="7"), find(below="elsewhere")] == ["a", "7", "7", "7", None]


def test_a_load_takes_the_later_job_of_equal_steps(run: Run, find: Find, destination: Path) -> None:
    """The older job has more saves."""
    older = Run(run.folder, name="20000101-000000-00000000")
    for made, tag in ((older, "first"), (older, "older"), (run, "later")):
        made.save(tag=tag, step=3, destinations={})
    assert find() == "later"


def test_a_load_ignores_a_later_step_that_was_rolled_back(run: Run, find: Find, destination: Path) -> None:
    run.save(tag="abandoned", step=9)
    assert run.write() and find() == "abandoned"
    write_source(destination, 7).rename(destination / "earlier")
    (destination / "latest").write_text("earlier")
    assert find() is None
    run.save(tag="next", step=5)
    assert find() == "next"


@pytest.mark.parametrize("is_tag_given", [False, True])
@pytest.mark.parametrize(("stored", "expected"), [(9, None), (3, TAG), (2, TAG)])
def test_a_load_prefers_a_later_save_at_a_destination_to_an_older_one_in_memory(
    stored: int, expected: str | None, is_tag_given: bool, run: Run, find: Find, destination: Path, tmp_path: Path
) -> None:
    """With ``to`` the script's folder stays empty."""
    tier = tmp_path / "tier"
    run.save(step=3, destinations={str(tier): None})
    set_counter(write_source(tier), "global_steps", stored)
    (tier / "latest").write_text(TAG)
    assert find(TAG if is_tag_given else None, to=[tier]) == expected


@pytest.mark.parametrize("step", [9, 4])
def test_a_dropped_save_is_loaded_only_without_a_later_one(step: int, run: Run, find: Find, destination: Path) -> None:
    """The node with the other part of the later save may be lost. A run that was rolled back has later steps."""
    dropped = run.save(tag="dropped", step=step)
    write_source(destination, 7)
    (destination / "latest").write_text(TAG)
    later = run.save(tag="next", step=5, nodes=2) if step == 4 else None
    dropped.note("done", {str(destination): ""})
    if later is None:
        assert find() is None and find("dropped") == "dropped"
        return
    assert find() == "dropped"
    later.note("done", {str(destination): "mark"})
    assert find() is None
    later.remove()
    later = replace(later, node=1)
    Path(later.folder).mkdir()
    later.write_record()
    later.note("done", {str(destination): "on the first node"})  # not yet published
    assert find() == "dropped"


@pytest.mark.parametrize("removed", ["all", "content", "nothing"])
@pytest.mark.parametrize("has_tiers", [False, True])
def test_a_load_from_memory_warns_if_the_user_emptied_all_destinations(
    removed: str, has_tiers: bool, run: Run, find: Find, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    destination = tmp_path / ("tier" if has_tiers else "destination")
    to = [destination] if has_tiers else []

    run.save(tag="first", step=1, destinations={str(destination): None})
    assert find(to=to) == "first" and caplog.text == ""  # the place never had a save
    assert run.write()
    run.save(tag="second", step=9, destinations={str(destination): None})
    if removed != "nothing":
        shutil.rmtree(destination)
    if removed == "content":
        destination.mkdir()
    assert find(to=to) == "second"
    text = (
        f"{destination} has no checkpoint, although the run wrote saves there: it continues from second "
        "in memory, step 9"
    )
    assert (text in caplog.text and f"rm -r {run.job.folder}" in caplog.text) is (removed != "nothing")


def test_a_tag_that_was_overwritten_without_the_plugin_is_loaded(run: Run, find: Find, destination: Path) -> None:
    """It has the same step, and its folder has the seal of the older save."""
    run.save()
    assert run.write() and find() == TAG
    anew = write_source(destination.parent / "anew", 7)
    shutil.copytree(anew, destination / TAG, dirs_exist_ok=True, copy_function=shutil.copyfile)
    assert find() is None


def test_a_load_skips_memory_of_another_running_job(run: Run, find: Find, destination: Path) -> None:
    """Its next save may overwrite an older one during a read."""
    run.save()
    assert find() == TAG
    run.job.unlock()
    with open(os.path.join(run.job.folder, "owner")) as other:
        fcntl.flock(other, fcntl.LOCK_EX)  # like another process
        assert find() is None


def test_an_error_of_one_rank_in_a_load_from_memory_does_not_fall_back() -> None:
    """The other ranks would wait for it in their load from memory. A failed load frees its memory."""
    config, comm = UniversalConfig(save=SaveOptions()), Comm()
    with (
        without_collector() as failing,
        mock.patch.object(hook, "find_in_memory", return_value=FoundSave("folder", TAG, 3)),
    ):

        def load(error: CheckpointError, size: int = 1) -> object:
            comm.size = size
            return hook._load_from_memory(
                Engine(), "destination", None, config, lambda *_, **__: failing.fail(error), mock.Mock(), comm
            )

        assert load(CheckpointError("alone")) is None and failing.held == 0
        with pytest.raises(CheckpointError, match="alone"):
            load(CheckpointError("alone"), size=2)
        error = CheckpointError("alone")
        error.shared = True
        assert load(error, size=2) is None


def test_destinations_are_searched_by_loads() -> None:
    tiers = [SaveTier(place="/fast"), SaveTier(place="s3://b/run")]
    for to, also in ((tiers, ["/also", "/fast", "s3://b/run"]), ([], ["/also"])):
        assert UniversalConfig(also=["/also"], save=SaveOptions(to=to)).with_tiers().also == also
