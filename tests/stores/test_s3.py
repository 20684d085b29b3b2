"""A real S3 protocol: how little is asked of the server, and what becomes of requests that fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

pytest.importorskip("s3fs")
pytest.importorskip("moto")

from botocore.exceptions import NoCredentialsError

from deepspeed_ucp.cli import main
from deepspeed_ucp.comm import Comm
from deepspeed_ucp.config import UniversalConfig
from deepspeed_ucp.convert import convert_checkpoint
from deepspeed_ucp.errors import CheckpointError, ConfigError, StorageError
from deepspeed_ucp.io import presign, ranged, remote, retry, store, urls
from deepspeed_ucp.load.tags import find_tag
from deepspeed_ucp.load.transfer import Transfer
from deepspeed_ucp.sources import open_checkpoint
from deepspeed_ucp.sources.latest import find_checkpoint, read_latest
from deepspeed_ucp.stream.duplicates import check_samples
from tests.stores.server import BUCKET, Asked, Fault, Server, fail_first, serve_bucket
from tests.support.ranks import run_ranks
from tests.support.reshard import FakeTarget, Loaded, make_targets, open_everywhere, prepare_rank
from tests.synth import Model, Param, State, Topology, random_state, write_checkpoint

SOURCE, TARGET = Topology(1, 2), Topology(3, 3)
LARGE = Model(tuple(Param(f"w{number}", (1000, 700)) for number in range(4)))
SMALL = Model((Param("a.w", (30, 20)), Param("a.b", (20,)), Param("frozen", (5,), frozen=True)))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serve_bucket() as found:
        yield found


@pytest.fixture(scope="module")
def large(server: Server, tmp_path_factory: pytest.TempPathFactory) -> State:
    return save(LARGE, tmp_path_factory.mktemp("large"), "large")


@pytest.fixture(scope="module")
def small(server: Server, tmp_path_factory: pytest.TempPathFactory) -> State:
    return save(SMALL, tmp_path_factory.mktemp("small"), "small")


def save(model: Model, folder: Path, name: str) -> State:
    state = random_state(model, 3)
    write_checkpoint(folder, model, state, SOURCE)
    put(folder, name)
    return state


def put(folder: Path, name: str) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            urls.put_file(str(path), f"s3://{BUCKET}/{name}/{path.relative_to(folder)}")


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "_PAUSE", 0.001)
    monkeypatch.setattr(presign, "_refused", set())


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is read through the file system."""

    def fail(*_: Any) -> None:
        raise AssertionError("the file system is asked")

    monkeypatch.setattr(ranged._Ranges, "_ask_system", fail)


def is_signed(environ: dict[str, Any]) -> bool:
    """Whether a request is one to a signed address."""
    return "X-Amz-Signature" in environ["QUERY_STRING"]


def load_all(folder: str, model: Model) -> list[Loaded]:
    """Load into all ranks of a run as a live load does: one pass."""
    targets = make_targets(model, TARGET)
    index = open_everywhere(folder, targets)

    def load(rank: int, comm: Comm) -> Loaded:
        return load_rank(index, targets[rank], comm)

    return run_ranks(len(targets), load)


def load_rank(index: Any, target: FakeTarget, comm: Comm) -> Loaded:
    loaded = prepare_rank(index, target, comm)
    loaded.transfer = Transfer(loaded.work, comm, UniversalConfig(), apart=True)
    loaded.transfer.read()
    loaded.transfer.verify()
    assert loaded.transfer.fill() == []
    return loaded


def check_masters(ranks: list[Loaded], state: State) -> None:
    """Every parameter's elements are those of the state, wherever they are."""
    for rank in ranks:
        for flat in rank.target.flats:
            for cut in flat.buffer.cuts(flat.part):
                here = flat.holder.detach().reshape(-1)[cut.offset : cut.offset + cut.numel]
                wanted = state.atoms[cut.name]["fp32"].reshape(-1)[cut.start : cut.start + cut.numel]
                assert torch.equal(here, wanted.float())


@pytest.mark.usefixtures("alone")
def test_a_load_asks_for_little_more_than_the_state(server: Server, large: State) -> None:
    server.asked.clear()
    ranks = load_all(find_checkpoint(f"s3://{BUCKET}/large"), LARGE)
    check_masters(ranks, large)
    gets, nbytes = server.gets(".pt"), sum(tensor.nbytes for held in large.atoms.values() for tensor in held.values())
    assert nbytes <= sum(each.nbytes for each in gets) <= 1.02 * nbytes
    assert not [each for each in server.asked if each.method == "HEAD" and each.path.endswith(".pt")]


def test_a_header_takes_two_requests(server: Server, small: State, large: State) -> None:
    for name, most in (("small", 1), ("large", 2)):
        folder = find_checkpoint(f"s3://{BUCKET}/{name}")
        server.asked.clear()
        open_checkpoint(folder, Comm())
        for file in store.list_folder(folder):
            gets = server.gets(file)
            assert 1 <= len(gets) <= most and sum(each.nbytes for each in gets) <= 1 << 17
        listings = [each for each in server.asked if each.method == "GET" and each.path == f"/{BUCKET}"]
        assert len(listings) <= 4


def test_an_index_takes_few_requests_one_after_the_other(server: Server, large: State) -> None:
    server.asked.clear()
    tag = find_tag(f"s3://{BUCKET}/large", None, Comm())
    open_checkpoint(f"s3://{BUCKET}/large/{tag}", Comm())
    others = [(each.method, each.path) for each in server.asked if not each.span]
    listing = ("GET", f"/{BUCKET}")
    assert others == [
        ("GET", f"/{BUCKET}/large/latest"),
        listing,
        listing,
        ("HEAD", f"/{BUCKET}/large/latest"),
    ]


def test_masters_and_copies_are_compared_by_few_requests(server: Server, tmp_path: Path) -> None:
    state = random_state(LARGE, 3, precision="bf16")
    write_checkpoint(tmp_path, LARGE, state, Topology(1, 2, "bf16"))
    put(tmp_path, "halves")
    index = open_checkpoint(find_checkpoint(f"s3://{BUCKET}/halves"), Comm())
    server.asked.clear()
    check_samples(index, index.stored.atoms, Comm())
    assert [len(server.gets(f"rank_{rank}_mp_rank_00_optim_states.pt")) for rank in range(2)] == [16, 16]
    assert len(server.gets()) == 64


@pytest.mark.parametrize(
    "fault",
    ["503", "reset", *(pytest.param(each, marks=pytest.mark.exhaustive) for each in ("truncate", "429", "500"))],
)
def test_what_fails_is_asked_for_again(server: Server, small: State, fault: str) -> None:
    with server.failing(fail_first(1, fault, having="optim")):
        check_masters(load_all(find_checkpoint(f"s3://{BUCKET}/small"), SMALL), small)


def test_an_attempt_goes_on_where_the_last_one_stopped(
    server: Server, large: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retry, "LEAST_RATE", 0)  # however slow this machine is: each attempt has half of what is left
    folder = find_checkpoint(f"s3://{BUCKET}/large")
    name = next(name for name, entry in store.list_folder(folder).items() if entry.size > 8 << 20)
    data = bytearray(8 << 20)
    server.asked.clear()
    with server.failing(fail_first(1, "truncate")), store.open_stored(f"{folder}/{name}") as file:
        file.read([memoryview(data)], 1000)
    first, second = server.gets(name)[:2]
    assert first.span == (1000, 1000 + len(data))
    assert second.span and 1000 < second.span[0] < second.span[1] == 1000 + len(data)
    assert bytes(data) == store.read_small(f"{folder}/{name}")[1000 : 1000 + len(data)]


def test_a_server_that_keeps_failing_is_told(
    server: Server, small: State, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    folder = find_checkpoint(f"s3://{BUCKET}/small")
    monkeypatch.setattr(retry, "ATTEMPTS", 4)
    monkeypatch.setattr(retry, "_warned", {})
    told = r"optim_states.pt .2 files.: cannot be .*failed 4 times.*check credentials, endpoint and network, and"
    with server.failing(fail_first(99, "503", having="optim")), pytest.raises(CheckpointError, match=told):
        open_checkpoint(folder, Comm())
    (warned,) = caplog.messages
    assert "attempt 3 of 4 failed with" in warned and f"{folder}/" in warned


def test_what_may_not_be_read_is_not_asked_for_again(server: Server, small: State) -> None:
    folder = find_checkpoint(f"s3://{BUCKET}/small")
    seen: list[tuple[str, bool]] = []

    def deny(environ: dict[str, Any]) -> str | None:
        if "optim" not in environ["PATH_INFO"]:
            return None
        seen.append((environ["PATH_INFO"], is_signed(environ)))
        return "403"

    with server.failing(deny), pytest.raises(CheckpointError, match="check the credentials"):
        open_checkpoint(folder, Comm())
    with server.failing(lambda environ: "403"), pytest.raises(CheckpointError, match=rf"{folder}: .*check the cred"):
        find_checkpoint(folder)
    assert len(seen) == len(set(seen))
    with pytest.raises(CheckpointError, match="does not exist"):
        find_checkpoint(f"s3://{BUCKET}/nowhere")
    for find in (find_checkpoint, read_latest):  # a load does not begin from scratch then
        with pytest.raises(CheckpointError, match="there is no bucket s3://no-such-bucket; check its name"):
            find("s3://no-such-bucket/run")
    assert read_latest(f"s3://{BUCKET}/nowhere") is None
    with pytest.raises(StorageError, match="cannot be written .there is no bucket s3://no-such-bucket; check its name"):
        convert_checkpoint(f"s3://{BUCKET}/small", "s3://no-such-bucket/converted")


@pytest.mark.parametrize(
    "options",
    [{"endpoint": "http://127.0.0.1:1"}, {"endpoint_url": "no address"}],
    ids=str,
)
def test_options_that_a_store_does_not_take_are_told(server: Server, options: Any) -> None:
    try:
        remote.set_options({**server.options, **options})
        with pytest.raises(ConfigError, match=f"s3://{BUCKET}/small.*`storage_options`"):
            find_checkpoint(f"s3://{BUCKET}/small")
    finally:
        remote.set_options(server.options)


def test_no_credentials_are_told_as_such(server: Server) -> None:
    def work() -> None:
        raise NoCredentialsError

    with pytest.raises(OSError, match="NoCredentialsError: .*; check the credentials"):
        retry.attempt(work, "s3://bucket/run")


@pytest.mark.usefixtures("alone")
def test_an_address_that_has_expired_is_made_anew(server: Server, small: State) -> None:
    asked: dict[str, int] = {}

    def expire(environ: dict[str, Any]) -> str | None:
        path = environ["PATH_INFO"]
        asked[path] = asked.get(path, 0) + is_signed(environ)
        return "403" if "optim" in path and asked[path] == 2 else None

    folder = find_checkpoint(f"s3://{BUCKET}/small")
    name = next(name for name in store.list_folder(folder) if "optim" in name)
    data = bytearray(100)
    with server.failing(expire), store.open_stored(f"{folder}/{name}") as file:
        for offset in (0, 100, 200):
            file.read([memoryview(data)], offset)
    assert asked[f"/{folder[5:]}/{name}"] == 4
    assert bytes(data) == store.read_small(f"{folder}/{name}")[200:300]


def test_a_store_that_refuses_signed_addresses_is_read_through_its_file_system(server: Server, small: State) -> None:
    tried: list[str] = []

    def refuse(environ: dict[str, Any]) -> str | None:
        tried.extend([environ["PATH_INFO"]] * is_signed(environ))
        return "403" if is_signed(environ) else None

    with server.failing(refuse):
        check_masters(load_all(find_checkpoint(f"s3://{BUCKET}/small"), SMALL), small)
    assert len(tried) == 1
    assert len(presign._refused) == 1
    remote.set_options({})
    assert not presign._refused
    remote.set_options(server.options)


@pytest.mark.parametrize(
    "options",
    [
        {"requester_pays": True},
        {"s3_additional_kwargs": {"SSECustomerKey": "0" * 32}},
        {"client_kwargs": {"verify": False}},
        {"config_kwargs": {"proxies": {"http": "http://127.0.0.1:1"}}},
    ],
    ids=str,
)
def test_what_plain_gets_would_not_honour_is_left_to_the_file_system(server: Server, options: Any) -> None:
    made = fsspec.filesystem("s3", **{**server.options, **options}, skip_instance_cache=True)
    assert presign._find_link(made, "bucket/file") is None
    assert presign._find_link(remote.connect("s3://x")[0], "bucket/file") is not None


def test_where_a_proxy_is_to_be_used_the_file_system_is_asked(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    system, path = remote.connect(f"s3://{BUCKET}/small/latest")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.setenv("no_proxy", "")
    assert presign._find_link(system, path) is None
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    assert presign._find_link(system, path) is not None


def test_who_says_nothing_of_himself_gets_plain_addresses(server: Server) -> None:
    system = fsspec.filesystem("s3", anon=True, endpoint_url=server.options["endpoint_url"], skip_instance_cache=True)
    link = presign._find_link(system, f"{BUCKET}/a folder/file")
    assert link is not None and link.url == f"{server.options['endpoint_url']}/{BUCKET}/a%20folder/file"


def test_a_file_that_is_replaced_during_a_load_is_refused(server: Server, tmp_path: Path) -> None:
    save(SMALL, tmp_path, "replaced")
    folder = find_checkpoint(f"s3://{BUCKET}/replaced")
    targets = make_targets(SMALL, TARGET)
    index = open_everywhere(folder, targets)
    path = next(file.path for file in index.stored.files if "optim" in file.path)
    store.write_small(path, store.read_small(path)[:-1] + b"!")  # of the same size

    def load(rank: int, comm: Comm) -> str:
        with pytest.raises(CheckpointError) as error:
            load_rank(index, targets[rank], comm)
        return str(error.value)

    for told in run_ranks(len(targets), load):
        assert f"{path}: has changed since its header was read" in told


def test_a_conversion_goes_and_comes(server: Server, small: State, tmp_path: Path, capsys: Any) -> None:
    source, to = f"s3://{BUCKET}/small", f"s3://{BUCKET}/there/converted"
    server.asked.clear()
    with server.failing(fail_first(1, "503", method="PUT", having="a.w/fp32")):
        convert_checkpoint(source, to)
    puts = [each for each in server.asked if each.method == "PUT"]
    names = [each.path.removeprefix(f"/{BUCKET}/there/") for each in puts]
    assert names[-3:] == ["converted/zero/optimizer_state.pt", "converted/ucp_manifest.json", "latest_universal"]
    convert_checkpoint(source, str(tmp_path / "local"))
    held = {name: store.read_small(f"{to}/{name}") for name in store.list_tree(to)}
    assert held == {name: (tmp_path / "local" / name).read_bytes() for name in store.list_tree(str(tmp_path / "local"))}
    check_masters(load_all(to, SMALL), small)
    options = [f"--storage-option=endpoint_url=http://127.0.0.1:{server.port}"]
    options += [f"--storage-option={key}={server.options[key]}" for key in ("key", "secret")]
    options += ['--storage-option=client_kwargs={"region_name": "eu-west-1"}']
    assert main(["verify", to, *options]) == 0
    assert "complete" in capsys.readouterr().out
    assert main(["export", to, f"s3://{BUCKET}/weights", *options]) == 0
    assert list(store.list_folder(f"s3://{BUCKET}/weights")) == ["model.safetensors"]


def test_a_large_file_is_written_in_parts(server: Server, tmp_path: Path) -> None:
    """Small ones: all that are under way are in memory, of many files at once."""
    path, sizes = tmp_path / "large", list[int]()
    path.write_bytes(bytes(20 << 20))

    def note(environ: dict[str, Any]) -> None:
        if environ["REQUEST_METHOD"] == "PUT":
            sizes.append(int(environ.get("HTTP_X_AMZ_DECODED_CONTENT_LENGTH") or environ["CONTENT_LENGTH"]))

    with server.failing(note):
        urls.put_file(str(path), f"s3://{BUCKET}/parts")
    assert sorted(sizes) == [4 << 20, 8 << 20, 8 << 20]
    entry = store.find_entry(f"s3://{BUCKET}/parts")
    assert entry is not None and entry.size == 20 << 20


def is_completion(environ: dict[str, Any]) -> bool:
    """Whether a request makes parts a file."""
    return environ["REQUEST_METHOD"] == "POST" and "uploadId" in environ["QUERY_STRING"]


@pytest.mark.parametrize("before", [0, 20 << 20])
def test_a_file_whose_last_answer_is_lost_has_arrived(server: Server, tmp_path: Path, before: int) -> None:
    """Also where another one of its size lay there; where the parts have gone, and it has not come, it is sent anew."""
    path, url = tmp_path / "large", f"s3://{BUCKET}/lost/{before}"
    faults = {"lost": iter(["lost"]), "404": iter(["404"])}
    for fault, left in faults.items():
        path.write_bytes(bytes(before))
        urls.put_file(str(path), url)
        path.write_bytes(fault[:1].encode() * (20 << 20))
        server.asked.clear()
        with server.failing(lambda environ, left=left: next(left, None) if is_completion(environ) else None):
            urls.put_file(str(path), url)
        assert len([each for each in server.asked if each.method == "PUT"]) == (3 if fault == "lost" else 6)
        assert store.read_small(url) == path.read_bytes()


def fail_once(fault: str, is_meant: Callable[[dict[str, Any]], bool]) -> Fault:
    left = iter([fault])
    return lambda environ: (next(left, None) or None) if is_meant(environ) else None


def is_put(environ: dict[str, Any]) -> bool:
    return environ["REQUEST_METHOD"] == "PUT"


@pytest.mark.parametrize("fault", ["", "lost"])
def test_a_small_file_is_exchanged_while_it_is_what_it_was(fault: str, server: Server) -> None:
    url = f"s3://{BUCKET}/exchanged{fault}"

    def exchange(data: bytes, before: bytes | None) -> bool:
        with server.failing(fail_once(fault, is_put)):
            return store.exchange_small(url, data, before)

    assert not exchange(b"1", b"0") and not store.exists(url)
    assert exchange(b"1", None) and exchange(b"1", None)
    assert not exchange(b"2", None) and not exchange(b"2", b"0")
    assert exchange(b"2", b"1") and store.read_small(url) == b"2"


@pytest.mark.parametrize("before", [None, b"0"])
def test_what_another_writes_between_look_and_write_stays(before: bytes | None, server: Server) -> None:
    url, seen = f"s3://{BUCKET}/between{before}", list[str]()
    if before is not None:
        store.write_small(url, before)

    def interpose(environ: dict[str, Any]) -> None:
        if is_put(environ) and not seen:
            seen.append(environ.get("HTTP_IF_MATCH") or environ["HTTP_IF_NONE_MATCH"])
            store.write_small(url, b"theirs")

    with server.failing(interpose):
        assert not store.exchange_small(url, b"ours", before)
    assert seen and store.read_small(url) == b"theirs"


def test_a_store_without_conditions_is_written_to_all_the_same(server: Server) -> None:
    def refuse(environ: dict[str, Any]) -> str | None:
        return "501" if {"HTTP_IF_MATCH", "HTTP_IF_NONE_MATCH"} & environ.keys() else None

    url = f"s3://{BUCKET}/unconditional"
    with server.failing(refuse):
        assert store.exchange_small(url, b"1", None) and store.exchange_small(url, b"2", b"1")
        assert not store.exchange_small(url, b"3", b"1") and store.read_small(url) == b"2"


def test_what_is_asked_is_counted(server: Server) -> None:
    server.asked.clear()
    store.write_small(f"s3://{BUCKET}/one", b"12345")
    assert [(each.method, each.span) for each in server.asked] == [("PUT", None)]
    assert isinstance(server.asked[0], Asked)
