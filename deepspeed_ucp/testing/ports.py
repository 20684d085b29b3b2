"""Free ports of this machine, reserved for tests."""

from __future__ import annotations

import socket


def hold_port() -> socket.socket:
    """Reserve a free port as long as the returned socket is open.

    A process group's store can listen on that port at the same time, because both sockets set SO_REUSEADDR.
    """
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("", 0))
    return reserved
