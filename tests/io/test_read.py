"""Reading requests from files into sinks."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from isal import isal_zlib

from deepspeed_ucp.errors import CheckpointError, OutOfReachError
from deepspeed_ucp.io import direct, memory, store
from deepspeed_ucp.io.memory import Scratch
from deepspeed_ucp.io.read import Checked, MemorySink, RecordReader, sum_range
from deepspeed_ucp.io.store import StoredFile
from deepspeed_ucp.model.records import CopyItem, FileRef, Read, Records
from deepspeed_ucp.torchsave.torchfile import list_records
from tests.support.descriptors import list_open
from tests.support.reads import item, read_of

DATA = random.Random(0).randbytes(4000)


class Bytes(MemorySink):
    """A sink of bytes. If ``staged``, it has no memory to read into directly."""

    def __init__(self, size: int, *, staged: bool = False) -> None:
        self.data, self.staged = bytearray(size), staged
        super().__init__(memoryview(self.data))

    def view(self, position: int, nbytes: int) -> memoryview | None:
        return None if self.staged else super().view(position, nbytes)


@pytest.fixture
def file(tmp_path: Path) -> FileRef:
    (tmp_path / "x.pt").write_bytes(DATA)
    return FileRef(str(tmp_path / "x.pt"), len(DATA))


def read(reads: list[Read], file: FileRef, sinks: list[Any], threads: int = 1, checksum: bool = True) -> list[Checked]:
    with RecordReader(Records.of([(0, 100, 3900, None)]), [file], checksum=checksum) as reader:
        return sorted(reader.read_parallel(reads, sinks, threads))


def test_bytes_are_read_into_the_destinations_of_the_items(file: FileRef) -> None:
    straight, staged = Bytes(10), Bytes(10, staged=True)
    items = item(0, 50, 4, 0, 6), item(0, 54, 3, 2, 0), item(0, 57, 5, 1, 2), item(0, 62, 2, 0, 0)
    checks = read([Read.of(0, 50, 66, *items)], file, [straight, staged, None])
    got = DATA[150:166]
    assert bytes(straight.data) == got[12:14] + bytes(4) + got[:4]
    assert bytes(staged.data) == bytes(2) + got[7:12] + bytes(3)
    assert checks == [Checked(0, 50, 16, isal_zlib.crc32(got))]


@pytest.mark.parametrize("checksum", [True, False])
def test_checksums_are_optional_and_include_discarded_bytes(file: FileRef, checksum: bool) -> None:
    sink, items = Bytes(20), (item(0, 0, 20, 0, 0), item(0, 20, 20, 1, 0))
    checks = read([read_of(*items)], file, [sink, None], checksum=checksum)
    assert checks == [Checked(0, 0, 40, isal_zlib.crc32(DATA[100:140]) if checksum else 0)]
    assert bytes(sink.data) == DATA[100:120]


@pytest.mark.parametrize("threads", [1, 3, 8])
@pytest.mark.parametrize("staged", [False, True], ids=["direct", "staged"])
def test_threads_share_the_reads(file: FileRef, threads: int, staged: bool) -> None:
    sink = Bytes(3900, staged=staged)
    reads = [read_of(item(0, low, 60, 0, low), item(0, low + 60, 40, 0, low + 60)) for low in range(0, 3900, 100)]
    checks = read(reads, file, [sink], threads)
    assert bytes(sink.data) == DATA[100:]
    assert [check.crc for check in checks] == [
        isal_zlib.crc32(DATA[100 + low : 200 + low]) for low in range(0, 3900, 100)
    ]


def test_short_reads_are_continued(file: FileRef, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = os.preadv

    def some(fd: int, views: list[memoryview], offset: int) -> int:
        return whole(fd, [views[0][: max(views[0].nbytes // 3, 1)]], offset)

    monkeypatch.setattr(os, "preadv", some)
    sink = Bytes(50)
    checks = read([read_of(item(0, 5, 20, 0, 0), item(0, 25, 30, 0, 20))], file, [sink])
    assert bytes(sink.data) == DATA[105:155]
    assert [check.crc for check in checks] == [isal_zlib.crc32(DATA[105:155])]


def refuse(code: int) -> mock.Mock:
    return mock.Mock(side_effect=OSError(code, os.strerror(code)))


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path, _: os.truncate(path, 1000), "ends at byte 1000; it was truncated"),
        (lambda path, _: os.unlink(path), r"cannot be opened \(No such file"),
        (
            lambda _, patch: patch.setattr(os, "preadv", refuse(errno.EIO)),
            r"cannot be read at byte \d+07 \(Input/output error\)",
        ),
    ],
    ids=["cut", "removed", "unreadable"],
)
def test_a_damaged_file_is_an_error_with_its_name(
    damage: Callable[..., None], message: str, threads: int, file: FileRef, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage(file.path, monkeypatch)
    reads = [read_of(item(0, low, 100, 0, low - 7)) for low in range(7, 3700, 100)]
    with pytest.raises(CheckpointError, match=rf"x.pt: {message}"):
        read(reads, file, [Bytes(3900)], threads)
    assert list_open(file.path) == []


def test_a_failing_sink_ends_all_threads(file: FileRef) -> None:
    class Full(Bytes):
        def store(self, item: CopyItem, data: memoryview) -> None:
            raise MemoryError("full")

    reads = [read_of(item(0, low, 1, 0, low)) for low in range(3900)]
    with pytest.raises(MemoryError, match="full"):
        read(reads, file, [Full(3900, staged=True)], threads=4)


@pytest.mark.parametrize("chunk", [1, 7, 100, 5000])
def test_the_checksum_of_a_range(file: FileRef, chunk: int) -> None:
    with StoredFile(file.path) as stored:
        assert sum_range(stored, 10, 300, chunk) == isal_zlib.crc32(DATA[10:310])
        with pytest.raises(CheckpointError, match="ends at byte 4000"):
            sum_range(stored, 10, 4000, chunk)


# -- past the page cache ----------------------------------------------------------------------------------------------

LARGE = random.Random(1).randbytes(3 * 4096 + 1234)


@pytest.fixture
def cold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StoredFile]:
    """A file that is read past the cache, on any kind of file system."""
    path = tmp_path / "cold.pt"
    path.write_bytes(LARGE)
    monkeypatch.setattr(store, "is_worth_passing", lambda fd: True)
    monkeypatch.setattr(store, "LEAST", 1)
    monkeypatch.setattr(store, "is_cached", lambda fd, offset, nbytes: False)
    with StoredFile(str(path)) as stored:
        past = direct.reopen(stored._file.fileno())
        if past is None:
            pytest.skip("this file system has no O_DIRECT")
        os.close(past)
        yield stored


RANGES = [(0, len(LARGE)), (0, 1), (4095, 2), (4096, 4096), (1, 8192), (5000, len(LARGE) - 5000), (len(LARGE) - 1, 1)]


@pytest.mark.parametrize(("offset", "nbytes"), RANGES)
def test_any_range_is_fetched_past_the_cache(cold: StoredFile, offset: int, nbytes: int) -> None:
    data = cold.fetch(offset, nbytes, Scratch())
    assert data is not None and bytes(data) == LARGE[offset : offset + nbytes]


def test_fetched_bytes_are_stored_at_the_destinations_of_the_items(cold: StoredFile) -> None:
    sink, staged = Bytes(9000), Bytes(20, staged=True)
    runs = CopyItem(0, 9057, 2, 2, 3, 1, 1, 5)
    items = item(0, 50, 9000, 0, 0), item(0, 9050, 7, 2, 0), runs, item(0, 9063, 3, 1, 17)
    checks = read([read_of(*items)], FileRef(cold.path, len(LARGE)), [sink, staged, None])
    got = LARGE[150 : 150 + 9016]
    assert bytes(sink.data) == got[:9000]
    rows = got[9007:]
    assert bytes(staged.data)[:13] == bytes(1) + rows[:2] + bytes(3) + rows[2:4] + bytes(3) + rows[4:6]
    assert bytes(staged.data)[17:] == rows[6:]
    assert checks == [Checked(0, 50, 9016, isal_zlib.crc32(got))]


def test_bytes_for_a_second_read_stay_in_the_cache(cold: StoredFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StoredFile, "fetch", lambda *_: pytest.fail("read past the cache"))
    records, sink = Records.of([(0, 0, len(LARGE), None)]), Bytes(100)
    with RecordReader(records, [FileRef(cold.path, len(LARGE))], again=lambda read: True) as reader:
        reader.read([read_of(item(0, 7, 100, 0, 0))], [sink])
    assert bytes(sink.data) == LARGE[7:107]


def test_few_bytes_are_read_through_the_cache(cold: StoredFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "LEAST", 5000)
    assert cold.fetch(100, 4999, Scratch()) is None
    assert cold.fetch(100, 5000, Scratch()) is not None


@pytest.mark.parametrize("offset", [8192, len(LARGE) - 10, len(LARGE), 5 * 4096])
def test_a_fetch_beyond_the_end_is_the_same_error_as_a_read(cold: StoredFile, offset: int) -> None:
    with pytest.raises(CheckpointError, match=f"ends at byte {len(LARGE)}; it was truncated"):
        cold.fetch(offset, len(LARGE) - offset + 1 if offset < len(LARGE) else 10, Scratch())


@pytest.mark.parametrize(
    ("code", "message"), [(errno.EINVAL, None), (errno.EFAULT, None), (errno.EIO, "cannot be read at byte 4096")]
)
def test_reads_fall_back_to_the_cache_if_the_system_refuses_direct_ones(
    cold: StoredFile, code: int, message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "preadv", refuse(code))
    if message is None:
        assert cold.fetch(4096, 10, Scratch()) is None
    else:
        with pytest.raises(CheckpointError, match=message):
            cold.fetch(4096, 10, Scratch())


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        *((code, CheckpointError) for code in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EIO)),
        *((code, OutOfReachError) for code in (errno.EACCES, errno.EMFILE, errno.ESTALE, errno.ETIMEDOUT)),
    ],
    ids=lambda value: errno.errorcode.get(value, ""),
)
def test_faults_of_files_and_of_the_system_have_different_errors(
    code: int, kind: type[CheckpointError], cold: StoredFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "preadv", refuse(code))
    monkeypatch.setattr(os, "open", refuse(code))
    for work in (lambda: cold.read_some([], 0), lambda: StoredFile(cold.path), lambda: list_records(cold.path)):
        with pytest.raises(CheckpointError) as caught:
            work()
        assert type(caught.value) is kind


def test_a_file_needs_one_descriptor(cold: StoredFile) -> None:
    """Checkpoints have many files, and processes have limits."""
    before = list_open(cold.path)
    with StoredFile(cold.path) as stored:
        assert stored.fetch(0, 9000, Scratch()) is not None
        assert len(list_open(cold.path)) == len(before) + 1


def test_reads_use_the_cache_without_a_spare_descriptor(cold: StoredFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "open", refuse(errno.EMFILE))
    assert cold.fetch(0, 9000, Scratch()) is None


def test_mincore_is_called_for_whole_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system has pages of 64 KiB, and its mmap refuses other offsets."""

    class Libc:
        def mmap(self, address: None, size: int, protection: int, flags: int, fd: int, offset: int) -> int | None:
            return None if offset % (64 << 10) else 1

        def munmap(self, address: int, size: int) -> None:
            assert size == (512 << 10) + 4096

        def mincore(self, address: int, size: int, pages: ctypes.Array[ctypes.c_ubyte]) -> int:
            assert len(pages) == 9 and size == (512 << 10) + 4096
            return 0

    monkeypatch.setattr(mmap, "PAGESIZE", 64 << 10)
    monkeypatch.setattr(direct, "load_libc", Libc)
    assert not direct.is_cached(0, (64 << 10) + 4096, 512 << 10)


def test_is_cached_checks_all_pages_of_a_range(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(bytes(64 << 12))
    with open(path, "rb") as file:
        assert direct.is_cached(file.fileno(), 5, (64 << 12) - 5)
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if direct.is_cached(file.fileno(), 0, 64 << 12):
            pytest.skip("this file system keeps what it is told to drop")
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        os.pread(file.fileno(), 40 << 12, 0)
        assert direct.is_cached(file.fileno(), 0, 40 << 12)
        assert not direct.is_cached(file.fileno(), 41 << 12, 20 << 12)


@pytest.mark.parametrize("passes", [True, False])
def test_small_reads_disable_a_long_readahead(passes: bool, file: FileRef, monkeypatch: pytest.MonkeyPatch) -> None:
    advise = mock.Mock()
    monkeypatch.setattr(store, "is_worth_passing", lambda _: passes)
    monkeypatch.setattr(os, "posix_fadvise", advise)
    for given, expected in ((os.POSIX_FADV_NORMAL, os.POSIX_FADV_RANDOM), (os.POSIX_FADV_SEQUENTIAL,) * 2):
        with StoredFile(file.path, given) as stored:
            is_advised = passes or given != os.POSIX_FADV_NORMAL
            assert advise.call_args_list == [mock.call(stored._file.fileno(), 0, 0, expected)] * is_advised
        advise.reset_mock()


@pytest.mark.parametrize(
    ("kind", "readahead", "pages", "passes"),
    [
        ("disk", "128", "never", True),
        ("disk", "4096", "never", False),
        ("disk", "", "never", True),
        ("disk", "4096", "madvise", True),
        ("disk", "4096", "always", True),
        ("disk", "4096", "", False),
        ("network", "128", "madvise", False),
    ],
)
def test_a_disk_is_read_past_the_cache_with_large_pages_or_a_short_readahead(
    kind: str, readahead: str, pages: str, passes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    enabled = tmp_path / "enabled"
    if pages:
        enabled.write_text("always madvise never\n".replace(pages, f"[{pages}]"))
    monkeypatch.setattr(memory, "_LARGE_PAGES", enabled)
    monkeypatch.setattr(direct, "has_large_pages", memory.has_large_pages.__wrapped__)
    file = tmp_path / "file"
    file.write_bytes(b"x")
    device = file.stat().st_dev
    told = tmp_path / f"{os.major(device)}:{os.minor(device)}" / "read_ahead_kb"
    if readahead:
        told.parent.mkdir()
        told.write_text(readahead + "\n")
    monkeypatch.setattr(direct, "_DEVICES", tmp_path)
    monkeypatch.setattr(direct, "find_kind", lambda fd: kind)
    with file.open() as opened:
        assert direct.is_worth_passing(opened.fileno()) == passes
