"""Removal of a trainer's folders while a save is pending, without a trainer."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from deepspeed_ucp.comm import Comm
from deepspeed_ucp.config import SaveOptions, SaveTier, UniversalConfig
from deepspeed_ucp.saves import keeping
from deepspeed_ucp.saves.memory import locate
from tests.convert.conversions import write_source
from tests.saves.saving import PATIENCE, TAG, Run, is_whole

CONFIG = UniversalConfig(save=SaveOptions())


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """Folders that lack saves."""
    folders = set[str]()
    saver = SimpleNamespace(list_pending=lambda: folders)
    monkeypatch.setattr(keeping, "list_savers", lambda: [saver])
    yield folders
    folders.clear()
    keeping.remove_postponed()


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., str]:
    """Make a trainer's folder, with a checkpoint and a file of the trainer."""

    def make_folder(name: str, *, own: str = "own", latest: str = TAG) -> str:
        write_source(tmp_path / name)
        (tmp_path / name / "latest").unlink(missing_ok=True)
        for file in filter(None, (own, "latest" if latest else "")):
            (tmp_path / name / file).write_text(latest)
        return str(tmp_path / name)

    return make_folder


def remove(folder: str, *, coming: bool = False) -> bool:
    """Remove a folder as a trainer does; return True if it is removed at once."""
    module = ModuleType("trainer")
    module.shutil = shutil
    with keeping.postpone_removals(module, "own", coming=coming):
        module.shutil.rmtree(folder)
        assert module.shutil.disk_usage is shutil.disk_usage
    assert module.shutil is shutil
    return not os.path.exists(folder)


@pytest.mark.parametrize(
    ("folders", "pending", "is_removed"),
    [
        pytest.param({"a": {}, "b": {}}, "c", True, id="another is complete"),
        pytest.param({"a": {}}, "c", False, id="the last complete one"),
        pytest.param({"a": {}, "b": {"own": ""}}, "c", False, id="another lacks the trainer's file"),
        pytest.param({"a": {}, "b": {"latest": ""}}, "c", False, id="another lacks latest"),
        pytest.param({"a": {"latest": ""}, "b": {}}, "c", True, id="incomplete"),
        pytest.param({"a": {}}, "elsewhere/c", True, id="no pending save next to it"),
        pytest.param({"a": {}, "c": {}}, "c", False, id="another holds an older save and is being written"),
        pytest.param({"a": {}, "b": {}}, "a", False, id="it is being written"),
    ],
)
def test_a_folder_is_kept_until_another_is_complete(
    folders: dict[str, dict[str, str]],
    pending: str,
    is_removed: bool,
    make: Callable[..., str],
    written: set[str],
    tmp_path: Path,
) -> None:
    for name, lacking in folders.items():
        make(name, **lacking)
    written.add(locate(str(tmp_path / pending)))
    for _ in range(1 if is_removed else 2):
        assert remove(str(tmp_path / "a")) == is_removed
    make("d")
    written.clear()
    keeping.remove_postponed()
    assert not os.path.exists(tmp_path / "a") and os.path.exists(tmp_path / "d")


def test_a_new_save_to_a_folder_cancels_its_removal(make: Callable[..., str], written: set[str]) -> None:
    a = make("a")
    assert not remove(a, coming=True)
    assert not keeping.begin_save(a, CONFIG, Comm())  # it holds a save already
    written.clear()
    keeping.remove_postponed()
    assert os.path.exists(a)


def test_modification_times_of_folders_are_the_times_of_their_saves(
    make: Callable[..., str], written: set[str], tmp_path: Path
) -> None:
    """Files that are written later do not make a folder newer."""
    for name in "ab":
        assert keeping.begin_save(tmp_path / name, CONFIG, Comm())
        time.sleep(0.01)
    make("b")
    make("a")
    keeping.restore_times()
    assert os.path.getmtime(tmp_path / "a") < os.path.getmtime(tmp_path / "b")


@pytest.mark.parametrize("save", [SaveOptions(to=[SaveTier(place="/elsewhere")]), None])
def test_a_save_to_another_destination_does_not_complete_the_folder(save: SaveOptions | None, tmp_path: Path) -> None:
    assert not keeping.begin_save(tmp_path / "a", UniversalConfig(save=save), Comm())


def test_pending_saves_of_a_dead_job_are_written_before_the_folder_is_read(tmp_path: Path) -> None:
    config = UniversalConfig(save=SaveOptions(memory=str(tmp_path / "memory"), wait_s=PATIENCE))
    dead = Run(tmp_path)
    dead.save("out/checkpoint-3")
    dead.job.unlock()
    keeping.finish_folders(config, tmp_path / "out", Comm())
    assert is_whole(str(tmp_path / "out" / "checkpoint-3" / TAG))
    keeping.finish_folders(UniversalConfig(), tmp_path / "out", Comm())
