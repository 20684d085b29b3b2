"""Reading of requests, each byte once, to its place where that can be, checksummed while it is still in the cache.

The bytes themselves come from a :class:`~.interface.Stored`: ``opened`` has local files, ``ranged`` those behind URLs.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar

import numpy as np
from isal import isal_zlib

from ..atoms import FileRef, Record
from ..plan.claims import DISCARD, Part, Request
from .checksum import Checked
from .failover import Failover
from .interface import Closing, Stored
from .memory import Scratch, ScratchPool
from .opened import allow_open_files
from .paths import is_url
from .store import open_stored
from .threads import run_threads

T = TypeVar("T")

JOINED = 16 << 20
"""Bytes of a request to a store that its latency hardly shows in: of 20 ms, where 200 MB/s come, a fifth."""


class Sink(Protocol):
    """Where a buffer's bytes go."""

    def view(self, position: int, nbytes: int) -> memoryview | None:
        """Memory to read into directly (from element ``position`` on), or None where bytes have to be converted."""

    def store(self, part: Part, data: memoryview) -> None:
        """Take a part's bytes, which were read into other memory."""


Fetched = tuple[list[memoryview], list[tuple[Sink, Part, memoryview]]]
"""Memory that a request's bytes were read into, in order, and what of them is still to be stored."""


class MemorySink:
    """Plain memory, whose elements have ``itemsize`` bytes."""

    def __init__(self, memory: memoryview, itemsize: int = 1) -> None:
        self.memory, self.itemsize = memory, itemsize

    def view(self, position: int, nbytes: int) -> memoryview | None:
        """The memory from element ``position`` on."""
        low = position * self.itemsize
        return self.memory[low : low + nbytes]

    def store(self, part: Part, data: memoryview) -> None:
        """Copy bytes, or rows, to their places."""
        base = np.frombuffer(self.memory, np.uint8)[part.position * self.itemsize :]
        rows = np.frombuffer(data, np.uint8).reshape(-1, part.run or part.nbytes)
        np.lib.stride_tricks.as_strided(base, rows.shape, (part.stride * self.itemsize, 1))[:] = rows


class RecordReader(Closing):
    """Reads byte ranges of records; several threads may use it at once.

    Files are opened when something of them is read, and closed together. A copy of a file in which something fails is
    passed over from then on.

    Args:
        records, files: of the source.
        checksum: compute the CRC32 of the bytes read. Without it, files that have no header CRC32 (atoms of an atomic
            checkpoint) are read from the first place only.
        failed: paths of copies that are passed over, to which others are added.
        pool: memory for bytes that cannot be read straight to their places.
        again: whether a request's bytes will be read once more, soon: they are left in the page cache.
        joined: bytes up to which requests for a store's file are joined, where they follow each other.

    Attributes:
        spent: by path the bytes read of a file and the seconds that this took, over all threads.
    """

    def __init__(
        self,
        records: Sequence[Record],
        files: Sequence[FileRef],
        *,
        checksum: bool = True,
        failed: set[str] | None = None,
        pool: ScratchPool | None = None,
        again: Callable[[Request], bool] = lambda request: False,
        joined: int = JOINED,
    ) -> None:
        self.records, self.files, self.checksum = records, files, checksum
        self._again, self._joined = again, joined
        self._pool = pool or ScratchPool()
        self.spent: dict[str, tuple[int, float]] = {}
        self._failover = Failover(failed)
        self._open: dict[str, Stored] = {}
        self._opening = defaultdict[str, threading.Lock](threading.Lock)
        self._lock = threading.Lock()
        allow_open_files(len(files))

    def close(self) -> None:
        """Close the files; no thread may be reading."""
        while self._open:
            self._open.popitem()[1].close()

    def read(self, requests: Sequence[Request], sinks: Sequence[Sink | None]) -> list[Checked]:
        """Carry out requests, one after the other.

        Args:
            sinks: per buffer number where its bytes go; None discards them (they are still checksummed).

        Returns:
            What was read; CRC32s are 0 where none are formed.

        Raises:
            CheckpointError: a file cannot be read or is shorter than its header says.
        """
        return [check for group in self.group(requests) for check in self.read_group(group, sinks)]

    def read_parallel(self, requests: Sequence[Request], sinks: Sequence[Sink | None], threads: int) -> list[Checked]:
        """The same by several threads, each of which takes the next request; in any order."""
        checks: list[Checked] = []

        def work(turn: Iterator[list[Request]]) -> None:
            for group in turn:
                checks.extend(self.read_group(group, sinks))

        if requests:
            run_threads(self.group(requests), work, threads)
        return checks

    def group(self, requests: Sequence[Request]) -> list[list[Request]]:
        """Requests that one read serves: of a store's file those that follow each other, up to ``joined`` bytes."""
        groups: list[list[Request]] = []
        end, left = (-1, -1), 0
        for request in requests:
            if (request.record, request.offset) == end and request.nbytes <= left:
                groups[-1].append(request)
            else:
                groups.append([request])
                left = self._joined if is_url(self.files[self.records[request.record].file].path) else 0
            end, left = (request.record, request.offset + request.nbytes), left - request.nbytes
        return groups

    def read_group(self, group: Sequence[Request], sinks: Sequence[Sink | None]) -> list[Checked]:
        """Read requests that follow each other in a record."""
        file, begin = self.records[group[0].record].file, time.perf_counter()
        with self._pool.lend() as scratch:
            path, fetched = self.read_file(
                file, lambda stored: (stored.path, self._fetch(stored, group, sinks, scratch))
            )
            self._note(path, sum(request.nbytes for request in group), time.perf_counter() - begin)
            return [self._take(request, *each) for request, each in zip(group, fetched, strict=True)]

    def _take(self, request: Request, views: list[memoryview], staged: list[tuple[Sink, Part, memoryview]]) -> Checked:
        """Sum up what was read for a request, and hand on what was not read to its place."""
        crc = 0
        if self.checksum:
            for view in views:
                crc = isal_zlib.crc32(view, crc)
        for sink, part, view in staged:
            sink.store(part, view)
        return Checked(request.record, request.offset, request.nbytes, crc)

    def _fetch(
        self, file: Stored, group: Sequence[Request], sinks: Sequence[Sink | None], scratch: Scratch
    ) -> list[Fetched]:
        """Read requests that follow each other in a record of an open file."""
        first, nbytes = group[0], sum(request.nbytes for request in group)
        offset = self.records[first.record].offset + first.offset
        data = file.fetch(offset, nbytes, scratch) if len(group) == 1 and not self._again(first) else None
        if data is not None:
            return [([data], _divide(first, sinks, data))]
        arranged, memory = [], scratch.take(nbytes)
        for request in group:
            arranged.append(_arrange(request, sinks, memory))
            memory = memory[request.nbytes :]
        file.read([view for views, _ in arranged for view in views], offset)
        return arranged

    def _note(self, path: str, nbytes: int, seconds: float) -> None:
        with self._lock:
            before = self.spent.get(path, (0, 0.0))
            self.spent[path] = before[0] + nbytes, before[1] + seconds

    def read_file(self, number: int, work: Callable[[Stored], T]) -> T:
        """Read from a file, or from its next copy if that fails.

        The nearest copy comes first if its header CRC32 shows that it is the same file, else the first place's.

        Raises:
            CheckpointError: no copy can be read.
        """
        file = self.files[number]
        copies: Sequence[str] = file.copies
        if file.header_crc is None:
            copies = [*dict.fromkeys((file.path, *file.copies))] if self.checksum else [file.path]
        return self._failover.read(copies, lambda path: work(self._hold_open(path, file)), file.path)

    def _hold_open(self, path: str, file: FileRef) -> Stored:
        with self._lock:
            opening = self._opening[path]
        with opening:  # those that read other files do not wait for it
            if path not in self._open:
                self._open[path] = self.open_copy(path, file)
            return self._open[path]

    def open_copy(self, path: str, file: FileRef) -> Stored:
        """Open one copy of a file.

        Raises:
            CheckpointError: it cannot be opened, or is another file.
        """
        return open_stored(path, size=file.size)


def _arrange(request: Request, sinks: Sequence[Sink | None], scratch: memoryview) -> Fetched:
    """Memory for each part: the buffer itself where possible, else scratch."""
    views, staged, used = [], [], 0
    for part in request.parts:
        sink = None if part.buffer == DISCARD else sinks[part.buffer]
        view = sink.view(part.position, part.nbytes) if sink is not None and not part.run else None
        if view is None:
            view = scratch[used : used + part.nbytes]
            used += part.nbytes
            if sink is not None:
                staged.append((sink, part, view))
        views.append(view)
    return views, staged


def _divide(request: Request, sinks: Sequence[Sink | None], data: memoryview) -> list[tuple[Sink, Part, memoryview]]:
    """What of bytes that were read goes where."""
    divided, used = [], 0
    for part in request.parts:
        sink = None if part.buffer == DISCARD else sinks[part.buffer]
        if sink is not None:
            divided.append((sink, part, data[used : used + part.nbytes]))
        used += part.nbytes
    return divided


def sum_range(file: Stored, offset: int, nbytes: int, chunk: int = 4 << 20) -> int:
    """CRC32 of bytes of a file, which are read one part after the other.

    Raises:
        CheckpointError: they cannot be read.
    """
    scratch, crc = Scratch(), 0
    for low in range(0, nbytes, chunk):
        size = min(chunk, nbytes - low)
        view = file.fetch(offset + low, size, scratch)
        if view is None:
            view = scratch.take(size)
            file.read([view], offset + low)
        crc = isal_zlib.crc32(view, crc)
    return crc
