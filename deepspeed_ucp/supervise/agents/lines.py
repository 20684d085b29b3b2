"""Connections between agents: the run's key, then JSON lines; nobody waits for the other side to take them."""

from __future__ import annotations

import errno
import json
import socket
from collections.abc import Mapping
from typing import Any

from ...heartbeat import keep_alive

_LONGEST = 4 << 20
"""Bytes of a line: a round of ten thousand agents takes a tenth."""

_LONGEST_KEY = 512


class Ended(Exception):
    """The other side has closed the connection, or its process has ended."""


class Line:
    """One side of a connection, which never blocks.

    Attributes:
        key: the first line that has come, once it has; only the side that was called gets one.
        unread: what was received, and is to be so again.
    """

    def __init__(self, connection: socket.socket, *, has_key: bool = False) -> None:
        connection.setblocking(False)
        keep_alive(connection)
        self.socket, self.key = connection, None if has_key else ""
        self.unread: list[Mapping[str, Any]] = []
        self._data, self._left = bytearray(), bytearray()

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, **fields: Any) -> None:
        """Send a line, now or with a later :meth:`flush`; to a side that has gone nothing is sent."""
        self._left += json.dumps(fields).encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        """Send what is left, as far as it is taken."""
        try:
            while self._left:
                del self._left[: self.socket.send(self._left)]
        except BlockingIOError:
            return
        except OSError:  # who reads is told
            self._left.clear()

    def receive(self) -> list[Mapping[str, Any]]:
        """What has come; empty where nothing has.

        Raises:
            Ended: the other side has ended it, or speaks another language.
            OSError: the connection has failed, which says nothing of the other side.
        """
        if self.unread:
            told, self.unread = self.unread, []
            return told
        try:
            data = self.socket.recv(1 << 16)
        except BlockingIOError:
            return []
        except (ConnectionResetError, BrokenPipeError) as error:
            raise Ended from error
        if not data:
            raise Ended
        *whole, rest = (self._data + data).split(b"\n")
        self._data = bytearray(rest)
        if self.key is None and whole:
            self.key = whole.pop(0).decode(errors="replace")
        if len(rest) > (_LONGEST_KEY if self.key is None else _LONGEST):
            raise Ended
        try:
            told = [json.loads(text) for text in whole]
        except ValueError as error:
            raise Ended from error
        if not all(isinstance(each, dict) for each in told):
            raise Ended
        return told

    def close(self) -> None:
        """Flush what the other side takes at once, and close."""
        self.flush()
        self.socket.close()


def call(address: str, key: str, timeout: float, **fields: Any) -> Line:
    """Connect to an agent, and say the key and a line.

    Raises:
        ConnectionRefusedError: its machine says that nobody listens there.
        OSError: it cannot be reached in time, or there is no such host.
    """
    connection = socket.create_connection(split_address(address), timeout)
    if connection.getsockname() == connection.getpeername():  # a port of this machine that called itself
        connection.close()
        raise ConnectionRefusedError(errno.ECONNREFUSED, "nobody listens")
    line = Line(connection)
    line._left += key.encode() + b"\n"
    line.send(**fields)
    return line


def listen(port: int, *, only_here: bool) -> socket.socket:
    """A socket for calls, on all addresses of this machine or on the loopback alone.

    Raises:
        OSError: the port is taken.
    """
    if only_here:
        return socket.create_server(("127.0.0.1", port), backlog=1024)
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("", port), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise
    return socket.create_server(("", port), backlog=1024)


def hold_port() -> socket.socket:
    """What keeps a port of this machine from being given to others as long as it is open.

    Who names the port, as the store of a process group does, can listen there all the same.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("", 0))
    return held


def split_address(address: str) -> tuple[str, int]:
    """Host and port of ``host:port``, of ``[…]:port`` for IPv6.

    Raises:
        ValueError: there is no port, or it is no number.
    """
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit() or int(port) > 65535:
        raise ValueError(address)
    return host.strip("[]"), int(port)


def join_address(host: str, port: int) -> str:
    """``host:port``; the inverse of :func:`split_address`."""
    host = host.removeprefix("::ffff:")  # IPv4 as an IPv6 socket shows it
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether a host's name or address is for this machine alone."""
    return host in ("localhost", "::1") or host.removeprefix("::ffff:").startswith("127.")
