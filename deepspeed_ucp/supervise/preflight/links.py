"""Links between nodes that are tested: whether there is a way, how long it takes, how much goes through."""

from __future__ import annotations

import os
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

import psutil

from .judging import Figure

_MESSAGE, _ROUNDS = 16 << 20, 20
"""Bytes that are sent, and how often one goes there and back."""

_ALL, _ONE = 15.0, 4.0
"""Seconds for all links, and for one."""


def time_once(work: Callable[[], Any]) -> float:
    """Seconds of some work."""
    began = time.perf_counter()
    work()
    return max(time.perf_counter() - began, 1e-9)


class Links:
    """The node's end of links to and from others, which answers until the process ends.

    Args:
        address: on which the others reach it.
        key: that they have to know.
    """

    def __init__(self, address: str, key: bytes) -> None:
        self.key = key
        self._server = socket.create_server((address, 0), backlog=128)
        self.port: int = self._server.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True, name="links").start()

    def _serve(self) -> None:
        while True:
            connection, _ = self._server.accept()
            threading.Thread(target=self._answer, args=(connection,), daemon=True, name="link").start()

    def _answer(self, connection: socket.socket) -> None:
        connection.settimeout(_ALL)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            with connection:
                if _receive(connection, len(self.key)) != self.key:
                    return
                for _ in range(_ROUNDS):
                    connection.sendall(_receive(connection, 1))
                data = _receive(connection, _MESSAGE)
                connection.sendall(b".")
                connection.sendall(zlib.crc32(data).to_bytes(4, "big"))
        except OSError:
            return

    def try_all(self, peers: Sequence[tuple[str, str, int]]) -> tuple[list[Figure], dict[str, str | None]]:
        """Try links to others (name, address, port), one after the other: figures over all, and why not by name."""
        until, links = time.monotonic() + _ALL, dict[str, str | None]()
        results = list[tuple[float, float]]()
        for name, address, port in peers:
            left = min(_ONE, until - time.monotonic())
            if left <= 0:
                break
            try:
                results.append(self._try(address, port, left))
                links[name] = None
            except OSError as error:
                links[name] = error.strerror or str(error) or type(error).__name__
        if not results:
            return [], links
        trips, rates = zip(*results, strict=True)
        return [Figure("network", median(rates)), Figure("round trips", median(trips))], links

    def _try(self, address: str, port: int, seconds: float) -> tuple[float, float]:
        """Round trips a second, and MB/s."""
        data = bytes(range(256)) * (_MESSAGE // 256)
        with socket.create_connection((address, port), timeout=seconds) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(self.key)

            def go_and_come() -> None:
                connection.sendall(b".")
                _receive(connection, 1)

            trip = min(time_once(go_and_come) for _ in range(_ROUNDS))

            def send() -> None:
                connection.sendall(data)
                _receive(connection, 1)

            seconds_sent = time_once(send)
            if _receive(connection, 4) != zlib.crc32(data).to_bytes(4, "big"):
                raise OSError("what came there is not what was sent")
        return 1 / trip, _MESSAGE / seconds_sent / 1e6


def _receive(connection: socket.socket, nbytes: int) -> bytearray:
    data = bytearray()
    while len(data) < nbytes:
        more = connection.recv(min(nbytes - len(data), 1 << 20))
        if not more:
            raise OSError("the other side has gone")
        data += more
    return data


def find_link_address(default: str) -> str:
    """This node's address on the network that training uses: of the interface that NCCL or gloo is told to take."""
    names = [each for key in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME") for each in _list_names(key)]
    for name, addresses in psutil.net_if_addrs().items():
        if any(name == wanted[1:] if wanted[0] == "=" else name.startswith(wanted) for wanted in names):
            for each in addresses:
                if each.family == socket.AF_INET:
                    return str(each.address)
    return default


def _list_names(key: str) -> Iterator[str]:
    """Interfaces that a variable names; one that begins with ``^`` names those that are not to be taken."""
    value = os.environ.get(key, "")
    if not value.startswith("^"):
        exact = "=" if value.startswith("=") else ""
        yield from (exact + name for name in value.removeprefix("=").split(",") if name)
