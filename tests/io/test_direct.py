"""Writes past the page cache: any range of a file, by several threads, with a fallback."""

from __future__ import annotations

import errno
import mmap
import os
import random
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_ucp.errors import DiskFullError
from deepspeed_ucp.io import direct
from deepspeed_ucp.io.direct import ALIGNMENT, cut_blocks
from deepspeed_ucp.io.disk import open_to_write, write_parts
from deepspeed_ucp.io.memory import Scratch, allocate_large
from tests.support.descriptors import list_open

BLOCK = max(ALIGNMENT, mmap.PAGESIZE)
DATA = random.Random(2).randbytes(200_000)


@pytest.fixture
def passed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """List of (offset, bytes) that are written past the cache, on any kind of file system."""
    try:
        os.close(os.open(tmp_path, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT))
    except OSError:
        pytest.skip("this file system has no O_DIRECT")
    monkeypatch.setattr(direct, "find_kind", lambda fd: direct.DISK)
    noted: list[tuple[int, int]] = []
    write = os.pwrite

    def note(fd: int, data: memoryview, offset: int) -> int:
        done = write(fd, data, offset)
        noted.append((offset, done))
        return done

    monkeypatch.setattr(os, "pwrite", note)
    return noted


def write(path: Path, parts: Sequence[bytes | memoryview], offset: int = 0) -> None:
    with open_to_write(str(path)) as fd:
        write_parts(fd, parts, offset)


@given(st.lists(st.sampled_from([0, 1, 100, BLOCK - 1, BLOCK, 70_000, 150_000]), max_size=4), st.integers(0, 3 * BLOCK))
def test_no_page_is_written_both_past_the_cache_and_through_it(sizes: list[int], offset: int) -> None:
    views = [memoryview(DATA[number : number + size]) for number, size in enumerate(sizes)]
    joined, end = b"", offset
    kinds: dict[int, bool] = {}
    for piece, at, is_whole in cut_blocks(views, offset):
        assert at == end
        joined += b"".join(piece)
        end += sum(view.nbytes for view in piece)
        for page in range(at // BLOCK, -(-end // BLOCK)) if end > at else ():
            assert kinds.setdefault(page, is_whole) == is_whole
        if is_whole:
            assert len(piece) == 1 and at % BLOCK == end % BLOCK == 0 and end - at >= direct.LEAST
    assert joined == b"".join(views)


@pytest.mark.parametrize("offset", [0, 1, BLOCK - 1, BLOCK, 12_345])
@pytest.mark.parametrize("sizes", [(200_000,), (100, 150_000, 50), (70_000, 3, 80_000), (10,)])
def test_any_parts_are_written_at_any_offset(
    sizes: tuple[int, ...], offset: int, passed: list[tuple[int, int]], tmp_path: Path
) -> None:
    parts, path = [DATA[size // 7 :][:size] for size in sizes], tmp_path / "file"
    path.write_bytes(b"x" * 300_000)
    write(path, parts, offset)
    assert list_open(str(tmp_path)) == []
    whole = b"".join(parts)
    assert path.read_bytes() == b"x" * offset + whole + b"x" * (300_000 - offset - len(whole))
    assert bool(passed) == (len(whole) > 10)
    assert sum(nbytes for _, nbytes in passed) >= len(whole) - 2 * BLOCK * len(parts) or not passed


@pytest.mark.parametrize("shift", [0, 1])
def test_a_long_piece_is_written_in_several_calls(
    shift: int, passed: list[tuple[int, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Aligned memory is not copied before."""
    monkeypatch.setattr(direct, "_WRITTEN", 2 * BLOCK)
    copies = mock.Mock(wraps=Scratch())
    monkeypatch.setitem(vars(direct._thread), "scratch", copies)
    view = allocate_large(len(DATA) + 1)[shift : shift + len(DATA)]
    view[:] = DATA
    write(tmp_path / "file", [view])
    assert len(passed) > 10 and (tmp_path / "file").read_bytes() == DATA
    assert copies.take.called == bool(shift)


@pytest.mark.parametrize("first", [True, False])
def test_writes_fall_back_to_the_cache_if_the_system_refuses_direct_ones(
    first: bool, tmp_path: Path, passed: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system may also have written a part with an unaligned end. A full disk is an error."""

    def refuse(fd: int, data: memoryview, offset: int) -> int:
        if first or offset % BLOCK:
            raise OSError(code, os.strerror(code))
        return min(BLOCK + 1, len(data))

    monkeypatch.setattr(os, "pwrite", refuse)
    code = errno.EINVAL
    write(tmp_path / "file", [DATA], 5)
    assert (tmp_path / "file").read_bytes() == bytes(5) + DATA
    code = errno.ENOSPC
    with pytest.raises(DiskFullError, match="file: disk full"):
        write(tmp_path / "file", [DATA])


@pytest.mark.parametrize("kind", ["memory", "network", ""])
def test_other_file_systems_are_written_through_their_cache(
    kind: str, tmp_path: Path, passed: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct, "find_kind", lambda fd: kind)
    write(tmp_path / "file", [DATA])
    assert not passed and (tmp_path / "file").read_bytes() == DATA
