"""GETs over plain HTTP on the calling thread, whose bytes go from the socket straight to their places.

The connections are http.client's: the answers of other libraries are bytes that have to be copied out, and those of
asynchronous ones pass through an event loop besides, which takes several times the processor time of the transfer.
"""

from __future__ import annotations

import io
import os
import select
import socket
import ssl
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection, InvalidURL
from typing import Any
from urllib.parse import urlsplit

from .memory import drop_front
from .presign import Link, RefusedError
from .retry import LEAST_RATE

_PATIENCE = 60.0
"""Seconds that a server may take for the next bytes, as with the stores' own libraries."""

_PATIENCE_IN_ALL = 60.0
"""Seconds of waiting for a server, over which it has to come to the least rate."""

_PIECE = 1 << 20
"""Bytes that are taken of an answer at once; what fails meanwhile is asked for again."""

_PASSING, _TELLING = {408, 425, 429}, {404, 416}
"""Of the HTTP statuses below 500 those that may pass, and those that tell of the file, not of the address."""


class _Paced(io.RawIOBase):
    """What comes of a connection, headers too, as long as it comes at the least rate.

    Args:
        raw: a socket's.
    """

    def __init__(self, raw: io.RawIOBase) -> None:
        self._raw, self._seconds, self._got = raw, 0.0, 0

    def readable(self) -> bool:
        return True

    def readinto(self, into: Any) -> int | None:
        """As of the socket.

        Raises:
            TimeoutError: too little has come for a while.
        """
        begin = time.monotonic()
        got = self._raw.readinto(into)
        self._seconds, self._got = self._seconds + time.monotonic() - begin, self._got + (got or 0)
        if self._seconds > _PATIENCE_IN_ALL:
            if self._got < LEAST_RATE * self._seconds:
                raise TimeoutError(f"{self._got} bytes came in {self._seconds:.0f} s")
            self._seconds, self._got = 0.0, 0
        return got

    def close(self) -> None:
        self._raw.close()
        super().close()


class _Answer(HTTPResponse):
    """An answer that is not waited for for ever."""

    def __init__(self, sock: socket.socket, *args: Any, **options: Any) -> None:
        super().__init__(sock, *args, **options)
        self.fp = io.BufferedReader(_Paced(self.fp.detach()))


class StatusError(OSError):
    """An answer that is none."""

    def __init__(self, answer: HTTPResponse) -> None:
        super().__init__(f"status {answer.status} {answer.reason}")
        self.status = answer.status


class _Idle:
    """Connections that wait for their next request, by origin."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._kept = defaultdict[tuple[str, str], list[HTTPConnection]](list)

    def take(self, origin: tuple[str, str]) -> HTTPConnection | None:
        """The one that was used last and is still open."""
        with self.lock:
            kept = self._kept[origin]
            while kept:
                connection = kept.pop()
                if not _is_dropped(connection):
                    return connection
                connection.close()
        return None

    def keep(self, origin: tuple[str, str], connection: HTTPConnection) -> None:
        with self.lock:
            self._kept[origin].append(connection)

    def close(self) -> None:
        with self.lock:
            kept = [connection for each in self._kept.values() for connection in each]
            self._kept.clear()
        for connection in kept:
            connection.close()


_idle = _Idle()


def _leave() -> None:
    """A forked process shares its parent's connections: it must not use them, and closes them when it ends."""
    global _idle  # noqa: PLW0603
    _idle = _Idle()


os.register_at_fork(after_in_child=_leave)


def close_idle() -> None:
    """Close the connections that wait for a request: when servers do, the descriptors here stay."""
    _idle.close()


def _is_dropped(connection: HTTPConnection) -> bool:
    """Whether the server has closed it: something is there to be read, though nothing was asked."""
    poll = select.poll()
    poll.register(connection.sock, select.POLLIN)
    return bool(poll.poll(0))


@cache
def _make_context() -> ssl.SSLContext:
    """The system's authorities, or those of the files that the stores' own libraries take instead."""
    return ssl.create_default_context(cafile=os.environ.get("AWS_CA_BUNDLE") or os.environ.get("REQUESTS_CA_BUNDLE"))


def _connect(scheme: str, host: str) -> HTTPConnection:
    if scheme != "https":
        connection = HTTPConnection(host, timeout=_PATIENCE)
    else:
        try:
            connection = HTTPSConnection(host, timeout=_PATIENCE, context=_make_context())
        except OSError as error:  # of the files
            raise RefusedError(f"no authorities: {error}") from error
    connection.response_class = _Answer
    return connection


@contextmanager
def get(link: Link, headers: Mapping[str, str]) -> Iterator[HTTPResponse]:
    """Ask for what lies at an address; the connection is kept where the block has read all of the answer.

    Raises:
        RefusedError: the address does not serve.
        StatusError: the answer has another status than 200 and 206.
        OSError: the connection fails.
    """
    idle, connection = _idle, _idle.take(link.origin) or _connect(*link.origin)
    kept = False
    try:
        parts = urlsplit(link.url)
        target = f"{parts.path or '/'}?{parts.query}" if parts.query else parts.path or "/"
        connection.request("GET", target, headers={"User-Agent": "deepspeed_ucp", **link.headers, **headers})
        answer = connection.getresponse()
        _check(answer)
        link.works = True
        yield answer
        kept = answer.isclosed() and connection.sock is not None
    except (ssl.SSLEOFError, ssl.SSLZeroReturnError):  # it was cut off
        raise
    except ssl.SSLError as error:  # another authority, or a certificate of the client's
        raise RefusedError(str(error)) from error
    except InvalidURL as error:
        raise RefusedError(str(error)) from error
    except HTTPException as error:
        raise ConnectionError(f"{type(error).__name__}: {error}") from error
    finally:
        if kept:
            idle.keep(link.origin, connection)
        else:
            connection.close()


def _check(answer: HTTPResponse) -> None:
    status = answer.status
    if status >= 500 or status in _PASSING or status in _TELLING:
        raise StatusError(answer)
    if status not in (200, 206) or answer.headers.get("Content-Encoding", "identity") != "identity":
        raise RefusedError(f"status {status} {answer.reason}")


def read_front(link: Link, most: int) -> bytes:
    """The first bytes of a file, all of one that has no more; whatever the answer says, memory is taken for what comes.

    Raises:
        EOFError: it ends before.
        OSError: as :func:`get`.
    """
    data = bytearray()
    with get(link, {}) as answer:
        while len(data) < most and (piece := answer.read(min(_PIECE, most - len(data)))):
            data += piece
        if answer.length and len(data) < most:
            raise EOFError(f"{answer.length} bytes did not come")
    return bytes(data)


def read_span(answer: HTTPResponse, views: list[memoryview]) -> None:
    """Fill memory with an answer's bytes as they come; what is full is taken from the views.

    Raises:
        EOFError: it ends before.
        OSError: the connection fails.
    """
    while views:
        got = answer.readinto(views[0][:_PIECE])
        if not got:
            raise EOFError(f"{sum(view.nbytes for view in views)} bytes did not come")
        drop_front(views, got)
