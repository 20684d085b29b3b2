"""Large pages for memory while they are fast, and the pause of the garbage collector."""

from __future__ import annotations

import errno
import gc
import mmap
from collections.abc import Iterator
from pathlib import Path

import pytest

from deepspeed_ucp.io import memory
from deepspeed_ucp.io.memory import (
    LARGE_PAGE,
    LargePages,
    Scratch,
    allocate,
    allocate_large,
    find_address,
    pause_collection,
)

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
