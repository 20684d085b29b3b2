"""Saves in other forms: loads and commands accept them like the usual form.

The fast writer of DeepSpeed names its files `<name>-<writer>.<writers>`. An object store has the files of a tag in a
folder below it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from deepspeed_ucp.cli.dispatch import main
from deepspeed_ucp.comm import Comm
from deepspeed_ucp.errors import CheckpointError
from deepspeed_ucp.examine.tags import look_at_tag
from deepspeed_ucp.examine.verify import verify_checkpoint
from deepspeed_ucp.formats import check_tag, find_tags
from deepspeed_ucp.formats.deepspeed.files import resolve_published
from deepspeed_ucp.formats.deepspeed.seal import remove_seal
from deepspeed_ucp.formats.latest import find_age, find_checkpoint, holds_foreign, is_sealed
from deepspeed_ucp.formats.open import seal_folder
from deepspeed_ucp.io.paths import join_path
from deepspeed_ucp.load import choice
from deepspeed_ucp.saves.destinations import find_mark
from deepspeed_ucp.saves.publishing import remove_tag
from tests.convert.conversions import write_source
from tests.formats.saves import STATES, check_refused, open_alone, shard
from tests.support.conversion import convert_checkpoint
from tests.synth import Model, Param, Topology, random_state, write_checkpoint

MODEL = Model((Param("a", (3, 5)), Param("b", (7,))))


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """A save of four ranks, and the same save written by two writers and by two ranks without writer."""
    topology = Topology(1, 4)
    plain = write_checkpoint(tmp_path / "plain", MODEL, random_state(MODEL, 0), topology)
    fast = write_checkpoint(tmp_path / "fast", MODEL, random_state(MODEL, 0), topology)
    for rank, writer in enumerate(("0.2", "0.1", "1.2", "0.1")):
        (fast / shard(rank)).rename(fast / f"{shard(rank)}-{writer}")
    for writer in ("0.1", "1.2"):
        (fast / f"{STATES}-{writer}").write_bytes((fast / STATES).read_bytes())
    (fast / STATES).rename(fast / f"{STATES}-0.2")
    return plain, fast


def test_other_ranks_copies_are_warnings_even_if_damaged(folders: tuple[Path, Path]) -> None:
    fast = folders[1]
    (fast / f"{STATES}-0.1").write_bytes(b"torn")
    found = verify_checkpoint(str(fast))
    assert {fault.file for fault in found.faults} == {f"{STATES}-0.1", f"{STATES}-1.2"}
    assert all(fault.warning for fault in found.faults)
    assert any(f"another rank's copy of {STATES}-0.2" in fault.text for fault in found.faults)
    assert len(found.files) == 7


@pytest.mark.parametrize("name", [f"{STATES}-0.2", f"{shard(2)}-1.2"])
def test_a_damaged_file_of_the_fast_writer_is_refused_by_name(folders: tuple[Path, Path], name: str) -> None:
    path = folders[1] / name
    path.write_bytes(path.read_bytes()[:-40])
    check_refused(folders[1], f"{name}: no zip directory")


def overwrite_in_place(folder: Path, model: Model, writer: str) -> Path:
    """Write over a tag like a second save: a longer old file keeps its end."""
    topology = Topology(1, 2)
    plain = write_checkpoint(folder / "once", model, random_state(model, 0), topology)
    tag = folder / "tag"
    tag.mkdir(exist_ok=True)
    for file in plain.iterdir():
        path, data = tag / f"{file.name}-{writer}", file.read_bytes()
        path.write_bytes(data + (path.read_bytes()[len(data) :] if path.exists() else b""))
    return tag


@pytest.mark.parametrize(
    ("rows", "writer", "words"),
    [
        (3, "0.2", r"does not truncate files .* Next time save into a new tag, or delete the old one first"),
        (300, "0.4", r"two saves .* Remove the older save's files; DeepSpeed's fast writer leaves them"),
    ],
    ids=["shorter", "other writers"],
)
def test_files_with_the_end_of_older_ones_are_refused(tmp_path: Path, rows: int, writer: str, words: str) -> None:
    overwrite_in_place(tmp_path, Model((Param("a", (300, 5)),)), "0.2")
    tag = overwrite_in_place(tmp_path, Model((Param("a", (rows, 5)),)), writer)
    check_refused(tag, words)


def test_a_missing_file_is_reported_by_name(folders: tuple[Path, Path]) -> None:
    (folders[1] / f"{shard(3)}-0.1").unlink()
    check_refused(folders[1], f"{shard(3)} is missing")


def test_seal_and_convert_accept_files_of_the_fast_writer(folders: tuple[Path, Path], tmp_path: Path) -> None:
    conversions = [tmp_path / name for name in ("of-plain", "of-fast")]
    for folder, destination in zip(folders, conversions, strict=True):
        seal_folder(str(folder), Comm())
        convert_checkpoint(str(folder), str(destination))
    left, right = ({p.relative_to(m): p.read_bytes() for p in m.rglob("*.pt")} for m in conversions)
    assert left == right
    (folders[1] / f"{shard(0)}-0.2").write_bytes((folders[0] / shard(0)).read_bytes() + b"\0")
    with pytest.raises(CheckpointError):
        open_alone(folders[1])


# -- a tag whose files are in a folder below it -----------------------------------------------------------------------

INSIDE = ".ucp-save-job-1-0a1b2c3d"


@pytest.fixture
def tag(tmp_path: Path) -> Path:
    """A sealed tag with its files in a folder below it."""
    source = write_source(tmp_path, 3)
    seal_folder(str(source), Comm())
    names = os.listdir(source)
    (source / INSIDE).mkdir()
    for name in names:
        (source / name).rename(source / INSIDE / name)
    (source / "ucp_published.json").write_text(json.dumps({"folder": INSIDE}))
    (tmp_path / "latest").write_text(source.name)
    return source


def test_a_published_tag_is_found_and_loaded(tag: Path, tmp_path: Path) -> None:
    place, name = str(tmp_path), tag.name
    assert find_tags(place) == [name] and check_tag(place, name) == str(tag) and find_checkpoint(place) == str(tag)
    assert not holds_foreign(str(tag)) and is_sealed([place], name) and find_mark(place, name)
    index = open_alone(tag)
    assert {os.path.dirname(file.path) for file in index.files} == {str(tag / INSIDE)}
    age = find_age([str(tag)])
    assert age.sealed and age.step == index.counters["global_steps"] and age.time > 0
    report = look_at_tag(place, name)
    assert not report["fault"] and report["topology"]
    assert verify_checkpoint(str(tag)).whole


def test_files_of_an_earlier_save_in_the_tag_do_not_count(tag: Path, tmp_path: Path) -> None:
    for path in (tag / INSIDE).iterdir():
        (tag / path.name).write_bytes(b"of another save")
        os.utime(tag / path.name, (1, 1))
    assert open_alone(tag) and verify_checkpoint(str(tag)).whole and is_sealed([str(tmp_path)], tag.name)


def test_an_unpublished_folder_is_not_read(tag: Path, tmp_path: Path) -> None:
    (tag / "ucp_published.json").unlink()
    assert find_tags(str(tmp_path)) == [] and not is_sealed([str(tmp_path)], tag.name)
    check_refused(tag, "no model states")


def test_a_deepspeed_save_into_a_local_copy_replaces_the_published_files(tag: Path) -> None:
    """The older files are in a folder below the tag and are not loaded."""
    write_source(tag.parent / "later", 5)
    for path in (tag.parent / "later").rglob("*.pt"):
        path.rename(tag / path.name)
    check_refused(tag, r"files of two saves.*remove ucp_published\.json")
    remove_seal(str(tag))  # like a save with the plugin
    assert {os.path.dirname(file.path) for file in open_alone(tag).files} == {str(tag)}


@pytest.mark.parametrize("name", ["..", ".ucp-save-a/../..", "/etc", "other", "", 3, None, ".ucp-save-/x"])
def test_invalid_folder_names_are_refused(name: object, tag: Path) -> None:
    (tag / "ucp_published.json").write_text(json.dumps({"folder": name}))
    check_refused(tag, r"ucp_published\.json")


def test_commands_accept_a_published_tag(tag: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", str(tmp_path), "--memory", str(tmp_path / "memory")]) == 0
    assert "a resume takes" in capsys.readouterr().out
    assert main(["verify", str(tmp_path)]) == 0
    assert main(["verify", "--seal", str(tag)]) == 0 and not (tag / "ucp_seal.json").exists()
    assert main(["convert", str(tmp_path), str(tmp_path / "atomic")]) == 0


def test_a_published_tag_is_removed(tag: Path, tmp_path: Path) -> None:
    (tag / "others").write_text("")
    assert is_sealed([str(tmp_path)], tag.name)
    remove_tag(str(tmp_path), tag.name)
    assert os.listdir(tag) == ["others"]


def test_deepspeeds_loader_is_not_chosen_for_a_published_tag(tag: Path) -> None:
    index = open_alone(tag)
    assert choice._list_elsewhere(index, str(tag)) == [choice._BELOW]
    assert "below the tag" in choice._BELOW
    assert choice._list_elsewhere(index, resolve_published(str(tag))) == []


def test_relative_paths_start_at_the_tag() -> None:
    assert join_path(f"/run/tag/{INSIDE}", "../ucp_frozen-1/file") == "/run/ucp_frozen-1/file"
    assert join_path(f"s3://run/tag/{INSIDE}", "../ucp_frozen-1/file") == "s3://run/ucp_frozen-1/file"
