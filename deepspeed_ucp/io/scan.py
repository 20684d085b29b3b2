"""Sequential reading of whole files by several threads, with the CRC32 of byte ranges; faults are collected.

For looking at a checkpoint, not for loading it: every byte of a file is read once, whatever it means, at the speed of
the disk. Threads take the next piece in file order, so that storage sees a few large reads close to each other.
"""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from isal import isal_zlib

from .memory import allocate

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


@dataclass(slots=True)
class _Open:
    """A file while it is read: its descriptor, pieces still to come, and the checksums of parts of its ranges."""

    file: ScanFile
    left: int
    pieces: dict[int, list[int]]
    fd: int = -1
    parts: dict[int, list[tuple[int, int, int]]] = field(default_factory=lambda: defaultdict(list))
    nbytes: int = 0
    errors: list[tuple[int, str]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)


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
    chunk = max(min(CHUNK, window // threads) // 4096, 1) * 4096
    opened = [_prepare(file, chunk) for file in files]
    turn = ((each, low) for each in opened for low in range(0, each.file.size, chunk))
    lock, stop = threading.Lock(), threading.Event()

    def work() -> None:
        scratch = memoryview(allocate(chunk))
        while not stop.is_set():
            with lock:
                each, low = next(turn, (None, 0))
                if each is None:
                    return
                _open(each)
            try:
                _read_piece(each, low, scratch[: min(chunk, each.file.size - low)])
            except BaseException:
                stop.set()
                raise
            finally:
                _close(each)
            if progress is not None:
                progress(min(chunk, each.file.size - low))

    with ThreadPoolExecutor(max_workers=threads, thread_name_prefix="ucp-scan") as pool:
        futures = [pool.submit(work) for _ in range(threads)]
        try:
            for future in futures:
                future.result()
        finally:
            stop.set()  # an interrupt does not wait for the rest
    return [_join(each) for each in opened]


def _prepare(file: ScanFile, chunk: int) -> _Open:
    pieces: dict[int, list[int]] = defaultdict(list)
    for number, (offset, nbytes) in enumerate(file.ranges):
        if nbytes:
            for piece in range(offset // chunk, (offset + nbytes - 1) // chunk + 1):
                pieces[piece * chunk].append(number)
    return _Open(file, -(-file.size // chunk), pieces)


def _open(each: _Open) -> None:
    """Open a file for its first piece; called by one thread at a time."""
    if each.fd >= 0 or each.errors:
        return
    try:
        each.fd = os.open(each.file.path, os.O_RDONLY | os.O_CLOEXEC)
        os.posix_fadvise(each.fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    except OSError as error:
        each.errors.append((0, f"cannot be opened ({error.strerror or error})"))


def _close(each: _Open) -> None:
    with each.lock:
        each.left -= 1
        if each.left == 0 and each.fd >= 0:
            os.close(each.fd)
            each.fd = -1


def _read_piece(each: _Open, low: int, view: memoryview) -> None:
    if each.fd < 0:
        return
    got, error = 0, ""
    try:
        while got < view.nbytes and (count := os.preadv(each.fd, [view[got:]], low + got)):
            got += count
        if got < view.nbytes:
            error = f"ends at byte {low + got}; it was cut off while it was read"
    except OSError as fault:
        error = f"cannot be read at byte {low + got} ({fault.strerror or fault})"
    parts = [(number, *_sum_part(each.file.ranges[number], low, view[:got])) for number in each.pieces.get(low, ())]
    with each.lock:
        each.nbytes += got
        if error:
            each.errors.append((low + got, error))
        for number, *part in parts:
            each.parts[number].append(tuple(part))  # type: ignore[arg-type]


def _sum_part(wanted: tuple[int, int], low: int, view: memoryview) -> tuple[int, int, int]:
    """(offset in the range, bytes, CRC32) of what a piece at ``low`` has of a range."""
    first, last = max(wanted[0], low), min(wanted[0] + wanted[1], low + view.nbytes)
    data = view[first - low : max(last - low, first - low)]
    return first - wanted[0], data.nbytes, isal_zlib.crc32(data)


def _join(each: _Open) -> Scanned:
    crcs = [
        _join_parts(sorted(each.parts.get(number, ())), nbytes) for number, (_, nbytes) in enumerate(each.file.ranges)
    ]
    return Scanned(crcs, each.nbytes, sorted(each.errors))


def _join_parts(parts: Sequence[tuple[int, int, int]], nbytes: int) -> int | None:
    crc, end = 0, 0
    for offset, count, part in parts:
        if offset != end:
            return None
        crc, end = isal_zlib.crc32_combine(crc, part, count), end + count
    return crc if end == nbytes else None
