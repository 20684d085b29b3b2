"""Writes past the page cache: any range of a file, by several threads, with a fallback."""

from __future__ import annotations

import errno
import mmap
import os
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_ucp.errors import DiskFullError
from deepspeed_ucp.io import direct, memory
from deepspeed_ucp.io.direct import ALIGNMENT, cut_blocks
from deepspeed_ucp.io.disk import write_at, write_parts
from deepspeed_ucp.io.memory import LARGE_PAGE, Scratch, allocate_large, find_address
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


def write(path: Path, parts: Sequence[bytes | memoryview], offset: int) -> None:
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        write_parts(fd, parts, offset)
    finally:
        os.close(fd)


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


def test_aligned_memory_is_written_without_a_copy(
    passed: list[tuple[int, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct._thread.scratch, "take", lambda nbytes: pytest.fail("copied"))
    view = allocate_large(len(DATA))
    view[:] = DATA
    write(tmp_path / "file", [view], 0)
    assert passed and (tmp_path / "file").read_bytes() == DATA


def test_a_long_piece_is_written_in_several_calls(
    passed: list[tuple[int, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct, "_WRITTEN", 2 * BLOCK)
    for shift in (0, 1):
        view = allocate_large(len(DATA) + 1)
        view[shift : shift + len(DATA)] = DATA
        write(tmp_path / "file", [view[shift : shift + len(DATA)]], 0)
        assert len(passed) > 10 and (tmp_path / "file").read_bytes() == DATA
        passed.clear()


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
        write(tmp_path / "file", [DATA], 0)


@pytest.mark.parametrize("kind", ["memory", "network", ""])
def test_other_file_systems_are_written_through_their_cache(
    kind: str, tmp_path: Path, passed: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct, "find_kind", lambda fd: kind)
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    write_at(fd, DATA, 0)
    os.close(fd)
    assert not passed and (tmp_path / "file").read_bytes() == DATA


@pytest.mark.parametrize("nbytes", [1, 4096, LARGE_PAGE - 1, LARGE_PAGE, 5 * LARGE_PAGE + 17])
def test_memory_in_large_pages_is_zeroed_and_aligned(nbytes: int) -> None:
    view = allocate_large(nbytes)
    assert view.nbytes == nbytes and find_address(view) % LARGE_PAGE == 0 and not any(view[::997])
    view[-1] = 1


@pytest.mark.parametrize("works", [True, False])
def test_large_pages_are_advised_for_memory_that_fills_them(works: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A system without large pages uses small ones."""
    calls: list[tuple[int, int, int]] = []

    class Memory(mmap.mmap):
        def madvise(self, option: int, start: int = 0, length: int = 0) -> None:
            calls.append((option, (find_address(self) + start) % LARGE_PAGE, length))
            if not works:
                raise OSError(errno.EINVAL, "no such advice")

    monkeypatch.setattr(memory, "allocate", lambda nbytes: Memory(-1, nbytes))
    allocate_large(LARGE_PAGE - 1)
    assert calls == []
    assert Scratch().take(2 * LARGE_PAGE + 5).nbytes == 2 * LARGE_PAGE + 5
    assert calls == [(mmap.MADV_HUGEPAGE, 0, 2 * LARGE_PAGE)]
