"""Reading requests from files into sinks."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
from isal import isal_zlib

from deepspeed_ucp.atoms import FileRef, Record
from deepspeed_ucp.errors import CheckpointError
from deepspeed_ucp.io.checksum import Checked
from deepspeed_ucp.io.read import MemorySink, RecordReader, sum_range
from deepspeed_ucp.io.store import StoredFile
from deepspeed_ucp.plan import DISCARD, Part, Request

DATA = random.Random(0).randbytes(4000)


class Bytes:
    """A sink of bytes; with ``staged`` it has no memory to read into directly."""

    def __init__(self, size: int, *, staged: bool = False) -> None:
        self.data, self.staged = bytearray(size), staged

    def view(self, position: int, nbytes: int) -> memoryview | None:
        return None if self.staged else memoryview(self.data)[position : position + nbytes]

    def store(self, part: Part, data: memoryview) -> None:
        run = part.run or part.nbytes
        for row in range(part.nbytes // run):
            low = part.position + row * part.stride
            self.data[low : low + run] = data[row * run : (row + 1) * run]


@pytest.fixture
def file(tmp_path: Path) -> FileRef:
    (tmp_path / "x.pt").write_bytes(DATA)
    return FileRef(str(tmp_path / "x.pt"), len(DATA))


def read(
    requests: list[Request], file: FileRef, sinks: list[Any], threads: int = 1, checksum: bool = True
) -> list[Checked]:
    with RecordReader([Record(0, 100, 3900, None)], [file], checksum=checksum) as reader:
        return sorted(reader.read_parallel(requests, sinks, threads))


def test_bytes_go_where_the_parts_say(file: FileRef) -> None:
    direct, staged = Bytes(10), Bytes(10, staged=True)
    parts = (Part(4, 0, 6), Part(3, DISCARD, 0), Part(5, 1, 2), Part(2, 0, 0))
    checks = read([Request(0, 50, 14, parts)], file, [direct, staged])
    got = DATA[150:164]
    assert bytes(direct.data) == got[12:14] + bytes(4) + got[:4]
    assert bytes(staged.data) == bytes(2) + got[7:12] + bytes(3)
    assert checks == [Checked(0, 50, 14, isal_zlib.crc32(got))]


@pytest.mark.parametrize("staged", [False, True], ids=["direct", "staged"])
def test_rows_go_through_scratch_memory(file: FileRef, staged: bool) -> None:
    """A buffer's rows are apart: its memory is not one view."""
    sink = Bytes(20, staged=staged)
    checks = read([Request(0, 0, 9, (Part(6, 0, 1, run=2, stride=5), Part(3, 0, 17)))], file, [sink])
    got = DATA[100:109]
    assert bytes(sink.data) == (bytes(1) + got[:2] + bytes(3) + got[2:4] + bytes(3) + got[4:6] + bytes(4) + got[6:9])
    assert [check.crc for check in checks] == [isal_zlib.crc32(got)]


def test_discarded_buffers_are_checksummed_all_the_same(file: FileRef) -> None:
    checks = read([Request(0, 0, 20, (Part(20, 0, 0),))], file, [None])
    assert [check.crc for check in checks] == [isal_zlib.crc32(DATA[100:120])]


def test_without_checksums_there_are_none(file: FileRef) -> None:
    sink = Bytes(20)
    assert read([Request(0, 0, 20, (Part(20, 0, 0),))], file, [sink], checksum=False) == [Checked(0, 0, 20, 0)]
    assert bytes(sink.data) == DATA[100:120]


@pytest.mark.parametrize("threads", [1, 3, 8])
@pytest.mark.parametrize("staged", [False, True], ids=["direct", "staged"])
def test_threads_share_the_requests(file: FileRef, threads: int, staged: bool) -> None:
    sink = Bytes(3900, staged=staged)
    requests = [Request(0, low, 100, (Part(60, 0, low), Part(40, 0, low + 60))) for low in range(0, 3900, 100)]
    checks = read(requests, file, [sink], threads)
    assert bytes(sink.data) == DATA[100:]
    assert [check.crc for check in checks] == [
        isal_zlib.crc32(DATA[100 + low : 200 + low]) for low in range(0, 3900, 100)
    ]


def test_nothing_to_do_opens_nothing(tmp_path: Path) -> None:
    assert read([], FileRef(str(tmp_path / "absent.pt"), 0), []) == []


def test_short_reads_are_continued(file: FileRef, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = os.preadv

    def some(fd: int, views: list[memoryview], offset: int) -> int:
        return whole(fd, [views[0][: max(views[0].nbytes // 3, 1)]], offset)

    monkeypatch.setattr(os, "preadv", some)
    sink = Bytes(50)
    checks = read([Request(0, 5, 50, (Part(20, 0, 0), Part(30, 0, 20)))], file, [sink])
    assert bytes(sink.data) == DATA[105:155]
    assert [check.crc for check in checks] == [isal_zlib.crc32(DATA[105:155])]


def test_several_files(tmp_path: Path) -> None:
    files = []
    for number in range(3):
        (tmp_path / f"{number}.pt").write_bytes(bytes([number]) * 10)
        files.append(FileRef(str(tmp_path / f"{number}.pt"), 10))
    sink = Bytes(12)
    requests = [Request(number, 2, 4, (Part(4, 0, 4 * number),)) for number in range(3)]
    with RecordReader([Record(number, 1, 9, None) for number in range(3)], files, checksum=False) as reader:
        reader.read_parallel(requests, [sink], 2)
    assert bytes(sink.data) == bytes(4) + b"\1" * 4 + b"\2" * 4


@pytest.mark.parametrize("threads", [1, 4])
def test_a_file_that_became_shorter_is_refused(file: FileRef, threads: int) -> None:
    Path(file.path).write_bytes(DATA[:1000])
    requests = [Request(0, low, 100, (Part(100, 0, low),)) for low in range(0, 3900, 100)]
    with pytest.raises(CheckpointError, match=r"x.pt: ends at byte 1000; it was truncated"):
        read(requests, file, [Bytes(3900)], threads)


def test_a_missing_file_is_refused_by_name(file: FileRef) -> None:
    Path(file.path).unlink()
    with pytest.raises(CheckpointError, match=r"x.pt: cannot be opened \(No such file"):
        read([Request(0, 0, 4, (Part(4, 0, 0),))], file, [Bytes(4)])


def test_a_read_error_is_told_with_its_place(file: FileRef, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(CheckpointError, match=r"x.pt: cannot be read at byte 107 \(Input/output error\)"):
        read([Request(0, 7, 4, (Part(4, 0, 0),))], file, [Bytes(4)])


def test_a_failing_sink_ends_all_threads(file: FileRef) -> None:
    class Full(Bytes):
        def store(self, part: Part, data: memoryview) -> None:
            raise MemoryError("full")

    requests = [Request(0, low, 1, (Part(1, 0, low),)) for low in range(3900)]
    with pytest.raises(MemoryError, match="full"):
        read(requests, file, [Full(3900, staged=True)], threads=4)


def test_no_file_stays_open(file: FileRef) -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    read([Request(0, 0, 4, (Part(4, 0, 0),))], file, [Bytes(4)])
    with pytest.raises(CheckpointError):
        read([Request(0, 3890, 40, (Part(40, 0, 0),))], file, [Bytes(40)])
    assert sorted(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("chunk", [1, 7, 100, 5000])
def test_the_checksum_of_a_range(file: FileRef, chunk: int) -> None:
    with StoredFile(file.path) as stored:
        assert sum_range(stored, 10, 300, chunk) == isal_zlib.crc32(DATA[10:310])
        with pytest.raises(CheckpointError, match="ends at byte 4000"):
            sum_range(stored, 10, 4000, chunk)


@pytest.mark.parametrize("itemsize", [1, 4])
def test_plain_memory_takes_rows(file: FileRef, itemsize: int) -> None:
    memory = bytearray(20 * itemsize)
    part = Part(6 * itemsize, 0, 1, run=2 * itemsize, stride=5)
    read([Request(0, 0, 6 * itemsize, (part,))], file, [MemorySink(memoryview(memory), itemsize)])
    rows = [DATA[100 + low : 100 + low + 2 * itemsize] for low in range(0, 6 * itemsize, 2 * itemsize)]
    gap = bytes(3 * itemsize)
    assert bytes(memory) == bytes(itemsize) + gap.join(rows) + bytes(7 * itemsize)
