"""Read whole files by several threads and checksum ranges; collect the faults.

For ``verify``, not for loads. Threads take pieces in file order: storage sees a few large reads close together.
"""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from ..errors import CheckpointError
from .interface import ReadableFile
from .memory import Scratch
from .paths import is_url
from .read import JOINED, Checked, crc32, merge_checks
from .store import open_stored
from .threads import run_threads

CHUNK = 4 << 20
"""Bytes of one read."""


@dataclass(frozen=True, slots=True)
class ScanFile:
    """A file and its byte ranges (offset, nbytes) to checksum, in any order."""

    path: str
    size: int
    ranges: tuple[tuple[int, int], ...] = ()


@dataclass(slots=True)
class Scanned:
    """Results of a scan for one file.

    Attributes:
        crcs: CRC32 of each range; None if a part of it could not be read.
        nbytes: bytes read.
        errors: (byte offset, message), by offset.
    """

    crcs: list[int | None]
    nbytes: int = 0
    errors: list[tuple[int, str]] = field(default_factory=list)


def scan_files(
    files: Sequence[ScanFile],
    *,
    threads: int = 4,
    window: int = 64 << 20,
    progress: Callable[[int], None] = lambda nbytes: None,
) -> list[Scanned]:
    """Compute the CRC32 of files' ranges; read errors are returned, not raised.

    Args:
        window: bytes of memory for all threads together.
        progress: called with the bytes of each piece, by any thread.
    """
    threads = max(threads, 1)
    most = JOINED if any(is_url(file.path) for file in files) else CHUNK
    chunk = max(min(most, window // threads) // 4096, 1) * 4096
    scans = [_Scan(file, chunk) for file in files]

    def work(turn: Iterator[tuple[_Scan, int]]) -> None:
        scratch = Scratch()
        for scan, low in turn:
            size = min(chunk, scan.file.size - low)
            scan.read(low, size, scratch)
            progress(size)

    run_threads([(scan, low) for scan in scans for low in range(0, scan.file.size, chunk)], work, threads)
    return [scan.join() for scan in scans]


class _Scan:
    """Scan of one file by several threads, open from its first piece to its last."""

    def __init__(self, file: ScanFile, chunk: int) -> None:
        self.file, self.left = file, -(-file.size // chunk)
        self.result = Scanned([None if nbytes else 0 for _, nbytes in file.ranges])
        self.checks: list[Checked] = []  # of parts of the ranges, by number of the range
        self.ranges_of: dict[int, list[int]] = defaultdict(list)
        self.stored: ReadableFile | None = None
        self.lock = threading.Lock()
        for number, (offset, nbytes) in enumerate(file.ranges):
            for piece in range(offset // chunk, -(-(offset + nbytes) // chunk) if nbytes else 0):
                self.ranges_of[piece * chunk].append(number)

    def read(self, low: int, nbytes: int, scratch: Scratch) -> None:
        """Read a piece and checksum its parts of the ranges."""
        view, error = self._fill(low, nbytes, scratch)
        checks = []
        for number in self.ranges_of[low]:
            offset, size = self.file.ranges[number]
            first, last = max(offset, low), min(offset + size, low + view.nbytes)
            if first < last:
                crc = crc32(view[first - low : last - low])
                checks.append(Checked(number, first - offset, last - first, crc))
        with self.lock:
            self.result.nbytes += view.nbytes
            self.left -= 1
            self.result.errors += [(low + view.nbytes, error)] if error else []
            self.checks += checks
            if not self.left and self.stored is not None:
                self.stored.close()

    def _fill(self, low: int, nbytes: int, scratch: Scratch) -> tuple[memoryview, str]:
        """Return the bytes that could be read, and an error message if these are not all."""
        got = 0
        with self.lock:
            if self.stored is None and not self.result.errors:
                try:
                    self.stored = open_stored(self.file.path, os.POSIX_FADV_SEQUENTIAL, size=self.file.size)
                except CheckpointError as error:
                    self.result.errors.append((0, error.text.removesuffix(".")))
        if self.stored is None:
            return memoryview(b""), ""
        with suppress(CheckpointError):  # the read below reports it with its offset
            view = self.stored.fetch(low, nbytes, scratch)
            if view is not None:
                return view, ""
        view = scratch.take(nbytes)
        try:
            while got < nbytes and (count := self.stored.read_some([view[got:]], low + got)):
                got += count
        except CheckpointError as error:
            return view[:got], error.text.removesuffix(".")
        return view[:got], "" if got == nbytes else f"ends at byte {low + got}; it was cut off while it was read"

    def join(self) -> Scanned:
        self.result.errors.sort()
        for check in merge_checks(self.checks):
            if check.nbytes == self.file.ranges[check.record][1]:
                self.result.crcs[check.record] = check.crc
        return self.result
