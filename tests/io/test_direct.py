"""Writes past the page cache, memory in large pages while they are fast, and the pause of the garbage collector."""

from __future__ import annotations

import errno
import gc
import mmap
import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_ucp.errors import DiskFullError
from deepspeed_ucp.io import direct, memory
from deepspeed_ucp.io.direct import ALIGNMENT, split_whole_blocks
from deepspeed_ucp.io.disk import open_to_write, write_parts
from deepspeed_ucp.io.memory import (
    LARGE_PAGE,
    LargePages,
    Scratch,
    allocate,
    allocate_large,
    find_address,
    pause_collection,
)
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
    monkeypatch.setattr(direct, "find_storage_kind", lambda fd: direct.DISK)
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
    for piece, at, is_whole in split_whole_blocks(views, offset):
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
    monkeypatch.setattr(direct, "find_storage_kind", lambda fd: kind)
    write(tmp_path / "file", [DATA])
    assert not passed and (tmp_path / "file").read_bytes() == DATA


# -- large pages, and the pause of the garbage collector ---------------------------------------------------------------

MIB = 1 << 20
LARGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")
WORTH, QUICK, SLOW = 4 * MIB, 1 / 1280, 1 / 100  # bytes, and their seconds at 5 and at 0.4 GiB/s


@pytest.fixture
def held() -> Iterator[mmap.mmap]:
    """Untouched memory, on a system that accepts advice on large pages and may have no such pages."""
    if not LARGE_PAGES.exists():
        pytest.skip("this system has no large pages")
    untouched = allocate(4 * LARGE_PAGE)
    yield untouched
    untouched.close()


def read_advice(address: int) -> str:
    """Return the system's advice for the pages at an address: "hg", "nh" or ""."""
    advice, inside = "", False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            low, high = (int(each, 16) for each in first.split("-"))
            inside = low <= address < high
        elif inside and first == "VmFlags:":
            advice = " ".join(flag for flag in ("hg", "nh") if flag in line.split())
    return advice


@pytest.mark.parametrize(
    ("low", "nbytes", "advice"),
    [
        (0, 4 * LARGE_PAGE, ["hg"] * 4),
        (mmap.PAGESIZE + 8, 2 * mmap.PAGESIZE, ["", "", "hg", ""]),
        (8, mmap.PAGESIZE, [""] * 4),
    ],
    ids=["all", "two pages in part", "within a page"],
)
def test_large_pages_are_advised_for_whole_pages(low: int, nbytes: int, advice: list[str], held: mmap.mmap) -> None:
    address = find_address(held)
    assert read_advice(address) == ""
    LargePages().add(address + low, nbytes)
    assert [read_advice(address + number * mmap.PAGESIZE) for number in range(4)] == advice


@pytest.mark.parametrize(
    ("costs", "advice"),
    [
        ([SLOW] * 5, "hg"),
        ([SLOW] * 10, "nh"),
        ([QUICK] * 1000 + [SLOW] * 5, "hg"),
        ([QUICK] * 1000 + [SLOW] * 10, "nh"),
        ([SLOW, *[QUICK] * 9] * 100, "hg"),
    ],
    ids=["slow for a moment", "slow", "slow for a moment after a while", "slow after a while", "slow now and then"],
)
def test_slow_large_pages_are_disabled(held: mmap.mmap, costs: list[float], advice: str) -> None:
    pages = LargePages()
    pages.add(find_address(held), len(held))
    for cost in costs:
        pages.note(WORTH, cost)
    assert read_advice(find_address(held)) == advice


@pytest.mark.parametrize("nbytes", [1, 4096, LARGE_PAGE - 1, LARGE_PAGE, 5 * LARGE_PAGE + 17])
@pytest.mark.parametrize("works", [True, False])
def test_large_memory_is_zeroed_aligned_and_in_large_pages(
    nbytes: int, works: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A system without large pages uses small ones."""
    calls: list[tuple[int, int, int]] = []

    class Memory(mmap.mmap):
        def madvise(self, option: int, start: int = 0, length: int = 0) -> None:
            calls.append((option, (find_address(self) + start) % LARGE_PAGE, length))
            if not works:
                raise OSError(errno.EINVAL, "no such advice")

    monkeypatch.setattr(memory, "allocate", lambda nbytes: Memory(-1, nbytes))
    view = Scratch().take(nbytes)
    assert view.nbytes == nbytes and find_address(view) % LARGE_PAGE == 0 and not any(view[::997])
    view[-1] = 1
    calls.clear()
    allocate_large(nbytes)
    whole = nbytes // LARGE_PAGE * LARGE_PAGE
    assert calls == [(mmap.MADV_HUGEPAGE, 0, whole)] * (whole > 0)


def fail_inside() -> None:
    with pause_collection():
        assert not gc.isenabled()
        raise KeyError


@pytest.mark.parametrize("enabled", [True, False])
def test_pausing_the_garbage_collector_restores_its_state(enabled: bool) -> None:
    before = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        with pytest.raises(KeyError):
            fail_inside()
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if before else gc.disable)()
