"""The contract of :class:`~deepspeed_ucp.io.interface.Store`, for folders, a store in memory and S3."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from deepspeed_ucp.errors import CheckpointError
from deepspeed_ucp.io import objects, paths, store
from deepspeed_ucp.io.read import MemorySink, RecordReader
from deepspeed_ucp.io.scan import ScanFile, scan_files
from deepspeed_ucp.model.records import FileRef, Records
from tests.stores.server import BUCKET, serve_bucket
from tests.support.covering import params
from tests.support.memory import clear_memory, read_tree
from tests.support.reads import item, read_of

pytest.importorskip("moto")

CONTENT = bytes(range(250)) * 40


@pytest.fixture(scope="module", params=["memory", "s3"])
def bucket(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "memory":
        clear_memory()
        yield f"memory://{BUCKET}"
        return
    with serve_bucket():
        yield f"s3://{BUCKET}"


@pytest.fixture
def stored(bucket: str, request: pytest.FixtureRequest) -> str:
    return f"{bucket}/{request.node.name}"


def check_files(folder: str) -> None:
    for name in ("run/a", "run/deep/b", "run/deep/c d#e", "runs"):
        store.write_small(f"{folder}/{name}", name.encode())
    found = {name: entry.size for name, entry in store.list_folder(folder).items()}
    assert found == {"run": paths.FOLDER, "runs": 4}
    tree = {name: entry.size for name, entry in store.list_tree(f"{folder}/run/").items()}
    assert tree == {"a": 5, "deep/b": 10, "deep/c d#e": 14}
    assert store.read_small(f"{folder}/run/deep/c d#e") == b"run/deep/c d#e"
    assert store.read_small(f"{folder}/runs", 3) == b"run" and store.read_small(f"{folder}/runs", 9) == b"runs"
    for name, is_folder in (("run", True), ("run/deep/", True), ("runs", False)):
        assert store.is_folder(f"{folder}/{name}") == is_folder != store.is_file(f"{folder}/{name}")
        assert store.exists(f"{folder}/{name}")
    entry = store.find_entry(f"{folder}/runs")
    assert entry and entry.size == 4 and entry.changed > 1e9
    assert store.find_change_time(f"{folder}/runs") == pytest.approx(entry.changed * 1e9, abs=1e6)
    store.write_small(f"{folder}/runs", b"")
    assert store.read_small(f"{folder}/runs") == b"" and store.list_folder(folder)["runs"].size == 0
    for _ in range(2):
        store.remove(f"{folder}/runs")
    assert not store.exists(f"{folder}/runs")
    for missing in ("runs", "runs/a", "ru"):
        assert not store.is_folder(f"{folder}/{missing}") and store.find_entry(f"{folder}/{missing}") is None
        for work in (store.list_folder, store.list_tree, store.read_small, store.find_change_time):
            with pytest.raises(FileNotFoundError):
                work(f"{folder}/{missing}")


def check_exchange(folder: str) -> None:
    url = f"{folder}/file"
    assert not store.exchange_small(url, b"1", b"0") and not store.exists(url)
    assert store.exchange_small(url, b"1", None) and store.exchange_small(url, b"1", None)
    assert not store.exchange_small(url, b"2", None) and not store.exchange_small(url, b"2", b"0")
    assert store.exchange_small(url, b"2", b"1") and store.read_small(url) == b"2"


@pytest.mark.parametrize("check", [check_files, check_exchange])
def test_small_files_are_written_read_and_removed(check: Callable[[str], None], stored: str, tmp_path: Path) -> None:
    check(stored)
    (tmp_path / "run" / "deep").mkdir(parents=True)
    check(str(tmp_path))


def test_conditional_writes_compare_versions_of_each_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Google compares generations, other stores ETags. Azure's listings have ETags without quotation marks."""
    answer = mock.Mock(meta={"e_tag": "tag", "version": "7"}, stream=lambda _: [b"1"])
    monkeypatch.setattr(objects.obstore, "get", lambda *_: answer)
    assert objects._read_front(f"memory://{BUCKET}/file", None) == (b"1", {"e_tag": "tag", "version": "7"})
    answer.meta = {"e_tag": "tag", "version": None}
    assert objects._read_front(f"memory://{BUCKET}/file", 1)[1] == {"e_tag": "tag"}
    assert objects.make_version('"tag"', None) == objects.make_version("tag", None) == "tag"


@pytest.mark.parametrize("before", [None, b"0"])
def test_a_conditional_write_fails_after_a_concurrent_write(
    before: bytes | None, stored: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, read, seen = f"{stored}/{before}", objects._read_front, list[str]()
    if before is not None:
        store.write_small(url, before)

    def interpose(path: str, most: int | None) -> Any:
        try:
            return read(path, most)
        finally:
            if not seen:
                seen.append(path)
                store.write_small(url, b"theirs")

    monkeypatch.setattr(objects, "_read_front", interpose)
    assert not store.exchange_small(url, b"ours", before)
    assert store.read_small(url) == b"theirs"


@pytest.mark.parametrize("size", params([0, 1, 8 << 20, (20 << 20) + 3], [(8 << 20) - 1]))
def test_uploads_of_any_size_keep_their_bytes(size: int, stored: str, tmp_path: Path) -> None:
    path, url = tmp_path / "file", f"{stored}/file"
    path.write_bytes(CONTENT * (size // len(CONTENT)) + CONTENT[: size % len(CONTENT)])
    for _ in range(2):
        store.put_file(url, str(path))
        entry = store.find_entry(url)
        assert entry and entry.size == size and store.read_small(url) == path.read_bytes()


def test_a_wrong_size_after_an_upload_is_an_error(stored: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(CONTENT)
    put = objects.obstore.put

    def overwrite(client: Any, key: str, file: Any, **how: Any) -> Any:
        sent = put(client, key, file, **how)
        put(client, key, b"of another writer")
        return sent

    monkeypatch.setattr(objects.obstore, "put", overwrite)
    with pytest.raises(OSError, match=r"17 bytes arrived of 10000.*write it again"):
        store.put_file(f"{stored}/file", str(tmp_path / "file"))


def test_ranges_of_an_object_are_read(stored: str) -> None:
    url, into = f"{stored}/file", bytearray(700)
    store.write_small(url, CONTENT)
    with store.open_stored(url) as file:
        file.read([memoryview(into)[:450], memoryview(into)[450:]], 100)
        assert bytes(into) == CONTENT[100:800]
        assert file.read_some([memoryview(into)], len(CONTENT) - 9) == 9 and bytes(into[:9]) == CONTENT[-9:]
        assert file.read_some([memoryview(into)], len(CONTENT)) == 0
        with pytest.raises(CheckpointError, match=f"ends at byte {len(CONTENT)}"):
            file.read([memoryview(into)], len(CONTENT) - 9)
    with pytest.raises(CheckpointError, match="does not exist"):
        store.open_stored(f"{stored}/none")


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """List of the offset and number of bytes of each request."""
    requests, fill = list[tuple[int, int]](), objects.RemoteFile.fill

    def note(self: Any, views: list[memoryview], offset: int) -> None:
        requests.append((offset, sum(view.nbytes for view in views)))
        fill(self, views, offset)

    monkeypatch.setattr(objects.RemoteFile, "fill", note)
    return requests


def test_each_block_of_a_header_is_requested_once(
    stored: str, requests: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order of reads does not matter."""
    url = f"{stored}/file"
    store.write_small(url, CONTENT)
    monkeypatch.setattr(objects, "_HEAD", 64)
    monkeypatch.setattr(objects, "_BLOCK", 16)
    with store.open_stream(url) as stream:
        stream.read_ahead([(305, 10), (9000, 3), (340, 20), (370, 1)])
        assert sorted(requests) == [(304, 80), (8992, 16)]
        for nbytes, offset in ((30, 310), (60, 300), (5, 100), (700, 0), (1, 9999), (9, 10_000)):
            assert stream.read_at(nbytes, offset) == CONTENT[offset : offset + nbytes]
        stream.seek(-4, 2)
        assert stream.read() == CONTENT[-4:]
    assert sum(nbytes for _, nbytes in requests) == sum(map(len, stream._blocks.values()))


@pytest.mark.parametrize("size", [63, 64, 65, 127, 128, 129])
def test_a_file_smaller_than_two_blocks_is_read_by_one_request(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "_HEAD", 64)
    monkeypatch.setattr(objects, "_BLOCK", 16)
    url = f"memory://{BUCKET}/ends{size}"
    store.write_small(url, CONTENT[:size])
    with store.open_stream(url) as stream:
        for low, high in combinations(range(size + 1), 2):
            assert stream.read_at(high - low, low) == CONTENT[low:high]
        assert sum(map(len, stream._blocks.values())) == size


def test_consecutive_ranges_are_joined_to_one_request(stored: str, requests: list[tuple[int, int]]) -> None:
    url = f"{stored}/record"
    store.write_small(url, CONTENT)
    into = bytearray(960)
    reads = [read_of(item(0, low, 60, 0, low)) for low in range(0, 960, 60)]
    with RecordReader(Records.of([(0, 10, 960, None)]), [FileRef(url, len(CONTENT))], joined=300) as reader:
        checks = reader.read_parallel(reads, [MemorySink(memoryview(into))], 3)
    assert sorted(nbytes for _, nbytes in requests) == [60, 300, 300, 300] and bytes(into) == CONTENT[10:970]
    sums = {(low, zlib.crc32(into[low : low + 60])) for low in range(0, 960, 60)}
    assert {(check.offset, check.crc) for check in checks} == sums


def read_file(url: str) -> None:
    with store.open_stored(url) as file:
        file.read([memoryview(bytearray(9))], 100)


def read_stream(url: str) -> None:
    with store.open_stream(url) as stream:
        stream.read_at(9, 0)


def read_record(url: str) -> None:
    with RecordReader(Records.of([(0, 0, 9, None)]), [FileRef(url, len(CONTENT))]) as reader:
        reader.read([read_of(item(0, 0, 9, 0, 0))], [None])


def read_all(url: str) -> None:
    (scanned,) = scan_files([ScanFile(url, len(CONTENT))], threads=1, window=4096)
    for _, text in scanned.errors:
        raise OSError(text)


@pytest.mark.parametrize("read", [read_file, read_stream, read_record, read_all])
def test_an_object_that_is_replaced_by_one_of_its_size_is_refused(read: Callable[[str], None], stored: str) -> None:
    url = f"{stored}/{read.__name__}"
    store.write_small(url, CONTENT)
    store.list_folder(stored)
    read(url)
    store.write_small(url, CONTENT[:-1] + b"!")
    with pytest.raises((OSError, CheckpointError), match="has changed since its header was read"):
        read(url)
    store.list_tree(stored)
    read(url)


def test_an_object_that_is_replaced_between_two_reads_is_refused(stored: str) -> None:
    """It is refused even if only its size was known before."""
    url, into = f"{stored}/file", memoryview(bytearray(9))
    for size, data in ((len(CONTENT), CONTENT[::-1]), (None, CONTENT[:-1])):
        store.write_small(url, CONTENT)
        objects._known.pop(url, None)
        with store.open_stored(url, size=size) as file:
            file.read([into], 0)
            store.write_small(url, data)
            with pytest.raises(CheckpointError, match=r"has changed since its header was read.*Load again"):
                file.read([into], 0)


def test_markers_of_folders_are_not_listed_as_files(stored: str) -> None:
    client, key = objects.connect(f"{stored}/run", writing=True)
    objects.obstore.put(client, key, b"")
    store.write_small(f"{stored}/run/a", b"1")
    assert store.list_tree(stored).keys() == {"run/a"} == {f"run/{name}" for name in store.list_folder(f"{stored}/run")}
    assert store.list_folder(stored)["run"].is_folder and read_tree(stored) == {"run/a": b"1"}


def test_an_object_that_is_not_small_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepspeed_ucp.io.objects._SMALL", 4)
    store.write_small("memory://large/file", bytes(4))
    assert store.read_small("memory://large/file") == bytes(4)
    store.write_small("memory://large/file", bytes(5))
    with pytest.raises(OSError, match="more than 4 bytes"):
        store.read_small("memory://large/file")
    assert store.read_small("memory://large/file", 2) == bytes(2)
