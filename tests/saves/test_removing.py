"""Removal deletes only files of a save and follows no link."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_ucp.io import deletion
from deepspeed_ucp.io.deletion import delete_tree
from deepspeed_ucp.saves.publishing import is_save_file, remove_tag, remove_tree
from tests.saves.saving import Run
from tests.support.reshard import examples

SWAPS = "offloaded_tensors"
STATES = "zero_pp_rank_0_mp_rank_00_optim_states.pt"


def look(top: Path) -> dict[str, object]:
    """Map every file, folder and link below a folder to its content, without following links."""
    found: dict[str, object] = {}
    for path in sorted(top.rglob("*")):
        mode = path.lstat().st_mode
        key = str(path.relative_to(top))
        if stat.S_ISLNK(mode):
            found[key] = os.readlink(path)
        else:
            found[key] = None if stat.S_ISDIR(mode) else path.read_bytes()
    return found


def make_tag(folder: Path) -> None:
    (folder / SWAPS / "rank0").mkdir(parents=True)
    for name in ("ucp_seal.json", "mp_rank_00_model_states.pt", STATES, f"{SWAPS}/rank0/0_1.tensor.swp", "notes.txt"):
        (folder / name).write_text(name)


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    folder = tmp_path / "precious"
    folder.mkdir()
    make_tag(folder)
    return folder


def test_removal_of_old_saves_follows_no_link_in_a_tag(tmp_path: Path, precious: Path) -> None:
    run = Run(tmp_path)
    run.write_save(tag="a", keep=1)
    before = look(precious)
    Path(run.destination, "a", SWAPS).symlink_to(precious)
    run.write_save(tag="b", keep=1)
    assert look(precious) == before and not Path(run.destination, "a").exists() and run.is_whole("b")


@pytest.mark.parametrize(
    ("tag", "message"),
    [*((tag, "links are not followed") for tag in ("link", "link/tag", "link/tag/tag")), ("../precious", "leads out")],
)
def test_removal_of_a_tag_elsewhere_is_refused(tag: str, message: str, tmp_path: Path, precious: Path) -> None:
    make_tag(precious / "tag" / "tag")
    before, destination = look(precious), tmp_path / "destination"
    destination.mkdir()
    (destination / "link").symlink_to(precious)
    with pytest.raises(OSError, match=message):
        remove_tag(str(destination), tag)
    assert look(precious) == before and (destination / "link").is_symlink()


def test_the_seal_is_deleted_first_and_states_last(tmp_path: Path) -> None:
    make_tag(tmp_path / "tag")
    names, unlink = list[str](), os.unlink

    def note(name: str, **options: Any) -> None:
        names.append(name)
        unlink(name, **options)

    with mock.patch.object(deletion.os, "unlink", note):
        remove_tag(str(tmp_path), "tag")
    assert names == ["ucp_seal.json", "mp_rank_00_model_states.pt", "0_1.tensor.swp", STATES]


@pytest.mark.parametrize("call", ["unlink", "open"])
def test_removal_follows_no_link_that_replaces_a_folder_meanwhile(call: str, tmp_path: Path, precious: Path) -> None:
    """The link replaces the folder after the listing, before the folder is opened or a file in it is deleted."""
    make_tag(tmp_path / "destination" / "tag")
    before, ranks, swapped = look(precious), tmp_path / "destination" / "tag" / SWAPS / "rank0", list[str]()
    original = getattr(os, call)

    def swap(name: str, *args: Any, **options: Any) -> Any:
        if name == ("0_1.tensor.swp" if call == "unlink" else "rank0") and not swapped:
            swapped.append(name)
            ranks.rename(tmp_path / "destination" / "tag" / "moved")
            ranks.symlink_to(precious / SWAPS / "rank0")
        return original(name, *args, **options)

    with mock.patch.object(deletion.os, call, swap):
        try:
            remove_tag(str(tmp_path / "destination"), "tag")
        except OSError:
            assert call == "open"
    assert swapped and look(precious) == before


def test_a_tree_is_deleted_without_the_targets_of_links(tmp_path: Path, precious: Path) -> None:
    top, before = tmp_path / "top", look(precious)

    def make_folder() -> None:
        top.mkdir()
        for name, target in (("link", precious), ("loop", top), ("dangling", "nowhere")):
            (top / name).symlink_to(target)

    for make in (lambda: top.symlink_to(precious), top.touch, make_folder, lambda: None):
        make()
        remove_tree(str(tmp_path), "top")
        assert not os.path.lexists(top) and look(precious) == before


NAMES = ["ucp_seal.json", "mp_rank_00_model_states.pt", STATES, SWAPS, "rank0", "0_1.tensor.swp", "notes.txt", "sub"]
TARGETS = [
    "/outside", "/outside/sub", "/outside/notes.txt", "nowhere", ".", "..", "../..", "../other", "../../other/rank0",
    "rank0", "sub", SWAPS,
]  # fmt: skip


def plant(top: Path, tree: dict[str, Any], root: Path) -> None:
    for name, kind in tree.items():
        path = top / name
        if isinstance(kind, dict):
            path.mkdir(exist_ok=True)
            plant(path, kind, root)
        elif kind.startswith("file"):
            path.write_text(kind)
        else:
            path.symlink_to(f"{root}{kind}" if kind.startswith("/") else kind)


TREES = st.recursive(
    st.sampled_from(["file", *TARGETS]),
    lambda inner: st.dictionaries(st.sampled_from(NAMES), inner, max_size=6),
    max_leaves=25,
)


@examples(300)
@given(st.dictionaries(st.sampled_from(NAMES), TREES, max_size=8))
def test_removal_of_random_trees_deletes_only_files_of_the_save(tree: dict[str, Any]) -> None:
    """The tag loses files of the save and empty folders. Files outside the tag stay unchanged.

    The destination is reached through a link.
    """
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        root = Path(name)
        for each in ("outside", "destination/other"):
            make_tag(root / each)
        for each in ("outside/sub", "destination/tag"):
            (root / each).mkdir()
        (root / "link").symlink_to("destination")
        plant(root / "destination" / "tag", tree, root)
        before = look(root)
        remove_tag(str(root / "link"), "tag")
        after = look(root)
        gone = {path.removeprefix("destination/tag").lstrip("/") for path in before.keys() - after.keys()}
        assert {path: before[path] for path in after} == after
        files = {path for path in gone if before[f"destination/tag/{path}".rstrip("/")] is not None}
        assert all(map(is_save_file, files))
        assert all(path == "" or path.split("/")[0] == SWAPS for path in gone - files)
        kept = {path.removeprefix("destination/tag/") for path in after if path.startswith("destination/tag/")}
        assert not [path for path in kept if is_save_file(path) and after[f"destination/tag/{path}"] is not None]


@pytest.mark.parametrize("path", [".", "..", "../..", "/"])
def test_removal_of_an_unnamed_path_is_refused(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path / "folder")
    with pytest.raises(OSError, match="does not end in a name"):
        delete_tree(path)
    assert (tmp_path / "file").exists()
