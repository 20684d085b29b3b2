from __future__ import annotations

from pathlib import Path

from deepspeed_ucp.io import store


def test_what_lies_behind_links_is_listed_once(tmp_path: Path) -> None:
    """As it is read by its path; those that lead back up, or nowhere, end nothing."""
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
