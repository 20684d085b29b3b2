"""Sequential reading of whole files by several threads, with the CRC32 of byte ranges; faults are collected.

For looking at a checkpoint, not for loading it: every byte of a file is read once, whatever it means, at the speed of
the disk. Threads take the next piece in file order, so that storage sees a few large reads close to each other.
"""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from ..errors import CheckpointError
from .checksum import combine_crc32, crc32
from .interface import Stored
from .memory import Scratch
from .paths import is_url
from .read import JOINED
from .store import open_stored
from .threads import run_threads

CHUNK = 4 << 20
"""Bytes of one read."""


@dataclass(frozen=True, slots=True)
class ScanFile:
    """A file and the byte ranges (offset, nbytes) in it whose CRC32 is wanted; they may lie anywhere in it."""

    path: str
    size: int
    ranges: tuple[tuple[int, int], ...] = ()


@dataclass(slots=True)
class Scanned:
    """What a scan found in one file.

    Attributes:
        crcs: per range its CRC32; None where a part of it could not be read.
        nbytes: bytes read.
        errors: (byte offset, what went wrong), by offset.
    """

    crcs: list[int | None]
    nbytes: int = 0
    errors: list[tuple[int, str]] = field(default_factory=list)


def scan_files(
    files: Sequence[ScanFile],
    *,
    threads: int = 4,
    window: int = 64 << 20,
    progress: Callable[[int], None] | None = None,
) -> list[Scanned]:
    """Read files from front to back and form the CRC32 of their ranges; nothing is raised for what cannot be read.

    Args:
        files: in the order in which they are read.
        threads: how many pieces are read at once.
        window: bytes of memory for all threads together.
        progress: told the bytes of every piece, from any thread.
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
            if progress is not None:
                progress(size)

    run_threads([(scan, low) for scan in scans for low in range(0, scan.file.size, chunk)], work, threads)
    return [scan.join() for scan in scans]


class _Scan:
    """A file that is scanned: open from its first piece to its last, read by several threads."""

    def __init__(self, file: ScanFile, chunk: int) -> None:
        self.file, self.left, self.nbytes = file, -(-file.size // chunk), 0
        self.ranges_of: dict[int, list[int]] = defaultdict(list)
        self.parts: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
        self.errors: list[tuple[int, str]] = []
        self.stored: Stored | None = None
        self.lock = threading.Lock()
        for number, (offset, nbytes) in enumerate(file.ranges):
            for piece in range(offset // chunk, -(-(offset + nbytes) // chunk) if nbytes else 0):
                self.ranges_of[piece * chunk].append(number)

    def read(self, low: int, nbytes: int, scratch: Scratch) -> None:
        """Read a piece and sum up what it has of the ranges."""
        with self.lock:
            self._open()
        view, error = self._fill(low, nbytes, scratch)
        parts = [(number, _sum_part(self.file.ranges[number], low, view)) for number in self.ranges_of[low]]
        with self.lock:
            self.nbytes += view.nbytes
            self.left -= 1
            self.errors += [(low + view.nbytes, error)] if error else []
            for number, part in parts:
                self.parts[number].append(part)
            if not self.left and self.stored is not None:
                self.stored.close()

    def _open(self) -> None:
        if self.stored is not None or self.errors:
            return
        try:
            self.stored = open_stored(self.file.path, os.POSIX_FADV_SEQUENTIAL, size=self.file.size)
        except CheckpointError as error:
            self.errors.append((0, self._shorten(error)))

    def _fill(self, low: int, nbytes: int, scratch: Scratch) -> tuple[memoryview, str]:
        """The bytes that could be read, and why no more."""
        got = 0
        if self.stored is None:
            return memoryview(b""), ""
        with suppress(CheckpointError):  # told below, with the place
            view = self.stored.fetch(low, nbytes, scratch)
            if view is not None:
                return view, ""
        view = scratch.take(nbytes)
        try:
            while got < nbytes and (count := self.stored.read_some([view[got:]], low + got)):
                got += count
        except CheckpointError as error:
            return view[:got], self._shorten(error)
        return view[:got], "" if got == nbytes else f"ends at byte {low + got}; it was cut off while it was read"

    def _shorten(self, error: CheckpointError) -> str:
        """Without the path, which is the caller's to tell."""
        return error.text.removesuffix(".")

    def join(self) -> Scanned:
        """What was found."""
        ranges = enumerate(self.file.ranges)
        crcs = [_join_parts(sorted(self.parts[number]), nbytes) for number, (_, nbytes) in ranges]
        return Scanned(crcs, self.nbytes, sorted(self.errors))


def _sum_part(wanted: tuple[int, int], low: int, view: memoryview) -> tuple[int, int, int]:
    """(offset in the range, bytes, CRC32) of what a piece at ``low`` has of a range."""
    first, last = max(wanted[0], low), min(wanted[0] + wanted[1], low + view.nbytes)
    data = view[first - low : max(last - low, first - low)]
    return first - wanted[0], data.nbytes, crc32(data)


def _join_parts(parts: Sequence[tuple[int, int, int]], nbytes: int) -> int | None:
    crc, end = 0, 0
    for offset, count, part in parts:
        if offset != end:
            return None
        crc, end = combine_crc32(crc, part, count), end + count
    return crc if end == nbytes else None
