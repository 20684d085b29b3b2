"""Scans of whole files: checksums of ranges for any piece size; faults are recorded, not raised."""

from __future__ import annotations

import re
import zlib
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_ucp.io import scan
from deepspeed_ucp.io.scan import ScanFile, scan_files
from deepspeed_ucp.io.store import open_stored
from tests.support.reshard import examples, temporary_folder

DATA = bytes(index * 37 % 251 for index in range(50_000))


@examples(40)
@given(
    ranges=st.lists(st.tuples(st.integers(0, 49_000), st.integers(0, 20_000)), max_size=6),
    threads=st.integers(1, 5),
    window=st.sampled_from((1, 5000, 40_000, 1 << 20)),
)
def test_scans_compute_checksums_of_any_ranges(ranges: list[tuple[int, int]], threads: int, window: int) -> None:
    """Ranges may overlap and span pieces."""
    ranges = [(offset, min(nbytes, len(DATA) - offset)) for offset, nbytes in ranges]
    progress: list[int] = []
    with temporary_folder() as folder:
        (folder / "a").write_bytes(DATA)
        (folder / "empty").write_bytes(b"")
        files = [ScanFile(str(folder / "a"), len(DATA), tuple(ranges)), ScanFile(str(folder / "empty"), 0)]
        found = scan_files(files, threads=threads, window=window, progress=progress.append)
    assert found[0].crcs == [zlib.crc32(DATA[offset : offset + nbytes]) for offset, nbytes in ranges]
    assert [each.nbytes for each in found] == [len(DATA), 0]
    assert sum(progress) == len(DATA)
    assert not found[0].errors


@pytest.mark.parametrize(
    ("name", "text"), [("gone", "cannot be opened .No such file"), (".", "cannot be opened .Is a directory")]
)
def test_an_unreadable_file_is_recorded_as_a_fault(tmp_path: Path, name: str, text: str) -> None:
    (found,) = scan_files([ScanFile(str(tmp_path / name), 9000, ((0, 10),))])
    assert found.crcs == [None]
    assert len(found.errors) == 1
    assert re.match(text, found.errors[0][1])


@pytest.mark.parametrize("size", [1, 4096, 4097, 12_288])
def test_a_file_is_closed_after_its_last_piece(size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_bytes(DATA[:size])
    opened: list[mock.Mock] = []

    def open_recorded(*args: Any, **options: Any) -> Any:
        opened.append(mock.Mock(wraps=open_stored(*args, **options)))
        return opened[-1]

    monkeypatch.setattr(scan, "open_stored", open_recorded)
    scan_files([ScanFile(str(tmp_path / "a"), size)] * 2, threads=1, window=4096)
    assert len(opened) == 2
    for stored in opened:
        names = [name for name, *_ in stored.method_calls]
        assert names.count("close") == 1 and names[-1] == "close" and len(names) > -(-size // 4096)
