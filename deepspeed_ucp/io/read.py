"""Parallel reading of requests with ``preadv``, each byte once, checksummed while it is still in the cache."""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol

from isal import isal_zlib

from ..atoms import FileRef, Record
from ..errors import CheckpointError
from ..plan.requests import DISCARD, Part, Request

_SPARE_FILES = 256
"""What a process has open besides."""


class Sink(Protocol):
    """Where a buffer's bytes go."""

    def view(self, position: int, nbytes: int) -> memoryview | None:
        """Memory to read into directly (from element ``position`` on), or None where bytes have to be converted."""

    def store(self, part: Part, data: memoryview) -> None:
        """Take a part's bytes, which were read into other memory."""


@dataclass(frozen=True, slots=True)
class ReadStats:
    """What a reading pass did: bytes, requests, and each request's CRC32 (empty when not asked for)."""

    nbytes: int
    requests: int
    crcs: list[int]

    def join(self, other: ReadStats) -> ReadStats:
        """Both together."""
        return ReadStats(self.nbytes + other.nbytes, self.requests + other.requests, [*self.crcs, *other.crcs])


@dataclass(slots=True)
class _Job:
    requests: Sequence[Request]
    records: Sequence[Record]
    files: Sequence[FileRef]
    sinks: Sequence[Sink | None]
    fds: dict[int, int]
    checksum: bool
    crcs: list[int]


def read_requests(
    requests: Sequence[Request],
    records: Sequence[Record],
    files: Sequence[FileRef],
    sinks: Sequence[Sink | None],
    *,
    threads: int,
    make_scratch: Callable[[int], memoryview],
    checksum: bool,
) -> ReadStats:
    """Carry out requests with several threads.

    Args:
        requests: each thread takes the next one.
        sinks: per buffer number where its bytes go; None discards them (they are still checksummed).
        threads: how many read at once; each holds scratch memory of the largest request's size.
        make_scratch: allocates scratch memory of so many bytes.
        checksum: compute each request's CRC32.

    Raises:
        CheckpointError: a file cannot be read or is shorter than its header says.
    """
    if not requests:
        return ReadStats(0, 0, [])
    largest = max(request.nbytes for request in requests)
    turn = iter(range(len(requests)))
    lock = threading.Lock()
    stop = threading.Event()

    with ExitStack() as stack:
        job = _Job(requests, records, files, sinks, {}, checksum, [0] * len(requests))
        needed = sorted({records[request.record].file for request in requests})
        allow_open_files(len(needed))
        for number in needed:
            job.fds[number] = _open(files[number].path)
            stack.callback(os.close, job.fds[number])

        def work() -> None:
            scratch = make_scratch(largest)
            try:
                while not stop.is_set():
                    with lock:
                        index = next(turn, None)
                    if index is None:
                        return
                    _read_one(job, index, scratch)
            except BaseException:
                stop.set()
                raise

        with ThreadPoolExecutor(max_workers=max(threads, 1), thread_name_prefix="ucp-read") as pool:
            futures = [pool.submit(work) for _ in range(max(threads, 1))]
        for future in futures:
            future.result()
    nbytes = sum(request.nbytes for request in requests)
    return ReadStats(nbytes, len(requests), job.crcs if checksum else [])


def _open(path: str) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be opened ({error.strerror or error}).") from error


def _read_one(job: _Job, index: int, scratch: memoryview) -> None:
    request = job.requests[index]
    record = job.records[request.record]
    views, staged = _arrange(request.parts, job.sinks, scratch)
    fill(job.fds[record.file], list(views), record.offset + request.offset, job.files[record.file].path)
    if job.checksum:
        crc = 0
        for view in views:
            crc = isal_zlib.crc32(view, crc)
        job.crcs[index] = crc
    for sink, part, view in staged:
        sink.store(part, view)


def _arrange(
    parts: Sequence[Part], sinks: Sequence[Sink | None], scratch: memoryview
) -> tuple[list[memoryview], list[tuple[Sink, Part, memoryview]]]:
    """Memory for each part: the buffer itself where possible, else scratch."""
    views, staged, used = [], [], 0
    for part in parts:
        sink = None if part.buffer == DISCARD else sinks[part.buffer]
        view = sink.view(part.position, part.nbytes) if sink is not None and not part.run else None
        if view is None:
            view = scratch[used : used + part.nbytes]
            used += part.nbytes
            if sink is not None:
                staged.append((sink, part, view))
        views.append(view)
    return views, staged


def fill(fd: int, views: list[memoryview], offset: int, path: str) -> None:
    """``preadv`` from byte ``offset`` until every view is full; ``views`` is used up.

    Raises:
        CheckpointError: the file cannot be read, or ends before.
    """
    while views:
        try:
            got = os.preadv(fd, views, offset)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read at byte {offset} ({error.strerror or error}).") from error
        if got == 0:
            size = os.fstat(fd).st_size
            raise CheckpointError(f"{path}: ends at byte {size}; it was truncated since its header was read.")
        offset += got
        while views and got >= views[0].nbytes:
            got -= views[0].nbytes
            views.pop(0)
        if got:
            views[0] = views[0][got:]


def allow_open_files(count: int) -> None:
    """Raise this process's limit of open files where ``count`` more may not fit; as far as the system lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + _SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        if most > soft:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def read_bytes(path: str, offset: int, nbytes: int) -> bytes:
    """A few bytes, without read-ahead.

    Raises:
        CheckpointError: they cannot be read.
    """
    fd = _open(path)
    try:
        os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_RANDOM)
        data = bytearray(nbytes)
        fill(fd, [memoryview(data)], offset, path)
    finally:
        os.close(fd)
    return bytes(data)


def read_whole_crc(path: str, record: Record, chunk: int = 4 << 20) -> int:
    """CRC32 of a record, read sequentially."""
    scratch = memoryview(bytearray(min(chunk, max(record.nbytes, 1))))
    fd, crc = _open(path), 0
    try:
        for low in range(0, record.nbytes, chunk):
            view = scratch[: min(chunk, record.nbytes - low)]
            fill(fd, [view], record.offset + low, path)
            crc = isal_zlib.crc32(view, crc)
    finally:
        os.close(fd)
    return crc
