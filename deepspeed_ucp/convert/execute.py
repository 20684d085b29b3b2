"""The workers of one node: each takes a batch of ranges, reads it, checks it and writes it where it belongs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from ..errors import CheckpointError
from ..io.checksum import Checked, crc32
from ..io.disk import explain_full, write_at, write_parts
from ..io.journal import Journal
from ..io.read import sum_range
from ..io.store import StoredFile
from ..plan.conversion import Batch, Range
from ..stream.batches import ReadBatch, Source, stream
from ..stream.checks import Checks
from ..stream.reader import AtomReader
from ..stream.wholes import Whole
from ..torchsave.zipframe import ZipImage


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
    checks: Checks = field(default_factory=Checks)

    def add(self, written: Iterable[Written], checks: Iterable[Checked]) -> None:
        """Note a batch; any thread may."""
        self.written.extend(written)
        self.checks.add(checks)


def run_batches(
    batches: Sequence[Batch],
    files: Sequence[OutputFile],
    folder: str,
    reader: AtomReader,
    journal: Journal,
    *,
    workers: int,
    progress: Callable[[int], None] = lambda nbytes: None,
    halted: Callable[[], bool] = lambda: False,
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
    outcome = Outcome()

    def consume(read: ReadBatch) -> None:
        written = []
        for each, item in zip(read.batch.ranges, read.sides[0], strict=True):
            crc = crc32(item.into)
            _write_range(files[each.output], each, item.into, crc, folder)
            written.append(Written(each, crc))
        _note(journal, files, written, read.checks)
        outcome.add(written, read.checks)

    source = Source(reader, [file.whole for file in files])
    stream([source], batches, consume, threads=workers, progress=progress, halted=halted)
    return outcome


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
        with StoredFile(path) as stored:
            whole = written.range.numel == file.whole.numel
            if whole and not _has_frame(stored, image, written.crc):
                return False
            return sum_range(stored, start, written.range.numel * size, chunk) == written.crc
    except CheckpointError:  # not there, or shorter than it was
        return False


def _has_frame(file: StoredFile, image: ZipImage, crc: int) -> bool:
    for expected, offset in ((image.head, 0), (image.tail(crc), image.data_offset + image.nbytes)):
        found = bytearray(len(expected))
        file.read([memoryview(found)], offset)
        if found != expected:
            return False
    return True
