"""HTTP servers: index pages with links to files, read only."""

from __future__ import annotations

import http.server
import io
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from deepspeed_ucp.cli import main
from deepspeed_ucp.comm import Comm
from deepspeed_ucp.errors import CheckpointError, UnsupportedError
from deepspeed_ucp.formats import open_checkpoint, read_latest
from deepspeed_ucp.formats.latest import find_checkpoint
from deepspeed_ucp.io import store
from deepspeed_ucp.io.web import ATTEMPTS
from tests.stores.server import use_options
from tests.support.certificates import make_certificate, make_context
from tests.support.contents import check_content
from tests.support.covering import params
from tests.support.reshard import load, make_targets, open_everywhere
from tests.synth import Model, Param, Topology, random_state, write_checkpoint

MODEL = Model((Param("a", (30, 20)), Param("b", (20,)), Param("frozen", (5,), frozen=True)))
CONTENT = bytes(range(256)) * 40


class Plain(http.server.SimpleHTTPRequestHandler):
    """``python -m http.server``, which ignores ranges."""

    def log_message(self, *_: Any) -> None:
        pass


class Ranged(Plain):
    """A server with byte ranges, like most servers."""

    protocol_version = "HTTP/1.1"
    length: Any = ()
    """Header of index pages in place of their length; None omits it."""

    def change_page(self, page: bytes) -> bytes:
        return page

    def list_directory(self, path: Any) -> Any:
        page = super().list_directory(path)
        return page and io.BytesIO(self.change_page(page.read()))

    def send_header(self, name: str, value: str) -> None:
        if name == "Content-Length" and Path(self.translate_path(self.path)).is_dir():
            if self.length is None:
                return
            name, value = self.length or (name, value)
        super().send_header(name, value)

    def send_head(self) -> Any:
        path, span = Path(self.translate_path(self.path)), self.headers.get("Range")
        if span is None or not path.is_file():
            return super().send_head()
        low, high = (int(part) for part in span.removeprefix("bytes=").split("-"))
        data = path.read_bytes()[low : high + 1]
        self.send_response(206)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Content-Range", f"bytes {low}-{low + len(data) - 1}/{path.stat().st_size}")
        self.send_header("Last-Modified", self.date_time_string(path.stat().st_mtime))
        self.end_headers()
        return io.BytesIO(data)


class Chunked(Ranged):
    """Sends index pages without their length, like nginx."""

    length = ("Transfer-Encoding", "chunked")

    def change_page(self, page: bytes) -> bytes:
        return b"%x\r\n%s\r\n0\r\n\r\n" % (len(page), page)


class Tagged(Ranged):
    """Sends ETags."""

    tag = "1"

    def end_headers(self) -> None:
        self.send_header("ETag", f'"{self.tag}"')
        super().end_headers()


class Shifted(Ranged):
    """Answers with other bytes than requested, and their correct range, like some caches."""

    def send_head(self) -> Any:
        if self.headers.get("Range") == "bytes=1000-5999":
            self.headers.replace_header("Range", "bytes=2000-6999")
        return super().send_head()


class Closed(Ranged):
    """Requires a token."""

    def send_head(self) -> Any:
        return super().send_head() if self.headers.get("X-Token") == "mine" else self.send_error(403)


class Odd(Ranged):
    """Lists links to files outside the folder."""

    length = None

    def change_page(self, page: bytes) -> bytes:
        links = b"".join(b'<a href="%s">odd</a>' % link for link in (b"http://[", b"%2e%2e/", b"./", b"//else/run/x"))
        return page.replace(b"<ul>", links)


class Endless(Ranged):
    """Lists a folder in each folder."""

    length = None

    def translate_path(self, path: str) -> str:
        return str(Path(self.directory) / "run") if path.endswith("/") else super().translate_path(path)

    def change_page(self, page: bytes) -> bytes:
        return page.replace(b"<ul>", b'<a href="a/">a</a>')


class Cut(Ranged):
    """Sends the first half of an index page."""

    def change_page(self, page: bytes) -> bytes:
        return super().change_page(page)[: len(page) // 2]


class ChunkedCut(Cut, Chunked):
    """Sends the first half of an index page, in chunks and without their end."""


class Partly(Ranged):
    """Cannot list one folder."""

    def list_directory(self, path: Any) -> Any:
        return self.send_error(503) if Path(path).name == "closed" else super().list_directory(path)


@contextmanager
def serve(folder: Path, handler: type[Plain], context: ssl.SSLContext | None = None) -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(folder)))
    if context is not None:
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        with use_options({}):
            yield f"{'https' if context else 'http'}://127.0.0.1:{server.server_port}/run"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "a file#1").write_bytes(CONTENT)
    return tmp_path


def read_parts(url: str) -> None:
    with store.open_stored(f"{url}/a file#1", size=len(CONTENT)) as file:
        for offset in (0, 1000, 5000):
            data = bytearray(5000)
            file.read([memoryview(data)[:2000], memoryview(data)[2000:]], offset)
            assert bytes(data) == CONTENT[offset : offset + 5000]


@pytest.mark.parametrize("handler", params([Chunked, Tagged], [Ranged]))
def test_a_load_reads_a_web_server(handler: type[Plain], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = random_state(MODEL, 5)
    write_checkpoint(tmp_path / "run", MODEL, state, Topology(1, 3))
    with serve(tmp_path, handler) as url:
        targets = make_targets(MODEL, Topology(3, 2))
        check_content(load(open_everywhere(find_checkpoint(url), targets), targets), state)
        assert main(["verify", url]) == 0
        assert "complete" in capsys.readouterr().out
        assert main(["verify", url, "--seal"]) == 2
        assert "read only" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("handler", "work", "error", "message"),
    [
        (Plain, read_parts, UnsupportedError, "answers with the whole file where a part is asked for"),
        (Shifted, read_parts, CheckpointError, "cannot be read at byte 1000"),
        (Endless, store.list_tree, OSError, "more than 64 folders deep"),
        (Cut, store.list_folder, OSError, f"failed {ATTEMPTS} times"),
        (ChunkedCut, store.list_folder, OSError, f"failed {ATTEMPTS} times"),
        (Partly, store.list_tree, OSError, f"failed {ATTEMPTS} times.*503"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_wrong_answers_are_errors(
    handler: type[Plain], work: Callable[[str], Any], error: type[Exception], message: str, folder: Path
) -> None:
    """Files that a truncated index page or a missing one of a subfolder does not list would count as missing."""
    (folder / "run" / "closed").mkdir()
    with serve(folder, handler) as url, pytest.raises(error, match=message):
        work(url)


def test_headers_in_the_storage_options_are_sent(folder: Path) -> None:
    with serve(folder, Closed) as url:
        for work in (read_parts, find_checkpoint, read_latest):
            with pytest.raises(CheckpointError, match="check the credentials"):
                work(url)
        with use_options({"headers": {"X-Token": "mine"}}):
            read_parts(url)
            assert store.list_folder(url)["a file#1"].size == len(CONTENT)


def test_a_dead_link_does_not_hide_other_files(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "run", MODEL, random_state(MODEL, 5), Topology(1, 2))
    (tmp_path / "run" / "gone").symlink_to("nowhere")
    (path / "zero_pp_rank_9_mp_rank_00_optim_states.pt").symlink_to("nowhere")
    with serve(tmp_path, Ranged) as url:
        assert store.list_folder(url)["gone"].size == 0
        assert find_checkpoint(url) == f"{url}/{path.name}"
        assert open_checkpoint(f"{url}/{path.name}", Comm()).atoms


def test_a_tree_lists_all_subfolders(folder: Path) -> None:
    for name in ("open/deep", "empty"):
        (folder / "run" / name).mkdir(parents=True)
    for name in ("open/deep/file", "open/other"):
        (folder / "run" / name).write_bytes(b"12")
    with serve(folder, Ranged) as url:
        sizes = {name: entry.size for name, entry in store.list_tree(url).items()}
    assert sizes == {"a file#1": len(CONTENT), "open/deep/file": 2, "open/other": 2}


def test_links_to_files_outside_the_folder_are_ignored(folder: Path) -> None:
    with serve(folder, Odd) as url:
        assert store.list_folder(url).keys() == {"a file#1"}


def test_an_error_of_the_server_does_not_count_as_absence(folder: Path) -> None:
    with use_options({}), pytest.raises(CheckpointError, match="failed 8 times.*refused.*network"):
        find_checkpoint("http://127.0.0.1:1/run")
    with serve(folder, Ranged) as url, pytest.raises(CheckpointError, match="does not exist"):
        find_checkpoint(f"{url}/nowhere")


@pytest.mark.parametrize("handler", [Ranged, Tagged])
def test_a_file_that_is_replaced_during_a_read_is_refused(
    handler: type[Plain], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ETag, or size and modification time, reveal the replacement."""
    into = memoryview(bytearray(10))
    for known in (False, True):
        with serve(folder, handler) as url:
            if known:
                store.list_folder(url)
            with store.open_stored(f"{url}/a file#1", size=len(CONTENT)) as file:
                file.read([into], 5)
                monkeypatch.setattr(Tagged, "tag", Tagged.tag + "2")
                __import__("os").utime(folder / "run" / "a file#1", (known + 5, known + 5))
                with pytest.raises(CheckpointError, match="has changed since its header was read"):
                    file.read([into], 5)


def test_certificates_of_web_servers_are_checked(folder: Path) -> None:
    with serve(folder, Ranged, make_context(make_certificate(folder))) as url:
        with pytest.raises(CheckpointError):
            read_parts(url)
        with pytest.raises(CheckpointError, match="CERTIFICATE_VERIFY_FAILED.*SSL_CERT_FILE"):
            find_checkpoint(url)
