"""URLs without a server: indices, loads, conversions and exports of a store are those of local files, to the bit."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import threading
import zlib
from collections.abc import Callable, Iterator
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractFileSystem

from deepspeed_ucp.atoms import FileRef, Record
from deepspeed_ucp.cli import main
from deepspeed_ucp.comm import Comm
from deepspeed_ucp.convert import ConvertOptions, convert_checkpoint
from deepspeed_ucp.errors import CheckpointError, ConfigError, StorageError, UnsupportedError
from deepspeed_ucp.export.safetensors import export_safetensors
from deepspeed_ucp.export.tensors import ExportOptions
from deepspeed_ucp.io import paths, ranged, remote, store, threads, upload
from deepspeed_ucp.io.paths import Entry
from deepspeed_ucp.io.ranged import RemoteStream
from deepspeed_ucp.io.read import MemorySink, RecordReader
from deepspeed_ucp.io.scan import ScanFile, scan_files
from deepspeed_ucp.plan import Part, Request
from deepspeed_ucp.sources import open_checkpoint
from deepspeed_ucp.sources.latest import find_checkpoint, find_tags, read_latest
from deepspeed_ucp.sources.open import seal_folder
from deepspeed_ucp.sources.seal import remove_seal
from deepspeed_ucp.torchsave.torchfile import list_records, read_header
from tests.support.ranks import Apart, World, run_ranks
from tests.support.reshard import Options, check_content, load, load_rank, make_targets, open_everywhere
from tests.synth import Model, Param, State, Topology, random_state, write_checkpoint

URL = "memory://stores/run"
MODEL = Model(
    (
        *(Param(f"layer.{number}.w", (40, 50 + number)) for number in range(4)),
        *(Param(f"layer.{number}.b", (50 + number,)) for number in range(4)),
        Param("frozen", (7, 9), frozen=True),
    )
)


@pytest.fixture
def saved(tmp_path: Path) -> Iterator[Callable[..., tuple[str, State]]]:
    """Saves a run in a local folder and in the store; the local tag's folder, and its state."""
    system = fsspec.filesystem("memory")

    def save(topology: Topology, **options: Any) -> tuple[str, State]:
        state = random_state(MODEL, 5, topology=topology)
        folder = write_checkpoint(tmp_path / "run", MODEL, state, topology, **options)
        system.put(str(tmp_path / "run"), "/stores/run", recursive=True)
        return str(folder), state

    yield save
    system.store.clear()
    system.pseudo_dirs[:] = [""]


class Folders(LocalFileSystem):  # type: ignore[misc]
    """A store with folders that have to be made, as SFTP and HDFS."""

    protocol = "folders"
    put_file = AbstractFileSystem.put_file

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.removeprefix("folders://")))


def test_a_conversion_to_a_store_that_has_folders(saved: Callable[..., tuple[str, State]], tmp_path: Path) -> None:
    fsspec.register_implementation("folders", Folders, clobber=True)
    folder, _ = saved(Topology(1, 2))
    convert_checkpoint(folder, f"folders://{tmp_path}/there/converted")
    convert_checkpoint(f"folders://{folder}", str(tmp_path / "here"))
    assert read_local(tmp_path / "there" / "converted") == read_local(tmp_path / "here")


def read_store(folder: str) -> dict[str, bytes]:
    return {name: store.read_small(f"{folder}/{name}") for name in store.list_tree(folder)}


def read_local(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_load_from_a_store_gives_every_bit(saved: Callable[..., tuple[str, State]], stage: int) -> None:
    _, state = saved(Topology(stage, 3 if stage else 1))
    targets = make_targets(MODEL, Topology(2, 2))
    check_content(load(open_everywhere(find_checkpoint(URL), targets), targets), state)


def test_headers_are_those_of_local_files(saved: Callable[..., tuple[str, State]]) -> None:
    folder, _ = saved(Topology(0))
    for name in store.list_folder(find_checkpoint(URL)):
        here, there = list_records(f"{folder}/{name}"), list_records(f"{URL}/{Path(folder).name}/{name}")
        assert there.records == here.records
        assert (there.header_crc, there.size, there.saved_as) == (here.header_crc, here.size, here.saved_as)


def test_legacy_files_are_read(saved: Callable[..., tuple[str, State]]) -> None:
    folder, _ = saved(Topology(1, 2), legacy=True)
    index = open_checkpoint(find_checkpoint(URL), Comm())
    assert index.stored.records == open_checkpoint(folder, Comm()).stored.records


def test_a_headers_bytes_are_asked_for_once(
    saved: Callable[..., tuple[str, State]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = saved(Topology(0))
    (name,) = store.list_folder(find_checkpoint(URL))
    asked: list[tuple[int, int]] = []
    fill = ranged._Ranges.fill

    def note(self: Any, views: list[memoryview], offset: int) -> None:
        asked.append((offset, offset + sum(view.nbytes for view in views)))
        fill(self, views, offset)

    monkeypatch.setattr(ranged._Ranges, "fill", note)
    monkeypatch.setattr(ranged, "_HEAD", 4096)
    monkeypatch.setattr(ranged, "_TAIL", 4096)
    read_header(f"{URL}/{Path(folder).name}/{name}")
    spans = sorted(asked)
    assert all(first[1] <= second[0] for first, second in pairwise(spans))
    assert len(asked) < 20  # 8 tensors' steps lie far apart; none of the 35 records' headers is looked at


def test_a_rank_without_a_folder_to_write_in_ends_all(
    saved: Callable[..., tuple[str, State]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = saved(Topology(1, 2))
    made = iter([tempfile.TemporaryDirectory])

    def make(**how: Any) -> Any:
        if (kind := next(made, None)) is None:
            raise FileNotFoundError(2, "No such file or directory", "/scratch")
        return kind(**how)

    monkeypatch.setattr(tempfile, "TemporaryDirectory", make)
    found = World(2).run(lambda _rank, comm: convert_checkpoint(folder, "memory://stores/there", comm=comm))
    assert [type(each) for each in found] == [StorageError] * 2


def test_a_conversion_to_a_store_is_the_one_to_a_folder(
    saved: Callable[..., tuple[str, State]], tmp_path: Path
) -> None:
    folder, _ = saved(Topology(1, 2))
    convert_checkpoint(folder, str(tmp_path / "local"))
    to = "memory://stores/there"
    reports = run_ranks(2, lambda rank, comm: convert_checkpoint(URL, to, comm=comm))
    assert read_store(to) == read_local(tmp_path / "local")
    twice = len(store.read_small(f"{to}/mp_rank_00_model_states.pt"))  # under upstream's second name as well
    assert reports[0].bytes_written == sum(map(len, read_store(to).values())) - twice
    assert store.read_small("memory://stores/latest_universal") == b"there"
    assert convert_checkpoint(URL, to).reused
    assert not convert_checkpoint(URL, to, options=ConvertOptions(overwrite=True)).reused
    assert main(["verify", to]) == main(["diff", to, folder]) == main(["inspect", "-q", to]) == 0
    assert main(["plan", to, "--target", "dp=3,zero=3"]) == main(
        ["verify", URL, "--against", f"{to}/ucp_manifest.json"]
    )


def test_large_atoms_are_taken_to_the_store_once(saved: Callable[..., tuple[str, State]], tmp_path: Path) -> None:
    model, topology = Model((Param("w", (1100, 1000)), Param("b", (3,)))), Topology(1, 2)
    folder = write_checkpoint(tmp_path / "large", model, random_state(model, 1), topology)
    options = ConvertOptions(window=16 << 20, workers=4)
    convert_checkpoint(str(folder), str(tmp_path / "local"), options=options)
    convert_checkpoint(str(folder), "memory://stores/there", options=options)
    assert read_store("memory://stores/there") == read_local(tmp_path / "local")


def test_an_export_to_a_store_is_the_one_to_a_folder(saved: Callable[..., tuple[str, State]], tmp_path: Path) -> None:
    saved(Topology(3, 2))
    index, to = open_checkpoint(find_checkpoint(URL), Comm()), "memory://stores/weights"
    export_safetensors(index, str(tmp_path / "local"), max_shard=20_000)
    export_safetensors(index, to, max_shard=20_000)
    assert read_store(to) == read_local(tmp_path / "local")
    with pytest.raises(StorageError, match="exists already"):
        export_safetensors(index, to)
    with pytest.raises(UnsupportedError, match="Export on one node"):
        run_ranks(2, lambda rank, comm: export_safetensors(index, f"{to}2", comm))


def test_where_a_full_disk_is_that_files_for_a_store_grow_on(
    saved: Callable[..., tuple[str, State]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = saved(Topology(1, 2))
    monkeypatch.setattr("deepspeed_ucp.io.disk._count_free", lambda _path: 1000)
    told = rf"(?s)needs .*, has 1,000 bytes free.*Files grow below TMPDIR \({tempfile.gettempdir()}\)"
    with pytest.raises(StorageError, match=told):
        convert_checkpoint(folder, f"{URL}/converted")


@pytest.mark.parametrize("stopped", [1, 12, -2, -1], ids=["first", "middle", "optimizer-state", "manifest"])
def test_a_stopped_upload_looks_whole_to_nobody(
    saved: Callable[..., tuple[str, State]], monkeypatch: pytest.MonkeyPatch, stopped: int, tmp_path: Path
) -> None:
    folder, _ = saved(Topology(1, 2))
    convert_checkpoint(folder, str(tmp_path / "local"))
    total, to, put = len(read_local(tmp_path / "local")), "memory://stores/there", upload.put_file
    for _ in range(2):  # a fresh destination, then one that is replaced
        done: list[str] = []
        lock = threading.Lock()

        def stop(path: str, url: str, done: list[str] = done, lock: Any = lock) -> None:
            with lock:
                if len(done) >= stopped % (total + 1) - (stopped < 0):
                    raise OSError("the network is gone")
                done.append(url)
            put(path, url)

        monkeypatch.setattr(upload, "put_file", stop)
        with pytest.raises(StorageError, match="cannot be written .the network is gone"):
            convert_checkpoint(folder, to, options=ConvertOptions(overwrite=True))
        with pytest.raises((CheckpointError, UnsupportedError)):
            open_checkpoint(to, Comm())
        monkeypatch.setattr(upload, "put_file", put)
        convert_checkpoint(folder, to)
        assert read_store(to) == read_local(tmp_path / "local")


def test_what_is_not_ours_is_left_alone(saved: Callable[..., tuple[str, State]]) -> None:
    folder, _ = saved(Topology(1, 2))
    convert_checkpoint(folder, "memory://stores/there")
    store.write_small("memory://stores/there/thesis.tex", b"years of work")
    with pytest.raises(StorageError, match=r"thesis.*left alone"):
        convert_checkpoint(folder, "memory://stores/there", options=ConvertOptions(overwrite=True))
    with pytest.raises(StorageError, match="lies in the checkpoint"):
        convert_checkpoint(URL, f"{find_checkpoint(URL)}/inside")
    with pytest.raises(StorageError, match="whole bucket"):
        convert_checkpoint(URL, "memory://stores")
    with pytest.raises(UnsupportedError, match="is read only"):
        convert_checkpoint(URL, "https://host/run")


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("name", ["mp_rank_00_model_states.pt", "client/notes", "zero/notes", "tokenizer.json"])
def test_what_has_our_names_and_is_no_output_is_left_alone(
    saved: Callable[..., tuple[str, State]], tmp_path: Path, name: str, overwrite: bool
) -> None:
    """A save of stage 0 has nothing but model states. In a store and in a folder alike."""
    folder, _ = saved(Topology(1, 2))
    store.write_small(f"memory://stores/there/{name}", b"of others")
    (tmp_path / "there" / name).parent.mkdir(parents=True)
    (tmp_path / "there" / name).write_bytes(b"of others")
    for to in ("memory://stores/there", str(tmp_path / "there")):
        with pytest.raises(StorageError, match="is not an atomic checkpoint, so it is left alone"):
            convert_checkpoint(folder, to, options=ConvertOptions(overwrite=overwrite))
        with pytest.raises(StorageError, match="is not an export, so it is left alone"):
            export_safetensors(open_checkpoint(folder, Comm()), to, options=ExportOptions(overwrite=overwrite))
    assert read_store("memory://stores/there") == read_local(tmp_path / "there") == {name: b"of others"}


@pytest.mark.parametrize("kind", ["folder", "store"])
def test_a_small_file_is_exchanged_while_it_is_what_it_was(kind: str, tmp_path: Path) -> None:
    path = str(tmp_path / "file") if kind == "folder" else "memory://stores/file"
    assert not store.exchange_small(path, b"1", b"0") and not store.exists(path)
    assert store.exchange_small(path, b"1", None) and store.exchange_small(path, b"1", None)
    assert not store.exchange_small(path, b"2", None) and store.read_small(path) == b"1"
    assert store.exchange_small(path, b"2", b"1") and store.read_small(path) == b"2"


def test_a_file_that_changes_is_refused(saved: Callable[..., tuple[str, State]]) -> None:
    saved(Topology(1, 2))
    tag = find_checkpoint(URL)
    name = next(name for name in store.list_folder(tag) if "optim" in name)
    file = store.open_stored(f"{tag}/{name}")
    store.write_small(f"{tag}/{name}", b"short")
    with pytest.raises(CheckpointError, match=r"has changed since its header was read.*Load again"):
        file.read([memoryview(bytearray(9))], 0)


@pytest.mark.parametrize("open_all", [open_checkpoint, seal_folder])
def test_every_rank_goes_by_what_one_was_told(
    saved: Callable[..., tuple[str, State]], open_all: Callable[[str, Comm], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of files that it has read no header of, too, and of those of which it knows an older version."""
    saved(Topology(1, 2))
    folder = find_checkpoint(URL)
    listed = {name: entry for name, entry in store.list_folder(folder).items() if name.endswith(".pt")}
    monkeypatch.setattr(remote, "_process", Apart())

    def look(rank: int, comm: Comm) -> dict[str, Any]:
        remote.note(folder, {name: Entry(entry.size, 0.0, "older") for name, entry in listed.items()})
        open_all(folder, comm)
        return {name: remote.find_known(f"{folder}/{name}") for name in listed}

    assert run_ranks(2, look) == [listed, listed]


def read_file(url: str, change: Callable[[], None]) -> None:
    with store.open_stored(url) as file:
        file.read([memoryview(bytearray(9))], 100)
        change()


def read_stream(url: str, change: Callable[[], None]) -> None:
    with RemoteStream(url) as stream:
        stream.read_at(9, 0)
        change()


def read_record(url: str, change: Callable[[], None]) -> None:
    with RecordReader([Record(0, 0, 9, None)], [FileRef(url, 10_000)]) as reader:
        reader.read([Request(0, 0, 9, (Part(9, 0, 0),))], [MemorySink(memoryview(bytearray(9)))])
        change()


def read_all(url: str, change: Callable[[], None]) -> None:
    (scanned,) = scan_files([ScanFile(url, 10_000)], threads=1, window=4096, progress=lambda _: change())
    for offset, text in scanned.errors:
        assert (scanned.nbytes, offset) == (10_000, 0)
        raise OSError(text)


@pytest.mark.parametrize("read", [read_file, read_stream, read_record, read_all])
def test_a_file_that_is_replaced_by_one_of_its_size_is_refused(read: Callable[..., None]) -> None:
    """Where no answer tells a version: by a look at the file when all of it has been read."""
    url, content = "memory://stores/replaced", b"0123456789" * 1000
    store.write_small(url, content)
    store.find_entry(url)
    read(url, lambda: None)
    with pytest.raises((OSError, CheckpointError), match="has changed since its header was read"):
        read(url, lambda: store.write_small(url, content))
    with pytest.raises(ZeroDivisionError):  # that is told then
        read(url, lambda: store.write_small(url, content) or 1 // 0)


def test_what_is_not_read_through_a_file_system_is_not_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    store.write_small("memory://stores/left", b"alone")
    monkeypatch.setattr(ranged._Ranges, "_compare", lambda _: 1 // 0)
    with store.open_stored("memory://stores/left"), RemoteStream("memory://stores/left"):
        pass


def test_a_load_whose_file_is_replaced_is_refused_on_every_rank(saved: Callable[..., tuple[str, State]]) -> None:
    saved(Topology(1, 2))
    targets = make_targets(MODEL, Topology(3, 2))
    index = open_everywhere(find_checkpoint(URL), targets)
    path = next(file.path for file in index.stored.files if "optim" in file.path)
    store.write_small(path, store.read_small(path))

    def refuse(rank: int, comm: Comm) -> str:
        with pytest.raises(CheckpointError) as error:
            load_rank(index, targets[rank], comm, Options())
        return str(error.value)

    for told in run_ranks(2, refuse):
        assert f"{path}: has changed since its header was read" in told


def test_what_a_file_system_has_in_memory_at_once_is_little(monkeypatch: pytest.MonkeyPatch) -> None:
    url, content = "memory://stores/pieces", bytes(range(250)) * 4
    store.write_small(url, content)
    monkeypatch.setattr(ranged, "_PIECE", 300)
    system, spans = remote.connect(url)[0], []
    ask = system.cat_file

    def note(path: str, start: int, end: int) -> bytes:
        spans.append((start, end))
        return bytes(ask(path, start=start, end=end))

    monkeypatch.setattr(system, "cat_file", note)
    into = bytearray(700)
    with store.open_stored(url) as file:
        file.read([memoryview(into)[:450], memoryview(into)[450:]], 100)
    assert bytes(into) == content[100:800]
    assert spans == [(100, 400), (400, 700), (700, 800)]


def test_a_seal_is_written_to_a_store(saved: Callable[..., tuple[str, State]], capsys: Any) -> None:
    saved(Topology(1, 2))
    tag = find_checkpoint(URL)
    assert main(["verify", URL, "--seal"]) == 0
    assert main(["verify", URL, "--against", f"{tag}/ucp_seal.json"]) == 0
    name = next(name for name in store.list_folder(tag) if "optim_states" in name)
    store.write_small(f"{tag}/{name}", store.read_small(f"{tag}/{name}") + b"more")
    with pytest.raises(CheckpointError, match=r"ucp_seal.json says"):
        open_checkpoint(tag, Comm())
    assert main(["verify", URL]) == 1
    remove_seal(tag)
    assert "ucp_seal.json" not in store.list_folder(tag)
    remove_seal(tag)
    capsys.readouterr()


def test_what_is_not_there_is_told(saved: Callable[..., tuple[str, State]]) -> None:
    with pytest.raises(CheckpointError, match="memory://stores/nowhere does not exist"):
        find_checkpoint("memory://stores/nowhere")
    assert find_tags("memory://stores") == []


@pytest.mark.parametrize(("scheme", "extra"), [("s3", "s3"), ("gs", "gcs"), ("abfs", "abfs")])
def test_what_reads_a_url_is_told(scheme: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(scheme: str) -> None:
        raise ImportError("it is not installed")

    monkeypatch.setattr(remote._process, "systems", {})
    with pytest.raises(UnsupportedError, match=r"s4://stores/run: s4:// is unknown; there are s3, gs, abfs"):
        find_checkpoint("s4://stores/run")
    monkeypatch.setattr(fsspec, "get_filesystem_class", refuse)
    told = rf"{scheme}://stores/run: it is not installed; pip install 'deepspeed_ucp\[{extra}\]' installs"
    with pytest.raises(UnsupportedError, match=told):
        find_checkpoint(f"{scheme}://stores/run")


def test_urls_and_paths_are_told_apart(tmp_path: Path) -> None:
    assert paths.is_url("s3://bucket/run") and paths.is_url("abfs://a@b/c") and not paths.is_url("/s3://x")
    assert not paths.is_url(f"file://{tmp_path}") and paths.normalize(f"file://{tmp_path}/") == str(tmp_path)
    assert paths.normalize("s3://bucket/run//") == "s3://bucket/run"


def test_a_chained_url_is_no_local_path(
    saved: Callable[..., tuple[str, State]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is it a place where nothing was saved yet, or a new folder's name."""
    saved(Topology(1, 2))
    monkeypatch.chdir(tmp_path)
    for url in ("simplecache::memory://stores/run", "zip://run::memory://stores/run"):
        for work in (find_checkpoint, read_latest, lambda url: convert_checkpoint(URL, url)):
            with pytest.raises(ConfigError, match=r"give the store's own URL \(memory://stores/run"):
                work(url)
    assert os.listdir(tmp_path) == ["run"]


def test_a_misspelt_option_is_told_with_the_right_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a library that would pass it over, too. What is like no option may be the library's."""
    monkeypatch.setattr(remote._process, "systems", {})
    monkeypatch.setattr(remote._process, "options", {"client_kwarg": {}, "headers": {}})
    with pytest.raises(
        ConfigError, match=r"http://h/run: `storage_options`: .* 'client_kwarg'; did you mean 'client_kw"
    ):
        remote.connect("http://h/run")
    monkeypatch.setattr(remote._process, "options", {"headers": {}, "use_listings_cache": False, "timeout": 3})
    remote.connect("http://h/run")


def test_a_urls_server_is_the_one_that_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("requests")
    monkeypatch.setattr(remote._process, "systems", {})
    first, path = remote.connect("webhdfs://user:secret@nn1:50070/run")
    second, _ = remote.connect("webhdfs://nn2:50071/run")
    assert path == "/run" and remote.connect("webhdfs://user:secret@nn1:50070/other")[0] is first
    assert first.url.startswith("http://nn1:50070/") and second.url.startswith("http://nn2:50071/")
    monkeypatch.setattr(remote._process, "options", {"host": "nn1", "user": "user", "password": "another"})
    assert remote.connect("webhdfs://nn1:50070/run")[0].url.startswith("http://nn1:50070/")
    for url in ("webhdfs://nn2:50070/run", "webhdfs://user:secret@nn1:50070/run"):
        with pytest.raises(ConfigError, match="names another (host|password) than `storage_options`") as error:
            remote.connect(url)
        assert "secret" not in str(error.value) and "another;" not in str(error.value)


def _look(url: str, found: Any) -> None:
    found.put(sorted(store.list_folder(url)))


def test_a_forked_process_makes_its_own_file_systems(saved: Callable[..., tuple[str, State]]) -> None:
    saved(Topology(1, 2))
    before, _ = remote.connect(URL)
    context = multiprocessing.get_context("fork")
    found = context.Queue()
    process = context.Process(target=_look, args=(URL, found))
    process.start()
    assert found.get(timeout=120) == sorted(store.list_folder(URL))
    process.join()
    remote._process.leave()
    assert remote.connect(URL)[0] is not before


def test_a_client_is_made_beside_other_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what fails there is told where the URL is read."""

    def wait() -> None:
        for thread in [each for each in threading.enumerate() if each.name == "ucp-store"]:
            thread.join()

    wait()  # what other tests have begun
    monkeypatch.setattr(remote._process, "systems", {})
    store.begin_reading(["/local", "memory://stores/run", "unheard-of://stores"])
    wait()
    assert [scheme for scheme, *_ in remote._process.systems] == ["memory"]
    with pytest.raises(UnsupportedError, match="unheard-of"):
        store.list_folder("unheard-of://stores")


def test_neighbours_are_read_by_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    content, url = bytes(range(250)) * 4, "memory://stores/record"
    store.write_small(url, content)
    asked: list[int] = []
    fill = ranged._Ranges.fill

    def note(self: Any, views: list[memoryview], offset: int) -> None:
        asked.append(sum(view.nbytes for view in views))
        fill(self, views, offset)

    monkeypatch.setattr(ranged._Ranges, "fill", note)
    into = bytearray(960)
    requests = [Request(0, low, 60, (Part(60, 0, low),)) for low in range(0, 960, 60)]
    with RecordReader([Record(0, 10, 960, None)], [FileRef(url, len(content))], joined=300) as reader:
        checks = reader.read_parallel(requests, [MemorySink(memoryview(into))], 3)
    assert sorted(asked) == [60, 300, 300, 300]
    assert bytes(into) == content[10:970]
    assert {(check.offset, check.crc) for check in checks} == {
        (low, zlib.crc32(into[low : low + 60])) for low in range(0, 960, 60)
    }


@pytest.mark.parametrize("size", [63, 64, 65, 100, 127, 128, 129])
def test_a_small_file_whose_ends_meet_is_read_whole(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever part of it: its first and its last bytes, which are asked for at once, have some in common."""
    monkeypatch.setattr(ranged, "_HEAD", 64)
    monkeypatch.setattr(ranged, "_TAIL", 64)
    content = bytes(range(size))
    store.write_small(f"memory://stores/ends{size}", content)
    with RemoteStream(f"memory://stores/ends{size}") as stream:
        for low, high in combinations(range(size + 1), 2):
            assert stream.read_at(high - low, low) == content[low:high]
        assert sum(len(data) for _, data in stream._blocks) == size


def test_ranges_within_a_large_one_are_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranged, "_HEAD", 64)
    content = bytes(range(256)) * 4
    store.write_small("memory://stores/ranges", content)
    with RemoteStream("memory://stores/ranges") as stream:
        stream.read_ahead([(300, 20)])
        stream.read_ahead([(0, 500), (100, 50), (290, 100), (450, 200), (700, 10)])
        assert sum(len(data) for _, data in stream._blocks) == 660
        assert stream.read_at(710, 0) == content[:710]


def test_blocks_that_overlap_are_joined() -> None:
    content = bytes(range(256)) * 8
    store.write_small("memory://stores/blocks", content)
    with RemoteStream("memory://stores/blocks") as stream:
        stream.read_ahead([(5, 10), (900, 3), (7, 20)])
        assert stream.read_at(30, 0) == content[:30]
        assert stream.read_at(5000, 890) == content[890:]
        stream.seek(-4, 2)
        assert stream.read() == content[-4:]
    with pytest.raises(ZeroDivisionError):
        threads.map_threads(lambda each: 1 // each, [1, 0], 4)
    assert threads.map_threads(lambda each: each * 2, range(20), 4) == [each * 2 for each in range(20)]
