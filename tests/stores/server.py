"""An S3 server (moto, in a thread of this process) that records requests and injects faults."""

from __future__ import annotations

import logging
import socket
import struct
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from unittest import mock

BUCKET = "bucket"
OPTIONS = {"key": "tests", "secret": "tests", "client_kwargs": {"region_name": "eu-west-1"}}


@dataclass(frozen=True)
class Request:
    """A request: method, path, byte range (None: the whole object), bytes of the answer."""

    method: str
    path: str
    span: tuple[int, int] | None
    nbytes: int


Fault = Callable[[dict[str, Any]], str | None]
"""Returns the fault for a request's environment, or None.

A status, a status with a code (``400 ExpiredToken``), ``truncate``, ``reset``, ``slow``, or ``lost``: the server
executes the request without an answer.
"""


class Server:
    """A running server: an application that passes requests on, records them and injects faults.

    Attributes:
        requests: the answered requests.
        fault: chooses the fault of each request.
    """

    def __init__(self, inner: Any) -> None:
        self.inner, self.port = inner, 0
        self.requests: list[Request] = []
        self.fault: Fault = lambda environ: None

    @property
    def options(self) -> dict[str, Any]:
        return {**OPTIONS, "endpoint_url": f"http://127.0.0.1:{self.port}"}

    def gets(self, suffix: str = "") -> list[Request]:
        """Return the requests for objects whose path has this suffix."""
        return [each for each in self.requests if each.method == "GET" and each.span and each.path.endswith(suffix)]

    @contextmanager
    def failing(self, fault: Fault) -> Iterator[None]:
        with mock.patch.object(self, "fault", fault):
            yield

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        fault = self.fault(environ)
        if fault == "reset":
            _reset(environ["werkzeug.socket"])
        if fault == "slow":
            time.sleep(0.3)
        elif fault and fault[0].isdigit():
            fault, _, code = fault.partition(" ")
            body = _ERROR % (code or "Injected").encode()
            start(f"{fault} FAULT", [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
            return [body]
        data = b"".join(self.inner(environ, start))
        low, separator, high = environ.get("HTTP_RANGE", "").removeprefix("bytes=").partition("-")
        span = (int(low), int(high) + 1) if separator else None
        self.requests.append(Request(environ["REQUEST_METHOD"], environ["PATH_INFO"], span, len(data)))
        if fault == "lost":
            _reset(environ["werkzeug.socket"])
        return [data[: len(data) // 2] if fault == "truncate" else data]


def fail_first(count: int, fault: str, *, method: str = "GET", having: str = "") -> Fault:
    """Return a fault for the first ``count`` requests of each path that contains ``having``."""
    seen: dict[tuple[str, Any], int] = {}
    lock = threading.Lock()

    def decide(environ: dict[str, Any]) -> str | None:
        path = environ["PATH_INFO"]
        if environ["REQUEST_METHOD"] != method or having not in path:
            return None
        with lock:
            key = path, environ.get("HTTP_RANGE", "").rpartition("-")[2]  # its end stays in a continued read
            seen[key] = seen.get(key, 0) + 1
            return fault if seen[key] <= count else None

    return decide


_ERROR = b'<?xml version="1.0" encoding="UTF-8"?><Error><Code>%s</Code><Message>injected</Message></Error>'


def _reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.shutdown(socket.SHUT_RDWR)
    raise ConnectionResetError


@contextmanager
def serve_bucket() -> Iterator[Server]:
    """Serve an empty bucket; moto keeps buckets per process, so existing ones are deleted."""
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
    found = Server(DomainDispatcherApplication(create_backend_app))
    listening = make_server("127.0.0.1", 0, found, threaded=True)
    found.port = listening.server_port
    thread = threading.Thread(target=listening.serve_forever, daemon=True)
    thread.start()
    try:
        for method, path in (("POST", "moto-api/reset"), ("PUT", BUCKET)):
            address = f"{found.options['endpoint_url']}/{path}"
            urllib.request.urlopen(urllib.request.Request(address, method=method)).close()
        with use_options(found.options):
            yield found
    finally:
        listening.shutdown()
        thread.join()


@contextmanager
def use_options(options: Mapping[str, Any]) -> Iterator[None]:
    """Use these ``storage_options`` in this process, and retry at once."""
    from deepspeed_ucp.io import clients, store, web

    before = clients._process.options
    backoff = {"init_backoff": timedelta(milliseconds=1), "max_backoff": timedelta(milliseconds=4), "base": 2}
    with mock.patch.dict(clients.RETRIES, backoff=backoff), mock.patch.object(web, "PAUSE", 0.001):
        clients._process.clients.clear()
        store.set_storage_options(options)
        try:
            yield
        finally:
            clients._process.clients.clear()
            store.set_storage_options(before)
