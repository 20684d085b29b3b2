"""Local folders, the distance of the storage behind a path, and the number of reads in flight for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepspeed_ucp.io import paths, store
from deepspeed_ucp.io.paths import DISK, MEMORY, NETWORK, choose_map, count_readers, find_kind, measure_distance


@pytest.mark.parametrize(("kind", "far"), [(DISK, 0), (MEMORY, 0), ("", 0), (NETWORK, 1)])
def test_network_storage_has_more_readers(kind: str, far: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "find_kind", lambda path: kind)
    assert measure_distance("/folder") == far
    monkeypatch.setattr(paths, "count_threads", lambda: 8)
    assert count_readers("/folder") == (16 if far else 8)
    monkeypatch.setattr(paths, "count_threads", lambda: 32)
    assert count_readers("/folder") == 32
    assert (choose_map("/folder") is map) == (not far)


def test_kinds_of_file_systems() -> None:
    assert measure_distance("s3://bucket/run") == 2
    assert find_kind("/proc") == NETWORK  # an unknown kind
    assert find_kind("/dev/shm") == MEMORY
    assert find_kind("/nowhere") == ""


def test_a_tree_lists_files_behind_links(tmp_path: Path) -> None:
    """Links to a parent folder and dangling links are ignored."""
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
