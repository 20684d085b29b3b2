"""Memory is filled in large pages as long as that is quick, as the system tells of it afterwards."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path

import pytest

from deepspeed_ucp.io import pages as large
from deepspeed_ucp.io.memory import LARGE_PAGE, allocate, find_address
from deepspeed_ucp.io.pages import LargePages

MIB = 1 << 20
LARGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")
WORTH, QUICK, SLOW = 4 * MIB, 1 / 1280, 1 / 100  # bytes, and seconds that they take at 5 and at 0.4 GiB/s


@pytest.fixture
def memory() -> Iterator[mmap.mmap]:
    """Untouched, on a system that can be told of large pages, whether it gives any or not."""
    if not LARGE_PAGES.exists():
        pytest.skip("this system has no large pages")
    held = allocate(4 * LARGE_PAGE)
    yield held
    held.close()


def read_advice(address: int) -> str:
    """What the system was told of the pages there: "hg", "nh" or nothing."""
    told, inside = "", False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            low, high = (int(each, 16) for each in first.split("-"))
            inside = low <= address < high
        elif inside and first == "VmFlags:":
            told = " ".join(flag for flag in ("hg", "nh") if flag in line.split())
    return told


def test_memory_is_to_lie_in_large_pages(memory: mmap.mmap) -> None:
    address = find_address(memory)
    assert read_advice(address) == ""
    LargePages().add(address, len(memory))
    assert read_advice(address) == read_advice(address + len(memory) - 1) == "hg"


def test_pages_that_are_only_partly_its_own_are_left_as_they_are(memory: mmap.mmap) -> None:
    address = find_address(memory)
    LargePages().add(address + mmap.PAGESIZE + 8, 2 * mmap.PAGESIZE)
    told = [read_advice(address + number * mmap.PAGESIZE) for number in range(4)]
    assert told == ["", "", "hg", ""]


def test_memory_within_a_page_is_left_as_it_is(memory: mmap.mmap) -> None:
    LargePages().add(find_address(memory) + 8, mmap.PAGESIZE)
    assert read_advice(find_address(memory)) == ""


@pytest.mark.parametrize("before", [0, 1000])
def test_large_pages_are_given_up_where_they_are_slow(memory: mmap.mmap, before: int) -> None:
    """A good time before makes up for nothing."""
    pages = LargePages()
    pages.add(find_address(memory), len(memory))
    for cost in [*[QUICK] * before, *[SLOW] * 5]:
        pages.note(WORTH, cost)
    assert read_advice(find_address(memory)) == "hg"
    for _ in range(5):
        pages.note(WORTH, SLOW)
    assert read_advice(find_address(memory)) == "nh"


def test_now_and_then_a_slow_one_is_no_reason(memory: mmap.mmap) -> None:
    pages = LargePages()
    pages.add(find_address(memory), len(memory))
    for _ in range(100):
        pages.note(WORTH, SLOW)
        for _ in range(9):
            pages.note(WORTH, QUICK)
    assert read_advice(find_address(memory)) == "hg"


def test_a_system_without_large_pages_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []

    def refuse(address: int, nbytes: int, advice: int) -> bool:
        told.append(advice)
        return False

    monkeypatch.setattr(large, "_advise", refuse)
    pages = LargePages()
    pages.add(1 << 30, 4 * LARGE_PAGE)
    for _ in range(100):
        pages.note(WORTH, SLOW)
    assert told == [mmap.MADV_HUGEPAGE]


def test_what_is_given_up_is_given_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, int, int]] = []

    def note(address: int, nbytes: int, advice: int) -> bool:
        told.append((address, nbytes, advice))
        return True

    monkeypatch.setattr(large, "_advise", note)
    pages = LargePages()
    for low in (1 << 30, 2 << 30):
        pages.add(low, LARGE_PAGE)
    for _ in range(100):
        pages.note(WORTH, SLOW)
    advices = (mmap.MADV_HUGEPAGE, mmap.MADV_NOHUGEPAGE)
    assert told == [(low, LARGE_PAGE, advice) for advice in advices for low in (1 << 30, 2 << 30)]
