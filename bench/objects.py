"""A folder as an object store serves it: S3's protocol, streams that are paced, late first bytes; and plain GETs."""

from __future__ import annotations

import hashlib
import http.client
import multiprocessing
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from cold import list_files, touch_memory
from floor import Piece, share_of
from meters import Io

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ranks import Peer

BUCKET = "bench"
RATE = 200e6  # bytes a second of each stream
DELAY = 0.02  # seconds before the first byte of an answer
_CHUNK = 1 << 20
_context = multiprocessing.get_context("fork")


class Store:
    """A server that runs; its counts are those of all requests so far.

    Attributes:
        port: of 127.0.0.1.
        served: bytes of objects.
    """

    def __init__(self, port: int, served: Any) -> None:
        self.port, self._served = port, served

    @property
    def served(self) -> int:
        return int(self._served.value)

    @property
    def options(self) -> dict[str, Any]:
        """For the plugin's `storage_options`."""
        return {"endpoint_url": f"http://127.0.0.1:{self.port}", "key": "bench", "secret": "bench"}


@contextmanager
def serve(root: Path) -> Iterator[Store]:
    """Serve the files below a folder as the objects of one bucket, by a process of its own."""
    ours, theirs = _context.Pipe()
    served = _context.Value("q", 0)
    process = _context.Process(target=_run_server, args=(root, served, theirs), daemon=True)
    process.start()
    try:
        yield Store(ours.recv(), served)
    finally:
        process.kill()
        process.join()


def _run_server(root: Path, served: Any, connection: Any) -> None:
    handler = type("Handler", (_Handler,), {"root": root, "served": served})
    server = _Server(("127.0.0.1", 0), handler)
    connection.send(server.server_address[1])
    server.serve_forever()


class _Server(ThreadingHTTPServer):
    daemon_threads, request_queue_size = True, 256


class _Handler(BaseHTTPRequestHandler):
    """GET and HEAD of objects and the listing of a bucket, which is all that reading takes."""

    protocol_version, disable_nagle_algorithm = "HTTP/1.1", True
    root: Path
    served: Any

    def log_message(self, *_: object) -> None:
        return

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        time.sleep(DELAY)
        url = urlsplit(self.path)
        bucket, _, key = unquote(url.path).lstrip("/").partition("/")
        file = self.root / key
        if bucket != BUCKET or (key and not file.is_file()):
            self._send(404, b"<Error><Code>NoSuchKey</Code></Error>" if with_body else b"")
        elif not key:
            query = {name: values[0] for name, values in parse_qs(url.query).items()}
            self._send(200, self._list(query) if with_body else b"")
        else:
            self._send_object(file, with_body=with_body)

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _list(self, query: dict[str, str]) -> bytes:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        objects, folders = [], set()
        for file in sorted(path for path in self.root.rglob("*") if path.is_file()):
            key = file.relative_to(self.root).as_posix()
            if not key.startswith(prefix):
                continue
            inside, found, _ = key[len(prefix) :].partition(delimiter) if delimiter else (key, "", "")
            if found:
                folders.add(f"{prefix}{inside}/")
            else:
                size, changed = file.stat().st_size, time.gmtime(file.stat().st_mtime)
                when = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", changed)
                told = f"<Key>{escape(key)}</Key><LastModified>{when}</LastModified><ETag>{_tag(file)}</ETag>"
                objects.append(f"<Contents>{told}<Size>{size}</Size></Contents>")
        shared = "".join(f"<CommonPrefixes><Prefix>{escape(f)}</Prefix></CommonPrefixes>" for f in sorted(folders))
        listed = f"<Name>{BUCKET}</Name><Prefix>{escape(prefix)}</Prefix><IsTruncated>false</IsTruncated>"
        return f"<ListBucketResult>{listed}{''.join(objects)}{shared}</ListBucketResult>".encode()

    def _send_object(self, file: Path, *, with_body: bool) -> None:
        size = file.stat().st_size
        low, high = _read_range(self.headers.get("Range"), size)
        self.send_response(206 if high - low < size else 200)
        self.send_header("Content-Length", str(high - low))
        self.send_header("Content-Range", f"bytes {low}-{high - 1}/{size}")
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("ETag", _tag(file))
        self.send_header("Last-Modified", formatdate(file.stat().st_mtime, usegmt=True))
        self.end_headers()
        if with_body:
            self._pour(file, low, high)

    def _pour(self, file: Path, low: int, high: int) -> None:
        began, at = time.perf_counter(), low
        with file.open("rb") as stream:
            while at < high:
                at += os.sendfile(self.connection.fileno(), stream.fileno(), at, min(_CHUNK, high - at))
                time.sleep(max(0.0, began + (at - low) / RATE - time.perf_counter()))
        with self.served.get_lock():
            self.served.value += high - low


def _tag(file: Path) -> str:
    found = file.stat()
    told = f"{found.st_ino} {found.st_size} {found.st_mtime_ns}"
    return f'"{hashlib.sha256(told.encode()).hexdigest()[:32]}"'


def _read_range(header: str | None, size: int) -> tuple[int, int]:
    """[low, high) of ``bytes=a-b``, ``bytes=a-`` or ``bytes=-n``."""
    if not header:
        return 0, size
    first, _, last = header.removeprefix("bytes=").partition("-")
    if not first:
        return max(size - int(last), 0), size
    return int(first), min(int(last) + 1, size) if last else size


def make_warm(root: Path) -> None:
    """Use memory, and read every file once: what is measured is the protocol, not the disk behind the server."""
    files = list_files(root)
    touch_memory(files)
    for file in files:
        with file.open("rb", buffering=0) as stream:
            while stream.read(16 << 20):
                continue


def get_body(store: Store, root: Path, pieces: Sequence[Piece], streams: int) -> Any:
    """The body of one process of the floor: plain ranged GETs, each stream over a connection of its own."""

    def body(peer: Peer) -> dict[str, Any]:
        mine, lock = iter(share_of(pieces, peer.rank, peer.world)), threading.Lock()
        buffers = [bytearray(os.urandom(4096) * (16 << 8)) for _ in range(streams)]  # touched
        peer.ready()
        before, began = Io.now(), time.perf_counter()
        with ThreadPoolExecutor(streams) as pool:
            for done in [pool.submit(_get_all, store.port, root, mine, lock, buffer) for buffer in buffers]:
                done.result()
        return {"seconds": time.perf_counter() - began, "io": Io.now() - before}

    return body


def _get_all(port: int, root: Path, pieces: Iterator[Piece], lock: threading.Lock, buffer: bytearray) -> None:
    connection, view = http.client.HTTPConnection("127.0.0.1", port), memoryview(buffer)
    while True:
        with lock:
            piece = next(pieces, None)
        if piece is None:
            return connection.close()
        span = f"bytes={piece.offset}-{piece.offset + piece.length - 1}"
        connection.request("GET", f"/{BUCKET}/{piece.file.relative_to(root)}", headers={"Range": span})
        answer, done = connection.getresponse(), 0
        while done < piece.length and (got := answer.readinto(view[done : piece.length])):
            done += got
        answer.read()
        if done < piece.length:
            raise EOFError(f"{piece.file}: {done} of {piece.length} bytes came")
