"""Ports for servers that a test starts."""

from __future__ import annotations

import socket

from deepspeed_ucp.testing.world import hold_port

_HELD = list[socket.socket]()


def find_port() -> int:
    """Return a free port that stays reserved until this process ends."""
    _HELD.append(hold_port())
    return int(_HELD[-1].getsockname()[1])
