"""The workers of one node: each takes a batch of ranges, reads it, checks it and writes it where it belongs."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from ..errors import CheckpointError
from ..io.checksum import Checked, crc32
from ..io.disk import explain_full, write_at, write_parts
from ..io.journal import Journal
from ..io.memory import allocate
from ..io.read import fill
from ..plan.conversion import Batch, Range
from ..stream.progress import run_threads
from ..stream.reader import Item, RangeReader
from ..torchsave.torchzip import ZipImage
from ..union.wholes import Whole


@dataclass(frozen=True, slots=True)
class OutputFile:
    """A file of the atomic checkpoint: a logical atom, where it goes (relative), and the bytes around its data."""

    whole: Whole
    path: str
    image: ZipImage


@dataclass(frozen=True, slots=True, order=True)
class Written:
    """A range that is written, and the CRC32 of its bytes."""

    range: Range
    crc: int


@dataclass(slots=True)
class Outcome:
    """What is done: ranges, and the checksums of the source bytes they were made from."""

    written: list[Written] = field(default_factory=list)
    checks: list[Checked] = field(default_factory=list)

    def add(self, written: Iterable[Written], checks: Iterable[Checked]) -> None:
        """Note a batch."""
        self.written += written
        self.checks += checks


def run_batches(
    batches: Sequence[Batch],
    files: Sequence[OutputFile],
    folder: str,
    reader: RangeReader,
    journal: Journal,
    *,
    workers: int,
    progress: Callable[[int], None] = lambda nbytes: None,
    halted: Callable[[], bool] | None = None,
) -> Outcome:
    """Carry out this node's part of a conversion.

    Args:
        batches: taken one by one by the workers; each worker holds memory for the largest, about twice.
        files: what the batches' output numbers mean.
        folder: the staging folder.
        journal: notes every batch once it is written.
        progress: told the bytes of every batch; any thread calls it.
        halted: asked before every batch whether another node has failed; the rest is left then.

    Raises:
        UcpError: the first worker's error; the others stop after their batch.
    """
    outcome, lock = Outcome(), threading.Lock()
    largest = max((batch.nbytes for batch in batches), default=0)

    def work(turn: Iterator[Batch]) -> None:
        memory = memoryview(allocate(max(largest, 1)))
        for batch in turn:
            if halted is not None and halted():
                return
            written, checks = _run_batch(batch, files, folder, reader, memory)
            _note(journal, files, written, checks)
            with lock:
                outcome.add(written, checks)
            progress(batch.nbytes)

    run_threads(batches, work, workers)
    return outcome


def _run_batch(
    batch: Batch, files: Sequence[OutputFile], folder: str, reader: RangeReader, memory: memoryview
) -> tuple[list[Written], list[Checked]]:
    items, position = [], 0
    for each in batch.ranges:
        whole = files[each.output].whole
        nbytes = each.numel * whole.itemsize
        items.append(Item(whole, each.start, each.numel, memory[position : position + nbytes]))
        position += nbytes
    checks = reader.read_items(items)
    written = []
    for each, item in zip(batch.ranges, items, strict=True):
        crc = crc32(item.into)
        _write_range(files[each.output], each, item.into, crc, folder)
        written.append(Written(each, crc))
    return written, checks


def _write_range(file: OutputFile, each: Range, data: memoryview, crc: int, folder: str) -> None:
    """Write a range, and what surrounds the data where the range is all of it."""
    image, start = file.image, file.image.data_offset + each.start * file.whole.itemsize
    fd = create(os.path.join(folder, file.path))
    try:
        if each.numel == file.whole.numel:
            write_parts(fd, [image.head, data, image.tail(crc)], 0)
        else:
            write_at(fd, data, start)
    finally:
        os.close(fd)


def create(path: str) -> int:
    """Open for writing; parts of a file that others write stay."""
    with explain_full(path):
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)


def _note(journal: Journal, files: Sequence[OutputFile], written: Sequence[Written], checks: Sequence[Checked]) -> None:
    journal.append(
        {
            "ranges": [[files[w.range.output].path, w.range.start, w.range.numel, w.crc] for w in written],
            "checks": [[c.record, c.offset, c.nbytes, c.crc] for c in checks],
        }
    )


def close_file(file: OutputFile, crc: int, folder: str) -> None:
    """Write what surrounds the data of a file that was written in several ranges."""
    fd = create(os.path.join(folder, file.path))
    try:
        write_at(fd, file.image.head, 0)
        write_at(fd, file.image.tail(crc), file.image.data_offset + file.image.nbytes)
    finally:
        os.close(fd)


def is_intact(file: OutputFile, written: Written, folder: str, chunk: int = 4 << 20) -> bool:
    """Whether a range that an earlier attempt wrote is there, to the bit (a power failure may have lost it)."""
    path, image, size = os.path.join(folder, file.path), file.image, file.whole.itemsize
    start = image.data_offset + written.range.start * size
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        whole = written.range.numel == file.whole.numel
        if whole and not _has_frame(fd, image, written.crc, path):
            return False
        return _sum_bytes(fd, start, written.range.numel * size, path, chunk) == written.crc
    except CheckpointError:  # shorter than it was
        return False
    finally:
        os.close(fd)


def _has_frame(fd: int, image: ZipImage, crc: int, path: str) -> bool:
    for expected, offset in ((image.head, 0), (image.tail(crc), image.data_offset + image.nbytes)):
        found = bytearray(len(expected))
        fill(fd, [memoryview(found)], offset, path)
        if found != expected:
            return False
    return True


def _sum_bytes(fd: int, offset: int, nbytes: int, path: str, chunk: int) -> int:
    scratch, crc = memoryview(bytearray(min(chunk, max(nbytes, 1)))), 0
    for low in range(0, nbytes, chunk):
        view = scratch[: min(chunk, nbytes - low)]
        fill(fd, [view], offset + low, path)
        crc = crc32(view, crc)
    return int(crc)
