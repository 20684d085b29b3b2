"""Frozen parameters of saves in memory: brought to a place once, and there as long as a tag names them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from deepspeed_ucp.saves import places
from deepspeed_ucp.saves.frozen import FrozenBase, FrozenParameters
from deepspeed_ucp.saves.memory import Job, Snapshot
from tests.saves.saving import is_whole, make_save, write
from tests.support.frozen import describe, take_out


@pytest.fixture
def job(tmp_path: Path) -> Job:
    made = Job(str(tmp_path / "memory" / "job"))
    made.own()
    return made


def make_frozen(job: Job, folder: Path | str, tag: str, base: str = "a", **changes: Any) -> Snapshot:
    """The next save of a job, which names the base of this letter."""
    save = make_save(job, str(folder), tag=tag, **changes)
    made = take_out(Path(save.folder) / tag, ["norm.weight"], f"ucp_frozen-{base * 12}")
    known = FrozenBase(os.path.join(job.folder, made.name), FrozenParameters())
    if not os.path.isdir(known.folder):
        shutil.copytree(made, known.folder)
    shutil.rmtree(made)
    known.files = {path.name: describe(path) for path in Path(known.folder).iterdir()}
    known.add(save.folder, tag)
    return save


def list_names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {"latest", "zero_to_fp32.py"}


def find_base(folder: Path, base: str = "a") -> os.stat_result:
    (path,) = (folder / f"ucp_frozen-{base * 12}").iterdir()
    return path.stat()


def test_a_place_gets_them_with_the_first_save_that_names_them(job: Job, tmp_path: Path) -> None:
    place = tmp_path / "place"
    make_frozen(job, place, "1")
    assert write(job)
    first, memory = find_base(place), find_base(Path(job.folder))
    content = next((place / f"ucp_frozen-{'a' * 12}").iterdir()).read_bytes()
    for tag in ("2", "3", "deep/4"):
        made = make_frozen(job, place, tag)
        assert find_base(Path(made.folder, tag).parent).st_ino == memory.st_ino
        assert write(job)
    found = find_base(place)
    assert (found.st_ino, found.st_mtime_ns) == (first.st_ino, first.st_mtime_ns)
    shutil.rmtree(tmp_path / "memory")
    assert all(is_whole(str(place / tag)) for tag in ("1", "2", "3", "deep/4"))
    assert next((place / f"ucp_frozen-{'a' * 12}").iterdir()).read_bytes() == content


@pytest.mark.parametrize("theirs", ["", "kept", "x/kept"])
def test_they_go_with_the_last_tag_that_names_them(theirs: str, job: Job, tmp_path: Path) -> None:
    place = tmp_path / "place"
    for tag, base in (("1", "a"), ("2", "a"), ("3", "b"), ("4", "b")):
        make_frozen(job, place, tag, base, keep=2)
        assert write(job)
        if tag == "1" and theirs:
            shutil.copytree(place / "1", place / theirs)
    bases = {f"ucp_frozen-{'b' * 12}", *([f"ucp_frozen-{'a' * 12}"] if theirs else [])}
    assert list_names(place) == {"3", "4", *filter(None, [theirs.partition("/")[0]]), *bases}


def test_folders_that_a_trainer_removes_whole_share_them(job: Job, tmp_path: Path) -> None:
    places = [tmp_path / f"checkpoint-{number}" for number in (1, 2)]
    for place in places:
        make_frozen(job, place, "global_step1")
        assert write(job)
    assert find_base(places[0]).st_ino == find_base(places[1]).st_ino
    shutil.rmtree(places[0])
    assert is_whole(str(places[1] / "global_step1"))


def test_a_place_never_has_a_tag_whose_frozen_parameters_could_not_be_brought(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, own = tmp_path / "place", places._copy

    def fail(source: str, destination: str, pace: Any) -> None:
        if "ucp_frozen-" in destination:
            raise OSError("no space")
        own(source, destination, pace)

    make_frozen(job, place, "1")
    monkeypatch.setattr(places, "_copy", fail)
    assert not write(job)
    assert list_names(place) == {f"ucp_frozen-{'a' * 12}"}
    monkeypatch.undo()
    assert write(job) and is_whole(str(place / "1"))


def test_a_tag_that_is_saved_anew_names_what_it_has(job: Job, tmp_path: Path) -> None:
    make_frozen(job, tmp_path / "place", "1")
    assert write(job)
    make_save(job, str(tmp_path / "place"), tag="1")
    assert write(job)
    assert not (tmp_path / "place" / "1" / "ucp_frozen.json").exists() and is_whole(str(tmp_path / "place" / "1"))


def test_the_next_job_has_them_from_the_last_ones_where_they_are_the_same(job: Job, tmp_path: Path) -> None:
    place = tmp_path / "place"
    make_frozen(job, place, "1")
    assert write(job)
    shutil.copytree(job.folder + f"/ucp_frozen-{'a' * 12}", job.folder + f"/ucp_frozen-{'b' * 12}")
    make_frozen(job, place, "2", "b")
    make_frozen(job, place, "3", "c", latest=False)
    assert write(job)
    assert find_base(place).st_ino == find_base(place, "b").st_ino != find_base(place, "c").st_ino
    assert all(is_whole(str(place / tag)) for tag in "123")
