"""Staging memory: large pages, reuse by threads, available bytes, and sharing."""

from __future__ import annotations

import ctypes
import functools
import gc
import mmap
import os
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from ..errors import RemoteError
from .paths import load_libc

_GROWTH = 1 << 20
_PROC = Path("/proc")
_GROUPS = Path("/sys/fs/cgroup")
_LARGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")

LARGE_PAGE = 2 << 20
"""Bytes of a large page on systems whose pages have 4 KiB."""

_SPEED = 2 << 30
"""Minimum rate, in bytes per second of processor time, at which available memory is filled and processed."""

_LOSS = 0.05
"""Seconds of processor time that large pages may lose against that rate before they are given up."""

_FRONT = mmap.PAGESIZE
_TOKEN = 16
"""Bytes at the beginning of shared memory that identify a rank's memory to the others."""


def allocate(nbytes: int) -> mmap.mmap:
    """Return ``nbytes`` > 0 zeroed bytes that return to the system when freed.

    malloc would keep buffers of a few MiB in an arena per thread: 200 MiB per rank. The memory is private: the first
    touch of shared memory takes one and a half times as long.
    """
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def allocate_large(nbytes: int) -> memoryview:
    """Return ``nbytes`` > 0 zeroed bytes, in large pages if possible.

    Reads and writes past the page cache use it. A request to a disk holds a few hundred pages. With small pages these
    are 1 MiB, which costs a disk up to half of its speed (docs/performance.md).
    """
    memory = allocate(nbytes + LARGE_PAGE)
    start = -find_address(memory) % LARGE_PAGE
    if whole := nbytes // LARGE_PAGE * LARGE_PAGE:
        with suppress(AttributeError, OSError):  # a system without
            memory.madvise(mmap.MADV_HUGEPAGE, start // mmap.PAGESIZE * mmap.PAGESIZE, whole)
    return memoryview(memory)[start : start + nbytes]


def find_address(memory: mmap.mmap | memoryview) -> int:
    """Return the address of writable memory."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


@functools.cache
def has_large_pages() -> bool:
    """Return True if the system grants large pages on request."""
    modes = _read(_LARGE_PAGES)
    return "[always]" in modes or "[madvise]" in modes


class LargePages:
    """Requests large pages for untouched memory while the machine has them available.

    The kernel zeroes memory before use: on 2 cores of an AMD EPYC 16 to 22 GiB/s in large pages and 3.2 GiB/s in small
    ones, which is most of the processor time of a load. But a virtual machine returns free memory to its host (balloon
    with free page reporting), and large pages are made of that memory: the host provides it at 0.4 GiB/s, while small
    pages are available. The system does not report this beforehand. So this class sums up the processor time lost
    against ``_SPEED``, in which the wait is included, and switches to small pages when the sum exceeds ``_LOSS``. A
    fast period does not make up for a slow one.

    Any thread may call :meth:`note`.
    """

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []
        self._lost = 0.0

    def add(self, address: int, nbytes: int) -> None:
        """Request large pages for untouched memory (its whole pages), if supported."""
        low, high = -(-address // mmap.PAGESIZE), (address + nbytes) // mmap.PAGESIZE
        place = low * mmap.PAGESIZE, (high - low) * mmap.PAGESIZE
        if place[1] > 0 and _advise(*place, mmap.MADV_HUGEPAGE):
            self._ranges.append(place)

    def note(self, nbytes: int, seconds: float) -> None:
        """Record the processor time of filling bytes; give large pages up if too slow."""
        self._lost = max(self._lost + seconds - nbytes / _SPEED, 0.0)
        if self._lost > _LOSS and self._ranges:
            ranges, self._ranges = self._ranges, []
            for place in ranges:
                _advise(*place, mmap.MADV_NOHUGEPAGE)


def _advise(address: int, nbytes: int, advice: int) -> bool:
    return bool(load_libc().madvise(address, nbytes, advice) == 0)


class Scratch:
    """Memory that one thread reuses; it grows to the largest size requested."""

    def __init__(self, allocate: Callable[[int], memoryview] = allocate_large) -> None:
        self._allocate, self._memory = allocate, memoryview(b"")

    def take(self, nbytes: int) -> memoryview:
        """Return the first ``nbytes`` of the memory, which grows if it is smaller."""
        if self._memory.nbytes < nbytes:
            self._memory = memoryview(b"")  # frees the smaller one first
            self._memory = self._allocate(-(-nbytes // _GROWTH) * _GROWTH)
        return self._memory[:nbytes]


class Event(Protocol):
    """An event of background work, as of CUDA."""

    def query(self) -> bool:
        """Return True if the work is done."""

    def synchronize(self) -> None:
        """Wait until the work is done."""


class ScratchPool:
    """Pool of scratch memory that threads reuse, since a first touch is slow.

    Args:
        record: called when memory is returned; returns the event of background work that still reads it, or None.
        most: maximum number of pieces to allocate rather than wait for an event.
    """

    def __init__(
        self,
        allocate: Callable[[int], memoryview] = allocate_large,
        record: Callable[[], Event | None] = lambda: None,
        most: int = 0,
    ) -> None:
        self._allocate, self._record, self._allowed, self._lock = allocate, record, most, threading.Lock()
        self._idle = deque[tuple[Scratch, Event | None]]()

    @contextmanager
    def lend(self) -> Iterator[Scratch]:
        """Lend a piece to one thread until the context ends."""
        scratch, event = self._take()
        if event is not None:
            event.synchronize()
        try:
            yield scratch
        finally:
            self._idle.append((scratch, self._record()))

    def _take(self) -> tuple[Scratch, Event | None]:
        """Return the piece that has been idle longest, or a new one if that is still read."""
        with self._lock:
            if self._idle:
                event = self._idle[0][1]
                if event is None or event.query() or self._allowed <= 0:
                    return self._idle.popleft()
            self._allowed -= 1
        return Scratch(self._allocate), None

    def settle(self) -> None:
        """Wait for the background work (the events) of all returned pieces."""
        for _, event in list(self._idle):
            if event is not None:
                event.synchronize()

    def clear(self) -> None:
        """Free the returned pieces; :meth:`settle` must have been called."""
        self._allowed += len(self._idle)
        self._idle.clear()


def drop_front(views: list[memoryview], nbytes: int) -> None:
    """Remove the first ``nbytes`` from a list of views."""
    while views and nbytes >= views[0].nbytes:
        nbytes -= views.pop(0).nbytes
    if nbytes:
        views[0] = views[0][nbytes:]


def take_front(views: Iterable[memoryview], nbytes: int) -> list[memoryview]:
    """Return views of the first ``nbytes``, or of all if there are fewer."""
    front = []
    for view in views:
        if nbytes <= 0:
            break
        front.append(view[:nbytes])
        nbytes -= view.nbytes
    return front


@contextmanager
def pause_collection() -> Iterator[None]:
    """Disable cyclic garbage collection while many small objects are created.

    The collector would walk torch's heap repeatedly: three quarters of the time for the headers of a 1 T model.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def identify_host() -> str:
    """Return an identifier of this machine, the same in all its containers."""
    return _read(_PROC / "sys/kernel/random/boot_id").strip()


def measure_available() -> int:
    """Return the bytes that this process can use without swapping; 0 if unknown."""
    lines = dict(line.split(":", 1) for line in _read(_PROC / "meminfo").splitlines() if ":" in line)
    free = int(lines.get("MemAvailable", "0 kB").split()[0]) << 10
    return max(min([free, *_measure_groups()]), 0)


def _measure_groups() -> Iterator[int]:
    """Yield free bytes, with inactive file pages, of each limited control group."""
    for line in _read(_PROC / "self/cgroup").splitlines():
        _, controllers, name = line.split(":", 2)
        if not controllers:
            yield from _measure_ancestors(_GROUPS, name, ("memory.max", "memory.current", "inactive_file"))
        elif "memory" in controllers.split(","):
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            yield from _measure_ancestors(_GROUPS / "memory", name, files)


def _measure_ancestors(root: Path, name: str, files: tuple[str, str, str]) -> Iterator[int]:
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


def share_memory(nbytes: int, rank: int, gather: Callable[[Any], list[Any]]) -> list[memoryview | None]:
    """Return the memory of every rank of this machine (collective).

    It has no name, so it is freed when the last process that maps it ends, and the size of no mount limits it.

    Args:
        nbytes: size of each rank's memory, the same on all ranks.
        gather: returns a value of every rank, in rank order.

    Returns:
        ``nbytes`` of zeroed memory by rank; None for ranks of other machines, and for all other ranks if those of this
        machine cannot access each other's memory (separate containers). Access is mutual.

    Raises:
        RemoteError: a rank could not allocate its memory; the same on every rank.
    """
    token = secrets.token_bytes(_TOKEN)
    fd, mine = _allocate_shared(nbytes, token)
    path = f"/proc/{os.getpid()}/fd/{fd}" if fd >= 0 else ""
    try:
        offers: list[tuple[str, str, bytes, bool]] = gather((identify_host(), path, token, mine is not None))
        if lacking := [number for number, offer in enumerate(offers) if not offer[3]]:
            error = RemoteError(
                f"[rank {lacking[0]}] out of memory: {nbytes >> 20} MiB to exchange bytes in cannot be allocated. Use "
                "a smaller window, or fewer ranks on its machine."
            )
            error.shared, error.echo = True, rank > 0
            raise error
        host = offers[rank][0]
        near = [number for number, offer in enumerate(offers) if offer[0] == host and number != rank]
        seen = {number: memory for number in near if (memory := _attach(*offers[number][1:3], nbytes)) is not None}
        shared = gather(fd >= 0 and len(seen) == len(near))
    finally:
        if fd >= 0:
            os.close(fd)
    if not all(shared[number] for number in (*near, rank)):
        seen = {}
    return [mine if number == rank else seen.get(number) for number in range(len(offers))]


def _allocate_shared(nbytes: int, token: bytes) -> tuple[int, memoryview | None]:
    """Return (file descriptor, memory): -1 without ``memfd``, None if memory is full."""
    fd = -1
    try:
        fd = os.memfd_create("deepspeed_ucp", os.MFD_CLOEXEC)
        os.ftruncate(fd, _FRONT + nbytes)
        memory = memoryview(mmap.mmap(fd, _FRONT + nbytes))
    except (AttributeError, OSError):
        if fd >= 0:
            os.close(fd)
    else:
        memory[:_TOKEN] = token
        return fd, memory[_FRONT:]
    try:
        return -1, memoryview(mmap.mmap(-1, max(nbytes, 1)))[:nbytes]
    except OSError:
        return -1, None


def _attach(path: str, token: bytes, nbytes: int) -> memoryview | None:
    """Map another rank's memory; None if inaccessible or of another process."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if os.fstat(fd).st_size != _FRONT + nbytes:
            return None
        memory = memoryview(mmap.mmap(fd, _FRONT + nbytes))
    except (OSError, ValueError):
        return None
    finally:
        os.close(fd)
    return memory[_FRONT:] if memory[:_TOKEN] == token else None
