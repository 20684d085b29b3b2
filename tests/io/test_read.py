"""Reading requests from files into sinks."""

from __future__ import annotations

import errno
import mmap
import os
import random
import zlib
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from isal import isal_zlib

from deepspeed_ucp.errors import CheckpointError, OutOfReachError
from deepspeed_ucp.io import direct, memory, scan, store
from deepspeed_ucp.io.memory import Scratch
from deepspeed_ucp.io.read import Checked, MemorySink, RecordReader, checksum_range
from deepspeed_ucp.io.scan import ScanFile, scan_files
from deepspeed_ucp.io.store import LocalFile, open_stored
from deepspeed_ucp.model.records import CopyItem, FileRef, Read, Records
from deepspeed_ucp.torchsave.torchfile import list_records
from tests.support.descriptors import list_open
from tests.support.reads import item, read_of
from tests.support.reshard import examples, temporary_folder

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


def read_short(fd: int, views: list[memoryview], offset: int, whole: Any = os.preadv) -> int:
    return whole(fd, [views[0][: max(views[0].nbytes // 3, 1)]], offset)  # type: ignore[no-any-return]


@pytest.mark.parametrize("way", ["whole", "short", "past the cache", "unchecked"])
@pytest.mark.parametrize("threads", [1, 3, 8])
def test_bytes_are_read_into_the_destinations_of_the_items(
    file: FileRef, threads: int, way: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Destinations are memory, memory that needs a conversion, runs of bytes in it, and none."""
    if way == "short":
        monkeypatch.setattr(os, "preadv", read_short)
    if way == "past the cache":
        request.getfixturevalue("cold")
    straight, staged = Bytes(3900), Bytes(3900, staged=True)
    reads, expected = [], (bytearray(3900), bytearray(3900))
    for low in range(0, 3900, 100):
        runs = CopyItem(0, low + 62, 2, 2, 3, 1, low + 11, 5)
        items = (item(0, low, 50, 0, low + 9), item(0, low + 50, 7, 1, low), item(0, low + 57, 5, 2, 0), runs)
        reads.append(Read.of(0, low, low + 70, *items))
        got = DATA[100 + low : 170 + low]
        expected[0][low + 9 : low + 59], expected[1][low : low + 7] = got[:50], got[50:57]
        for row in range(3):
            at = low + 11 + 5 * row
            expected[1][at : at + 2] = got[62 + 2 * row : 64 + 2 * row]
    checks = read(reads, file, [straight, staged, None], threads, checksum=way != "unchecked")
    assert (straight.data, staged.data) == expected
    crcs = [isal_zlib.crc32(DATA[100 + low : 170 + low]) for low in range(0, 3900, 100)]
    assert checks == [Checked(0, 100 * number, 70, crc if way != "unchecked" else 0) for number, crc in enumerate(crcs)]


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
            r"cannot be read at byte \d+07 \(Input/output",
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
    with LocalFile(file.path) as stored:
        assert checksum_range(stored, 10, 300, chunk) == isal_zlib.crc32(DATA[10:310])
        with pytest.raises(CheckpointError, match="ends at byte 4000"):
            checksum_range(stored, 10, 4000, chunk)


# -- past the page cache ----------------------------------------------------------------------------------------------

LARGE = random.Random(1).randbytes(3 * 4096 + 1234)


@pytest.fixture
def cold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalFile]:
    """A file that is read past the cache, on any kind of file system."""
    path = tmp_path / "cold.pt"
    path.write_bytes(LARGE)
    monkeypatch.setattr(store, "prefers_direct_reads", lambda fd: True)
    monkeypatch.setattr(store, "LEAST", 1)
    monkeypatch.setattr(store, "is_cached", lambda fd, offset, nbytes: False)
    with LocalFile(str(path)) as stored:
        past = direct.reopen_direct(stored._file.fileno())
        if past is None:
            pytest.skip("this file system has no O_DIRECT")
        os.close(past)
        yield stored


RANGES = [(0, len(LARGE)), (0, 1), (4095, 2), (4096, 4096), (1, 8192), (5000, len(LARGE) - 5000), (len(LARGE) - 1, 1)]


@pytest.mark.parametrize(("offset", "nbytes"), RANGES)
def test_any_range_is_fetched_past_the_cache(cold: LocalFile, offset: int, nbytes: int) -> None:
    data = cold.fetch(offset, nbytes, Scratch())
    assert data is not None and bytes(data) == LARGE[offset : offset + nbytes]


def test_bytes_for_a_second_read_stay_in_the_cache(cold: LocalFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalFile, "fetch", lambda *_: pytest.fail("read past the cache"))
    records, sink = Records.of([(0, 0, len(LARGE), None)]), Bytes(100)
    with RecordReader(records, [FileRef(cold.path, len(LARGE))], again=lambda read: True) as reader:
        reader.read([read_of(item(0, 7, 100, 0, 0))], [sink])
    assert bytes(sink.data) == LARGE[7:107]


@pytest.mark.parametrize(
    ("owner", "name", "value", "message"),
    [
        (store, "LEAST", 9001, None),
        (os, "open", refuse(errno.EMFILE), None),
        (os, "preadv", refuse(errno.EINVAL), None),
        (os, "preadv", refuse(errno.EFAULT), None),
        (os, "preadv", refuse(errno.EIO), "cannot be read at byte 0"),
    ],
    ids=["few bytes", "no spare descriptor", "refused", "refused memory", "unreadable"],
)
def test_reads_fall_back_to_the_cache(
    cold: LocalFile, owner: Any, name: str, value: Any, message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cold.fetch(100, 9000, Scratch()) is not None
    monkeypatch.setattr(owner, name, value)
    with pytest.raises(CheckpointError, match=message) if message else nullcontext():
        assert cold.fetch(100, 9000, Scratch()) is None


@pytest.mark.parametrize("offset", [8192, len(LARGE) - 10, len(LARGE), 5 * 4096])
def test_a_fetch_beyond_the_end_is_the_same_error_as_a_read(cold: LocalFile, offset: int) -> None:
    with pytest.raises(CheckpointError, match=f"ends at byte {len(LARGE)}; it was truncated"):
        cold.fetch(offset, len(LARGE) - offset + 1 if offset < len(LARGE) else 10, Scratch())


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        *((code, CheckpointError) for code in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EIO)),
        *((code, OutOfReachError) for code in (errno.EACCES, errno.EMFILE, errno.ESTALE, errno.ETIMEDOUT)),
    ],
    ids=lambda value: errno.errorcode.get(value, ""),
)
def test_faults_of_files_and_of_the_system_have_different_errors(
    code: int, kind: type[CheckpointError], cold: LocalFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "preadv", refuse(code))
    monkeypatch.setattr(os, "open", refuse(code))
    for work in (lambda: cold.read_some([], 0), lambda: LocalFile(cold.path), lambda: list_records(cold.path)):
        with pytest.raises(CheckpointError) as caught:
            work()
        assert type(caught.value) is kind


def test_a_file_needs_one_descriptor(cold: LocalFile) -> None:
    """Checkpoints have many files, and processes have limits."""
    before = list_open(cold.path)
    with LocalFile(cold.path) as stored:
        assert stored.fetch(0, 9000, Scratch()) is not None
        assert len(list_open(cold.path)) == len(before) + 1


def test_mincore_is_called_for_whole_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system has pages of 64 KiB, and its mmap refuses other offsets."""
    libc, size = mock.Mock(), (512 << 10) + 4096
    libc.mmap.side_effect = lambda *args: None if args[-1] % (64 << 10) else 1
    libc.mincore.return_value = 0
    monkeypatch.setattr(mmap, "PAGESIZE", 64 << 10)
    monkeypatch.setattr(direct, "load_libc", lambda: libc)
    assert not direct.is_cached(0, (64 << 10) + 4096, 512 << 10)
    address, nbytes, pages = libc.mincore.call_args.args
    assert (address, nbytes, len(pages)) == (1, size, 9)
    libc.munmap.assert_called_once_with(1, size)


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
    monkeypatch.setattr(store, "prefers_direct_reads", lambda _: passes)
    monkeypatch.setattr(os, "posix_fadvise", advise)
    for advice, expected in ((os.POSIX_FADV_NORMAL, os.POSIX_FADV_RANDOM), (os.POSIX_FADV_SEQUENTIAL,) * 2):
        with LocalFile(file.path, advice) as stored:
            is_advised = passes or advice != os.POSIX_FADV_NORMAL
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
    enabled, file = tmp_path / "enabled", tmp_path / "file"
    file.touch()
    if pages:
        enabled.write_text("always madvise never\n".replace(pages, f"[{pages}]"))
    monkeypatch.setattr(memory, "_LARGE_PAGES", enabled)
    monkeypatch.setattr(direct, "has_large_pages", memory.has_large_pages.__wrapped__)
    if readahead:
        device = tmp_path / f"{os.major(file.stat().st_dev)}:{os.minor(file.stat().st_dev)}"
        device.mkdir()
        (device / "read_ahead_kb").write_text(readahead + "\n")
    monkeypatch.setattr(direct, "_DEVICES", tmp_path)
    monkeypatch.setattr(direct, "find_storage_kind", lambda fd: kind)
    with file.open() as opened:
        assert direct.prefers_direct_reads(opened.fileno()) == passes


# -- scans of whole files: checksums of ranges for any piece size; faults are recorded, not raised ---------------------

SCANNED = bytes(index * 37 % 251 for index in range(50_000))


@examples(40)
@given(
    ranges=st.lists(st.tuples(st.integers(0, 49_000), st.integers(0, 20_000)), max_size=6),
    threads=st.integers(1, 5),
    window=st.sampled_from((1, 5000, 40_000, 1 << 20)),
)
def test_scans_compute_checksums_of_any_ranges(ranges: list[tuple[int, int]], threads: int, window: int) -> None:
    """Ranges may overlap and span pieces."""
    ranges = [(offset, min(nbytes, len(SCANNED) - offset)) for offset, nbytes in ranges]
    progress: list[int] = []
    with temporary_folder() as folder:
        (folder / "a").write_bytes(SCANNED)
        (folder / "empty").write_bytes(b"")
        files = [ScanFile(str(folder / "a"), len(SCANNED), tuple(ranges)), ScanFile(str(folder / "empty"), 0)]
        found = scan_files(files, threads=threads, window=window, progress=progress.append)
    assert found[0].crcs == [zlib.crc32(SCANNED[offset : offset + nbytes]) for offset, nbytes in ranges]
    assert [each.nbytes for each in found] == [len(SCANNED), 0]
    assert sum(progress) == len(SCANNED)
    assert not found[0].errors


@pytest.mark.parametrize(("name", "text"), [("gone", "No such file"), (".", "Is a directory")])
def test_an_unreadable_file_is_recorded_as_a_fault(tmp_path: Path, name: str, text: str) -> None:
    (found,) = scan_files([ScanFile(str(tmp_path / name), 9000, ((0, 10),))])
    ((_, message),) = found.errors
    assert found.crcs == [None] and message.startswith(f"cannot be opened ({text}")


@pytest.mark.parametrize("size", [1, 4096, 4097, 12_288])
def test_a_file_is_closed_after_its_last_piece(size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_bytes(SCANNED[:size])
    opened = [mock.Mock(wraps=open_stored(str(tmp_path / "a"))) for _ in range(2)]
    monkeypatch.setattr(scan, "open_stored", mock.Mock(side_effect=opened))
    scan_files([ScanFile(str(tmp_path / "a"), size)] * 2, threads=1, window=4096)
    for stored in opened:
        names = [name for name, *_ in stored.method_calls]
        assert names.count("close") == 1 and names[-1] == "close" and len(names) > -(-size // 4096)
