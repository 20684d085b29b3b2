"""Read byte ranges of records into their destinations, and checksum them.

Each byte is read once, and checksummed while the processor cache holds it. A file that has copies is read from the
first place that has it, and from the next one if that fails.
"""

from __future__ import annotations

import logging
import resource
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Protocol, TypeVar

import numpy as np
from isal import isal_zlib

from ..errors import CheckpointError, UnsupportedError
from ..model.records import CopyItem, FileRef, Read, Records
from .interface import Closing, ReadableFile
from .memory import Scratch, ScratchPool
from .paths import is_url
from .store import open_stored
from .threads import map_threads

logger = logging.getLogger("deepspeed_ucp")

T = TypeVar("T")
Buffer = bytes | bytearray | memoryview

_SPARE_FILES = 256
"""Number of other files that a process has open."""

_ENOUGH = 3
"""Failed files after which a place is tried last: each failure may take minutes."""

JOINED = 16 << 20
"""Bytes of a request to a store that make its latency small: 20 ms are a fifth of their time at 200 MB/s."""


def crc32(data: Buffer, crc: int = 0) -> int:
    """Return the CRC32 of ``data``, continued from ``crc``."""
    return int(isal_zlib.crc32(data, crc))


def combine_crc32(first: int, second: int, nbytes: int) -> int:
    """Return the CRC32 of two consecutive parts; ``nbytes`` is the second's size."""
    return int(isal_zlib.crc32_combine(first, second, nbytes))


@dataclass(frozen=True, slots=True, order=True)
class Checked:
    """CRC32 of bytes [offset, offset + nbytes) of a record."""

    record: int
    offset: int
    nbytes: int
    crc: int


def merge_checks(checks: Iterable[Checked]) -> list[Checked]:
    """Sort checksums, and combine those of adjacent ranges of a record."""
    merged: list[Checked] = []
    for check in sorted(checks, key=lambda c: (c.record, c.offset)):
        last = merged[-1] if merged else None
        if last and last.record == check.record and last.offset + last.nbytes == check.offset:
            crc = isal_zlib.crc32_combine(last.crc, check.crc, check.nbytes)
            merged[-1] = Checked(last.record, last.offset, last.nbytes + check.nbytes, crc)
        else:
            merged.append(check)
    return merged


class Failover:
    """Chooses the copies of files to read, except those that have failed; thread-safe."""

    def __init__(self, failed: set[str] | None = None) -> None:
        self.failed = set[str]() if failed is None else failed
        self._lost = Counter[str]()  # number of failed files by place
        self._lock = threading.Lock()

    def read(self, copies: Sequence[str], work: Callable[[str], T], primary: str) -> T:
        """Return ``work(path)`` of the first copy that works; warn about failed ones.

        Args:
            copies: paths in order of preference.
            primary: the copy whose error is raised if all fail.
        """
        errors: dict[str, CheckpointError | UnsupportedError] = {}
        while True:
            left = [path for path in copies if path not in self.failed]
            left.sort(key=lambda path: self._lost[_find_place(path, copies)] >= _ENOUGH)
            path = left[0] if left else primary
            try:
                return work(path)
            except (CheckpointError, UnsupportedError) as error:
                errors[path] = error
            if not self._mark_failed(path, copies, errors[path]):
                raise errors.get(primary, errors[path])

    def _mark_failed(self, path: str, copies: Sequence[str], error: Exception) -> bool:
        """Exclude a copy from later reads; return True if others remain."""
        with self._lock:
            is_new, left = path not in self.failed, not self.failed.issuperset({*copies} - {path})
            self.failed.add(path)
            self._lost[_find_place(path, copies)] += is_new and isinstance(error.__cause__, OSError)
        if is_new and left:
            logger.warning("%s The file is taken from another place.", error)
        return left


def _find_place(path: str, copies: Sequence[str]) -> str:
    """Return the place of a copy: its path without the end that all copies share."""
    ends = zip(*(reversed(path.split("/")) for path in copies), strict=False)
    shared = sum(1 for _ in takewhile(lambda parts: len(set(parts)) == 1, ends))
    return path.rsplit("/", shared)[0]


class Sink(Protocol):
    """Destination of a buffer's bytes."""

    def view(self, position: int, nbytes: int) -> memoryview | None:
        """Return memory from element ``position`` on, or None if bytes need conversion."""

    def store(self, item: CopyItem, data: memoryview) -> None:
        """Store the bytes of an item, which were read into other memory."""


Staged = list[tuple[Sink, CopyItem, memoryview]]
"""Items that must still be stored, and the memory that their bytes were read into."""


class MemorySink:
    """Plain memory with elements of ``itemsize`` bytes."""

    def __init__(self, memory: memoryview, itemsize: int = 1) -> None:
        self.memory, self.itemsize = memory, itemsize

    def view(self, position: int, nbytes: int) -> memoryview | None:
        low = position * self.itemsize
        return self.memory[low : low + nbytes]

    def store(self, item: CopyItem, data: memoryview) -> None:
        base = np.frombuffer(self.memory, np.uint8)[item.position * self.itemsize :]
        rows = np.frombuffer(data, np.uint8).reshape(-1, item.run if item.stride else item.nbytes)
        np.lib.stride_tricks.as_strided(base, rows.shape, (item.stride * self.itemsize, 1))[:] = rows


class RecordReader(Closing):
    """Reads byte ranges of records; several threads may use it at once.

    A file is opened at its first read; all are closed together. A copy of a file that fails is not used again.

    Args:
        checksum: compute the CRC32 of the bytes read. Without it, files that have no header CRC32 (swap files) are
            read from the first place only.
        failed: paths of copies not to be used; further ones are added.
        pool: memory for bytes that cannot be read directly to their destination.
        again: returns True if the bytes of a read are read again soon, and should stay in the page cache.
        joined: maximum bytes of consecutive reads of a store's file that are joined.

    Attributes:
        spent: bytes read and seconds by path, over all threads.
    """

    def __init__(
        self,
        records: Records,
        files: Sequence[FileRef],
        *,
        checksum: bool = True,
        failed: set[str] | None = None,
        pool: ScratchPool | None = None,
        again: Callable[[Read], bool] = lambda read: False,
        joined: int = JOINED,
    ) -> None:
        self.records, self.files, self.checksum = records, files, checksum
        self._again, self._joined = again, joined
        self._pool = pool or ScratchPool()
        self.spent: dict[str, tuple[int, float]] = {}
        self._failover = Failover(failed)
        self._open: dict[str, ReadableFile] = {}
        self._opening = defaultdict[str, threading.Lock](threading.Lock)
        self._lock = threading.Lock()
        allow_open_files(len(files))

    def close(self) -> None:
        while self._open:
            self._open.popitem()[1].close()

    def read(self, reads: Sequence[Read], sinks: Sequence[Sink | None]) -> list[Checked]:
        """Execute reads in order; return checksums, which are 0 without ``checksum``.

        Args:
            sinks: by destination number; None discards the bytes after their checksum.
        """
        return [check for group in self.group(reads) for check in self.read_group(group, sinks)]

    def read_parallel(self, reads: Sequence[Read], sinks: Sequence[Sink | None], threads: int) -> list[Checked]:
        """Execute reads by several threads as :meth:`read` does."""
        parts = map_threads(lambda group: self.read_group(group, sinks), self.group(reads), threads)
        return [check for checks in parts for check in checks]

    def group(self, reads: Sequence[Read]) -> list[list[Read]]:
        """Group consecutive reads that one request serves, up to ``joined`` bytes."""
        groups: list[list[Read]] = []
        end, left = (-1, -1), 0
        for read in reads:
            if (read.record, read.offset) == end and read.nbytes <= left:
                groups[-1].append(read)
            else:
                groups.append([read])
                left = self._joined if is_url(self.files[self.records.files[read.record]].path) else 0
            end, left = (read.record, read.end), left - read.nbytes
        return groups

    def read_group(self, group: Sequence[Read], sinks: Sequence[Sink | None]) -> list[Checked]:
        file, begin = self.records.files[group[0].record], time.perf_counter()
        with self._pool.lend() as scratch:
            path, fetched = self.read_file(
                file, lambda stored: (stored.path, self._fetch_group(stored, group, sinks, scratch))
            )
            with self._lock:
                nbytes, seconds = self.spent.get(path, (0, 0.0))
                nbytes += sum(read.nbytes for read in group)
                self.spent[path] = nbytes, seconds + time.perf_counter() - begin
            return [self._finish_read(read, *parts) for read, parts in zip(group, fetched, strict=True)]

    def _finish_read(self, read: Read, views: list[memoryview], staged: Staged) -> Checked:
        """Checksum a read's bytes, and store its staged items in their sinks."""
        crc = 0
        if self.checksum:
            for view in views:
                crc = isal_zlib.crc32(view, crc)
        for sink, item, view in staged:
            sink.store(item, view)
        return Checked(read.record, read.offset, read.nbytes, crc)

    def _fetch_group(
        self, file: ReadableFile, group: Sequence[Read], sinks: Sequence[Sink | None], scratch: Scratch
    ) -> list[tuple[list[memoryview], Staged]]:
        """Read a group's bytes from a file; return each read's views and staged items."""
        first, nbytes = group[0], sum(read.nbytes for read in group)
        offset = self.records.offsets[first.record] + first.offset
        data = file.fetch(offset, nbytes, scratch) if len(group) == 1 and not self._again(first) else None
        if data is not None:
            return [([data], _arrange(first, sinks, data, in_scratch=True)[1])]
        arranged, memory = [], scratch.take(nbytes)
        for read in group:
            arranged.append(_arrange(read, sinks, memory))
            memory = memory[read.nbytes :]
        file.read([view for views, _ in arranged for view in views], offset)
        return arranged

    def read_file(self, number: int, work: Callable[[ReadableFile], T]) -> T:
        """Return ``work(file)`` for file ``number``, or for its next copy if that fails.

        The nearest copy comes first if its header CRC32 shows that it is the same file, else the first place's.
        """
        file = self.files[number]
        copies: Sequence[str] = file.copies
        if file.header_crc is None:
            copies = [*dict.fromkeys((file.path, *file.copies))] if self.checksum else [file.path]
        return self._failover.read(copies, lambda path: work(self._open_once(path, file)), file.path)

    def _open_once(self, path: str, file: FileRef) -> ReadableFile:
        with self._lock:
            opening = self._opening[path]
        with opening:
            if path not in self._open:
                self._open[path] = self.open_copy(path, file)
            return self._open[path]

    def open_copy(self, path: str, file: FileRef) -> ReadableFile:
        return open_stored(path, size=file.size)


def _arrange(
    read: Read, sinks: Sequence[Sink | None], scratch: memoryview, in_scratch: bool = False
) -> tuple[list[memoryview], Staged]:
    """Return a read's views (destinations or scratch) and its staged items."""
    views, staged, memory = list[memoryview](), Staged(), scratch[: read.nbytes]
    for item in read.items:
        sink = sinks[item.destination]
        view = None if sink is None or item.stride or in_scratch else sink.view(item.position, item.nbytes)
        if view is None:
            view = memory[: item.nbytes]
            if sink is not None:
                staged.append((sink, item, view))
        views.append(view)
        memory = memory[item.nbytes :]
    return [*views, memory] if memory.nbytes else views, staged


def checksum_range(file: ReadableFile, offset: int, nbytes: int, chunk: int = 4 << 20) -> int:
    """Return the CRC32 of bytes [offset, offset + nbytes) of an open file."""
    scratch, crc = Scratch(), 0
    for low in range(0, nbytes, chunk):
        size = min(chunk, nbytes - low)
        view = file.fetch(offset + low, size, scratch)
        if view is None:
            view = scratch.take(size)
            file.read([view], offset + low)
        crc = isal_zlib.crc32(view, crc)
    return crc


def allow_open_files(count: int) -> None:
    """Increase this process's limit of open files to ``count`` more, if possible."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + _SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        if most > soft:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
