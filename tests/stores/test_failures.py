"""S3 servers that fail, throttle, truncate answers or refuse, and wrong options and credentials."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest

from deepspeed_ucp.comm import Comm
from deepspeed_ucp.errors import CheckpointError, ConfigError, StorageError, UcpError, UnsupportedError
from deepspeed_ucp.formats import open_checkpoint, read_latest
from deepspeed_ucp.formats.latest import find_checkpoint
from deepspeed_ucp.io import clients, store
from deepspeed_ucp.load.tags import find_tag
from tests.stores.server import BUCKET, Server, fail_first, serve_bucket, use_options
from tests.support.contents import check_content
from tests.support.conversion import convert_checkpoint
from tests.support.covering import params
from tests.support.crash import run_child
from tests.support.memory import put_folder
from tests.support.reshard import load, make_targets, open_everywhere
from tests.synth import Model, Param, State, Topology, random_state, write_checkpoint

pytest.importorskip("moto")

SMALL = Model((Param("a.w", (30, 20)), Param("a.b", (20,)), Param("frozen", (5,), frozen=True)))
LARGE = Model(tuple(Param(f"w{number}", (500, 700)) for number in range(4)))
CONTENT = os.urandom(5 << 20)
LOST = ("429", "503", "reset", "slow", "lost")
PASSING = ("429", "500", "503", "503 SlowDown", "reset", "truncate", "slow")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve_bucket() as found:
        yield found


@pytest.fixture(scope="module")
def saved(server: Server, tmp_path_factory: pytest.TempPathFactory) -> State:
    folder, state = tmp_path_factory.mktemp("saved"), random_state(SMALL, 3)
    write_checkpoint(folder, SMALL, state, Topology(1, 2))
    put_folder(folder, f"s3://{BUCKET}/run")
    return state


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(clients.RETRIES, "max_retries", 2)
    clients._process.clients.clear()
    yield
    clients._process.clients.clear()


@pytest.mark.parametrize("fault", params(["500", "reset", "truncate"], PASSING))
def test_requests_of_a_load_are_retried(fault: str, server: Server, saved: State) -> None:
    targets = make_targets(SMALL, Topology(3, 2))
    with server.failing(fail_first(1, fault, having="optim")):
        check_content(load(open_everywhere(find_checkpoint(f"s3://{BUCKET}/run"), targets), targets), saved)


@pytest.mark.parametrize(
    ("fault", "method"), params([*product(LOST, ["PUT"]), ("lost", "POST")], product(LOST, ["POST"]), "-".join)
)
def test_writes_are_retried(fault: str, method: str, server: Server, tmp_path: Path) -> None:
    """They are uploads and conditional writes."""
    path, url, before = tmp_path / "file", f"s3://{BUCKET}/retried/{fault}/{method}", None
    for data in (CONTENT * 4, CONTENT[::-1] * 4):
        path.write_bytes(data)
        with server.failing(fail_first(1, fault, method=method, having="retried")):
            store.put_file(f"{url}/large", str(path))
            assert store.exchange_small(f"{url}/small", data[:9], before)
        assert store.read_small(f"{url}/large") == data
        before = store.read_small(f"{url}/small")
        assert before == data[:9]


@pytest.mark.usefixtures("few")
def test_a_store_without_conditional_writes_gets_plain_writes(server: Server) -> None:
    def refuse(environ: dict[str, Any]) -> str | None:
        return "501 NotImplemented" if {"HTTP_IF_MATCH", "HTTP_IF_NONE_MATCH"} & environ.keys() else None

    url = f"s3://{BUCKET}/unconditional"
    with server.failing(refuse):
        assert store.exchange_small(url, b"1", None) and store.exchange_small(url, b"2", b"1")
        assert not store.exchange_small(url, b"3", b"1") and store.read_small(url) == b"2"


def test_a_truncated_read_continues_after_the_received_bytes(server: Server) -> None:
    """Each answer has half of the missing bytes."""
    url, into = f"s3://{BUCKET}/cut", bytearray(len(CONTENT) - 1000)
    store.write_small(url, CONTENT)
    store.find_entry(url)
    server.requests.clear()
    wanted = (len(into) >> step for step in range(1, 6))
    with server.failing(lambda environ: "truncate" if next(wanted, None) else None), store.open_stored(url) as file:
        file.read([memoryview(into)], 1000)
    spans = [each.span for each in server.gets("cut") if each.span]
    assert bytes(into) == CONTENT[1000:] and len(spans) >= 5
    assert spans[0] == (1000, len(CONTENT)) and all(low < high for (low, _), (high, _) in pairwise(spans))
    assert sum(each.nbytes for each in server.gets("cut")) < 2.1 * len(into)


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("fault", ["503 SlowDown", "truncate", "reset"])
def test_a_permanently_failing_store_is_an_error_with_a_remedy(fault: str, server: Server, saved: State) -> None:
    folder = find_checkpoint(f"s3://{BUCKET}/run")
    with server.failing(fail_first(99, fault, having="optim")), pytest.raises(CheckpointError) as error:
        open_checkpoint(folder, Comm())
    assert "check credentials, endpoint and network, and try again" in str(error.value)
    assert "optim_states.pt" in str(error.value) and "Debug source" not in str(error.value)


@pytest.mark.parametrize("fault", ["403 AccessDenied", "400 ExpiredToken", "401 Unauthorized"])
def test_a_refusal_is_not_retried(fault: str, server: Server, saved: State) -> None:
    folder, seen = find_checkpoint(f"s3://{BUCKET}/run"), list[str]()

    def deny(environ: dict[str, Any]) -> str | None:
        seen.append(environ["PATH_INFO"])
        return fault

    with server.failing(deny):
        for work in (find_checkpoint, read_latest, store.list_tree):
            seen.clear()
            with pytest.raises((CheckpointError, PermissionError), match="check the credentials"):
                work(folder)
            assert len(seen) == 1


def test_a_missing_bucket_is_an_error(server: Server, saved: State) -> None:
    """A mistyped bucket must not restart training. A folder may be created by the first save."""
    with pytest.raises(CheckpointError, match="does not exist"):
        find_checkpoint(f"s3://{BUCKET}/nowhere")
    assert read_latest(f"s3://{BUCKET}/nowhere") is None
    for find in (find_checkpoint, read_latest):
        with pytest.raises(CheckpointError, match="there is no bucket s3://no-such-bucket; check its name"):
            find("s3://no-such-bucket/run")
    with pytest.raises(StorageError, match="cannot be written .there is no bucket s3://no-such-bucket; check its name"):
        convert_checkpoint(f"s3://{BUCKET}/run", "s3://no-such-bucket/converted")
    for write in (store.write_small, lambda url, data: store.exchange_small(url, data, None)):
        with pytest.raises(FileNotFoundError, match="there is no bucket s3://no-such-bucket"):
            write("s3://no-such-bucket/file", b"")


def test_the_number_of_requests_of_a_load_is_bounded(server: Server, tmp_path: Path) -> None:
    """A load reads only slightly more bytes than the state. A header needs two requests, a file's size no request."""
    state = random_state(LARGE, 3)
    write_checkpoint(tmp_path, LARGE, state, Topology(1, 2))
    put_folder(tmp_path, f"s3://{BUCKET}/large")
    server.requests.clear()
    tag = find_tag(f"s3://{BUCKET}/large", None, Comm())
    index = open_checkpoint(f"s3://{BUCKET}/large/{tag}", Comm())
    others = [(each.method, each.path) for each in server.requests if not each.span]
    listing = ("GET", f"/{BUCKET}")
    assert others.count(listing) <= 2 and len(others) <= 5 and not [path for _, path in others if path.endswith(".pt")]
    for file in index.files:
        gets = server.gets(os.path.basename(file.path))
        assert 1 <= len(gets) <= 2 and sum(each.nbytes for each in gets) <= 1 << 17
    server.requests.clear()
    targets, sizes = make_targets(LARGE, Topology(3, 3)), {"chunk": 4 << 20, "window": 64 << 20}  # the defaults
    check_content(load(open_everywhere(find_checkpoint(f"s3://{BUCKET}/large"), targets), targets, **sizes), state)
    gets, nbytes = server.gets(".pt"), sum(each.nbytes for held in state.atoms.values() for each in held.values())
    assert nbytes <= sum(each.nbytes for each in gets) <= 1.05 * nbytes
    assert not [each for each in server.requests if each.method == "HEAD" and each.path.endswith(".pt")]


def test_a_large_file_is_uploaded_in_parts(server: Server, tmp_path: Path) -> None:
    """Parts have a bounded size, because they are in memory. A failed upload leaves no parts."""
    sizes, path = list[int](), tmp_path / "large"
    path.write_bytes(bytes(20 << 20))

    def note(environ: dict[str, Any]) -> None:
        if environ["REQUEST_METHOD"] == "PUT":
            sizes.append(int(environ["CONTENT_LENGTH"]))

    with server.failing(note):
        store.put_file(f"s3://{BUCKET}/parts", str(path))
    assert sorted(sizes) == [4 << 20, 8 << 20, 8 << 20]
    server.requests.clear()
    with (
        server.failing(fail_first(99, "403 AccessDenied", method="PUT")),
        pytest.raises(PermissionError, match="check the credentials"),
    ):
        store.put_file(f"s3://{BUCKET}/refused", str(path))
    assert [each.method for each in server.requests if "refused" in each.path][-1] == "DELETE"


def test_expired_credentials_are_renewed(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = list[int]()

    def provide() -> Any:
        taken.append(1)
        until = datetime.now(UTC) + timedelta(seconds=1)
        return {"access_key_id": "a", "secret_access_key": "b", "token": None, "expires_at": until}

    monkeypatch.setattr(clients, "_find_aws_provider", lambda profile: provide)
    options = {name: value for name, value in server.options.items() if name not in ("key", "secret")}
    with use_options(options):
        for count in (1, 2):
            store.write_small(f"s3://{BUCKET}/expiring", b"1")
            assert len(taken) == count
            time.sleep(1.1 if count == 1 else 0)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home without credentials."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    (tmp_path / ".aws").mkdir()
    return tmp_path / ".aws"


def test_profiles_supply_credentials(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are read only if neither options nor the environment have credentials."""
    assert clients._find_aws_provider(None) is None
    (home / "credentials").write_text(
        "[default]\naws_access_key_id=one\naws_secret_access_key=s\n"
        "[work]\naws_access_key_id=two\naws_secret_access_key=s\n"
    )
    (home / "config").write_text("[profile work]\nregion=eu-north-1\n")
    assert clients._find_aws_provider(None)()["access_key_id"] == "one"
    found = clients._find_aws_provider("work")
    assert found()["access_key_id"] == "two" and found.config == {"region": "eu-north-1"}
    with pytest.raises(ConfigError, match=r"AWS profile 'none'.*check AWS_PROFILE and ~/.aws"):
        clients._find_aws_provider("none")
    monkeypatch.setenv("AWS_PROFILE", "work")
    assert clients._find_aws_provider(None)()["access_key_id"] == "two"
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "three")
    assert clients._find_aws_provider(None) is None
    monkeypatch.setitem(__import__("sys").modules, "boto3", None)
    with pytest.raises(UnsupportedError, match="AWS profile 'work' takes boto3; pip install boto3"):
        clients._find_aws_provider("work")


GOOGLE = (
    '{"gcs_base_url": "http://h", "disable_oauth": true, "client_email": "", "private_key": "", "private_key_id": ""}'
)
OPTIONS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("s3://b", {"key": "k", "secret": "s", "token": "t"},
     {"access_key_id": "k", "secret_access_key": "s", "session_token": "t"}),
    ("s3a://b", {"anon": True, "client_kwargs": {"endpoint_url": "http://h", "region_name": "r"}},
     {"skip_signature": "true", "endpoint": "http://h", "region": "r"}),
    ("gs://b", {"token": "anon"}, {"skip_signature": "true"}),
    ("gs://b", {"token": "google_default", "project": "p"}, {}),
    ("gs://b", {"endpoint_url": "http://h"}, {"service_account_key": GOOGLE}),
    ("az://b", {"account_name": "a", "account_key": "a2V5"}, {"account_name": "a", "account_key": "a2V5"}),
    ("abfs://b@a.dfs.core.windows.net", {"sas_token": "sv=1&sig=2"}, {"account_name": "a", "sas_key": "sv=1&sig=2"}),
    ("az://b", {"connection_string": "AccountName=a;AccountKey=a2V5cw==;EndpointSuffix=x"},
     {"account_name": "a", "account_key": "a2V5cw=="}),
]  # fmt: skip


@pytest.mark.parametrize(("url", "options", "config"), OPTIONS, ids=lambda each: str(each)[:30])
def test_storage_options_have_the_names_of_fsspec(
    url: str, options: dict[str, Any], config: dict[str, Any], home: Path
) -> None:
    with use_options(options):
        client, key = clients.connect(f"{url}/run/tag/")
        found = {name: value for name, value in client.config.items() if name not in ("bucket", "container_name")}
    assert (key, found) == ("run/tag", config)


@pytest.mark.parametrize(
    ("url", "options", "error", "text"),
    [
        ("s3://b", {"endpoint": "http://h"}, ConfigError, "'endpoint' is not supported; did you mean 'endpoint_url'"),
        ("s3://b", {"client_kwargs": {"verify": False}}, ConfigError, "'verify' is not supported; there are key, se"),
        ("s3://b", {"use_ssl": False}, ConfigError, "'use_ssl' is not supported"),
        ("az://b", {"account_key": "no base 64"}, ConfigError, "az://b: .*; check the URL and `storage_options`"),
        ("s4://b", {}, UnsupportedError, "s4://b/run: s4:// is unknown; there are s3://, s3a://, gs://"),
        ("simplecache::s3://b", {}, UnsupportedError, "simplecache::s3:// is unknown; there are s3://, s3a://, gs://"),
        ("https://host", {}, UnsupportedError, "such URLs are read only"),
    ],
    ids=str,
)
def test_invalid_urls_and_options_are_refused(
    url: str, options: dict[str, Any], error: type[Exception], text: str, home: Path
) -> None:
    with pytest.raises(error, match=text), use_options(options):
        store.write_small(f"{url}/run", b"")


def test_a_store_in_a_forked_process_is_refused(server: Server) -> None:
    """It lacks obstore's threads and would wait forever."""

    def read_forked() -> None:
        with pytest.raises(UcpError, match="does not survive a fork: start processes that use stores with `spawn`"):
            store.read_small(f"s3://{BUCKET}/forked")

    store.write_small(f"s3://{BUCKET}/forked", b"1")
    assert run_child(read_forked) == 0
    assert store.read_small(f"s3://{BUCKET}/forked") == b"1"


def test_clients_are_shared_by_the_files_of_a_store(server: Server) -> None:
    one, same, other = (clients.connect(url)[0] for url in (f"s3://{BUCKET}/a", f"s3://{BUCKET}/b/c", "s3://other/a"))
    assert one is same is not other
