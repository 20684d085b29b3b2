"""Listings of local folders."""

from __future__ import annotations

from pathlib import Path

from deepspeed_ucp.io import store


def test_a_tree_lists_files_behind_links(tmp_path: Path) -> None:
    """Links that lead back up or nowhere do no harm."""
    elsewhere, folder = tmp_path / "elsewhere", tmp_path / "tag"
    for each in (elsewhere / "w", folder / "deep"):
        each.mkdir(parents=True)
    (elsewhere / "w" / "fp32.pt").write_bytes(b"123")
    (folder / "deep" / "file").write_bytes(b"1")
    for name, target in {"zero": elsewhere, "again": elsewhere, "deep/up": folder, "none": tmp_path / "gone"}.items():
        (folder / name).symlink_to(target)
    (elsewhere / "back").symlink_to(folder)
    (folder / "itself").symlink_to("itself")
    found = {name: entry.size for name, entry in store.list_tree(str(folder)).items()}
    assert found == {"zero/w/fp32.pt": 3, "again/w/fp32.pt": 3, "deep/file": 1, "none": 0, "itself": 0}
