"""`http://`: index pages with links to files, of servers that answer ranged requests, and of those that do not."""

from __future__ import annotations

import http.server
import io
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta, timezone
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp")
pytest.importorskip("cryptography")

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from deepspeed_ucp.cli import main
from deepspeed_ucp.comm import Comm
from deepspeed_ucp.errors import CheckpointError, ConfigError, UnsupportedError
from deepspeed_ucp.io import http as plain_http
from deepspeed_ucp.io import presign, ranged, remote, retry, store
from deepspeed_ucp.sources import open_checkpoint, read_latest
from deepspeed_ucp.sources.latest import find_checkpoint
from tests.support.reshard import check_content, load, make_targets, open_everywhere
from tests.synth import Model, Param, Topology, random_state, write_checkpoint

MODEL = Model((Param("a", (30, 20)), Param("b", (20,)), Param("frozen", (5,), frozen=True)))


class Plain(http.server.SimpleHTTPRequestHandler):
    """As `python -m http.server` has it: a range that is asked for is passed over."""

    def log_message(self, *_: Any) -> None:
        pass


class Ranged(Plain):
    """As usual servers have it."""

    def send_head(self) -> Any:
        path, span = Path(self.translate_path(self.path)), self.headers.get("Range")
        if span is None or not path.is_file():
            return super().send_head()
        low, high = (int(part) for part in span.removeprefix("bytes=").split("-"))
        data = path.read_bytes()[low : high + 1]
        self.send_response(206)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Content-Range", f"bytes {low}-{low + len(data) - 1}/{path.stat().st_size}")
        self.end_headers()
        return io.BytesIO(data)


class Kept(Ranged):
    """Connections stay open; they are counted."""

    protocol_version = "HTTP/1.1"
    begun = 0

    def setup(self) -> None:
        type(self).begun += 1
        super().setup()


class Closing(Kept):
    """Closes each connection behind an answer, without a word."""

    def handle_one_request(self) -> None:
        super().handle_one_request()
        self.close_connection = True


class Once(Kept):
    """A connection for each request, and says so."""

    protocol_version = "HTTP/1.0"


class Moved(Ranged):
    """What is asked for below `there` lies below `run`."""

    def do_GET(self) -> None:
        if not self.path.startswith("/there/"):
            return super().do_GET()
        self.send_response(302)
        self.send_header("Location", self.path.replace("/there/", "/run/"))
        self.send_header("Content-Length", "0")
        return self.end_headers()


class Circling(Ranged):
    """Each address leads to itself."""

    asked = 0

    def do_GET(self) -> None:
        type(self).asked += 1
        self.send_response(302)
        self.send_header("Location", self.path)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET


class Dripping(Ranged):
    """Gives a byte now and then, from the answer's beginning on, or from that of the file."""

    head = False

    def handle_one_request(self) -> None:
        if self.head:
            self.wfile = Drops(self.wfile)  # type: ignore[assignment]
        super().handle_one_request()

    def copyfile(self, source: Any, outputfile: Any) -> None:
        with suppress(OSError):
            super().copyfile(source, Drops(outputfile))


class DrippingHead(Dripping):
    head = True


class Drops:
    """A stream that is written to byte by byte."""

    def __init__(self, stream: Any) -> None:
        self.stream, self.closed = stream, False

    def write(self, data: bytes) -> None:
        for at in range(len(data)):
            time.sleep(0.02)
            self.stream.write(data[at : at + 1])

    def flush(self) -> None:
        with suppress(OSError):
            self.stream.flush()

    def close(self) -> None:
        self.stream.close()


class Silent(Ranged):
    """Lists nothing until it is let go."""

    goes_on = threading.Event()

    def list_directory(self, path: Any) -> Any:
        self.goes_on.wait()
        return super().list_directory(path)


class Shifted(Ranged):
    """A cache in front of it answers with other bytes than it was asked for, and says so."""

    def send_head(self) -> Any:
        if self.headers.get("Range") == "bytes=1000-5999":
            self.headers.replace_header("Range", "bytes=2000-6999")
        return super().send_head()


class Closed(Ranged):
    """For those alone who send a token."""

    def send_head(self) -> Any:
        return super().send_head() if self.headers.get("X-Token") == "mine" else self.send_error(403)


class Partly(Ranged):
    """One folder cannot be listed."""

    def list_directory(self, path: Any) -> Any:
        return self.send_error(503) if Path(path).name == "closed" else super().list_directory(path)


class Endless(Ranged):
    """`latest` is said to be of 2^62 bytes, of which so many come."""

    comes = 0

    def do_GET(self) -> None:
        if not self.path.endswith("/latest"):
            return super().do_GET()
        self.send_response(200)
        self.send_header("Content-Length", str(1 << 62))
        self.end_headers()
        with suppress(ConnectionError):
            for _ in range(0, self.comes, 1 << 16):
                self.wfile.write(b"x" * min(1 << 16, self.comes))
        return None


@contextmanager
def serve(folder: Path, handler: type[Plain], context: ssl.SSLContext | None = None) -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(folder)))
    if context is not None:
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"{'https' if context else 'http'}://127.0.0.1:{server.server_port}/run"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_a_load_from_an_index_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = random_state(MODEL, 5)
    write_checkpoint(tmp_path / "run", MODEL, state, Topology(1, 3))
    with serve(tmp_path, Ranged) as url:
        targets = make_targets(MODEL, Topology(3, 2))
        check_content(load(open_everywhere(find_checkpoint(url), targets), targets), state)
        assert main(["verify", url]) == 0
        assert "complete" in capsys.readouterr().out
        assert main(["verify", url, "--seal"]) == 2
        assert "read only" in capsys.readouterr().err


def test_a_server_without_ranges_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "run", MODEL, random_state(MODEL, 5), Topology(1, 3))
    with serve(tmp_path, Plain) as url:
        folder = find_checkpoint(url)
        name = next(name for name in store.list_folder(folder) if "optim" in name)
        with (
            pytest.raises(UnsupportedError, match=r"answers with the whole file where a part is asked for"),
            store.open_stored(f"{folder}/{name}") as file,
        ):
            file.read([memoryview(bytearray(10))], 5)


CONTENT = bytes(range(256)) * 40


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What is served; what fails is asked for again at once."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "a file").write_bytes(CONTENT)
    monkeypatch.setattr(retry, "_PAUSE", 0.001)
    monkeypatch.setattr(presign, "_refused", set())
    return tmp_path


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Where what is read through the file system begins."""
    found: list[int] = []
    ask = ranged._Ranges._ask_system

    def note(self: Any, views: list[memoryview], offset: int, nbytes: int) -> None:
        found.append(offset)
        ask(self, views, offset, nbytes)

    monkeypatch.setattr(ranged._Ranges, "_ask_system", note)
    return found


def read_parts(url: str, name: str = "a file") -> None:
    with store.open_stored(f"{url}/{name}", size=len(CONTENT)) as file:
        for offset in (0, 1000, 5000):
            data = bytearray(5000)
            file.read([memoryview(data)[:2000], memoryview(data)[2000:]], offset)
            assert bytes(data) == CONTENT[offset : offset + 5000]


@pytest.mark.parametrize(("handler", "connections"), [(Kept, 1), (Closing, 3), (Once, 3)])
def test_connections_are_used_again_while_they_are_open(
    folder: Path, asked: list[int], handler: type[Kept], connections: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handler, "begun", 0)
    with serve(folder, handler) as url:
        read_parts(url)
    assert (handler.begun, asked) == (connections, [])


def test_connections_that_wait_are_closed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Kept, "begun", 0)
    monkeypatch.setattr(plain_http, "_idle", plain_http._Idle())
    with serve(folder, Kept) as url:
        read_parts(url)
        (kept,) = plain_http._idle._kept.values()
        (connection,) = kept
        store.end_reading()
        assert connection.sock is None and not plain_http._idle._kept
        read_parts(url)
        assert Kept.begun == 2
        store.end_reading()


def test_other_bytes_than_those_asked_for_are_not_taken(folder: Path, asked: list[int]) -> None:
    with (
        serve(folder, Shifted) as url,
        pytest.raises(CheckpointError, match="bytes from 2000 on came where those from"),
    ):
        read_parts(url)
    assert asked == []


def test_a_redirection_is_left_to_the_file_system(folder: Path, asked: list[int]) -> None:
    with serve(folder, Moved) as url:
        read_parts(url.replace("/run", "/there"))
    assert asked == [0, 1000, 5000]


def test_a_redirection_that_leads_nowhere_is_not_tried_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Circling, "asked", 0)
    with serve(folder, Circling) as url, pytest.raises(CheckpointError, match="TooManyRedirects"):
        read_parts(url)
    assert Circling.asked < 15  # one plain GET, and as many as the file system follows


@pytest.mark.parametrize("handler", [Dripping, DrippingHead])
def test_a_server_that_drips_is_given_up(
    folder: Path, asked: list[int], handler: type[Dripping], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each byte comes in time; the attempts are not counted anew with each."""
    monkeypatch.setattr(plain_http, "_PATIENCE_IN_ALL", 0.1)
    monkeypatch.setattr(retry, "ATTEMPTS", 3)
    with serve(folder, handler) as url, pytest.raises(CheckpointError, match=r"failed 3 times.*bytes came in \d+ s"):
        read_parts(url)
    assert asked == []


def test_a_store_that_is_slow_is_read_to_the_end(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Above the least rate nothing is given up, and where connections end attempts are counted anew."""
    monkeypatch.setattr(plain_http, "_PATIENCE_IN_ALL", 0.01)
    monkeypatch.setattr(plain_http, "LEAST_RATE", 0.01)  # however slow this machine is
    monkeypatch.setattr(retry, "LEAST_RATE", 0.01)
    with serve(folder, Dripping) as url, store.open_stored(f"{url}/a file", size=len(CONTENT)) as file:
        data = bytearray(20)
        file.read([memoryview(data)], 0)
    assert bytes(data) == CONTENT[:20]


def test_a_file_system_may_not_take_for_ever(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_LONGEST_REQUEST", 0.2)
    monkeypatch.setattr(retry, "ATTEMPTS", 1)
    with serve(folder, Silent) as url:
        with pytest.raises(CheckpointError, match="failed 1 times.*Timeout"):
            find_checkpoint(url)
        Silent.goes_on.set()


def test_headers_of_the_options_are_sent(folder: Path, asked: list[int]) -> None:
    with serve(folder, Closed) as url:
        with pytest.raises(CheckpointError, match="403"):
            read_parts(url)
        try:
            store.set_storage_options({"headers": {"X-Token": "mine"}})
            asked.clear()
            read_parts(url)
        finally:
            store.set_storage_options({})
    assert asked == []


@pytest.mark.parametrize("comes", [16 << 20, 12], ids=["all-of-it", "nothing-more"])
def test_a_small_file_takes_no_more_memory_than_comes_of_it(
    comes: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Endless, "comes", comes)
    taken, read = list[int](), plain_http._Paced.readinto

    def note(raw: Any, into: Any) -> int | None:
        taken.append(read(raw, into) or 0)
        return taken[-1]

    monkeypatch.setattr(plain_http._Paced, "readinto", note)
    told = "which is no tag" if comes > 12 else f"{(1 << 62) - comes} bytes did not come"
    with serve(folder, Endless) as url, pytest.raises(CheckpointError, match=told):
        read_latest(url)
    assert 0 < sum(taken) < 1 << 20


def test_a_file_system_is_asked_for_the_beginning(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presign, "_find_link", lambda *_: None)
    with serve(folder, Ranged) as url:
        system, path = remote.connect(f"{url}/a file")
        cat, asked = system.cat_file, list[dict[str, Any]]()
        monkeypatch.setattr(system, "cat_file", lambda path, **how: asked.append(how) or cat(path, **how))
        assert store.read_small(path, 100) == CONTENT[:100]
        assert store.read_small(path, len(CONTENT)) == CONTENT
    assert [(how.get("start"), how.get("end")) for how in asked] == [(0, 100), (None, None)]


def test_a_dead_link_hides_nothing_beside_it(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "run", MODEL, random_state(MODEL, 5), Topology(1, 2))
    (tmp_path / "run" / "gone").symlink_to("nowhere")
    (path / "zero_pp_rank_9_mp_rank_00_optim_states.pt").symlink_to("nowhere")
    with serve(tmp_path, Ranged) as url:
        assert store.list_folder(url)["gone"].size == 0
        assert find_checkpoint(url) == f"{url}/{path.name}"
        assert open_checkpoint(f"{url}/{path.name}", Comm()).stored.atoms


def test_what_fails_is_not_told_as_absent(folder: Path) -> None:
    with serve(folder, Closed) as url, pytest.raises(CheckpointError, match="403.*check the credentials"):
        find_checkpoint(url)
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # nor does another process get this port
        with pytest.raises(CheckpointError, match="failed 8 times.*ClientConnector.*network"):
            find_checkpoint(f"http://127.0.0.1:{nobody.getsockname()[1]}/run")
    with serve(folder, Ranged) as url, pytest.raises(CheckpointError, match="does not exist"):
        find_checkpoint(f"{url}/nowhere")
    (folder / "key").write_bytes(make_certificate(folder).read_bytes())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "key")
    with serve(folder, Ranged, context) as url, pytest.raises(CheckpointError, match="CERTIFICATE_VERIFY_FAILED"):
        find_checkpoint(url)


def test_a_tree_has_all_of_its_folders_or_fails(folder: Path) -> None:
    for name in ("open/deep/file", "open/other", "closed/file"):
        (folder / "run" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "run" / name).write_bytes(b"12")
    (folder / "run" / "empty").mkdir()
    with serve(folder, Partly) as url:
        sizes = {name: entry.size for name, entry in store.list_tree(f"{url}/open").items()}
        assert sizes == {"deep/file": 2, "other": 2}
        assert store.list_tree(f"{url}/empty") == {}
        with pytest.raises(OSError, match="failed 8 times.*503"):
            store.list_tree(url)


def test_options_that_are_not_the_webs_are_told(folder: Path) -> None:
    try:
        store.set_storage_options({"endpoint": "http://minio:9000"})
        with serve(folder, Ranged) as url, pytest.raises(ConfigError, match=r"run.*endpoint.*`storage_options`"):
            find_checkpoint(url)
    finally:
        store.set_storage_options({})


def make_certificate(folder: Path) -> Path:
    """A file with a key, and a certificate of 127.0.0.1 that vouches for itself."""
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(timezone.utc)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "tests")])
    address = x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))])
    made = x509.CertificateBuilder(name, name, key.public_key(), 1, now, now + timedelta(days=1))
    signed = made.add_extension(address, critical=False).sign(key, hashes.SHA256())
    plain = Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()
    (folder / "pem").write_bytes(key.private_bytes(*plain) + signed.public_bytes(Encoding.PEM))
    return folder / "pem"


def test_certificates_are_checked(folder: Path, asked: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is not known to plain GETs may be to the file system: here it is not."""
    certificate = make_certificate(folder)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    monkeypatch.setattr(plain_http, "_make_context", plain_http._make_context.__wrapped__)
    with serve(folder, Ranged, context) as url:
        with pytest.raises(CheckpointError, match=r"[Cc]ertificate"):
            read_parts(url)
        assert asked == [0]
        monkeypatch.setenv("AWS_CA_BUNDLE", str(folder / "nowhere"))
        presign.forget_refusals()
        with pytest.raises(CheckpointError, match=r"[Cc]ertificate"):
            read_parts(url)
        assert asked == [0, 0]
        monkeypatch.setenv("AWS_CA_BUNDLE", str(certificate))
        presign.forget_refusals()
        read_parts(url)
    assert asked == [0, 0]


def test_a_file_that_is_replaced_is_refused(folder: Path) -> None:
    class Tagged(Kept):
        version = "1"

        def end_headers(self) -> None:
            self.send_header("ETag", f'"{self.version}"')
            super().end_headers()

    with serve(folder, Tagged) as url, store.open_stored(f"{url}/a file", size=len(CONTENT)) as file:
        file.read([memoryview(bytearray(10))], 5)
        Tagged.version = "2"
        with pytest.raises(CheckpointError, match="has changed since its header was read"):
            file.read([memoryview(bytearray(10))], 5)
    with serve(folder, Kept) as url, store.open_stored(f"{url}/a file", size=len(CONTENT)) as file:
        (folder / "run" / "a file").write_bytes(CONTENT[:-1])
        with pytest.raises(CheckpointError, match="has changed since its header was read"):
            file.read([memoryview(bytearray(10))], 5)
