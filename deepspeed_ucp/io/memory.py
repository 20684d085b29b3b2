"""Memory for staging, and how much of it there is."""

from __future__ import annotations

import ctypes
import functools
import gc
import mmap
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Protocol

_GROWTH = 1 << 20
_PROC = Path("/proc")
_GROUPS = Path("/sys/fs/cgroup")
_LARGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")

LARGE_PAGE = 2 << 20
"""Bytes of a large page where pages have 4 KiB."""


def allocate(nbytes: int) -> mmap.mmap:
    """``nbytes`` > 0 zeroed bytes that go back to the system once they are freed.

    malloc would keep buffers of a few MiB, in an arena for every thread: 200 MiB a rank. It is private: a first touch
    of memory that could be shared takes one and a half times as long.
    """
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def allocate_large(nbytes: int) -> memoryview:
    """``nbytes`` > 0 zeroed bytes for disks to read into and write from past the page cache, again and again.

    They begin at a large page and lie in such pages as far as they fill them, where the system gives any: a request to
    a disk holds few hundred pages, and with small ones a disk gets requests of 1 MiB, which costs it up to half of its
    speed (docs/performance.md).
    """
    memory = allocate(nbytes + LARGE_PAGE)
    start = -find_address(memory) % LARGE_PAGE
    if whole := nbytes // LARGE_PAGE * LARGE_PAGE:
        with suppress(AttributeError, OSError):  # a system without
            memory.madvise(mmap.MADV_HUGEPAGE, start // mmap.PAGESIZE * mmap.PAGESIZE, whole)
    return memoryview(memory)[start : start + nbytes]


def find_address(memory: mmap.mmap | memoryview) -> int:
    """Where memory that can be written begins."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


@functools.cache
def has_large_pages() -> bool:
    """Whether the system gives large pages to who asks for them."""
    modes = _read(_LARGE_PAGES)
    return "[always]" in modes or "[madvise]" in modes


class Scratch:
    """Memory that one thread uses again and again; it grows to the largest that was asked for.

    Args:
        allocate: makes the memory.
    """

    def __init__(self, allocate: Callable[[int], memoryview] = allocate_large) -> None:
        self._allocate, self._memory = allocate, memoryview(b"")

    def take(self, nbytes: int) -> memoryview:
        """The leading ``nbytes``; what they held is lost."""
        if self._memory.nbytes < nbytes:
            self._memory = memoryview(b"")  # the smaller one goes back first
            self._memory = self._allocate(-(-nbytes // _GROWTH) * _GROWTH)
        return self._memory[:nbytes]


class Mark(Protocol):
    """A point up to which something is done in the background."""

    def query(self) -> bool:
        """Whether it is done."""

    def synchronize(self) -> None:
        """Wait until it is."""


class ScratchPool:
    """Scratch memory of several threads, of which each takes what another has given back: it is touched once.

    Args:
        allocate: as for :class:`Scratch`.
        mark: called when memory is given back: up to there it is still read from in the background.
        most: pieces from which on a piece that is read from is waited for, where there are that many.
    """

    def __init__(
        self,
        allocate: Callable[[int], memoryview] | None = None,
        mark: Callable[[], Mark | None] = lambda: None,
        most: int = 0,
    ) -> None:
        self._make = Scratch if allocate is None else partial(Scratch, allocate)
        self._mark, self._left, self._lock = mark, most, threading.Lock()
        self._idle = deque[tuple[Scratch, Mark | None]]()

    @contextmanager
    def lend(self) -> Iterator[Scratch]:
        """Memory of the calling thread alone, as long as the context lasts."""
        scratch, mark = self._take()
        if mark is not None:
            mark.synchronize()
        try:
            yield scratch
        finally:
            self._idle.append((scratch, self._mark()))

    def _take(self) -> tuple[Scratch, Mark | None]:
        """The piece that has been idle for longest, or a new one in the place of one that is still read from."""
        with self._lock:
            if self._idle:
                mark = self._idle[0][1]
                if mark is None or mark.query() or self._left <= 0:
                    return self._idle.popleft()
            self._left -= 1
        return self._make(), None

    def settle(self) -> None:
        """Wait until nothing is read from what has been given back."""
        for _, mark in list(self._idle):
            if mark is not None:
                mark.synchronize()

    def clear(self) -> None:
        """Let go of what has been given back; nothing may be read from it."""
        self._left += len(self._idle)
        self._idle.clear()


def drop_front(views: list[memoryview], nbytes: int) -> None:
    """Take away what is done of memory that is read or written, one view after the other."""
    while views and nbytes >= views[0].nbytes:
        nbytes -= views.pop(0).nbytes
    if nbytes:
        views[0] = views[0][nbytes:]


def take_front(views: Iterable[memoryview], nbytes: int) -> list[memoryview]:
    """The first ``nbytes`` of memory, one view after the other, or all of it."""
    front = []
    for view in views:
        if nbytes <= 0:
            break
        front.append(view[:nbytes])
        nbytes -= view.nbytes
    return front


@contextmanager
def pause_collection() -> Iterator[None]:
    """Make many small acyclic objects without Python's cyclic collector walking torch's heap again and again.

    For the headers of a 1 T model's checkpoint that walk takes three quarters of the time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def identify_host() -> str:
    """The same for all processes of a machine, in whatever container."""
    return _read(_PROC / "sys/kernel/random/boot_id").strip()


def measure_available() -> int:
    """Bytes that this process could use without swapping: of the machine, and of the control groups it is in.

    0 where the system does not tell.
    """
    lines = dict(line.split(":", 1) for line in _read(_PROC / "meminfo").splitlines() if ":" in line)
    free = int(lines.get("MemAvailable", "0 kB").split()[0]) << 10
    return max(min([free, *_measure_groups()]), 0)


def _measure_groups() -> Iterator[int]:
    """What each limited control group above this process has left; pages of files that can be dropped are free."""
    for line in _read(_PROC / "self/cgroup").splitlines():
        _, controllers, name = line.split(":", 2)
        if not controllers:
            yield from _measure_group(_GROUPS, name, ("memory.max", "memory.current", "inactive_file"))
        elif "memory" in controllers.split(","):
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            yield from _measure_group(_GROUPS / "memory", name, files)


def _measure_group(root: Path, name: str, files: tuple[str, str, str]) -> Iterator[int]:
    place = root / name.strip("/")
    for folder in (place, *place.parents):
        limit, used = (_read(folder / file).strip() for file in files[:2])
        if limit.isdigit() and used.isdigit():
            stat = dict(line.split() for line in _read(folder / "memory.stat").splitlines())
            yield int(limit) - int(used) + int(stat.get(files[2], 0))
        if folder == root:
            return


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
