"""An S3 server (moto's, in a thread of this process) that counts what it is asked for and fails as it is told."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

BUCKET = "bucket"
OPTIONS = {"key": "tests", "secret": "tests", "client_kwargs": {"region_name": "eu-west-1"}}


@dataclass(frozen=True)
class Asked:
    """A request: method, path, byte range (None: the whole object), bytes of its answer."""

    method: str
    path: str
    span: tuple[int, int] | None
    nbytes: int


Fault = Callable[[dict[str, Any]], str | None]
"""Of a request's environment the fault to answer it with; None for none.

A status, ``truncate``, ``reset``, or ``lost``: the request is carried out, and its answer does not come.
"""


@dataclass
class Server:
    """A server that runs.

    Attributes:
        asked: what it has answered.
        fault: asked about every request.
    """

    port: int = 0
    asked: list[Asked] = field(default_factory=list)
    fault: Fault = lambda environ: None
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def options(self) -> dict[str, Any]:
        return {**OPTIONS, "endpoint_url": f"http://127.0.0.1:{self.port}"}

    def gets(self, suffix: str = "") -> list[Asked]:
        """The objects' requests, of those whose path ends so."""
        return [each for each in self.asked if each.method == "GET" and each.span and each.path.endswith(suffix)]

    @contextmanager
    def failing(self, fault: Fault) -> Iterator[None]:
        self.fault = fault
        try:
            yield
        finally:
            self.fault = lambda environ: None


def fail_first(count: int, fault: str, *, method: str = "GET", having: str = "") -> Fault:
    """A fault for the first ``count`` requests whose path has ``having`` in it, for each path."""
    seen: dict[tuple[str, Any], int] = {}
    lock = threading.Lock()

    def decide(environ: dict[str, Any]) -> str | None:
        path = environ["PATH_INFO"]
        if environ["REQUEST_METHOD"] != method or having not in path:
            return None
        with lock:
            key = path, environ.get("HTTP_RANGE")
            seen[key] = seen.get(key, 0) + 1
            return fault if seen[key] <= count else None

    return decide


class _Middleware:
    """Counts, and fails."""

    def __init__(self, inner: Any, server: Server) -> None:
        self.inner, self.server = inner, server

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        fault = self.server.fault(environ)
        if fault == "reset":
            _reset(environ["werkzeug.socket"])
        if fault and fault.isdigit():
            body = _ERROR % _CODES[fault]
            start(f"{fault} FAULT", [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
            return [body]
        data = b"".join(self.inner(environ, start))
        self._note(environ, len(data))
        if fault == "lost":
            _reset(environ["werkzeug.socket"])
        return [data[: len(data) // 2] if fault == "truncate" else data]

    def _note(self, environ: dict[str, Any], nbytes: int) -> None:
        told = environ.get("HTTP_RANGE", "").removeprefix("bytes=")
        low, _, high = told.partition("-")
        span = (int(low), int(high) + 1) if told else None
        with self.server.lock:
            self.server.asked.append(Asked(environ["REQUEST_METHOD"], environ["PATH_INFO"], span, nbytes))


_CODES = {
    "403": b"AccessDenied",
    "404": b"NoSuchUpload",
    "429": b"TooManyRequests",
    "500": b"InternalError",
    "501": b"NotImplemented",
    "503": b"SlowDown",
}
_ERROR = b'<?xml version="1.0" encoding="UTF-8"?><Error><Code>%s</Code><Message>injected</Message></Error>'


def _reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.shutdown(socket.SHUT_RDWR)
    raise ConnectionResetError


@contextmanager
def serve() -> Iterator[Server]:
    """A server while the block runs."""
    import logging

    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
    found = Server()
    http = make_server(
        "127.0.0.1", 0, _Middleware(DomainDispatcherApplication(create_backend_app), found), threaded=True
    )
    found.port = http.server_port
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        http.shutdown()
        thread.join()


@contextmanager
def serve_bucket() -> Iterator[Server]:
    """A server with a bucket, which this process's stores go to."""
    from deepspeed_ucp.io import remote

    with serve() as found:
        remote.set_options(found.options)
        with suppress(FileExistsError):  # moto's buckets are the process's
            remote.connect("s3://x", writing=True)[0].mkdir(BUCKET)
        yield found
    remote.set_options({})
