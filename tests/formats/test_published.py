"""A tag whose files are in a folder below it, as an object store has them, or a copy of one."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from deepspeed_ucp.cli.dispatch import main
from deepspeed_ucp.comm import Comm
from deepspeed_ucp.errors import CheckpointError
from deepspeed_ucp.examine.tags import look_at_tag
from deepspeed_ucp.examine.verify import verify_checkpoint
from deepspeed_ucp.formats import check_tag, find_tags, open_checkpoint
from deepspeed_ucp.formats.deepspeed.files import resolve_published
from deepspeed_ucp.formats.latest import find_age, find_checkpoint, holds_foreign, is_sealed
from deepspeed_ucp.formats.open import seal_folder
from deepspeed_ucp.io.paths import join_path
from deepspeed_ucp.load import choice
from deepspeed_ucp.saves.places import find_mark
from deepspeed_ucp.saves.removing import remove_tag
from tests.convert.conversions import write_source

INSIDE = ".ucp-save-job-1-0a1b2c3d"


@pytest.fixture
def tag(tmp_path: Path) -> Path:
    """A sealed tag with its files in a folder below it."""
    made = write_source(tmp_path, 3)
    seal_folder(str(made), Comm())
    names = os.listdir(made)
    (made / INSIDE).mkdir()
    for name in names:
        (made / name).rename(made / INSIDE / name)
    (made / "ucp_published.json").write_text(json.dumps({"folder": INSIDE}))
    (tmp_path / "latest").write_text(made.name)
    return made


def test_a_published_tag_is_found_and_read(tag: Path, tmp_path: Path) -> None:
    place, name = str(tmp_path), tag.name
    assert find_tags(place) == [name] and check_tag(place, name) == str(tag) and find_checkpoint(place) == str(tag)
    assert not holds_foreign(str(tag)) and is_sealed([place], name) and find_mark(place, name)
    index = open_checkpoint(str(tag), Comm())
    assert {os.path.dirname(file.path) for file in index.stored.files} == {str(tag / INSIDE)}
    age = find_age([str(tag)])
    assert age.sealed and age.step == index.run.counters["global_steps"] and age.time > 0
    report = look_at_tag(place, name)
    assert not report.fault and report.topology
    assert verify_checkpoint(str(tag)).whole


def test_files_of_an_earlier_save_in_the_tag_do_not_count(tag: Path, tmp_path: Path) -> None:
    for path in (tag / INSIDE).iterdir():
        (tag / path.name).write_bytes(b"of another save")
    assert (
        open_checkpoint(str(tag), Comm()) and verify_checkpoint(str(tag)).whole and is_sealed([str(tmp_path)], tag.name)
    )


def test_an_unpublished_folder_is_not_read(tag: Path, tmp_path: Path) -> None:
    """An upload that has not come to its end."""
    (tag / "ucp_published.json").unlink()
    assert find_tags(str(tmp_path)) == [] and not is_sealed([str(tmp_path)], tag.name)
    with pytest.raises(CheckpointError, match="no model states"):
        open_checkpoint(str(tag), Comm())


@pytest.mark.parametrize("name", ["..", ".ucp-save-a/../..", "/etc", "other", "", 3, None, ".ucp-save-/x"])
def test_invalid_folder_names_are_refused(name: object, tag: Path) -> None:
    (tag / "ucp_published.json").write_text(json.dumps({"folder": name}))
    with pytest.raises(CheckpointError, match=r"ucp_published\.json"):
        open_checkpoint(str(tag), Comm())


def test_the_commands_take_it(tag: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", str(tmp_path), "--memory", str(tmp_path / "memory")]) == 0
    assert "a resume takes" in capsys.readouterr().out
    assert main(["verify", str(tmp_path)]) == 0
    assert main(["verify", "--seal", str(tag)]) == 0 and not (tag / "ucp_seal.json").exists()
    assert main(["convert", str(tmp_path), str(tmp_path / "atomic")]) == 0


def test_it_is_removed(tag: Path, tmp_path: Path) -> None:
    (tag / "others").write_text("")
    assert is_sealed([str(tmp_path)], tag.name)
    remove_tag(str(tmp_path), tag.name)
    assert os.listdir(tag) == ["others"]


def test_deepspeed_cannot_load_it(tag: Path) -> None:
    index = open_checkpoint(str(tag), Comm())
    assert choice._list_elsewhere(index, str(tag)) == [choice._BELOW]
    assert "below the tag" in choice._BELOW
    assert choice._list_elsewhere(SimpleNamespace(stored=index.stored), resolve_published(str(tag))) == []


def test_relative_paths_start_at_the_tag() -> None:
    assert join_path(f"/run/tag/{INSIDE}", "../ucp_frozen-1/file") == "/run/ucp_frozen-1/file"
    assert join_path(f"s3://run/tag/{INSIDE}", "../ucp_frozen-1/file") == "s3://run/ucp_frozen-1/file"
